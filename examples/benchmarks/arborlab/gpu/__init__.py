"""Phases of ``arbordraft bench gpu``: checks and timings of all GPU code, each phase with a deadline."""
