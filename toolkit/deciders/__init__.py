"""Deciders: before every level of drafting they say which samples go on."""

from arbordraft.deciders.base import Decider
from arbordraft.deciders.learned import LearnedDecider
from arbordraft.deciders.simple import Backoff, ConfidenceThreshold, EntropyBound, FixedDepth

__all__ = ["Backoff", "ConfidenceThreshold", "Decider", "EntropyBound", "FixedDepth", "LearnedDecider"]
