"""Deciders say, before every level of drafting, which samples go on."""

from arbordraft.deciders.adaptive import AcceptedAverage, AdaEDL, Bandit, Heuristic
from arbordraft.deciders.base import Decider
from arbordraft.deciders.cost_aware import CostAware
from arbordraft.deciders.learned import LearnedDecider, RowSurvival
from arbordraft.deciders.simple import ConfidenceThreshold, EntropyBound, FixedDepth, NodeBudget, PathSurvival

__all__ = [
    "AcceptedAverage",
    "AdaEDL",
    "Bandit",
    "ConfidenceThreshold",
    "CostAware",
    "Decider",
    "EntropyBound",
    "FixedDepth",
    "Heuristic",
    "LearnedDecider",
    "NodeBudget",
    "PathSurvival",
    "RowSurvival",
]
