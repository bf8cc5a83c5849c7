"""One decoder layer that drafts from the target's hidden states: EAGLE-3 (Li et al., 2025).

Slot j holds the target's hidden states of token j together with token j + 1 and predicts token j + 2. Where the target
has not been yet, the layer's own output stands for the hidden states.

Shapes: ... any leading sizes, F hidden states side by side, E embedding size, H hidden size, Hq/Hkv heads, C head size,
D draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from arbordraft.heads.base import DraftHead, GatedMLP, HeadConfig, mlp_settings


def default_layers(count: int) -> tuple[int, int, int]:
    """A low, a middle and a high one of the hidden states of a model with ``count`` layers."""
    return min(2, count), count // 2, max(count - 3, 0)


class EagleConfig(HeadConfig):
    """Settings of an :class:`EagleHead`; see also :class:`~arbordraft.heads.base.HeadConfig`.

    Args:
        hidden_size: H.
        intermediate_size: of the MLP.
        num_attention_heads: Hq.
        num_key_value_heads: Hkv.
        head_dim: C.
        rms_norm_eps: of the norms.
        rope_theta: base of the rotary embedding.
        max_position_embeddings: longest text.
    """

    model_type = "arbordraft_eagle"

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        inputs = config.target_hidden_size + config.hidden_size
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj = nn.Linear(inputs, heads * dim, bias=False)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)


class EagleHead(DraftHead):
    """The layer with what stands before and behind it, under the tensor names of EAGLE-3 checkpoints.

    It has no attention of its own: callers hand :meth:`queries_keys_values` to the attention that suits them and its
    output to :meth:`finish`. Token embeddings are the target's.
    """

    config: EagleConfig
    config_class = EagleConfig
    base_model_prefix = "eagle"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        fused = len(config.hidden_layers or ()) * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self._frequencies: Tensor | None = None  # of the rotary embedding, as soon as they are needed
        self.post_init()

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        tokens: Sequence[int],
        *,
        hidden_layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        name: str | None = None,
        **own: Any,
    ) -> Self:
        """A new head, begun with the target's last layer, its norm and its rows of the output matrix.

        Args:
            model: the target; a decoder of Llama's kind gives its weights, another one only its sizes.
            tokens: target ids that can be drafted.
            hidden_layers: hidden states to read; by default a low, a middle and a high one.
            intermediate_size: of the MLP, by default the target's.
            name: of the target.
            **own: settings that a further kind of head has besides.
        """
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        rope = getattr(config, "rope_parameters", None) or {}
        settings = cls.config_class.for_target(
            model,
            name,
            draft_vocab_size=len(set(tokens)),
            hidden_layers=list(hidden_layers or default_layers(config.num_hidden_layers)),
            hidden_size=config.hidden_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rope_theta=rope.get("rope_theta", 10000.0),
            max_position_embeddings=config.max_position_embeddings,
            **mlp_settings(config, intermediate_size),
            **own,
        )
        head = cls(settings)
        head.set_vocabulary(tokens)
        head._begin(model)
        return head

    def fuse(self, states: Tensor) -> Tensor:
        """``[..., F]`` of the target to ``[..., H]``."""
        return self.fc(states)

    def queries_keys_values(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the attention needs.

        Args:
            embeddings: ``[..., E]`` of each slot's token.
            hidden: ``[..., H]`` fused states, or the layer's own output.
            rotary: what :meth:`rotary` gives for the slots' positions.

        Returns:
            ``[..., Hq, C]``, ``[..., Hkv, C]`` and ``[..., Hkv, C]``.
        """
        layer, attention = self.midlayer, self.midlayer.self_attn
        x = torch.cat([layer.input_layernorm(embeddings), layer.hidden_norm(hidden)], dim=-1)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(x).unflatten(-1, (-1, self.config.head_dim)) for project in projections)
        both, (cosine, sine) = torch.cat([query, key], dim=-2), rotary
        turned = both * cosine + rotate_half(both) * sine
        return *turned.split([query.shape[-2], key.shape[-2]], dim=-2), value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """``[..., H]`` the layer's output, from its input and what its heads attended to, ``[..., Hq * C]``."""
        hidden = hidden + self.midlayer.self_attn.o_proj(attended)
        return hidden + self.midlayer.mlp(self.midlayer.post_attention_layernorm(hidden))

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[..., 1, C]`` of positions ``[...]``."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            half = torch.arange(0, self.config.head_dim, 2, device=positions.device) / self.config.head_dim
            self._frequencies = (self.config.rope_theta**-half).repeat(2)
        angles = positions[..., None, None].float() * self._frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)

    @torch.no_grad()
    def _begin(self, model: PreTrainedModel) -> None:
        """Takes over what fits of the target's own weights."""
        config = self.config
        self.lm_head.weight.copy_(model.get_output_embeddings().weight[self.tokens])
        if config.hidden_layers:
            # The highest states stand for all, so that training starts from something close to the last layer.
            self.fc.weight.normal_(0.0, 0.01)
            self.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        source = dict(model.named_parameters())
        last = f".layers.{model.config.get_text_config().num_hidden_layers - 1}."
        given = {name.split(last)[1]: tensor for name, tensor in source.items() if last in name}
        for name, parameter in self.midlayer.named_parameters():
            weight = given.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
            if name == "input_layernorm.weight" or weight is None:
                continue
            if weight.shape == parameter.shape:
                parameter.copy_(weight)
            elif parameter.dim() == 2 and weight.shape[1] * 2 == parameter.shape[1]:
                parameter.copy_(torch.cat([weight / 2, weight], dim=1))  # embeddings, hidden states
        norms = [t for n, t in source.items() if n.endswith("norm.weight") and ".layers." not in n and t.dim() == 1]
        if norms and norms[-1].shape == self.norm.weight.shape:
            self.norm.weight.copy_(norms[-1])
