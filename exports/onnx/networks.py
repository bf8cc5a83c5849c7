"""Networks in the form of graphs: plain tensors in and out, noise and caches among them.

Shapes: B samples, n rows of each, P keys before them, V vocabulary, D draft vocabulary, H hidden size, F hidden states
side by side, Hq/Hkv heads, C head size, R rows, k children, N draft heads.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from arbordraft.deciders import LearnedDecider
from arbordraft.heads.block import BlockHead
from arbordraft.heads.eagle import EagleHead
from arbordraft.heads.medusa import MedusaHead
from arbordraft.onnx.graph import HIDDEN
from arbordraft.target.hf_cache import cache_argument


class CausalNetwork(nn.Module):
    """A causal LM with its keys and values as plain tensors.

    Args:
        model: any model of transformers whose cache is made of full-attention layers.
        hidden_layers: hidden states to return, as transformers numbers them.
        causal: whether to take a padding mask, as ``generate`` does, instead of an attention mask.
    """

    def __init__(self, model: PreTrainedModel, hidden_layers: Sequence[int] = (), *, causal: bool = False) -> None:
        super().__init__()
        self.model, self.hidden_layers, self.causal = model, tuple(hidden_layers), causal

    def forward(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor) -> list[Tensor]:
        """Runs rows after a past.

        Args:
            input_ids: ``[B, n]``.
            attention_mask: ``[B, 1, n, P + n]`` to add to the scores; or ``[B, P + n]``, 0 for padding.
            position_ids: ``[B, n]``.
            *past: ``[B, Hkv, P, C]`` keys and values of every layer in turn.

        Returns:
            ``[B, n, V]`` logits, ``[B, n, F]`` hidden states if there are any, and all keys and values, past and new.
        """
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        if self.causal:
            attention_mask = _causal_mask(attention_mask, input_ids.shape[1])
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=True,
            output_hidden_states=bool(self.hidden_layers),
            **{cache_argument(self.model): cache},
        )
        states = [outputs.hidden_states[layer] for layer in self.hidden_layers]
        shown = [torch.cat(states, dim=-1)] if states else []
        layers: list[Any] = cache.layers
        present = [part for layer in layers for part in (layer.keys, layer.values)]
        return [outputs.logits, *shown, *present]


class EagleNetwork(nn.Module):
    """An EAGLE head with the target's embeddings and the attention that it borrows."""

    def __init__(self, head: EagleHead, embeddings: nn.Module) -> None:
        super().__init__()
        self.head, self.embeddings = head, embeddings
        head.rotary(torch.zeros(1, dtype=torch.int64), torch.float32)  # its frequencies must exist before tracing

    def forward(
        self, input_ids: Tensor, hidden_states: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> list[Tensor]:
        """Fills slots, each from a token and the states of the token before it.

        Args:
            input_ids: ``[B, n]``.
            hidden_states: ``[B, n, H]`` output of the fusing graph, or of this graph itself.
            attention_mask: ``[B, 1, n, P + n]`` to add to the scores.
            position_ids: ``[B, n]``.
            *past: ``[B, Hkv, P, C]`` keys and values.

        Returns:
            ``[B, n, D]`` logits, their ``[B, n, H]`` inputs, the ``[B, n, H]`` output that replaces the target's states
            further down the tree, and all keys and values, past and new.
        """
        out, *present = self._layer(self.embeddings(input_ids), hidden_states, attention_mask, position_ids, past)
        final = self.head.norm(out)
        return [self.head.lm_head(final), final, out, *present]

    def _layer(
        self, embeddings: Tensor, hidden: Tensor, mask: Tensor, positions: Tensor, past: Sequence[Tensor]
    ) -> list[Tensor]:
        """Returns the layer's output, and all keys and values, past and new."""
        head = self.head
        query, key, value = head.queries_keys_values(embeddings, hidden, head.rotary(positions, hidden.dtype))
        keys, values = (
            torch.cat([before, new.transpose(1, 2)], dim=2) for before, new in zip(past, (key, value), strict=True)
        )
        groups = query.shape[2] // key.shape[2]
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.repeat_interleave(groups, dim=1),
            values.repeat_interleave(groups, dim=1),
            attn_mask=mask,
            scale=head.config.head_dim**-0.5,
        )
        return [head.finish(hidden, attended.transpose(1, 2).flatten(2)), keys, values]


