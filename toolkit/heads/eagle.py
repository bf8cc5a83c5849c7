"""One decoder layer, or several, that draft from the target's hidden states: EAGLE-3 (Li et al., 2025).

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
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
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
        rope_parameters: of a rotary embedding of another kind, as transformers has them; ``rope_theta`` by default.
        max_position_embeddings: longest text.
        num_hidden_layers: layers; those behind the first one read hidden states alone.
        own_embeddings: whether tokens have embeddings of its own, not the target's.
        qk_norm: whether every head's query and key is normed, as in Qwen3.
        attention_bias: whether queries, keys and values have a bias.
        fc_norm: whether each of the target's states is normed before they are fused (EAGLE-3.1).
        norm_before_fc: whether all of them together are.
        norm_before_residual: whether the layer adds to the normed states, not to the states themselves.
        norm_output: whether the next step reads the output behind the last norm (EAGLE-3.1).
    """

    model_type = "arbordraft_eagle"

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_parameters: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    num_hidden_layers: int = 1
    own_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def check_plain(self, what: str) -> None:
        """Raises ValueError unless this is a head as we train them, which alone ``what`` knows."""
        if peculiar := self._peculiar():
            settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in peculiar)
            raise ValueError(f"{what} knows EAGLE-3 heads of one plain layer, this one has {settings}")

    def _peculiar(self) -> list[str]:
        plain = EagleConfig()
        names = ["num_hidden_layers", "own_embeddings", "qk_norm", "attention_bias", "fc_norm", "norm_before_fc"]
        names += ["norm_before_residual", "norm_output"]
        turned = (self.rope_parameters or {}).get("rope_type", "default") != "default"
        return [name for name in names if getattr(self, name) != getattr(plain, name)] + ["rope_parameters"] * turned

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.hidden_size if self.own_embeddings else self.target_hidden_size


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, inputs: int) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(inputs, heads * dim, bias=bias)
        self.k_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.v_proj = nn.Linear(inputs, kv_heads * dim, bias=bias)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(dim, config.rms_norm_eps)
            self.k_norm = nn.RMSNorm(dim, config.rms_norm_eps)


class _Layer(nn.Module):
    def __init__(self, config: EagleConfig, first: bool = True) -> None:
        super().__init__()
        width = config.embedding_size if first else config.hidden_size
        self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        if first:
            self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, config.hidden_size + first * config.embedding_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)


class EagleHead(DraftHead):
    """The layers with what stands before and behind them, under the tensor names of EAGLE-3 checkpoints.

    It has no attention of its own: callers hand :meth:`queries_keys_values` of a layer to the attention that suits them
    and its output to :meth:`finish`. Token embeddings are the target's, unless it has some.
    """

    config: EagleConfig
    config_class = EagleConfig
    base_model_prefix = "eagle"

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        count, size = len(config.hidden_layers or ()), config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        self.input_norm = nn.RMSNorm(count * size, config.rms_norm_eps) if config.norm_before_fc else None
        norms = [nn.RMSNorm(size, config.rms_norm_eps) for _ in range(count if config.fc_norm else 0)]
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(count * size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.deeper = nn.ModuleList(_Layer(config, first=False) for _ in range(config.num_hidden_layers - 1))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self._frequencies: Tensor | None = None  # of the rotary embedding, as soon as they are needed
        self._factor = 1.0
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
        return self.fc(self.normed(states))

    def normed(self, states: Tensor) -> Tensor:
        """``[..., F]`` of the target as :attr:`fc` takes them, in their own dtype unless there is a norm."""
        if self.input_norm is None and not self.fc_norm:
            return states
        states = states.to(self.dtype)
        if self.input_norm is not None:
            return self.input_norm(states)
        parts = states.chunk(len(self.fc_norm), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)

    @property
    def layers(self) -> "list[_Layer]":
        """From the first to the last."""
        return [self.midlayer, *self.deeper]

    def queries_keys_values(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the attention of a layer needs.

        Args:
            embeddings: ``[..., E]`` of each slot's token, which the first layer reads.
            hidden: ``[..., H]`` fused states, or the last layer's output; for deeper layers that of the one before.
            rotary: what :meth:`rotary` gives for the slots' positions.
            layer: its number.

        Returns:
            ``[..., Hq, C]``, ``[..., Hkv, C]`` and ``[..., Hkv, C]``.
        """
        block, attention = self.layers[layer], self.layers[layer].self_attn
        if layer:
            x = block.input_layernorm(hidden)
        else:
            x = torch.cat([block.input_layernorm(embeddings), block.hidden_norm(hidden)], dim=-1)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        query, key, value = (project(x).unflatten(-1, (-1, self.config.head_dim)) for project in projections)
        if self.config.qk_norm:
            query, key = attention.q_norm(query), attention.k_norm(key)
        both, (cosine, sine) = torch.cat([query, key], dim=-2), rotary
        turned = both * cosine + rotate_half(both) * sine
        return *turned.split([query.shape[-2], key.shape[-2]], dim=-2), value

    def finish(self, hidden: Tensor, attended: Tensor, layer: int = 0) -> Tensor:
        """``[..., H]`` a layer's output, from its input and what its heads attended to, ``[..., Hq * C]``."""
        block = self.layers[layer]
        if layer == 0 and self.config.norm_before_residual:
            hidden = block.hidden_norm(hidden)
        hidden = hidden + block.self_attn.o_proj(attended)
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    def predict(self, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last layer's output ``[..., D]`` logits, the ``[..., H]`` before them, what the next step reads."""
        final = self.norm(out)
        return self.lm_head(final), final, final if self.config.norm_output else out

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``[..., 1, C]`` of positions ``[...]``."""
        if self._frequencies is None or self._frequencies.device != positions.device:
            frequencies, self._factor = self.frequencies(positions.device)
            self._frequencies = frequencies.repeat(2)
        angles = positions[..., None, None].float() * self._frequencies
        return (self._factor * angles.cos()).to(dtype), (self._factor * angles.sin()).to(dtype)

    def frequencies(self, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
        """``[C / 2]`` float32 of the rotary embedding, and the factor of its cosines and sines."""
        config = self.config
        kind = (config.rope_parameters or {}).get("rope_type", "default")
        if kind == "default":
            theta = (config.rope_parameters or {}).get("rope_theta", config.rope_theta)
            half = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
            return (theta**-half).float(), 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device(device))
        return frequencies.float(), float(factor)

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
