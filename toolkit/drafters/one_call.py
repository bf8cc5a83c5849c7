"""Whole draft trees in one call, of native kernels or in fixed shapes, where what is wanted can be told in numbers.

Shapes: S samples that draft, T packed rows, R of them, F hidden states side by side, H hidden size, D outputs.
"""

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from arbordraft.deciders.decisions import Plan
from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext, OneCallDrafts
from arbordraft.drafters.grower import TreeGrower
from arbordraft.kernels.draft_tree import Drafted, DraftRun, Draws, Growth, usable
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.target.attention import Attending
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree

CHUNK = 2048  # rows of a call, which bounds its memory

Missing = tuple[
    Sequence[int], Tensor | None
]  # committed tokens that a cache lacks, and the target's states beside them


class DraftNetwork(Protocol):
    """A drafting model as fixed shapes run it: by operations on its device alone.

    Attributes:
        device: where it is.
        dtype: of what it reads and writes.
        states: F; 0 if it reads no states of the target.
        vocab_size: the target's token ids.
        vocabulary: ``[D]`` tokens of its outputs; ``None`` for 0 to D - 1.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def states(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocabulary(self) -> Tensor | None: ...

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        """Keys and values of its layers in a cache, which need not have any yet; ``dummy`` has room for a token."""

    def fuse(self, states: Tensor) -> Tensor:
        """``[T, F]`` states of the target as the ``[T, H]`` that it reads; unless it reads none."""

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs packed rows.

        Args:
            tokens: ``[T]``.
            hidden: ``[T, H]`` beside them: of the target, or its own output for their parents.
            positions: ``[T]``.
            ragged: stores keys and values and attends to them.
            rows: ``[R]`` rows that are wanted, all T by default.

        Returns:
            ``[R, D]`` logits, and the ``[R, H]`` output that its next rows read, if they read any.
        """


@dataclass(frozen=True)
class ModelOnRows:
    """A causal LM as fixed shapes run it: a :class:`DraftNetwork`.

    Args:
        model: the draft model.
        network: its modules as they are now.
    """

    model: RaggedModel
    network: nn.Module
    states = 0
    vocabulary = None

    def __repr__(self) -> str:
        return type(self.model.model).__name__

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the model."""
        return self.model.model.dtype

    @property
    def vocab_size(self) -> int:
        """Its token ids, which are the target's."""
        return self.model.vocab_size

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        """Keys and values of all layers; what they are like is seen in a forward."""
        if next(cache.buffers(), None) is None:
            self.model.prefill({dummy: [0]}, cache)
        return cache.layers(self.model.num_layers)

    def fuse(self, states: Tensor) -> Tensor:
        """Not asked for."""
        return states

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """``[R, V]`` logits; ``hidden`` is of no account."""
        output = self.network(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=slice(None) if rows is None else rows,
            ragged=ragged,
        )
        return output.logits[0], None


def grow_in_one_call(
    context: DraftContext,
    drafter: Drafter,
    able: Collection[int],
    run: Callable[[list[int], Growth, Draws | None], Drafted],
) -> tuple[DraftTree, dict[int, list[int]]] | None:
    """Does what :func:`~arbordraft.drafters.base.grow` does, in one call.

    Args:
        context: the step.
        drafter: whose trees they are.
        able: the samples that it can draft for.
        run: given S samples, how far their trees go on and how tokens are drawn, what was drafted.

    Returns:
        The trees, and of every sample that drafted the nodes that were fed to a model, in their order. ``None``, and
        nothing was done, where only ``grow`` can do it: without kernels and fixed shapes, with deciders that want to be
        asked, random draws, and processors that do more than divide by a temperature.
    """
    told = context.candidates is None and context.law.deterministic and context.pathwise
    if not told or context.temperatures is None or not (context.static or usable()):
        return None
    grower = TreeGrower(context, context.law, drafter)
    plans = [plan for plan in grower.plans if plan is not None]
    if len(plans) != len(grower.plans):
        return None
    parents = context.topology.parent_list
    fed: dict[int, list[int]] = {}
    for group, plan in zip(grower.groups, plans, strict=True):
        going = [index for index, levels in enumerate(plan.levels) if levels > 0 and group[index] in able]
        if not going:
            continue
        samples = [group[index] for index in going]
        drafted = run(samples, _growth(context, plan, going, samples), _draws(context, samples))
        if drafted.broken:
            warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=3)
        for (index, node, token), chance in zip(drafted.nodes, drafted.chances, strict=True):
            grower.add(samples[index], parents[node], node, token, chance)
        fed |= {sample: [] for sample in samples}
        for index, node in drafted.fed:
            fed[samples[index]].append(node)
    return grower.tree(), fed


