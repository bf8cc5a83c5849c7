"""Expected acceptance of draft laws and verifiers on a real model's rows, computed instead of counted.

At every position of text that the target samples, each draft law drafts a tree, and the chance of every verdict follows
from the verifier's own law. Only the text and the drafts are random. All laws see the same positions. With noise that
target and drafter share a verdict has no law of its own given the drafts: it is drawn, several times at every position.

Shapes: V vocabulary.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from arbordraft.bench.workload import Tell, Workload, quiet
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter
from arbordraft.kernels.gumbel import gumbel
from arbordraft.sampling.laws import IID, AdaptiveTopTail, DraftLaw, SharedNoise, TopTail, WithoutReplacement
from arbordraft.sampling.noise import GumbelNoise, Noise, draw
from arbordraft.sampling.rows import Rows
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers import (
    GlobalResolution,
    GreedyMultiPath,
    KSeq,
    Lifted,
    RecursiveRejection,
    Remembered,
    Rule,
    SharedMatching,
    SpecHub,
    TopDown,
    TopTailRule,
    TreeVerifier,
    optimal_acceptance,
)
from arbordraft.verifiers.coupling import Coupling

DRAWS = 3  # of children at every position
SHARED_DRAWS = 32  # of shared noise at a node, and for whole trees:
SHARED_TREES = 4
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)
# Is shown a sample or prompt by its number, its tree, the ``[V]`` target rows of its batch, and accepted tokens.
Look = Callable[[int, SampleTree, Rows[Tensor], int], None]


@dataclass(frozen=True)
class NodeRow:
    """Acceptance at one node with k children, on average over positions.

    Args:
        by_rank: chance that the child drawn first, second, ... is the accepted one.
        acceptance: that one is.
        error: standard error of that, prompts being independent.
        optimum: the most that any lossless rule could reach with these draws.
        changed: with shared noise, how often the target's token is another than without drafts.
    """

    drafter: str
    temperature: float
    k: int
    law: str
    rule: str
    positions: int
    by_rank: list[float]
    acceptance: float
    error: float
    optimum: float
    changed: float = 0.0


@dataclass(frozen=True)
class TreeRow:
    """Tokens per target forward with one kind of tree, on average over positions.

    Args:
        nodes: root included.
        tau: 1 + expected accepted tokens.
        error: standard error of that, prompts being independent.
    """

    drafter: str
    temperature: float
    topology: str
    nodes: int
    law: str
    verifier: str
    positions: int
    tau: float
    error: float


def laws_of(k: int) -> "dict[str, tuple[DraftLaw, dict[str, Rule]]]":
    """The draft laws for k children, and the rules that are valid for each; none for shared noise."""
    rejection = RecursiveRejection()
    laws: dict[str, tuple[DraftLaw, dict[str, Rule]]] = {
        f"IID({k})": (IID(k), {"RRS": rejection, "K-SEQ": KSeq(), "global resolution": GlobalResolution()}),
        f"WithoutReplacement({k})": (WithoutReplacement(k), {"RRS": rejection}),
        f"SharedNoise({k})": (SharedNoise(k), {}),
    }
    if k == 2:
        laws["TopTail(1,1)"] = TopTail(1, 1), {"SpecHub, paper's order": SpecHub("paper"), "SpecHub": SpecHub()}
    else:
        laws |= {f"TopTail({m},{k - m})": (TopTail(m, k - m), {"TopTail": TopTailRule()}) for m in range(1, k)}
    return laws


class Witness(TreeVerifier):
    """Emits one token of the target's law per step, whatever was drafted, and whatever noise it was drafted with.

    Args:
        look: sees sample, tree, rows, and how many tokens shared noise would have accepted.
        shared: whether it did share its noise.
    """

    def __init__(self, look: Look, shared: bool) -> None:
        super().__init__()
        self.look, self.shared = look, shared

    def supports(self, law: DraftLaw) -> bool:
        return True

    def start(self, seeds: Sequence[int]) -> None:
        """Begins a batch of texts that follow from these seeds alone."""
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
    tell: Tell = quiet,
    other: int = 0,
) -> None:
    """Shows every position of text that the target samples, with a tree drafted there.

    The workload's ``new_tokens`` are the positions of each prompt. Other drafts of the same text have another number.
    """
    first = 0

    def show(sample: int, tree: SampleTree, rows: Rows[Tensor], accepted: int) -> None:
        if len(tree.rows) > 1:  # the last positions have no room for drafts
            look(first + sample, tree, rows, accepted)

    witness = Witness(show, law.shared)
    decoder = SpeculativeDecoder(target, drafter, topology, Coupling(law, witness))
    batches = workload.batches(target)
    for done, inputs in enumerate(batches):
        tell(f"{topology.num_nodes} nodes, temperature {workload.temperature:g}, {law}", done, len(batches))
        size = len(inputs["input_ids"])
        seeds = workload.seeds(size, first)
        witness.start(seeds)
        decoder.generate(**inputs, **workload.request(), seeds=[seed + 2**32 * other for seed in seeds])
        first += size


def node_acceptance(
    target: RaggedModel,
    drafters: Mapping[str, Drafter],
    workload: Workload,
    *,
    children: Sequence[int] = (2, 3, 4),
    optima: int = 100,
    tell: Tell = quiet,
) -> Iterator[NodeRow]:
    """Acceptance of the children of one node by every law and rule; all laws draw from the same rows.

    The law that chooses its tops by a threshold is given the best one on every second prompt; the figures of all laws
    are those of the other prompts.

    Args:
        workload: two prompts or more, at a temperature above 0; ``new_tokens`` are the positions of each.
        optima: positions for which the optima of three or more draws without replacement are solved, which takes
            longer than all else; the others are solved for all.

    Raises:
        ValueError: if there is one prompt only.
    """
    if len(workload.prompts) < 2:
        raise ValueError("thresholds are chosen on every second prompt and judged on the others: give 2 or more")
    for name, drafter in drafters.items():
        rows: list[tuple[int, Tensor, Tensor]] = []

        def keep(prompt: int, tree: SampleTree, target: Rows[Tensor], _: int, rows: list[Any] = rows) -> None:
            if (draft := tree.drawn_from(tree.root)) is not None:
                rows.append((prompt, target[tree.root].clone(), draft.clone()))

        watch(target, drafter, TreeTopology.chain(1), IID(1), workload, keep, tell)
        for done, k in enumerate(children):
            tell(f"laws and rules of {k} children, temperature {workload.temperature:g}", done, len(children))
            for row in _node_rows(rows, k, optima):
                yield NodeRow(drafter=name, temperature=workload.temperature, **row)


def _node_rows(rows: Sequence[tuple[int, Tensor, Tensor]], k: int, optima: int) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(len(rows), DRAWS, k, generator=generator, dtype=torch.float64).tolist()
    judged = [index for index, (prompt, _, _) in enumerate(rows) if prompt % 2]
    chosen = [index for index, (prompt, _, _) in enumerate(rows) if not prompt % 2]

    changes: dict[int, float] = {}  # by position, of the law and rule in hand

    def ranks(law: DraftLaw, rule: Rule | None, index: int) -> list[float]:
        """Acceptance by rank, as the mean of a few draws."""
        _, p, q = rows[index]
        if rule is None:
            found, changes[index] = shared_acceptance(p, q, k, index, lists=not law.shared)
            return found
        total = [0.0] * k
        for noise in uniforms[index]:
            for rank, accept in enumerate(rule(p, 1.0, q, law.draw(q, noise), law).accept):
                total[rank] += accept / DRAWS
        return total

    def total(law: DraftLaw, rule: Rule | None, indices: Sequence[int]) -> float:
        return sum(sum(ranks(law, rule, index)) for index in indices) / max(1, len(indices))

    laws: dict[str, tuple[DraftLaw, Mapping[str, Rule | None]]] = {**laws_of(k)}
    laws[f"GumbelLists({k})"] = IID(k), {"list matching": None}
    best = max(THRESHOLDS, key=lambda at: total(AdaptiveTopTail(k, at), TopTailRule(), chosen))
    laws[f"AdaptiveTopTail({k}, {best:g})"] = AdaptiveTopTail(k, best), {"TopTail": TopTailRule()}
    for law_name, (law, rules) in laws.items():
        drawn = WithoutReplacement(k) if law.shared else law  # what the highest perturbed tokens are, one by one
        every = 1 if drawn.replacement or drawn.tails < 3 else max(1, len(judged) // optima)
        solved = [optimal_acceptance(drawn, rows[i][1], rows[i][2]) for i in judged[::every]]
        for rule_name, rule in ({"SharedMatching": None} if law.shared else rules).items():
            changes.clear()
            accepts = [ranks(law, rule, index) for index in judged]
            # Positions that were not solved count with what the rule reaches there, above or below those that were.
            reached = sum(map(sum, accepts[::every])) / max(1, len(solved))
            mean, error = clustered([(rows[i][0], sum(accept)) for i, accept in zip(judged, accepts, strict=True)])
            yield {
                "k": k,
                "law": law_name,
                "rule": rule_name,
                "positions": len(judged),
                "by_rank": [sum(column) / len(judged) for column in zip(*accepts, strict=True)],
                "acceptance": mean,
                "error": error,
                "optimum": sum(solved) / max(1, len(solved)) + mean - reached,
                "changed": sum(changes.values()) / len(judged),
            }


def shared_acceptance(p: Tensor, q: Tensor, k: int, seed: int, *, lists: bool) -> tuple[list[float], float]:
    """How often the target's own token is the drafter's first, second, ... under noise that both share.

    Args:
        p: ``[V]`` target row.
        q: ``[V]`` draft row.
        k: number of children.
        seed: of the noise.
        lists: each child has a list of noise of its own and the target takes the highest of them for every token, as in
            Gumbel list sampling (Rowan et al., NeurIPS 2025, arXiv 2506.05632). Else there is one list, and children
            are the k highest tokens under it.

    Returns:
        ``[k]`` by rank, and how often the target's token is another one than under the first list alone.
    """
    seeds = torch.full((SHARED_DRAWS,), seed)
    target, draft = p.double().log(), q.double().log()
    first = noise = gumbel(seeds, torch.arange(SHARED_DRAWS), len(p))
    if not lists:
        children = (draft + noise).topk(k, dim=1).indices
    else:
        columns = []
        for number in range(k):
            own = gumbel(seeds, torch.arange(SHARED_DRAWS) + number * SHARED_DRAWS, len(p))
            columns.append((draft + own).argmax(dim=1))
            noise = torch.maximum(noise, own)
        children = torch.stack(columns, dim=1)
    token = (target + noise).argmax(dim=1, keepdim=True)
    hit = children == token
    hit &= hit.cumsum(dim=1) == 1  # equal tokens of several lists are one child
    changed = (token[:, 0] != (target + first).argmax(dim=1)).double().mean().item()
    return hit.double().mean(dim=0).tolist(), changed


def tree_tau(
    target: RaggedModel,
    drafters: Mapping[str, Drafter],
    workload: Workload,
    *,
    nodes: Sequence[int] = (8, 16, 32),
    children: Sequence[int] = (2,),
    ranks: Mapping[tuple[str, str], Sequence[float]] | None = None,
    resolution: bool = False,
    tell: Tell = quiet,
) -> Iterator[TreeRow]:
    """Tokens per forward of trees of about the same size and of every shape, by every law, rule and verifier.

    Args:
        workload: the prompts; ``new_tokens`` are the positions of each.
        nodes: sizes, root included; trees that cannot have as many have a few less.
        children: numbers of them that a node may have, each at least 2; chains are measured once.
        ranks: by drafter and law, acceptance by rank: Sequoia and delayed trees are fitted to it,
            and are left out without it.
        resolution: judge by global resolution, too, which takes some 20 ms for every node.
    """
    for name, drafter in drafters.items():
        lone = laws_of(1)
        laws = {key: lone[key] for key in ("IID(1)", "SharedNoise(1)")}
        for count in children:
            laws |= laws_of(count)
        chains = {False: [0.5], True: [0.5]}  # acceptance by depth, with shared noise or not, once chains are measured
        for law_name, (law, rules) in laws.items():
            rates = (ranks or {}).get((name, law_name))
            rules = {key: rule for key, rule in rules.items() if resolution or not isinstance(rule, GlobalResolution)}
            for shape, topology in _shapes(law, nodes, rates, chains[law.shared]):
                accepted: dict[str, list[tuple[int, float]]] = defaultdict(list)
                reached: list[float] = [0.0] * (topology.max_depth + 1)
                weigh = partial(_weigh, accepted, reached, _judges(law, rules, topology))
                for other in range(SHARED_TREES if law.shared else 1):
                    watch(target, drafter, topology, law, workload, weigh, tell, other)
                if shape == "chain":
                    chains[law.shared] = [below / max(above, 1e-9) for above, below in pairwise(reached)]
                for verifier, values in accepted.items():
                    mean, error = clustered(values)
                    size, at = topology.num_nodes, workload.temperature
                    yield TreeRow(name, at, shape, size, law_name, verifier, len(values), 1 + mean, error)


def _shapes(
    law: DraftLaw, nodes: Sequence[int], rates: Sequence[float] | None, chain: Sequence[float]
) -> Iterator[tuple[str, TreeTopology]]:
    """Trees by name. The longest chain is the last one."""
    for size in sorted(nodes):
        if law.k == 1:
            yield "chain", TreeTopology.chain(size - 1)
        if law.k == 1 or size <= law.k:  # no room for all children of one node
            continue
        depth = int(math.log(size * (law.k - 1) + 1, law.k) + 1e-9) - 1  # of the greatest complete tree of that size
        yield "complete", TreeTopology.k_ary(law.k, depth)
        yield "paths", TreeTopology.fork(law.k, (size - 1) // law.k)
        if rates is not None:
            yield "sequoia", TreeTopology.sequoia([max(rate, 1e-3) for rate in rates], size)
            fork = [chain[0]] * (law.k - 1) + [max(sum(rates), chain[0])]  # of one child or of all
            yield "delayed", TreeTopology.delayed(chain, fork, size)


def _judges(law: DraftLaw, rules: Mapping[str, Rule], topology: TreeTopology) -> dict[str, Callable[[], TreeVerifier]]:
    """What makes the verifiers that are valid for law and tree; each remembers the rows of one position alone."""

    def judge(kind: type[TopDown] | type[Lifted], rule: Rule) -> TreeVerifier:
        return kind(Remembered(rule))

    judges: dict[str, Callable[[], TreeVerifier]] = {
        f"{kind.__name__}({name})": partial(judge, kind, rule)
        for name, rule in rules.items()
        for kind in (TopDown, Lifted)
    }
    paths = GreedyMultiPath()
    if paths.supports(law):
        with contextlib.suppress(ValueError):
            paths.check(topology)
            judges["multi-path"] = GreedyMultiPath
    return judges


def _weigh(
    accepted: dict[str, list[tuple[int, float]]],
    reached: list[float],
    judges: Mapping[str, Callable[[], TreeVerifier]],
    prompt: int,
    tree: SampleTree,
    rows: Rows[Tensor],
    matched: int,
) -> None:
    """Adds, by verifier, the number of the prompt and the expected accepted tokens at one position.

    ``reached[d]`` counts how often the first of the verifiers accepts d tokens or more.
    """
    if tree.proposal.law.shared:
        accepted["SharedMatching"].append((prompt, matched))
        for depth in range(matched + 1):
            reached[depth] += 1
    for number, (name, judge) in enumerate(judges.items()):
        ends = judge().law(tree, rows)
        accepted[name].append((prompt, sum(chance * (len(path) - 1) for chance, path, _ in ends)))
        if number == 0:
            for chance, path, _ in ends:
                for depth in range(len(path)):
                    reached[depth] += chance


def clustered(values: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Mean of ``(cluster, value)`` pairs, and its standard error with clusters as the independent units."""
    mean = sum(value for _, value in values) / len(values)
    sums: dict[int, float] = defaultdict(float)
    for cluster, value in values:
        sums[cluster] += value - mean
    count = len(sums)
    if count < 2:
        return mean, math.nan
    return mean, math.sqrt(count / (count - 1) * sum(total**2 for total in sums.values())) / len(values)
