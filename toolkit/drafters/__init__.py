"""Drafters: they propose tokens and know the law they were drawn from."""

from arbordraft.drafters.base import Drafter
from arbordraft.drafters.early_exit import EarlyExitDrafter
from arbordraft.drafters.hybrid import HybridDrafter
from arbordraft.drafters.language_model import LanguageModelDrafter
from arbordraft.drafters.ngram import NGramDrafter
from arbordraft.drafters.none import NoDrafter

__all__ = ["Drafter", "EarlyExitDrafter", "HybridDrafter", "LanguageModelDrafter", "NGramDrafter", "NoDrafter"]
