"""Checks and timings of everything that is meant for a GPU, in phases with deadlines: ``arbordraft bench gpu``."""
