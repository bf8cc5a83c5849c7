"""Training drafters and deciders, and fitting trees to what a target accepts."""

from arbordraft.training.trees import fit_topology

__all__ = ["fit_topology"]
