"""Drafters, which propose tokens and know the law that these were drawn from."""

from arbordraft.drafters.base import Drafter
from arbordraft.drafters.block import BlockDrafter
from arbordraft.drafters.dflash import DFlashDrafter
from arbordraft.drafters.eagle import EagleDrafter
from arbordraft.drafters.early_exit import EarlyExitDrafter
from arbordraft.drafters.grammar import GrammarDrafter
from arbordraft.drafters.hybrid import HybridDrafter
from arbordraft.drafters.language_model import LanguageModelDrafter
from arbordraft.drafters.medusa import MedusaDrafter
from arbordraft.drafters.mtp import MtpDrafter
from arbordraft.drafters.ngram import NGramDrafter
from arbordraft.drafters.none import NoDrafter
from arbordraft.drafters.other_tokenizer import IntersectionDrafter, RetokenizedDrafter
from arbordraft.drafters.self_drafter import SelfDrafter
from arbordraft.drafters.text_pool import TextPool

__all__ = [
    "BlockDrafter",
    "DFlashDrafter",
    "Drafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "GrammarDrafter",
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
]
