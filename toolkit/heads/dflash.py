"""Layers that predict a whole block of tokens in one pass, and a term for the previous token: DFlash and DSpark.

The context is the target's hidden states of all tokens but the last, fused and normed. Every layer computes only keys
and values from it. A block begins with the last token, followed by masks; its rows see the context and each other. With
``from_anchor`` the row of the last token predicts the first draft, as in DSpark. Otherwise the first mask does, as in
DFlash.

A row predicts the same for all nodes of its depth. The Markov term adds the effect of a node's own token y:
``logits(d, y) = W h_d + C m``. For ``vanilla``, m is the token's embedding e_y in a table of rank r. For ``gated``, it
is e_y times a gate ``sigmoid(G [h_d; e_y])``. For ``rnn``, it is the output of a recurrent cell along the path.

Shapes: ... any leading sizes, R rows, F hidden states side by side, H hidden size, Hq/Hkv heads, C head size, D draft
vocabulary, r rank.
"""

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arbordraft.heads.layers import (
    Layer,
    LayeredHead,
    LayersConfig,
    apply_rotary,
    layer_settings,
    take_over,
    take_over_norm,
)
from arbordraft.utils.checks import check_int


class DFlashConfig(LayersConfig):
    """Settings of a :class:`DFlashHead`; see also :class:`~arbordraft.heads.layers.LayersConfig`.

    Args:
        block_size: rows of a block, 1 to 32; at least 2 if the first row predicts nothing.
        from_anchor: whether the row of the last token predicts a draft.
        mask_token_id: the token whose embedding stands for unknown tokens.
        own_head: whether it has its own output matrix, in place of the target's.
        markov_rank: r; 0 for no Markov term, so that all nodes of a depth predict the same.
        markov: kind of the term: ``vanilla``, ``gated`` or ``rnn``.
    """

    model_type = "arbordraft_dflash"

    qk_norm: bool = True
    block_size: int = 5
    from_anchor: bool = True
    mask_token_id: int = 0
    own_head: bool = True
    markov_rank: int = 64
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"

    @property
    def depths(self) -> int:
        """Depth of the deepest draft."""
        return self.block_size - (not self.from_anchor)


