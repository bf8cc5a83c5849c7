"""Checks of arguments, files written whole, memory from the system: nothing that knows of decoding."""