class BlockNetwork(EagleNetwork):
    """A block head with the target's embeddings and the attention that it borrows, without its Markov term."""

    head: BlockHead

    def forward(  # type: ignore[override]  # one input more
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        depths: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        *past: Tensor,
    ) -> list[Tensor]:
        """Fills slots, and predicts the tokens at several depths after them.

        Args:
            input_ids: ``[B, n]`` tokens of the slots.
            hidden_states: ``[B, n, H]`` output of the fusing graph.
            depths: ``[B, n]`` int64; 0 for a slot itself, d for a prediction d tokens further ahead.
            attention_mask: ``[B, 1, n, P + n]`` to add to the scores; rows of depths see slots only.
            position_ids: ``[B, n]`` positions of the slots, plus d for predictions d tokens further ahead.
            *past: ``[B, Hkv, P, C]`` keys and values.

        Returns:
            ``[B, n, D]`` logits, their ``[B, n, H]`` inputs, ``[B, n, r]`` gates of the Markov term if there is one,
            and all keys and values, past and new.
        """
        embeddings, hidden = self.head.ask(self.embeddings(input_ids), hidden_states, depths)
        out, *present = self._layer(embeddings, hidden, attention_mask, position_ids, past)
        final = self.head.norm(out)
        gates = [] if self.head.gate is None else [self.head.gates(final)]
        return [self.head.lm_head(final), final, *gates, *present]


class MarkovNetwork(nn.Module):
    """The Markov term of a block head, by which a node's own token adds to the logits of its depth."""

    table: Tensor

    def __init__(self, head: BlockHead, embeddings: nn.Module, vocabulary: int) -> None:
        super().__init__()
        assert head.lm_head_markov is not None
        self.head = head.lm_head_markov
        # Folded: r numbers per token instead of its whole embedding.
        self.register_buffer("table", head.follow(embeddings(torch.arange(vocabulary))).detach())

    def forward(self, input_ids: Tensor, gates: Tensor) -> list[Tensor]:
        """Maps ``[R]`` tokens and ``[R, r]`` gates of their depths to ``[R, D]``."""
        return [self.head(gates * self.table[input_ids])]


class FuseNetwork(nn.Module):
    """The layer that fuses the target's hidden states for an EAGLE or block head."""

    def __init__(self, head: EagleHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden_states: Tensor) -> list[Tensor]:
        """Maps ``[B, n, F]`` to ``[B, n, H]``."""
        return [self.head.fuse(hidden_states)]


class MedusaNetwork(nn.Module):
    """All Medusa heads at once."""

    def __init__(self, head: MedusaHead) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden_states: Tensor) -> list[Tensor]:
        """Maps ``[B, H]`` outputs of the target's final norm to ``[B, N, D]`` logits."""
        rows = hidden_states[:, None]  # quantisation supports products of three dimensions only
        return [torch.cat([self.head.logits(rows, head) for head in range(self.head.config.num_heads)], dim=1)]


class DeciderNetwork(nn.Module):
    """The chances that a learned decider gives to draft rows."""

    def __init__(self, decider: LearnedDecider) -> None:
        super().__init__()
        self.decider = decider

    def forward(self, places: Tensor, statistics: Tensor, hidden_states: Tensor | None = None) -> list[Tensor]:
        """Computes ``[R]`` chances; for the arguments see ``LearnedDecider.chances``."""
        return [self.decider.chances(places, statistics, hidden_states)]


