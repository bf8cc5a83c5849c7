"""Fitting the parts of a decoder to measurements."""

from arbordraft.training.trees import fit_topology

__all__ = ["fit_topology"]
