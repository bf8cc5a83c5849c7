"""One decoder layer, or several, that draft from the target's hidden states: EAGLE-3 (Li et al., 2025).

Slot j holds the target's hidden states of token j together with token j + 1 and predicts token j + 2. For tokens that
the target has not read yet, the layer's own output replaces the hidden states.

EAGLE-1 and EAGLE-2 (Li et al., 2024) have the same slots, but read only the target's last hidden state. They fuse it
with the embedding before a layer without a first norm. They have no norm after the layer, and use the target's output
matrix.

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
    """Returns the numbers of a low, a middle and a high hidden state of a model with ``count`` layers."""
    return min(2, count), count // 2, max(count - 3, 0)


class EagleConfig(LayersConfig):
    """Settings of an :class:`EagleHead`; see also :class:`~arbordraft.heads.layers.LayersConfig`.

    Args:
        own_embeddings: whether it has its own token embeddings, in place of the target's.
        first_generation: whether it is an EAGLE-1 or EAGLE-2 head.
        fc_bias: whether the fusing layer has a bias (HASS); only for the first generation.
        fc_norm: whether each of the target's states is normed before they are fused (EAGLE-3.1).
        norm_before_fc: whether all these states are normed together.
        norm_before_residual: whether the layer adds to the normed states, not to the states themselves.
        norm_output: whether the next step reads the output after the last norm (EAGLE-3.1).
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
        """Raises ValueError unless this is a head as we train them, the only kind that ``what`` knows."""
        if unsupported := self._unsupported():
            settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in unsupported)
            raise ValueError(f"{what} knows EAGLE-3 heads of one plain layer, this one has {settings}")

    def _unsupported(self) -> list[str]:
        plain = EagleConfig()
        names = ["num_hidden_layers", "own_embeddings", "qk_norm", "attention_bias", "fc_norm", "norm_before_fc"]
        names += ["norm_before_residual", "norm_output", "first_generation"]
        scaled_rope = (self.rope_parameters or {}).get("rope_type", "default") != "default"
        return [name for name in names if getattr(self, name) != getattr(plain, name)] + [
            "rope_parameters"
        ] * scaled_rope

    @property
    def embedding_size(self) -> int:
        """E."""
        return self.hidden_size if self.own_embeddings else self.target_hidden_size


class EagleHead(LayeredHead):
    """The layers with fusion, norms and output matrix, under the tensor names of EAGLE-3 checkpoints.

    It computes no attention: callers pass :meth:`queries_keys_values` of a layer to their own attention, and its output
    to :meth:`finish`. Token embeddings are the target's, unless it has its own.
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
        """Creates a head that starts from the target's last layer, its norm and its rows of the output matrix.

        Args:
            model: the target; a decoder like Llama gives its weights, another one only its sizes.
            tokens: target ids that can be drafted.
            hidden_layers: hidden states to read; by default a low, a middle and a high one.
            intermediate_size: inner size of the MLP, by default the target's.
            name: name of the target.
            **own: further settings of subclasses.
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
        """Fuses ``[..., F]`` states of the target into ``[..., H]``; the first generation fuses in :meth:`enter`."""
        return states if self.config.first_generation else self.fc(self.normed(states))

    def enter(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Returns the first layer's ``[..., H]`` input for ``[..., E]`` embeddings and :meth:`fuse` or own states."""
        return self.fc(torch.cat([embeddings, hidden], dim=-1)) if self.config.first_generation else hidden

    def normed(self, states: Tensor) -> Tensor:
        """Norms ``[..., F]`` states of the target for :attr:`fc`; without a norm, they keep their dtype."""
        if self.input_norm is None and not self.fc_norm:
            return states
        states = states.to(self.dtype)
        if self.input_norm is not None:
            return self.input_norm(states)
        parts = states.chunk(len(self.fc_norm), dim=-1)
        return torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)

    @property
    def layers(self) -> list[Layer]:
        """The layers, from the first to the last."""
        return [self.midlayer, *self.deeper]

    def queries_keys_values(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int = 0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a layer's queries, keys and values.

        Args:
            embeddings: ``[..., E]`` of each slot's token, which the first layer reads.
            hidden: ``[..., H]`` result of :meth:`enter`; for deeper layers the output of the previous one.
            rotary: result of :meth:`rotary` for the slots' positions.
            layer: number of the layer.

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
        if layer == 0 and self.config.norm_before_residual:
            hidden = self.midlayer.hidden_norm(hidden)
        return super().finish(hidden, attended, layer)

    def predict(self, out: Tensor, head: nn.Module | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``[..., D]`` logits, the ``[..., H]`` states before them and those that the next step reads.

        Args:
            out: ``[..., H]`` output of the last layer.
            head: the target's output matrix, for heads that have none.
        """
        final = self.norm(out)
        output: Any = self.lm_head or head
        return output(final), final, final if self.config.norm_output else out

    @torch.no_grad()
    def _begin(self, model: PreTrainedModel) -> None:
        """Copies the target's own weights where they fit."""
        config = self.config
        self.lm_head.weight.copy_(model.get_output_embeddings().weight[self.tokens])
        if config.hidden_layers:
            # Passes on mainly the highest states, so that training starts close to the last layer.
            self.fc.weight.normal_(0.0, 0.01)
            self.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        last = model.config.get_text_config().num_hidden_layers - 1
        # The norm of states starts from the target's norm of the layer's input, the norm of embeddings from ones.
        take_over(
            self.midlayer, model, last, {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": ""}
        )
        take_over_norm(self.norm, model)
