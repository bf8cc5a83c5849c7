"""Exports decoders and their parts to other tools."""
