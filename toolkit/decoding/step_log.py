"""Log of a decoder's steps as a table of drafted, accepted and added tokens.

Shapes: none; rows are counted.
"""

from typing import TYPE_CHECKING, Any

from arbordraft.decoding.state import DecodeState
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Verdict

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedTokenizerBase


class StepLog:
    """Records the steps of a decoder; set it as ``decoder.on_step = log``.

    Each step adds one row per packed node of each sample, and one row for the token that the target adds:

    ========== ========================================================================================
    step       number of the step, from 0
    sample     number of the sample in its batch; reused after the sample has ended
    length     committed tokens of the sample before the step, prompt included
    kind       ``root`` (the last committed token), ``draft``, ``recovered`` or ``bonus``
    node       node number in the topology; -1 for the token that the target adds
    parent     parent node; -1 for the root
    depth      depth below the root
    token      token id
    text       text of the token, if the log has a tokenizer
    chance     draft probability given the parent, if the drafter states it
    accepted   whether the token was accepted; always true for the root and the target's own token
    source     kind of drafter that proposed the tree; empty if the step drafted nothing
    ========== ========================================================================================

    A step is recorded before it is committed. If an answer ends among the accepted tokens, the later ones are in the
    table but not in the answer.

    Args:
        tokenizer: spells the tokens.

    Attributes:
        rows: all rows so far, as dictionaries.

    Examples:
        >>> from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder
        >>> from arbordraft.testing import left_padded, tiny_model
        >>> target = RaggedModel(tiny_model(), kernels="torch")
        >>> decoder = SpeculativeDecoder(target, NGramDrafter())
        >>> decoder.on_step = log = StepLog()
        >>> answer = decoder.generate(**left_padded([[5, 6, 7]]), max_new_tokens=1)
        >>> [(row["kind"], row["token"] == answer[0, -1].item()) for row in log.rows]
        [('root', False), ('bonus', True)]
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None" = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self._tokenizer = tokenizer
        self._step = 0

    def __call__(self, state: DecodeState, tree: DraftTree, verdict: Verdict) -> None:
        """Records one step; has the signature of ``on_step``."""
        for sample in tree.living:
            if verdict.paths[sample]:
                self._record(sample, len(state[sample].tokens), tree, verdict)
        self._step += 1

    def to_frame(self) -> "DataFrame":
        """Returns the rows as a pandas ``DataFrame``.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError("a table needs pandas: pip install pandas, or read .rows") from error
        return DataFrame(self.rows)

    def _record(self, sample: int, length: int, tree: DraftTree, verdict: Verdict) -> None:
        step = {"step": self._step, "sample": sample, "length": length}
        own, judged = tree[sample], verdict[sample]

        def add(kind: str, node: int, parent: int, depth: int, token: int, chance: float | None, kept: bool) -> None:
            row = {**step, "kind": kind, "node": node, "parent": parent, "depth": depth, "token": token}
            if self._tokenizer is not None:
                row["text"] = str(self._tokenizer.decode([token]))
            self.rows.append({**row, "chance": chance, "accepted": kept, "source": own.proposal.source})

        parents = tree.topology.parent_list
        for row in own.rows:
            node, token = int(tree.node[row]), int(tree.token[row])
            chance = float(tree.chance[row]) if node else None
            kind = "draft" if node else "root"
            add(kind, node, parents[node], int(tree.depth[row]), token, chance, row in judged.path)
        last = int(tree.node[judged.path[-1]])
        kind = "recovered" if judged.recovered else "bonus"
        add(kind, -1, last, len(judged.path), judged.token, None, True)


__all__ = ["StepLog"]
