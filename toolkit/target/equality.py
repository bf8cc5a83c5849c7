"""Reports how exactly speculative output equals plain output, for one decoder on one machine.

Shapes: N nodes, V vocabulary.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch

from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.self_test import ROUNDING, apart
from arbordraft.trees.topology import TreeTopology, ancestor_words
from arbordraft.trees.verdict import Exactness


class Equality(StrEnum):
    """How much of plain decoding's output a decoder reproduces, from strong to weak."""

    pathwise = "pathwise"
    bitwise = "bitwise"
    tokens = "fp32 tokens"
    law = "law only"
    lossy = "lossy"


@dataclass(frozen=True)
class EqualityReport:
    """How exactly a decoder's output equals plain decoding on this machine.

    Args:
        equality: degree of equality.
            ``pathwise``: every row of a tree has the bits of plain decoding of the same model, and target and drafter
            share their noise. The same seed gives the same tokens as plain decoding at every temperature, in any
            precision.
            ``bitwise``: rows have those bits, but the noise is not shared, so only greedy output is identical.
            ``fp32 tokens``: greedy tokens, and sampled ones with shared noise, equal plain ones unless two scores are
            closer than float32 rounding.
            ``law only``: sampled output has the law of the rows the verifier saw. Half-precision rounding of these rows
            depends on the batch.
            ``lossy``: the verifier changes the law by design.
        reason: reason against a stronger degree.
        rows: number of rows that were computed both in trees of a batch and one by one.
        equal: number of these rows with equal bits both ways.
    """

    equality: Equality
    reason: str
    rows: int
    equal: int

    def __str__(self) -> str:
        return f"{self.equality}: {self.reason} ({self.equal} of {self.rows} probed rows have equal bits)"


def equality_report(target: RaggedModel, exactness: Exactness) -> EqualityReport:
    """Reports the equality that a verifier's promise and a probe of random trees on this machine support."""
    rows, equal, largest = _probe(target)
    if not exactness.lossless:
        equality, reason = Equality.lossy, f"the verifier is {exactness.value}"
    elif target.row_invariant and equal == rows:
        equality = Equality.pathwise if exactness is Exactness.PATHWISE else Equality.bitwise
        reason = "every part of the forward gives a row the same bits regardless of the rows beside it"
    else:
        wide = target.model.dtype in (torch.float32, torch.float64)
        if target.row_invariant:
            reason = "all parts promise row invariance, yet the probe found different bits: please report it"
        elif wide and not largest < ROUNDING:
            reason = "the model's own modules give a row other logits when other rows run beside it"
        elif target.backend == "native":
            reason = "some modules are not known to be row-invariant"
        else:
            reason = "rounding depends on the number of rows; kernels='native' may change that"
        equality = Equality.tokens if wide and largest < ROUNDING else Equality.law
    return EqualityReport(equality, reason, rows, equal)


def _probe(target: RaggedModel) -> tuple[int, int, float]:
    """Computes trees of a ragged batch at once, then each of their rows as plain decoding does.

    Returns:
        Number of rows, number of rows with bitwise equal logits, and the largest distance between a row's logits,
        relative to their spread.
    """
    generator = torch.Generator().manual_seed(0)
    longest = min(150, (target.max_positions or 150) - 8)
    prompts = [torch.randint(target.vocab_size, (n,), generator=generator).tolist() for n in (5, longest, longest // 3)]
    topology = TreeTopology.from_k_config((2, 2, 1))
    nodes = topology.num_nodes
    tokens = torch.randint(target.vocab_size, (len(prompts), nodes), generator=generator)

    cache = RaggedKVCache()
    samples = [cache.open(len(prompt) + nodes) for prompt in prompts]
    target.prefill(dict(zip(samples, prompts, strict=True)), cache)
    words = ancestor_words(topology.visible.cpu()).repeat(len(prompts), 1)
    batch = cache.lay_out(samples, [topology.depth_list] * len(prompts), words)
    together = target(tokens.flatten(), batch, cache).view(len(prompts), nodes, -1)

    rows = equal = 0
    largest = 0.0
    for prompt, drafted, logits in zip(prompts, tokens, together, strict=True):
        for leaf in (node for node, children in enumerate(topology.child_list) if not children):
            alone = RaggedKVCache()
            sample = alone.open(len(prompt) + nodes)
            target.prefill({sample: prompt}, alone, chunk=64)
            for node in topology.path(leaf):
                row = target(drafted[node : node + 1], alone.lay_out([sample], [[0]]), alone)[0]
                alone.commit({sample: [0]})
                rows += 1
                equal += torch.equal(row, logits[node])
                largest = max(largest, apart(logits[node : node + 1], row[None]))
    return rows, equal, largest