def _growth(context: DraftContext, plan: Plan, going: Sequence[int], samples: Sequence[int]) -> Growth:
    """The plan for the samples that stand at ``going`` in it."""
    told = [(plan.trust[index], plan.next[index]) for index in going]
    depths = range(max(len(factors) for row in told for factors in row))
    return Growth(
        context.topology.child_offsets,
        context.topology.child_order,
        [min(plan.levels[index], context.max_depth[sample] or 0) for index, sample in zip(going, samples, strict=True)],
        [trust[min(depth, len(trust) - 1)] for trust, _ in told for depth in depths],
        [following[min(depth, len(following) - 1)] for _, following in told for depth in depths],
        [plan.weights[index] for index in going] if plan.weights else [1.0] * len(going),
        plan.level,
        plan.row,
        -1 if plan.budget is None else plan.budget,
    )


def _draws(context: DraftContext, samples: Sequence[int]) -> Draws | None:
    noise = context.noise
    if not isinstance(noise, GumbelNoise):
        return None
    seeds = torch.tensor([source.seed if (source := noise.sources[sample]) else 0 for sample in samples])
    positions = torch.tensor([noise.lengths[sample] for sample in samples])
    return Draws(seeds, positions, [context.temperatures[sample] for sample in samples])  # type: ignore[index]


def feed(
    run: DraftRun, cache: RaggedKVCache, missing: Mapping[int, Missing], growth: Growth, draws: Draws | None
) -> Drafted:
    """Runs a model on what its cache lacks, which is committed, and then on its own drafts.

    Args:
        run: the model.
        cache: its cache.
        missing: by handle, in the order of ``growth``.
        growth: how far trees go on.
        draws: how tokens are drawn.
    """
    if sum(len(tokens) for tokens, _ in missing.values()) <= CHUNK:
        return _call(run, cache, missing, growth, draws)
    ends = {}  # of prompts, of which all but the last token come first
    idle = growth._replace(levels=[0], trust=[1.0], next=[1.0], weights=[1.0])
    for handle, (tokens, states) in missing.items():
        for first in range(0, len(tokens) - 1, CHUNK):
            last = min(first + CHUNK, len(tokens) - 1)
            _call(run, cache, {handle: (tokens[first:last], _rows(states, first, last))}, idle, None)
        ends[handle] = tokens[-1:], _rows(states, len(tokens) - 1, len(tokens))
    return _call(run, cache, ends, growth, draws)


def _rows(states: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if states is None else states[first:last]


def _call(
    run: DraftRun, cache: RaggedKVCache, missing: Mapping[int, Missing], growth: Growth, draws: Draws | None
) -> Drafted:
    counts = [len(tokens) for tokens, _ in missing.values()]
    inner = sum(before < after for before, after in pairwise(growth.offsets))
    places = cache.reserve(list(missing), [count + inner for count in counts])
    like = run.weights.embedding
    states = [part for _, part in missing.values() if part is not None]
    drafted = run(
        torch.tensor([token for tokens, _ in missing.values() for token in tokens]),
        torch.cat(states).to(like.dtype) if states else None,
        [cache.pools(index, (layer.kv_heads, layer.dim), like) for index, layer in enumerate(run.weights.layers)],
        torch.tensor([[start for start, _ in places], [length for _, length in places], counts]),
        growth,
        draws,
    )
    caught_up(cache, missing)
    return drafted


def caught_up(cache: RaggedKVCache, missing: Mapping[int, Missing]) -> None:
    """Commits what a cache lacked and has been written."""
    for handle, (tokens, _) in missing.items():
        cache.wrote(handle, range(len(tokens)))
        cache.commit({handle: range(len(tokens))})


def feed_static(
    static: OneCallDrafts,
    network: DraftNetwork,
    prefill: Callable[[dict[int, Missing]], object],
    cache: RaggedKVCache,
    missing: Mapping[int, Missing],
    growth: Growth,
    draws: Draws | None,
) -> Drafted:
    """The same in fixed shapes, which have room for what a step commits: ``prefill`` goes over prompts before."""
    early, late = {}, {}
    for handle, (tokens, states) in missing.items():
        first = max(0, len(tokens) - static.rows)
        late[handle] = tokens[first:], _rows(states, first, len(tokens))
        if first:
            early[handle] = tokens[:first], _rows(states, 0, first)
    if early:
        prefill(early)
    return static(network, cache, late, growth, draws)


__all__ = ["CHUNK", "DraftNetwork", "Missing", "ModelOnRows", "caught_up", "feed", "feed_static", "grow_in_one_call"]
