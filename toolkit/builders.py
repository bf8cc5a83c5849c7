"""Builds decoders of the literature."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from arbordraft.deciders import ConfidenceThreshold, CostAware, Decider, NodeBudget
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.decoding.assemble import as_drafter, wrapped
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.measuring import known_costs
from arbordraft.decoding.target_initialised import TargetInitialisedDecoder
from arbordraft.drafters import Drafter, EagleDrafter, HybridDrafter, NGramDrafter, NoDrafter
from arbordraft.sampling.laws import IID, TopTail, WithoutReplacement
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import MOST_DEPTH, MOST_NODES, TreeTopology
from arbordraft.utils.checks import check_instance, check_int, check_sequence
from arbordraft.verifiers import RecursiveRejection, SpecHub, TopDown
from arbordraft.verifiers.coupling import Coupling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = RaggedModel | PreTrainedModel


def plain(target: "Model") -> SpeculativeDecoder:
    """Builds a decoder without drafts, which uses the same ragged batches and kernels."""
    return SpeculativeDecoder(target, NoDrafter())


def lookup(target: "Model", costs: StepCosts | CostTable | None = None, expected_batch: int = 1) -> SpeculativeDecoder:
    """Builds n-gram speculation with a :class:`~arbordraft.CostAware` decider, which drafts only where it pays.

    Args:
        target: the target.
        costs: costs of steps; by default those of this machine, measured once by
            :func:`~arbordraft.decoding.measuring.known_costs`.
        expected_batch: batch size that a sampled request assumes, see :class:`SpeculativeDecoder`.
    """
    model = wrapped(target)
    drafter = NGramDrafter(longest=8, shortest=1)
    decider = CostAware(known_costs(model, drafter) if costs is None else costs, running=costs is None)
    return SpeculativeDecoder(model, drafter, decider=decider, expected_batch=expected_batch)


def ems_sd(target: "Model", draft: "Model | Drafter | None" = None, length: int = 7) -> SpeculativeDecoder:
    """Builds EMS-SD (Ni et al., NAACL 2025): chains in an unpadded batch.

    Args:
        target: the target.
        draft: a draft model, or any drafter; by default lookup in the sample's own text, as in the paper's LLMA runs.
        length: drafted tokens per step, 0 to 512.
    """
    drafter = NGramDrafter() if draft is None else as_drafter(draft)
    lookup = isinstance(drafter, NGramDrafter)
    coupling = Coupling.shared() if lookup else Coupling(IID(1), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(target, drafter, TreeTopology.chain(length), coupling)


def specinfer(
    target: "Model", draft: "Model | Drafter", k_config: Sequence[int] = (1, 1, 3, 1, 1, 1, 1, 1)
) -> SpeculativeDecoder:
    """Builds SpecInfer (Miao et al., ASPLOS 2024): IID draws, multi-step rejection, and by default its expansion."""
    topology = TreeTopology.from_k_config(k_config)
    coupling = Coupling(IID(topology.width), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(target, draft, topology, coupling)


def mcsd(target: "Model", draft: "Model | Drafter", k_config: Sequence[int] = (4, 2, 2)) -> SpeculativeDecoder:
    """Builds MCSD (Yang et al., 2024): several candidates, drawn without replacement."""
    topology = TreeTopology.from_k_config(k_config)
    coupling = Coupling(WithoutReplacement(topology.width), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(target, draft, topology, coupling)


def dynasd(
    target: "Model",
    draft: "Model | Drafter",
    width: int = 1,
    depth: int = 5,
    *,
    k_config: Sequence[int] | None = None,
    decider: Decider | None = None,
) -> SpeculativeDecoder:
    """Builds improved MCSD (Lu et al., 2024; its code is DynaSD): target-initialised candidates and an early stop.

    The mask of the largest tree is built once. The target verifies the part of this tree that was drafted.

    Args:
        target: the target.
        draft: a draft model or drafter.
        width: tokens that the target proposes for the first level, 1 or more. A width of 1 is lossless: the token is
            the one that ends every step. Larger widths reproduce the paper. Its output does not follow the target, so
            results are marked lossy.
        depth: length of the chains below these tokens, 0 to 512; together they are the paper's fork.
        k_config: children per level below these tokens, instead of chains: the paper's static tree.
        decider: stops drafting early; by default once no draft's probability reaches the paper's 0.4.
    """
    width = check_int("width", width, 1)
    below = (
        (1,) * check_int("depth", depth, 0, MOST_DEPTH)
        if k_config is None
        else check_sequence("k_config", k_config, check_int)
    )
    topology = TreeTopology.from_k_config((width, *below) if width > 1 else below)
    model, drafter = wrapped(target), as_drafter(draft)
    decider = ConfidenceThreshold(0.4) if decider is None else decider
    if width > 1:
        return TargetInitialisedDecoder(model, drafter, topology, decider)
    coupling = Coupling(WithoutReplacement(topology.width), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(model, drafter, topology, coupling, decider)


def spechub(target: "Model", draft: "Model | Drafter", depth: int = 4) -> SpeculativeDecoder:
    """Builds SpecHub (Sun et al., EMNLP 2024): binary trees of hub pairs, verified in the paper's order."""
    coupling = Coupling(TopTail(1, 1), TopDown(SpecHub(order="paper")))
    return SpeculativeDecoder(target, draft, TreeTopology.k_ary(2, depth), coupling)


