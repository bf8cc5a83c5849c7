"""Expected acceptance of draft laws and verifiers on a real model's rows, computed instead of counted.

The target samples a text. At each of its positions every draft law drafts a tree, and the verifier's own law gives the
probability of every verdict. Only the text and the drafts are random, and all laws see the same positions. With shared
noise, the noise decides drafts and verdict alike, so it is drawn several times at every position.
"""

from arborlab.verifiers.nodes import NodeRow, node_acceptance
from arborlab.verifiers.trees import TreeRow, tree_tau

__all__ = ["NodeRow", "TreeRow", "node_acceptance", "tree_tau"]
