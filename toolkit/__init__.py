"""Multi-draft speculative decoding from parts that assemble."""

from pathlib import Path

_here = Path(__file__).resolve().parent
if _here.name == "toolkit":  # an editable checkout: the sibling folders hold the subpackages
    __path__.append(str(_here.parent))

from arbordraft import builders
from arbordraft.deciders import ConfidenceThreshold, CostAware
from arbordraft.deciders.costs import CostTable
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.generate import DecodingError
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.requests import Request
from arbordraft.decoding.step_log import StepLog
from arbordraft.drafters import (
    BlockDrafter,
    DFlashDrafter,
    EagleDrafter,
    EarlyExitDrafter,
    HybridDrafter,
    IntersectionDrafter,
    LanguageModelDrafter,
    MedusaDrafter,
    MtpDrafter,
    NGramDrafter,
    NoDrafter,
    RetokenizedDrafter,
    SelfDrafter,
    TextPool,
)
from arbordraft.loading import load
from arbordraft.sampling.laws import IID, Fixed, TopTail, WithoutReplacement
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import Lifted, Matching, RecursiveRejection, SpecHub, TopDown
from arbordraft.verifiers.coupling import Coupling

__version__ = "0.2.0"

__all__ = [
    "IID",
    "BlockDrafter",
    "ConfidenceThreshold",
    "CostAware",
    "CostTable",
    "Coupling",
    "DFlashDrafter",
    "DecodeStats",
    "DecodingError",
    "EagleDrafter",
    "EarlyExitDrafter",
    "Engine",
    "Fixed",
    "HybridDrafter",
    "IntersectionDrafter",
    "LanguageModelDrafter",
    "Lifted",
    "Matching",
    "MedusaDrafter",
    "MtpDrafter",
    "NGramDrafter",
    "NoDrafter",
    "RaggedModel",
    "RecursiveRejection",
    "Request",
    "RetokenizedDrafter",
    "SelfDrafter",
    "SpecHub",
    "SpeculativeDecoder",
    "StepLog",
    "TextPool",
    "TopDown",
    "TopTail",
    "TreeTopology",
    "UnsupportedModel",
    "WithoutReplacement",
    "builders",
    "load",
]
