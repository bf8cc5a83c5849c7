"""Drafters as students: what each predicts from a batch of the target's own text."""

from arbordraft.training.students.base import HeadStudent, Prediction, Student
from arbordraft.training.students.eagle import EagleStudent, attend_unrolled
from arbordraft.training.students.early_exit import EarlyExitStudent
from arbordraft.training.students.language_model import LanguageModelStudent
from arbordraft.training.students.medusa import MedusaStudent

__all__ = [
    "EagleStudent",
    "EarlyExitStudent",
    "HeadStudent",
    "LanguageModelStudent",
    "MedusaStudent",
    "Prediction",
    "Student",
    "attend_unrolled",
]
