"""Assembles the parts of a decoder: derives omitted parts and checks that all of them fit."""

from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.deciders import Decider, FixedDepth
from arbordraft.deciders.base import check_answers, growth_of
from arbordraft.drafters import Drafter, LanguageModelDrafter
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Causality
from arbordraft.utils.checks import check_instance
from arbordraft.verifiers import TreeVerifier
from arbordraft.verifiers.coupling import Coupling

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class AssembledParts(NamedTuple):
    """Parts of a decoder, see :class:`~arbordraft.SpeculativeDecoder`."""

    target: RaggedModel
    drafter: Drafter
    topology: TreeTopology
    coupling: Coupling
    decider: Decider


def assemble(
    target: "RaggedModel | PreTrainedModel",
    drafter: "Drafter | RaggedModel | PreTrainedModel",
    topology: TreeTopology | None = None,
    coupling: Coupling | None = None,
    decider: Decider | None = None,
) -> AssembledParts:
    """Completes the given parts of a decoder with defaults and checks that they fit.

    Raises:
        TypeError: if a part has the wrong type, or a decider overrides only some of its answers.
        ValueError: if the parts do not fit: vocabulary, tokenizer, draft law or topology. Also if the decider looks at
            drafts further than the verifier allows.
    """
    target, drafter = wrapped(target), as_drafter(drafter)
    topology = drafter.default_topology() if topology is None else topology
    check_instance("topology", topology, TreeTopology)
    coupling = Coupling.of(drafter.default_law(topology.width)) if coupling is None else coupling
    check_instance("coupling", coupling, Coupling)
    decider = FixedDepth() if decider is None else decider
    check_answers(check_instance("decider", decider, Decider))
    drafter.check(target, coupling.law)
    coupling.check(topology)
    for law in drafter.laws(coupling.law):
        if not coupling.verifier.supports(law):
            raise ValueError(f"{drafter} also proposes by {law}, for which {coupling.verifier} is not valid")
    _check_growth(decider, coupling.verifier)
    return AssembledParts(target, drafter, topology, coupling, decider)


def _check_growth(decider: Decider, verifier: TreeVerifier) -> None:
    """Raises ValueError if trees would grow by drafts that the verifier's law takes for independent of their growth."""
    if (growth := growth_of(decider)) <= verifier.growth:
        return
    if growth is Causality.ANTICIPATING:
        raise ValueError(
            f"{decider} looks at tokens that are still to be verified, which would bias the output unless target "
            "and drafter share their noise: Coupling.shared(k)"
        )
    raise ValueError(
        f"{decider} looks at drafted tokens, but {verifier} preserves the output law only if the growth of trees does "
        "not depend on them: take FixedDepth(), Heuristic() or AcceptedAverage(), or the verifier "
        "Lifted(RecursiveRejection())"
    )


def wrapped(target: Any) -> RaggedModel:
    """Returns a :class:`RaggedModel` as it is, and wraps a transformers model in one."""
    return target if isinstance(target, RaggedModel) else RaggedModel(target)


def as_drafter(drafter: Any) -> Drafter:
    """Returns a drafter as it is, and makes a drafter of a draft model."""
    if isinstance(drafter, RaggedModel) or hasattr(drafter, "get_output_embeddings"):
        return LanguageModelDrafter(drafter)
    check_instance("drafter", drafter, Drafter)
    return drafter


__all__ = ["AssembledParts", "as_drafter", "assemble", "wrapped"]
