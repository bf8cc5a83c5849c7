"""Tools to test your own parts: exact oracles of output laws, and random models small enough to compare with."""

from arbordraft.testing.models import greedy_reference, left_padded, new_tokens, tiny_model
from arbordraft.testing.oracles import (
    ROW_KINDS,
    acceptance,
    distance_to_target,
    draft_trees,
    expected_accepted,
    one_tree,
    packed,
    random_rows,
    random_table,
    row,
    step_law,
    target_rows,
    total_variation,
    tree_arguments,
)

__all__ = [
    "ROW_KINDS",
    "acceptance",
    "distance_to_target",
    "draft_trees",
    "expected_accepted",
    "greedy_reference",
    "left_padded",
    "new_tokens",
    "one_tree",
    "packed",
    "random_rows",
    "random_table",
    "row",
    "step_law",
    "target_rows",
    "tiny_model",
    "total_variation",
    "tree_arguments",
]
