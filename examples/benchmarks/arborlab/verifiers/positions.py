"""Positions of text that the target samples, each shown with a tree drafted there.

Shapes: V vocabulary.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

from torch import Tensor

from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise, draw
from arbordraft.sampling.rows import Rows
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers import SharedMatching, TreeVerifier
from arbordraft.verifiers.coupling import Coupling

# Receives the number of a sample or prompt, its tree, the ``[V]`` target rows of its batch, and its accepted tokens.
Look = Callable[[int, SampleTree, Rows[Tensor], int], None]


class Probe(TreeVerifier):
    """Shows every drafted tree, then emits one token of the target's law, which depends on no draft.

    Args:
        look: receives sample, tree, target rows, and the tokens that shared noise would accept.
        shared: whether target and drafter share their noise.
    """

    def __init__(self, look: Look, shared: bool) -> None:
        super().__init__()
        self.look, self.shared = look, shared

    def supports(self, law: DraftLaw) -> bool:
        return True

    def start(self, seeds: Sequence[int]) -> None:
        """Begins a batch of texts, each of which depends on its seed alone."""
        self.sources = [Noise.source(seed) for seed in seeds]

    def forward(
        self,
        tree: DraftTree,
        target_probs: Rows[Tensor],
        noise: Noise | GumbelNoise,
        samples: Sequence[int] | None = None,
    ) -> Verdict:
        judged = SharedMatching()(tree, target_probs, noise, samples) if self.shared else None
        ends = {}
        for sample in tree.living if samples is None else samples:
            drafted = tree[sample]
            self.look(sample, drafted, target_probs, judged.accepted(sample) if judged else 0)
            ends[sample] = drafted.root, draw(target_probs[drafted.root], self.sources[sample].random())
        return Verdict.of(tree, ends)


def watch(
    target: RaggedModel,
    drafter: Drafter,
    topology: TreeTopology,
    law: DraftLaw,
    workload: Workload,
    look: Look,
    on_progress: ProgressCallback = quiet,
    other: int = 0,
) -> None:
    """Shows every position of texts that the target samples, each with a tree drafted there.

    The workload's ``new_tokens`` is the number of positions per prompt. Each value of ``other`` gives other drafts of
    the same texts.
    """
    first = 0

    def show(sample: int, tree: SampleTree, rows: Rows[Tensor], accepted: int) -> None:
        if len(tree.rows) > 1:  # the last positions have no room for drafts
            look(first + sample, tree, rows, accepted)

    probe = Probe(show, law.shared)
    decoder = SpeculativeDecoder(target, drafter, topology, Coupling(law, probe))
    batches = workload.batches(target)
    for done, inputs in enumerate(batches):
        on_progress(f"{topology.num_nodes} nodes, temperature {workload.temperature:g}, {law}", done, len(batches))
        size = len(inputs["input_ids"])
        seeds = workload.seeds(size, first)
        probe.start(seeds)
        decoder.generate(**inputs, **workload.request(), seeds=[seed + 2**32 * other for seed in seeds])
        first += size


def by_cluster(values: Sequence[tuple[int, float]]) -> list[float]:
    """Returns the mean of each cluster of ``(cluster, value)`` pairs, by the number of the cluster."""
    clusters: dict[int, list[float]] = defaultdict(list)
    for cluster, value in values:
        clusters[cluster].append(value)
    return [sum(clusters[cluster]) / len(clusters[cluster]) for cluster in sorted(clusters)]


def difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Returns the mean difference of two figures by prompt, and its standard error.

    Figures of the same prompts have most of their errors in common, so this error is less than that of either.

    Examples:
        >>> mean, error = difference([0.5, 0.9], [0.4, 0.7])
        >>> round(mean, 3), round(error, 3)
        (0.15, 0.05)
    """
    gaps = [own - other for own, other in zip(ours, theirs, strict=True)]
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    return statistics.fmean(gaps), error


def clustered(values: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Returns the mean of ``(cluster, value)`` pairs, and its standard error with clusters as independent units."""
    mean = sum(value for _, value in values) / len(values)
    sums: dict[int, float] = defaultdict(float)
    for cluster, value in values:
        sums[cluster] += value - mean
    count = len(sums)
    if count < 2:
        return mean, math.nan
    return mean, math.sqrt(count / (count - 1) * sum(total**2 for total in sums.values())) / len(values)
