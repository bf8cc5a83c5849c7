"""Measures the time of a verdict about one tree, by draft law, verifier, shape and vocabulary.

Shapes: N nodes, V vocabulary, k children of a node.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from timeit import timeit
from typing import Annotated, ClassVar

import torch
import typer
from torch import Tensor

from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, quiet
from arbordraft.cli.options import JsonOption, RepeatsOption, SeedOption, numbers, whole_numbers
from arbordraft.cli.program import run_script
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise, SharedSource
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import SharedMatching
from arbordraft.verifiers.coupling import Coupling
from arborlab.gpu.score_problems import drafted_trees
from arborlab.verifiers.laws import laws_of, verifiers_of
from arborlab.verifiers.trees import complete_tree

NODES = 15  # root included: both trees of two children have as many
TREES = 8  # judged in turns, so that their rows are not in the innermost caches


@dataclass(frozen=True)
class VerdictRow:
    """Time of one verdict, including the softmax of the target rows that the verifier reads.

    Args:
        milliseconds: median of the rounds, each the mean over trees.
        softmaxes: the same time in units of one softmax over all rows of the tree.
    """

    table: ClassVar[str] = "times of one verdict"

    vocabulary: int
    topology: str
    nodes: int
    law: str
    verifier: str
    milliseconds: float
    softmaxes: float


def verdict_times(
    vocabulary: int, k: int, rounds: int, seed: int, on_progress: ProgressCallback = quiet
) -> Iterator[VerdictRow]:
    """Times every verifier on trees whose draft rows resemble the target's. All verifiers take turns in every round."""
    if k == 1:
        shapes = {"chain": TreeTopology.chain(NODES - 1)}
    else:
        shapes = {"complete": complete_tree(k, NODES), "paths": TreeTopology.fork(k, (NODES - 1) // k)}
    calls: dict[tuple[str, int, str, str], Callable[[], object]] = {}
    for shape, topology in shapes.items():
        for law, verifier, call in _verdicts(topology, k, vocabulary, seed):
            calls[shape, topology.num_nodes, law, verifier] = call
    softmax = partial(torch.randn(NODES, vocabulary).softmax, dim=-1)
    times: dict[tuple[str, int, str, str], list[float]] = {key: [] for key in calls}
    references = []
    for done in range(rounds + 1):
        on_progress(f"verdicts of {vocabulary} tokens", done, rounds + 1)
        references.append(timeit(softmax, number=TREES))
        for key, call in calls.items():
            times[key].append(timeit(call, number=1))
    reference = statistics.median(references[1:])  # the first round warms up
    for (shape, nodes, law, verifier), found in times.items():
        median = statistics.median(found[1:])
        yield VerdictRow(vocabulary, shape, nodes, law, verifier, median * 1e3 / TREES, median / reference)


def _verdicts(
    topology: TreeTopology, k: int, vocabulary: int, seed: int
) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Yields law and verifier by name, and a call that judges all trees."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(topology.num_nodes, vocabulary, generator=generator) * 3 for _ in range(TREES)]
    for name, (law, rules) in laws_of(k).items():
        if law.shared:
            shared = GumbelNoise([SharedSource(seed)], [0])
            trees = [_shared_tree(topology, law, rows, shared, generator) for rows in logits]
            yield name, "SharedMatching", partial(_judge, Coupling(law, SharedMatching()), trees, logits, shared)
            continue
        trees = [drafted_trees(topology, law, rows, generator) for rows in logits]
        noise = Noise.draw([Noise.source(seed)], topology.num_nodes)
        for verifier, judge in verifiers_of(law, rules, topology).items():
            yield name, verifier, partial(_judge, Coupling(law, judge), trees, logits, noise)


def _judge(coupling: Coupling, trees: list[DraftTree], logits: list[Tensor], noise: Noise | GumbelNoise) -> None:
    for tree, rows in zip(trees, logits, strict=True):
        coupling(tree, SoftmaxRows(rows), noise)


def _shared_tree(
    topology: TreeTopology, law: DraftLaw, scores: Tensor, noise: GumbelNoise, generator: torch.Generator
) -> DraftTree:
    """Returns a tree whose children are the highest tokens under the noise with which the target draws."""
    tokens = {0: 0}
    for node, children in enumerate(topology.child_list):
        row = scores[node] + torch.randn(scores.shape[1], generator=generator)
        highest = noise.perturb(row.log_softmax(dim=-1)[None], [(0, topology.depth_list[node])])[0].topk(law.k)
        tokens |= dict(zip(children, highest.indices.tolist(), strict=False))
    return DraftTree.of(topology, law, [dict(sorted(tokens.items()))], [{}])


def main(
    vocabularies: Annotated[
        str, typer.Option(callback=whole_numbers, help="Numbers of tokens in the vocabulary.")
    ] = "49152,262144",
    children: Annotated[str, typer.Option(callback=whole_numbers, help="Numbers of children of one node.")] = "1,2,4",
    repeats: RepeatsOption = 7,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure the time of one verdict, by draft law, verifier, shape of the tree and vocabulary."""
    with Report(json, vocabularies=vocabularies, children=children, repeats=repeats, seed=seed) as report:
        for vocabulary in numbers(vocabularies, int):
            for k in numbers(children, int):
                report.take(verdict_times(vocabulary, k, repeats, seed, report.on_progress))


if __name__ == "__main__":
    run_script(main)
