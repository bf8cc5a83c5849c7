"""One decoder layer, or several, that draft from the target's hidden states: EAGLE-3 (Li et al., 2025).

Slot j holds the target's hidden states of token j together with token j + 1 and predicts token j + 2. Where the target
has not been yet, the layer's own output stands for the hidden states.

EAGLE-1 and EAGLE-2 (Li et al., 2024) have the same slots. They read the target's last hidden state alone, fuse it with
the embedding in front of a layer without a first norm, have no norm behind it, and use the target's output matrix.

Shapes: ... any leading sizes, F hidden states side by side, E embedding size, H hidden size, Hq/Hkv heads, C head size,
D draft vocabulary.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arbordraft.heads.layers import (
    Layer,
    LayeredHead,
    LayersConfig,
    layer_settings,
    take_over,
    take_over_norm,
)


def default_layers(count: int) -> tuple[int, int, int]:
    """A low, a middle and a high one of the hidden states of a model with ``count`` layers."""
    return min(2, count), count // 2, max(count - 3, 0)


class EagleConfig(LayersConfig):
    """Settings of an :class:`EagleHead`; see also :class:`~arbordraft.heads.layers.LayersConfig`.

    Args:
        own_embeddings: whether tokens have embeddings of its own, not the target's.
        first_generation: whether it is one of EAGLE-1 or EAGLE-2.
        fc_bias: whether what fuses has a bias (HASS); of the first generation alone.
        fc_norm: whether each of the target's states is normed before they are fused (EAGLE-3.1).
        norm_before_fc: whether all of them together are.
        norm_before_residual: whether the layer adds to the normed states, not to the states themselves.
        norm_output: whether the next step reads the output behind the last norm (EAGLE-3.1).
    """

    model_type = "arbordraft_eagle"

    own_embeddings: bool = False
    first_generation: bool = False
    fc_bias: bool = False
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
        names += ["norm_before_residual", "norm_output", "first_generation"]
        turned = (self.rope_parameters or {}).get("rope_type", "default") != "default"
        return [name for name in names if getattr(self, name) != getattr(plain, name)] + ["rope_parameters"] * turned

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.hidden_size if self.own_embeddings else self.target_hidden_size


class EagleHead(LayeredHead):
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
        first = config.first_generation
        fused = count * size + first * config.embedding_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=config.fc_bias)
        self.midlayer = Layer(config, 0 if first else config.embedding_size)
        self.deeper = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers - 1))
        self.norm: Any = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head: Any = None
        if first:
            self.midlayer.input_layernorm = self.norm = nn.Identity()
        else:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
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
        settings = cls.config_class.for_target(
            model,
            name,
            draft_vocab_size=len(set(tokens)),
            hidden_layers=list(hidden_layers or default_layers(config.num_hidden_layers)),
            **layer_settings(config, intermediate_size),
            **own,
        )
        head = cls(settings)
        head.set_vocabulary(tokens)
        head._begin(model)
        return head

    def fuse(self, states: Tensor) -> Tensor:
        """``[..., F]`` of the target to ``[..., H]``; the first generation fuses later, see :meth:`enter`."""
        return states if self.config.first_generation else self.fc(self.normed(states))

    def enter(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """``[..., H]`` what the first layer reads, of embeddings ``[..., E]`` and :meth:`fuse` or its own output."""
        return self.fc(torch.cat([embeddings, hidden], dim=-1)) if self.config.first_generation else hidden

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
    def layers(self) -> list[Layer]:
        """From the first to the last."""
        return [self.midlayer, *self.deeper]

    def queries_keys_values(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the attention of a layer needs.

        Args:
            embeddings: ``[..., E]`` of each slot's token, which the first layer reads.
            hidden: ``[..., H]`` what :meth:`enter` gives; for deeper layers the output of the one before.
            rotary: what :meth:`rotary` gives for the slots' positions.
            layer: its number.

        Returns:
            ``[..., Hq, C]``, ``[..., Hkv, C]`` and ``[..., Hkv, C]``.
        """
        block = self.layers[layer]
        if layer or self.config.first_generation:
            x = block.input_layernorm(hidden)
        else:
            x = torch.cat([block.input_layernorm(embeddings), self.midlayer.hidden_norm(hidden)], dim=-1)
        return self.project(block.self_attn, x, rotary)

    def finish(self, hidden: Tensor, attended: Tensor, layer: int = 0) -> Tensor:
        """``[..., H]`` a layer's output, from its input and what its heads attended to, ``[..., Hq * C]``."""
        if layer == 0 and self.config.norm_before_residual:
            hidden = self.midlayer.hidden_norm(hidden)
        return self.layers[layer].finish(hidden, attended)

    def predict(self, out: Tensor, head: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Of the last layer's output ``[..., D]`` logits, the ``[..., H]`` before them, what the next step reads.

        Args:
            out: ``[..., H]``.
            head: the target's output matrix, for heads that have none.
        """
        final = self.norm(out)
        output: Any = self.lm_head or head
        return output(final), final, final if self.config.norm_output else out

    @torch.no_grad()
    def _begin(self, model: PreTrainedModel) -> None:
        """Takes over what fits of the target's own weights."""
        config = self.config
        self.lm_head.weight.copy_(model.get_output_embeddings().weight[self.tokens])
        if config.hidden_layers:
            # The highest states stand for all, so that training starts from something close to the last layer.
            self.fc.weight.normal_(0.0, 0.01)
            self.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        last = model.config.get_text_config().num_hidden_layers - 1
        # Embeddings and states are normed by what norms the layer's input in the target; the former begin with ones.
        take_over(
            self.midlayer, model, last, {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": ""}
        )
        take_over_norm(self.norm, model)
