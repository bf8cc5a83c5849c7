"""Multi-draft speculative decoding from composable parts."""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

_here = Path(__file__).resolve().parent
if _here.name == "toolkit":  # an editable checkout: the sibling folders hold the subpackages
    __path__.append(str(_here.parent))

if TYPE_CHECKING:
    from arbordraft import builders as builders
    from arbordraft.deciders import ConfidenceThreshold as ConfidenceThreshold
    from arbordraft.deciders import CostAware as CostAware
    from arbordraft.deciders import Decider as Decider
    from arbordraft.deciders.costs import CostTable as CostTable
    from arbordraft.decoding.decoder import SpeculativeDecoder as SpeculativeDecoder
    from arbordraft.decoding.engine import Engine as Engine
    from arbordraft.decoding.generate import DecodingError as DecodingError
    from arbordraft.decoding.metrics import DecodeStats as DecodeStats
    from arbordraft.decoding.requests import Request as Request
    from arbordraft.decoding.step_log import StepLog as StepLog
    from arbordraft.drafters import BlockDrafter as BlockDrafter
    from arbordraft.drafters import DFlashDrafter as DFlashDrafter
    from arbordraft.drafters import Drafter as Drafter
    from arbordraft.drafters import EagleDrafter as EagleDrafter
    from arbordraft.drafters import EarlyExitDrafter as EarlyExitDrafter
    from arbordraft.drafters import HybridDrafter as HybridDrafter
    from arbordraft.drafters import IntersectionDrafter as IntersectionDrafter
    from arbordraft.drafters import LanguageModelDrafter as LanguageModelDrafter
    from arbordraft.drafters import MedusaDrafter as MedusaDrafter
    from arbordraft.drafters import MtpDrafter as MtpDrafter
    from arbordraft.drafters import NGramDrafter as NGramDrafter
    from arbordraft.drafters import NoDrafter as NoDrafter
    from arbordraft.drafters import RetokenizedDrafter as RetokenizedDrafter
    from arbordraft.drafters import SelfDrafter as SelfDrafter
    from arbordraft.drafters import TextPool as TextPool
    from arbordraft.grammars import Grammar as Grammar
    from arbordraft.loading import load as load
    from arbordraft.sampling.laws import IID as IID
    from arbordraft.sampling.laws import Fixed as Fixed
    from arbordraft.sampling.laws import SharedNoise as SharedNoise
    from arbordraft.sampling.laws import TopTail as TopTail
    from arbordraft.sampling.laws import WithoutReplacement as WithoutReplacement
    from arbordraft.target.attention import UnsupportedModel as UnsupportedModel
    from arbordraft.target.model import RaggedModel as RaggedModel
    from arbordraft.trees.topology import TreeTopology as TreeTopology
    from arbordraft.verifiers import Lifted as Lifted
    from arbordraft.verifiers import Matching as Matching
    from arbordraft.verifiers import RecursiveRejection as RecursiveRejection
    from arbordraft.verifiers import SharedMatching as SharedMatching
    from arbordraft.verifiers import SpecHub as SpecHub
    from arbordraft.verifiers import TopDown as TopDown
    from arbordraft.verifiers.coupling import Coupling as Coupling

__version__ = "0.2.0"

# Names are imported on first use: torch and transformers take seconds, and `arbordraft --help` needs neither.
_NAMES = {
    "deciders": ("ConfidenceThreshold", "CostAware", "Decider"),
    "deciders.costs": ("CostTable",),
    "decoding.decoder": ("SpeculativeDecoder",),
    "decoding.engine": ("Engine",),
    "decoding.generate": ("DecodingError",),
    "decoding.metrics": ("DecodeStats",),
    "decoding.requests": ("Request",),
    "decoding.step_log": ("StepLog",),
    "drafters": (
        "BlockDrafter",
        "DFlashDrafter",
        "Drafter",
        "EagleDrafter",
        "EarlyExitDrafter",
        "HybridDrafter",
        "IntersectionDrafter",
        "LanguageModelDrafter",
        "MedusaDrafter",
        "MtpDrafter",
        "NGramDrafter",
        "NoDrafter",
        "RetokenizedDrafter",
        "SelfDrafter",
        "TextPool",
    ),
    "grammars": ("Grammar",),
    "loading": ("load",),
    "sampling.laws": ("IID", "Fixed", "SharedNoise", "TopTail", "WithoutReplacement"),
    "target.attention": ("UnsupportedModel",),
    "target.model": ("RaggedModel",),
    "trees.topology": ("TreeTopology",),
    "verifiers": ("Lifted", "Matching", "RecursiveRejection", "SharedMatching", "SpecHub", "TopDown"),
    "verifiers.coupling": ("Coupling",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = ["builders", *_MODULES]

if not TYPE_CHECKING:  # type checkers would take any name for one of the package's

    def __getattr__(name: str) -> Any:
        if name == "builders":
            return import_module("arbordraft.builders")
        if name not in _MODULES:
            raise AttributeError(f"module 'arbordraft' has no attribute {name!r}")
        from arbordraft.kernels.progress import phase

        with phase("importing torch and transformers"):
            value = globals()[name] = getattr(import_module(f"arbordraft.{_MODULES[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
