"""Checks of arguments, atomic file writes, memory from the system: helpers independent of decoding."""