class MarkovTerm(nn.Module):
    """A low-rank term for the previous token, with the tensor names of DSpark checkpoints.

    Args:
        config: settings of the head.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        rank = config.markov_rank
        self.kind = config.markov
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(config.hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + config.hidden_size, 3 * rank)

    def follow(self, final: Tensor, tokens: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Computes m of nodes with these tokens, and the memory for their children.

        Args:
            final: ``[..., H]`` states of their depths' rows before the logits.
            tokens: ``[...]`` int64.
            memory: ``[..., r]`` memory from their parents; ``None`` for roots, and for all kinds but ``rnn``.

        Returns:
            ``[..., r]`` m, which ``markov_w2`` maps to the term, and the memory, which is ``None`` but for ``rnn``.
        """
        embedded = self.markov_w1(tokens)
        if self.kind == "gated":
            return self.gate_proj(torch.cat([final, embedded], dim=-1)).sigmoid() * embedded, None
        if self.kind == "rnn":
            memory = torch.zeros_like(embedded) if memory is None else memory
            gate, candidate, output = self.joint_proj(torch.cat([memory, embedded, final], dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            return output.tanh(), gate * memory + (1 - gate) * candidate.tanh()
        return embedded, None


class DFlashHead(LayeredHead):
    """The layers with fusion, norms and output matrix, under the tensor names of DFlash and DSpark checkpoints.

    It computes no attention: callers pass :meth:`queries_keys_values` of a layer to their own attention, and its output
    to :meth:`finish`. Token embeddings are the target's.

    Raises:
        TypeError: if a setting is no whole number.
        ValueError: if one is out of range or unknown.

    Source: DFlash (arXiv:2602.06036); the Markov term is that of DSpark (Cheng et al., 2026).
    """

    config: DFlashConfig
    config_class = DFlashConfig
    base_model_prefix = "dflash"

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        check_int("block_size", config.block_size, 1 + (not config.from_anchor), 32)
        check_int("mask_token_id", config.mask_token_id, 0, config.vocab_size - 1)
        rank = check_int("markov_rank", config.markov_rank, 0)
        if config.markov not in ("vanilla", "gated", "rnn"):
            raise ValueError(f"markov must be vanilla, gated or rnn, got {config.markov!r}")
        fused = len(config.hidden_layers or ()) * config.target_hidden_size
        self.fc = nn.Linear(fused, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        own = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_head else None
        self.lm_head = own
        self.markov_head = MarkovTerm(config) if rank else None
        self.post_init()

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        tokens: Sequence[int],
        *,
        hidden_layers: Sequence[int],
        mask_token_id: int,
        num_hidden_layers: int = 2,
        intermediate_size: int | None = None,
        name: str | None = None,
        **own: Any,
    ) -> Self:
        """Creates a head that starts from the target's last layers, its norm and its rows of the output matrix.

        Args:
            model: the target; a decoder like Llama gives its weights, another one only its sizes.
            tokens: target ids that can be drafted.
            hidden_layers: hidden states to read, the highest last.
            mask_token_id: the token whose embedding is that of masks; best one that does not occur in texts.
            num_hidden_layers: number of layers, at most the target's.
            intermediate_size: inner size of the MLP, by default the target's.
            name: name of the target.
            **own: further settings of :class:`DFlashConfig`.
        """
        config = model.config.get_text_config()
        settings = cls.config_class.for_target(
            model,
            name,
            draft_vocab_size=len(set(tokens)),
            hidden_layers=list(hidden_layers),
            mask_token_id=mask_token_id,
            num_hidden_layers=check_int("num_hidden_layers", num_hidden_layers, 1, config.num_hidden_layers),
            **layer_settings(config, intermediate_size),
            **own,
        )
        head = cls(settings)
        head.set_vocabulary(tokens)
        head._begin(model)
        return head

    def check_target(self, model: PreTrainedModel) -> None:
        super().check_target(model)
        size = self.config.target_hidden_size
        if self.config.hidden_size != size:
            raise ValueError(
                f"its layers have size {self.config.hidden_size}, the target's embeddings that it reads {size}"
            )

    def context(self, states: Tensor) -> Tensor:
        """Fuses ``[..., F]`` hidden states of the target into ``[..., H]`` and norms them."""
        return self.hidden_norm(self.fc(states))

    def keys_values(self, context: Tensor, rotary: tuple[Tensor, Tensor], layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's ``[..., Hkv, C]`` keys and values of context ``[..., H]``."""
        attention = self.layers[layer].self_attn
        key, value = (
            part(context).unflatten(-1, (-1, self.config.head_dim)) for part in (attention.k_proj, attention.v_proj)
        )
        return apply_rotary(attention.k_norm(key) if self.config.qk_norm else key, rotary), value

    def queries_keys_values(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns a layer's queries, keys and values of a block's rows.

        Args:
            hidden: ``[..., H]`` input of the layer; embeddings for the first one.
            rotary: result of :meth:`rotary` for their positions.
            layer: number of the layer.

        Returns:
            ``[..., Hq, C]``, ``[..., Hkv, C]`` and ``[..., Hkv, C]``.
        """
        block = self.layers[layer]
        return self.project(block.self_attn, block.input_layernorm(hidden), rotary)

    @torch.no_grad()
    def _begin(self, model: PreTrainedModel) -> None:
        """Copies the target's own weights where they fit."""
        config = self.config
        if self.lm_head is not None:
            self.lm_head.weight.copy_(model.get_output_embeddings().weight[self.tokens])
        self.fc.weight.normal_(0.0, 0.01)
        self.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)
        first = model.config.get_text_config().num_hidden_layers - len(self.layers)
        for number, layer in enumerate(self.layers):
            take_over(layer, model, first + number)
        take_over_norm(self.norm, model)
        if self.markov_head is not None:
            self.markov_head.markov_w1.weight.normal_(0.0, 0.02)
            self.markov_head.markov_w2.weight.zero_()


__all__ = ["DFlashConfig", "DFlashHead", "MarkovTerm"]