class NodeVerification(nn.Module):
    """The verdict at a node whose children were drawn by ``TopTail(tops, tails)``: ``TopTailRule``, applied top-down.

    With one top and one tail this is SpecHub's closed form.

    Args:
        tops: number of certain children of a node, the most probable tokens.
        tails: number of children drawn without replacement among the other tokens; at least one.

    Raises:
        ValueError: if there is no tail, or a negative number of tops.
    """

    def __init__(self, tops: int, tails: int) -> None:
        super().__init__()
        if tails < 1 or tops < 0:
            raise ValueError(f"the rule of drawn children needs at least one tail, got {tops} tops and {tails} tails")
        self.tops, self.tails = tops, tails

    def forward(self, logits: Tensor, draft_probs: Tensor, draft_tokens: Tensor, uniforms: Tensor) -> list[Tensor]:
        """Decides at R nodes.

        Args:
            logits: ``[R, V]`` processed logits of the target.
            draft_probs: ``[R, V]`` rows that the children were drawn from.
            draft_tokens: ``[R, k]`` int64 children as they were drawn, tails first; -1 for a missing child.
            uniforms: ``[R, k + 1]`` float64: one per child to decide about it, and a last one to draw the recovered
                token.

        Returns:
            ``[R]`` int64 index of the accepted child, or -1; ``[R]`` int64 emitted token: the child's, or the
            recovered one.
        """
        target = logits.softmax(dim=-1)
        accepts, stop = self._law(target, draft_probs, draft_tokens)
        left, accepted = torch.ones_like(accepts[0]), torch.full_like(draft_tokens[:, 0], -1)
        for child, accept in enumerate(accepts):
            whole = torch.where(left > accept, left, 1.0)
            share = torch.where(left > accept, accept / whole, (accept > 0).to(accept.dtype))
            taken = (accepted < 0) & (uniforms[:, child] < share)
            accepted = torch.where(taken, child, accepted)
            left = left - accept
        stop = torch.where(stop.sum(dim=-1, keepdim=True) > 0, stop, target)
        recovered = _drawn(stop, uniforms[:, -1:])
        child_token = draft_tokens.gather(1, accepted.clamp(min=0)[:, None])[:, 0]
        return [accepted, torch.where(accepted < 0, recovered, child_token)]

    def _law(self, target: Tensor, draft: Tensor, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns ``[R]`` chances of every child, and ``[R, V]`` weights of the tokens to emit if all are rejected."""
        places = torch.arange(target.shape[1])
        drafted = places == tokens[:, :, None]  # all False for a missing child
        row = torch.where(drafted[:, self.tails :].any(dim=1), 0.0, draft) if self.tops else draft
        rest, left, alive = target, torch.ones_like(target[:, 0]), torch.ones_like(target[:, 0], dtype=torch.bool)
        accepts = []
        for child in range(self.tails):
            here, known = drafted[:, child], tokens[:, child] >= 0
            total = row.sum(dim=-1, keepdim=True)
            proposal = row / torch.where(total > 0, total, 1.0)
            wanted, offered = ((x * here).sum(dim=-1) for x in (rest, proposal))
            ratio = torch.where(
                known & (offered > 0), (wanted / torch.where(offered > 0, offered, 1.0)).clamp(max=1), 0
            )
            accepts.append(left * ratio)
            left = left * (1 - ratio)
            residual = (rest - proposal).clamp(min=0)
            mass = residual.sum(dim=-1, keepdim=True)
            alive = alive & (~known | ((left > 0) & (mass[:, 0] > 0)))
            rest = torch.where(known[:, None], residual / torch.where(mass > 0, mass, 1.0), rest) * alive[:, None]
            row = torch.where(here, 0.0, row)
        stop = rest * left[:, None]
        # Emitting a token that is also drafted means continuing with it.
        accepts += [torch.zeros_like(left)] * self.tops
        accepts = [accept + (stop * drafted[:, child]).sum(dim=-1) for child, accept in enumerate(accepts)]
        return accepts, torch.where(drafted.any(dim=1), 0.0, stop)


def _drawn(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Makes ``[R]`` inverse-CDF draws from ``[R, V]`` weights with ``[R, 1]`` uniforms."""
    cumulative = weights.double().cumsum(dim=-1)
    token = (cumulative <= uniforms * cumulative[:, -1:]).sum(dim=-1)
    last = torch.where(weights > 0, torch.arange(weights.shape[1]), 0).amax(dim=-1)
    return torch.minimum(token, last)


def _causal_mask(kept: Tensor, rows: int) -> Tensor:
    """Builds the ``[B, 1, n, P + n]`` mask to add to the scores, from the padding mask ``[B, P + n]``."""
    columns = torch.arange(kept.shape[1])
    visible = (columns <= columns[-rows:, None]) & (kept[:, None, None, :] != 0)
    return torch.where(visible, 0.0, HIDDEN)
