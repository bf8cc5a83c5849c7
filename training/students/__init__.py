"""Drafters as students, which predict tokens from a batch of the target's own text."""

from arbordraft.training.students.base import Student
from arbordraft.training.students.block import BlockStudent
from arbordraft.training.students.dflash import DFlashStudent
from arbordraft.training.students.eagle import EagleStudent
from arbordraft.training.students.early_exit import EarlyExitStudent
from arbordraft.training.students.language_model import LanguageModelStudent
from arbordraft.training.students.medusa import MedusaStudent

__all__ = [
    "BlockStudent",
    "DFlashStudent",
    "EagleStudent",
    "EarlyExitStudent",
    "LanguageModelStudent",
    "MedusaStudent",
    "Student",
]
