"""Multi-draft speculative decoding from parts that assemble."""

from pathlib import Path

_here = Path(__file__).resolve().parent
if _here.name == "toolkit":  # an editable checkout: the sibling folders hold the subpackages
    __path__.append(str(_here.parent))

from arbordraft import builders
from arbordraft.costs import CostTable, NodeBudget, StepCosts
from arbordraft.coupling import Coupling
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
    Backoff,
    Bandit,
    ConfidenceThreshold,
    CostAware,
    Decider,
    EntropyBound,
    FixedDepth,
    Heuristic,
    LearnedDecider,
    OnnxDecider,
    PathSurvival,
)
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    HybridDrafter,
    LanguageModelDrafter,
    MedusaDrafter,
    NGramDrafter,
    NoDrafter,
    OnnxDrafter,
)
from arbordraft.huggingface import DecodingError
from arbordraft.laws import IID, AdaptiveTopTail, DraftLaw, Fixed, TopTail, WithoutReplacement
from arbordraft.masks import SlicedCausalMask
from arbordraft.metrics import DecodeStats
from arbordraft.sampling import Noise
from arbordraft.target.cache import CacheOverflow, RaggedKVCache
from arbordraft.target.exactness import ExactnessReport
from arbordraft.target.hook import UnsupportedModel
from arbordraft.target.model import RaggedModel
from arbordraft.target_initialised import TargetInitialisedDecoder
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftContext, DraftTree, Exactness, Outcome, SampleTree, StepView, Verdict
from arbordraft.verifiers import (
    KSeq,
    Lifted,
    LongestBranch,
    Matching,
    NodeLaw,
    OptimalTransport,
    RecursiveRejection,
    Rule,
    SpecHub,
    TopDown,
    TopTailRule,
    TreeVerifier,
    TypicalAcceptance,
    optimal_acceptance,
)

__version__ = "0.1.0"

__all__ = [
    "IID",
    "AcceptedAverage",
    "AdaEDL",
    "AdaptiveTopTail",
    "Backoff",
    "Bandit",
    "CacheOverflow",
    "ConfidenceThreshold",
    "CostAware",
    "CostTable",
    "Coupling",
    "Decider",
    "DecodeStats",
    "DecodingError",
    "DraftContext",
    "DraftLaw",
    "DraftTree",
    "Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "EntropyBound",
    "Exactness",
    "ExactnessReport",
    "Fixed",
    "FixedDepth",
    "Heuristic",
    "HybridDrafter",
    "KSeq",
    "LanguageModelDrafter",
    "LearnedDecider",
    "Lifted",
    "LongestBranch",
    "Matching",
    "MedusaDrafter",
    "NGramDrafter",
    "NoDrafter",
    "NodeBudget",
    "NodeLaw",
    "Noise",
    "OnnxDecider",
    "OnnxDrafter",
    "OptimalTransport",
    "Outcome",
    "PathSurvival",
    "RaggedKVCache",
    "RaggedModel",
    "RecursiveRejection",
    "Rule",
    "SampleTree",
    "SlicedCausalMask",
    "SpecHub",
    "SpeculativeDecoder",
    "StepCosts",
    "StepView",
    "TargetInitialisedDecoder",
    "TopDown",
    "TopTail",
    "TopTailRule",
    "TreeTopology",
    "TreeVerifier",
    "TypicalAcceptance",
    "UnsupportedModel",
    "Verdict",
    "WithoutReplacement",
    "builders",
    "optimal_acceptance",
]
