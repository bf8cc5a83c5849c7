"""Expected acceptance of draft laws and verifiers on a real model's rows, computed instead of counted.

At every position of text that the target samples, each draft law drafts a tree, and the chance of every verdict follows
from the verifier's own law. Only the text and the drafts are random. All laws see the same positions. With noise that
target and drafter share, a verdict has no law of its own given the drafts, so several are drawn at every position.
"""

from arbordraft.bench.verifiers.nodes import NodeRow, node_acceptance
from arbordraft.bench.verifiers.trees import TreeRow, tree_tau

__all__ = ["NodeRow", "TreeRow", "node_acceptance", "tree_tau"]
