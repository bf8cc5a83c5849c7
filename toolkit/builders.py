"""Plain functions that wire the decoders of the literature."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arbordraft.costs import CostTable
from arbordraft.coupling import Coupling
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, LanguageModelDrafter, NGramDrafter, NoDrafter
from arbordraft.laws import IID, Fixed, TopTail, WithoutReplacement
from arbordraft.target import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.verifiers import Matching, RecursiveRejection, SpecHub, TopDown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = RaggedModel | PreTrainedModel


def plain(target: "Model") -> SpeculativeDecoder:
    """Decoding without drafts, in the same ragged batches and with the same kernels."""
    return SpeculativeDecoder(
        _ragged(target), NoDrafter(), TreeTopology.chain(0), Coupling(Fixed(1), TopDown(Matching()))
    )


def lookup(target: "Model", costs: CostTable | None = None) -> SpeculativeDecoder:
    """n-gram speculation where it pays and plain decoding where it does not, by what rows cost on this machine.

    Args:
        target: the target.
        costs: measured now by default, which takes about a second for a small model.
    """
    model = _ragged(target)
    drafter, coupling = NGramDrafter(longest=8, shortest=1), Coupling(Fixed(1), TopDown(Matching()))
    return SpeculativeDecoder(model, drafter, TreeTopology.chain(12), coupling, costs=costs or CostTable.measure(model))


def ems_sd(target: "Model", draft: "Model | Drafter | None" = None, length: int = 7) -> SpeculativeDecoder:
    """Chains in an unpadded batch: EMS-SD (Ni et al., NAACL 2025).

    Args:
        target: the target.
        draft: a draft model, or any drafter; by default lookup in the sample's own text, as in the paper's LLMA runs.
        length: drafted tokens per step.
    """
    drafter = NGramDrafter() if draft is None else _drafter(draft)
    lookup = isinstance(drafter, NGramDrafter)
    coupling = Coupling(Fixed(1), TopDown(Matching())) if lookup else Coupling(IID(1), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(_ragged(target), drafter, TreeTopology.chain(length), coupling)


def specinfer(
    target: "Model", draft: "Model | Drafter", k_config: Sequence[int] = (1, 1, 3, 1, 1, 1, 1, 1)
) -> SpeculativeDecoder:
    """IID draws and multi-step rejection: SpecInfer (Miao et al., ASPLOS 2024), with its expansion by default."""
    coupling = Coupling(IID(max(k_config)), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(_ragged(target), _drafter(draft), TreeTopology.from_k_config(k_config), coupling)


def mcsd(target: "Model", draft: "Model | Drafter", k_config: Sequence[int] = (4, 2, 2)) -> SpeculativeDecoder:
    """Several candidates without replacement: MCSD (Yang et al., 2024)."""
    coupling = Coupling(WithoutReplacement(max(k_config)), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(_ragged(target), _drafter(draft), TreeTopology.from_k_config(k_config), coupling)


def spechub(target: "Model", draft: "Model | Drafter", depth: int = 4) -> SpeculativeDecoder:
    """Binary trees of hub pairs, verified in the paper's order: SpecHub (Sun et al., EMNLP 2024)."""
    coupling = Coupling(TopTail(1, 1), TopDown(SpecHub(order="paper")))
    return SpeculativeDecoder(_ragged(target), _drafter(draft), TreeTopology.k_ary(2, depth), coupling)


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
    return SpeculativeDecoder(_ragged(target), _drafter(draft), topology, coupling)


def _ragged(model: "Model") -> RaggedModel:
    return model if isinstance(model, RaggedModel) else RaggedModel(model)


def _drafter(draft: "Model | Drafter") -> Drafter:
    return draft if isinstance(draft, Drafter) else LanguageModelDrafter(_ragged(draft))
