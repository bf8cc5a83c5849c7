"""Measures verification: a tree against the target's forward, rules against a softmax and the linear program.

Shapes: B samples, N nodes, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from forward import forward_pair
from torch import Tensor

from arbordraft.bench.measure import Measurement, precision
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.cli.options import BOTH, DtypesOption, JsonOption, ModelOption, RepeatsOption, SeedOption
from arbordraft.cli.program import run_script
from arbordraft.loading import load_target
from arbordraft.sampling.laws import DraftLaw, TopTail, WithoutReplacement
from arbordraft.sampling.noise import Noise
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.choices import Kernels
from arbordraft.verifiers import (
    Lifted,
    OptimalTransport,
    RecursiveRejection,
    Rule,
    SpecHub,
    TopDown,
    TopTailRule,
)
from arbordraft.verifiers.coupling import Coupling
from arborlab.gpu.score_problems import drafted_trees
from arborlab.pairs import paired

_CALLS = 40  # calls per timing of something that takes microseconds


def verify_cost(
    target: RaggedModel, workload: Workload, on_progress: ProgressCallback = quiet
) -> Iterator[Measurement]:
    """Measures verification of a full 16-node tree against the target's forward of its rows."""
    topology = TreeTopology.from_k_config((3, 2, 1))
    generator, source = torch.Generator().manual_seed(workload.seed), Noise.source(0)
    forward, _ = forward_pair(target, [200], topology.num_nodes)
    for name, coupling in (
        ("recursive rejection, top-down", Coupling(WithoutReplacement(3), TopDown(RecursiveRejection()))),
        ("recursive rejection, lifted", Coupling(WithoutReplacement(3), Lifted(RecursiveRejection()))),
        ("tail and tops, lifted", Coupling(TopTail(1, 2), Lifted(RecursiveRejection()))),
    ):
        logits = torch.randn(topology.num_nodes, target.vocab_size, generator=generator) * 3
        tree = drafted_trees(topology, coupling.law, logits, generator)

        def verify(coupling: Coupling = coupling, logits: Tensor = logits, tree: DraftTree = tree) -> None:
            coupling(tree, logits.softmax(dim=-1), Noise.draw([source], topology.num_nodes))

        size = f"{topology.num_nodes} nodes, V={target.vocab_size}"
        case = f"{precision(target.model)} forward, {size}, {name}, with softmax"
        yield paired("verify", case, verify, forward, workload, on_progress, reach="<= 0.15")


def rule_cost(workload: Workload) -> Iterator[Measurement]:
    """Measures rules at one node against a softmax of the same row, and SpecHub against its linear program.

    The rules are SpecHub, and tail and tops. The program's variables are pairs of a drawn outcome and a token, so it
    can be solved for small vocabularies only.
    """
    generator = torch.Generator().manual_seed(workload.seed)
    hub = TopTail(1, 1)
    nodes: list[tuple[str, Rule, TopTail, int]] = [
        *(("SpecHub", SpecHub(), hub, vocab) for vocab in (4096, 16384, 49152, 131072, 262144)),
        *(
            (f"TopTail({k - 1}, 1)", TopTailRule(), TopTail(k - 1, 1), vocab)
            for k in (2, 3, 4)
            for vocab in (4096, 32768, 131072, 262144)
        ),
    ]
    for name, rule, law, vocab in nodes:
        logits = torch.randn(2, vocab, generator=generator) * 3
        case = f"{name} at one node, V={vocab}, against one softmax"
        # A smaller row fits the innermost caches, so that the rule's fixed cost shows.
        reach = "<= 2.0" if name == "SpecHub" and vocab >= 49152 else ""
        node, softmax = _node(rule, law, logits, generator), partial(logits[0].softmax, dim=-1)
        row = paired("verify", case, node, softmax, workload, reach=reach, calls=(_CALLS, _CALLS))
        yield replace(row, detail=f"{row.ours / vocab * 1e6:.2f} ns per token")
    for vocab in (64, 256, 1024):
        logits = torch.randn(2, vocab, generator=generator) * 3
        closed, solved = (_node(rule, hub, logits, generator) for rule in (SpecHub(), OptimalTransport()))
        case = f"SpecHub at one node, V={vocab}, against its compact linear program"
        yield paired("verify", case, closed, solved, workload, calls=(_CALLS, 1))


def _node(rule: Rule, law: DraftLaw, logits: Tensor, generator: torch.Generator) -> Callable[[], object]:
    """Returns a call of a rule at one node, with new children each time; ``logits`` are of target and draft."""
    p, q = logits.softmax(dim=-1)
    uniforms = torch.rand(_CALLS, law.k, generator=generator).tolist()
    drawn = cycle([law.draw(q, each) for each in uniforms])
    return lambda: rule(p, 1.0, q, next(drawn), law)


def main(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = BOTH,
    repeats: RepeatsOption = 7,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure verification of a tree against the target's forward; rules against a softmax and against the LP."""
    torch.manual_seed(seed)
    workload = Workload(repeats=repeats, seed=seed)
    with Report(json, model=model, dtype=dtype, repeats=repeats, seed=seed) as report:
        for each in dtype:
            target, _ = load_target(model, each, Kernels.torch)
            report.take(verify_cost(target, workload, report.on_progress))
        report.take(rule_cost(workload))


if __name__ == "__main__":
    run_script(main)