def sequoia(
    target: "Model",
    draft: "Model | Drafter",
    acceptance: Sequence[float],
    nodes: int = 16,
    max_depth: int | None = None,
) -> SpeculativeDecoder:
    """Builds Sequoia (Chen et al., 2024): the best tree for a measured acceptance, drawn without replacement.

    Args:
        target: the target.
        draft: a draft model or drafter.
        acceptance: for each rank, the probability that the child of this rank is accepted.
        nodes: size of the tree, root included.
        max_depth: bound on the tree's depth; 512 by default.
    """
    topology = TreeTopology.sequoia(acceptance, nodes, max_depth)
    coupling = Coupling(WithoutReplacement(len(acceptance)), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(target, draft, topology, coupling)


def eagle(target: "Model", head: "str | os.PathLike[str] | EagleDrafter", **options: Any) -> SpeculativeDecoder:
    """Builds EAGLE-2 and -3 (Li et al., 2024 and 2025): a trained EAGLE-3 drafter with trees for its acceptance.

    Args:
        target: the target.
        head: folder or hub name of a trained head, or a drafter.
        **options: options of :func:`cost_aware`.
    """
    check_instance("head", head, str, os.PathLike, EagleDrafter)
    model = wrapped(target)
    drafter = head if isinstance(head, EagleDrafter) else EagleDrafter.from_pretrained(head, model)
    return cost_aware(model, drafter, **options)


def cost_aware(
    target: "Model",
    draft: "Model | Drafter",
    nodes: int = 16,
    *,
    lookup: bool = False,
    max_depth: int = 6,
    topology: TreeTopology | None = None,
    costs: StepCosts | CostTable | None = None,
) -> SpeculativeDecoder:
    """Builds a decoder for any drafter; each step uses the tree size and shape that pay, down to no draft.

    Sampling shares noise between target and drafter, see :meth:`Coupling.shared <arbordraft.Coupling.shared>`.

    Args:
        target: the target.
        draft: a draft model or drafter.
        nodes: rows per sample that the target verifies at most, root included; 1 to 2,048.
        lookup: copy from the sample's own text where its last tokens occurred before, and draft elsewhere.
        max_depth: bound on the depth of drafted trees; tokens copied by ``lookup`` may go deeper, within ``nodes``.
        topology: the largest tree; by default fitted to the drafter's acceptance.
        costs: costs of steps; by default those of this machine, measured once by
            :func:`~arbordraft.decoding.measuring.known_costs`.
    """
    nodes = check_int("nodes", nodes, 1, MOST_NODES)
    if topology is not None:
        check_instance("topology", topology, TreeTopology)
    model, drafter = wrapped(target), as_drafter(draft)
    decider = CostAware(known_costs(model, drafter) if costs is None else costs, nodes, running=costs is None)
    return _tree_decoder(model, drafter, nodes, decider, lookup, max_depth, topology)


def eagle2(
    target: "Model", draft: "Model | Drafter", nodes: int = 16, *, lookup: bool = False, max_depth: int = 6
) -> SpeculativeDecoder:
    """Builds EAGLE-2 (Li et al., 2024) for comparison: as :func:`cost_aware`, with a fixed number of nodes per step.

    Args:
        target: the target.
        draft: a draft model or drafter.
        nodes: rows per sample that the target verifies, root included; 1 to 2,048.
        lookup: as in :func:`cost_aware`.
        max_depth: as in :func:`cost_aware`.
    """
    nodes = check_int("nodes", nodes, 1, MOST_NODES)
    return _tree_decoder(wrapped(target), as_drafter(draft), nodes, NodeBudget(nodes), lookup, max_depth)


def _tree_decoder(
    target: RaggedModel,
    drafter: Drafter,
    nodes: int,
    decider: Decider,
    lookup: bool,
    max_depth: int,
    topology: TreeTopology | None = None,
) -> SpeculativeDecoder:
    proposer = HybridDrafter(NGramDrafter(longest=5, shortest=3), drafter) if lookup else drafter
    if topology is None:
        topology = drafter.fitted_topology(min(4 * nodes, MOST_NODES), max_depth)
        if lookup:  # copied tokens may use all of the budget
            topology = _with_trunk(topology, nodes - 1)
    return SpeculativeDecoder(target, proposer, topology, Coupling.shared(topology.width), decider)


def _with_trunk(topology: TreeTopology, depth: int) -> TreeTopology:
    """Extends the first of the tree's deepest paths to ``depth``."""
    parents = topology.parent_list
    more = max(0, depth - topology.max_depth)
    trunk = [topology.levels[-1][0], *range(len(parents), len(parents) + more)][:more]
    return TreeTopology.from_parents([*parents, *trunk])
