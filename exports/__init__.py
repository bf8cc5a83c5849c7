"""Carrying decoders and their parts to other tools."""

from arbordraft.exports.tree_choices import from_tree_choices, to_tree_choices

__all__ = ["from_tree_choices", "to_tree_choices"]
