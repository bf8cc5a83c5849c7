"""Plain functions that wire the decoders of the literature."""

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
    """Decoding without drafts, in the same ragged batches and with the same kernels."""
    return SpeculativeDecoder(target, NoDrafter())


def lookup(target: "Model", costs: StepCosts | CostTable | None = None, expected_batch: int = 1) -> SpeculativeDecoder:
    """n-gram speculation where it pays and plain decoding where it does not, by what rows cost on this machine.

    Args:
        target: the target.
        costs: by default those of this machine, measured once by
            :func:`~arbordraft.decoding.measuring.known_costs`.
        expected_batch: samples that a sampled request takes its batch to have, see :class:`SpeculativeDecoder`.
    """
    model = wrapped(target)
    drafter = NGramDrafter(longest=8, shortest=1)
    decider = CostAware(known_costs(model, drafter) if costs is None else costs)
    return SpeculativeDecoder(model, drafter, decider=decider, expected_batch=expected_batch)


def ems_sd(target: "Model", draft: "Model | Drafter | None" = None, length: int = 7) -> SpeculativeDecoder:
    """Chains in an unpadded batch: EMS-SD (Ni et al., NAACL 2025).

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
    """IID draws and multi-step rejection: SpecInfer (Miao et al., ASPLOS 2024), with its expansion by default."""
    topology = TreeTopology.from_k_config(k_config)
    coupling = Coupling(IID(topology.width), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(target, draft, topology, coupling)


def mcsd(target: "Model", draft: "Model | Drafter", k_config: Sequence[int] = (4, 2, 2)) -> SpeculativeDecoder:
    """Several candidates without replacement: MCSD (Yang et al., 2024)."""
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
    """Target-initialised candidates and an early stop: improved MCSD (Lu et al., 2024; its code is called DynaSD).

    The tree that the target verifies is the part that was drafted of one largest tree, whose mask is built once.

    Args:
        target: the target.
        draft: a draft model or drafter.
        width: tokens that the target proposes for the first level, 1 or more. One is lossless: the token that every
            step ends with. More reproduce the paper, whose output is not the target's: results are marked lossy.
        depth: levels below these tokens, 0 to 512: chains, the paper's fork.
        k_config: children per level below these tokens instead of chains, the paper's static tree.
        decider: stops drafting early; by default while no draft's probability reaches the paper's 0.4.
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
    """Binary trees of hub pairs, verified in the paper's order: SpecHub (Sun et al., EMNLP 2024)."""
    coupling = Coupling(TopTail(1, 1), TopDown(SpecHub(order="paper")))
    return SpeculativeDecoder(target, draft, TreeTopology.k_ary(2, depth), coupling)


def sequoia(
    target: "Model",
    draft: "Model | Drafter",
    acceptance: Sequence[float],
    nodes: int = 16,
    max_depth: int | None = None,
) -> SpeculativeDecoder:
    """The best tree for a measured acceptance, drawn without replacement: Sequoia (Chen et al., 2024).

    Args:
        target: the target.
        draft: a draft model or drafter.
        acceptance: probability that the child of each rank is the accepted one.
        nodes: size of the tree, root included.
        max_depth: bound on its depth.
    """
    topology = TreeTopology.sequoia(acceptance, nodes, max_depth)
    coupling = Coupling(WithoutReplacement(len(acceptance)), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(target, draft, topology, coupling)


def eagle(target: "Model", head: "str | os.PathLike[str] | EagleDrafter", **options: Any) -> SpeculativeDecoder:
    """A trained EAGLE-3 drafter with trees for its own acceptance: EAGLE-2 and -3 (Li et al., 2024 and 2025).

    Args:
        target: the target.
        head: folder or hub name of a trained head, or a drafter.
        **options: those of :func:`fitted`.
    """
    check_instance("head", head, str, os.PathLike, EagleDrafter)
    model = wrapped(target)
    drafter = head if isinstance(head, EagleDrafter) else EagleDrafter.from_pretrained(head, model)
    return fitted(model, drafter, **options)


def fitted(
    target: "Model",
    draft: "Model | Drafter",
    nodes: int = 16,
    *,
    lookup: bool = False,
    max_depth: int = 6,
    topology: TreeTopology | None = None,
    costs: StepCosts | CostTable | None = None,
) -> SpeculativeDecoder:
    """Any drafter with trees of the size and shape that pay at each step, down to no draft at all.

    Sampling shares noise between target and drafter, see :meth:`Coupling.shared <arbordraft.Coupling.shared>`.

    Args:
        target: the target.
        draft: a draft model or drafter.
        nodes: rows per sample that the target verifies at most, root included; 1 to 2,048.
        lookup: copy from the sample's own text where its last tokens occurred before, and draft elsewhere.
        max_depth: bound on the trees' depth; what lookups copy may go on below, as long as ``nodes`` last.
        topology: the largest tree; by default fitted to the drafter's acceptance.
        costs: by default those of this machine, measured once by
            :func:`~arbordraft.decoding.measuring.known_costs`.
    """
    nodes = check_int("nodes", nodes, 1, MOST_NODES)
    if topology is not None:
        check_instance("topology", topology, TreeTopology)
    model, drafter = wrapped(target), as_drafter(draft)
    decider = CostAware(known_costs(model, drafter) if costs is None else costs, nodes)
    return _expanding(model, drafter, nodes, decider, lookup, max_depth, topology)


def expanding(
    target: "Model", draft: "Model | Drafter", nodes: int = 16, *, lookup: bool = False, max_depth: int = 6
) -> SpeculativeDecoder:
    """The same with as many nodes at every step, whatever they cost: EAGLE-2 (Li et al., 2024), to compare with.

    Args:
        target: the target.
        draft: a draft model or drafter.
        nodes: rows per sample that the target verifies, root included; 1 to 2,048.
        lookup: as in :func:`fitted`.
        max_depth: as there.
    """
    nodes = check_int("nodes", nodes, 1, MOST_NODES)
    return _expanding(wrapped(target), as_drafter(draft), nodes, NodeBudget(nodes), lookup, max_depth)


def _expanding(
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
        if lookup:  # what is copied may go on for as long as the budget lasts
            topology = _with_trunk(topology, nodes - 1)
    return SpeculativeDecoder(target, proposer, topology, Coupling.shared(topology.width), decider)


def _with_trunk(topology: TreeTopology, depth: int) -> TreeTopology:
    """The tree with the first of its deepest paths carried on down to a depth."""
    parents = topology.parent_list
    more = max(0, depth - topology.max_depth)
    trunk = [topology.levels[-1][0], *range(len(parents), len(parents) + more)][:more]
    return TreeTopology.from_parents([*parents, *trunk])
