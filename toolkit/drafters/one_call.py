"""Grows whole trees in one call of a network, where the host need not see any level.

Shapes: B samples, S samples that draft.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.planning import Group
from arbordraft.drafters.stage import Stage
from arbordraft.kernels.draft_tree import Corrections, Draws, TreesToGrow, usable
from arbordraft.kernels.draft_tree import reference as rule
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.trees.forest import Forest

_CERTAIN = 1e9  # a calibration whose product with any probability counts as 1


def trees_of(stage: Stage, group: Group) -> TreesToGrow | None:
    """Returns the trees of a group, if one call can grow them."""
    context, limits, topology = stage.context, stage.limits, stage.context.topology
    slots = [sample for sample in group.samples if limits.levels[sample] > 0]
    if group.asked or not group.pathwise or context.candidates is not None or not slots:
        return None
    if stage.ranked is not None:  # so that all planned levels are drafted
        limits = replace(limits, calibration=np.full_like(limits.calibration, _CERTAIN))
    draws = draws_of(context, slots)
    return TreesToGrow(stage.forest, slots, topology.child_offsets, topology.child_order, limits, draws)


def grow_in_one_call(stage: Stage, group: Group) -> bool:
    """Lets a network grow a group's trees at once; returns whether the group is finished."""
    context, forest, topology = stage.context, stage.forest, stage.context.topology
    if (trees := trees_of(stage, group)) is None:
        return not group.asked and not stage.limits.levels[group.samples].any()
    slots = trees.slots
    if stage.device is not None and (network := stage.drafter.network(context)) is not None:
        if stage.constrained:  # a device knows no masks
            return False
        broken: int | None = stage.device(stage.drafter, stage.state, context, network, trees)
    else:
        trees = trees._replace(corrections=corrections_of(context, slots, forest))
        broken = stage.drafter.grow_natively(stage.state, context, trees) if usable() else None
    if broken is None:
        return False
    if broken:
        warn_of_broken_rows()
    if stage.ranked is not None:
        for level in topology.tree_levels:
            chance = stage.ranked[level.rank.clip(max=len(stage.ranked) - 1)]
            chance = np.where(forest.certain[slots, level.below], _CERTAIN, chance)
            forest.chance[slots, level.below] = np.where(forest.token[slots, level.below] >= 0, chance, 0)
        rule.reached(forest, stage.limits, topology.tree_levels, slots)
        forest.chance[forest.certain] = 1
    for sample in slots if stage.constrained else ():
        _drop_forbidden(stage, sample)
    return True


def _drop_forbidden(stage: Stage, sample: int) -> None:
    """Drops the drafts of a sample that constraints forbid, with all that follow them."""
    forest, topology = stage.forest, stage.context.topology
    state = stage.context[sample].path_state
    if state is None:
        return
    for node in ((forest.token[sample, 1:] >= 0).nonzero()[0] + 1).tolist():
        parent, token = topology.parent_list[node], int(forest.token[sample, node])
        allowed = state.allowed(forest.path(sample, parent)) if forest.token[sample, parent] >= 0 else None
        if forest.token[sample, parent] < 0 or (allowed is not None and token not in allowed):
            forest.token[sample, node] = -1
        elif allowed is not None and allowed.only == token:
            forest.certain[sample, node], forest.reach[sample, node] = True, forest.reach[sample, parent]


def draws_of(context: DraftContext, samples: Sequence[int]) -> Draws | None:
    """Returns how tokens of S samples are drawn with shared noise; ``None`` if the noise is not shared."""
    noise = context.noise
    if not isinstance(noise, GumbelNoise):
        return None
    seeds, positions = noise.keys([(sample, 0) for sample in samples])
    temperatures = [context.temperature(sample) for sample in samples]
    truncations = [context[sample].pipeline.truncation for sample in samples]
    return Draws(seeds, positions, temperatures, truncations)


def corrections_of(context: DraftContext, samples: Sequence[int], forest: Forest) -> Corrections | None:
    """Returns the changes that the processors of S samples make, and the tokens allowed after their forced drafts."""
    changes = [context[sample].corrections() for sample in samples]
    masks = [_mask_after_forced(context, sample, forest) for sample in samples]
    if not any(map(len, changes)) and not any(masks):
        return None
    table, bounds = torch.from_numpy(np.concatenate(changes)), [0, *accumulate(map(len, changes))]
    if not any(masks):
        return Corrections(table, bounds)
    width = max(len(bits) for _, bits in filter(None, masks))
    allowed = np.zeros((len(samples), width), dtype=np.uint8)
    for row, mask in enumerate(masks):
        if mask:
            allowed[row, : len(mask[1])] = np.frombuffer(mask[1], np.uint8)
    return Corrections(table, bounds, torch.from_numpy(allowed), [mask[0] if mask else -1 for mask in masks])


def _mask_after_forced(context: DraftContext, sample: int, forest: Forest) -> tuple[int, bytes] | None:
    """Returns the depth of a sample's last forced draft, and a bit for each token allowed after it, unless all are."""
    if (state := context[sample].path_state) is None:
        return None
    depth, node, children = 0, 0, context.topology.child_list
    while children[node] and forest.token[sample, children[node][0]] >= 0:
        depth, node = depth + 1, children[node][0]
    allowed = state.allowed(forest.path(sample, node))
    return None if allowed is None else (depth, allowed.bits)


def warn_of_broken_rows() -> None:
    """Warns that some rows of draft scores are no numbers."""
    warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=2)


__all__ = ["draws_of", "grow_in_one_call", "trees_of", "warn_of_broken_rows"]
