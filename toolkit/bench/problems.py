"""The problems on which the Triton kernels are checked and timed.

Shapes: T packed rows, B samples, R rows of scores, N nodes, V vocabulary, P pool rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from arbordraft.bench.kernels import ATTENTION, Goal, Problem
from arbordraft.bench.packed import Packed, flash, flex, sdpa
from arbordraft.bench.roofline import Shape, Stepped
from arbordraft.kernels import choice, work
from arbordraft.kernels.kv_cache import append, append_reference, compact_reference
from arbordraft.kernels.kv_cache.operator import kv_compact
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention
from arbordraft.kernels.tree_expand.operator import expand
from arbordraft.kernels.tree_expand.reference import perturb, uniforms
from arbordraft.kernels.verify.operator import CHUNK, left_mass, left_pick, lowest_kept, row_stats
from arbordraft.kernels.verify.tree import PackedTree, verify_tree
from arbordraft.laws import WithoutReplacement
from arbordraft.sampling import Noise
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftTree, SampleTree
from arbordraft.verifiers import Lifted, RecursiveRejection, TopDown
from arbordraft.verifiers.packed import pack

ROUNDING = 2.0**-7  # a step of bfloat16: the interpreter cuts off, a GPU rounds but rounds the weights too
SUMS = 1e-4  # of float32 sums over a vocabulary
FAST = Goal("us", 100)
TINY_SHAPES = [Shape(70, 2, 5, 2, 16, 4), Shape(300, 1, 3, 4, 16, 4)]
TINY_STEPPED = Stepped(
    samples=2,
    tree=(2, 1),
    vocabulary=CHUNK + 130,
    layers=2,
    context=12,
    kv_heads=2,
    size=8,
    moves=2,
    level=1,
    children=3,
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 33},
    "soft cap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "all options": {"window": 40, "softcap": 3.0, "sinks": True},
    "prompts": {"causal": True},
    "splits of 64": {"split_size": 64},
}


def chosen(
    device: torch.device, shapes: Sequence[Shape], stepped: Stepped, compiled: Sequence[Shape]
) -> Iterator[Problem]:
    """The problems that are asked for on a GPU, and tiny ones in the interpreter; one by one, as they may be large.

    Args:
        device: where.
        shapes: of attention to time.
        stepped: what comes behind it.
        compiled: shapes to time FlexAttention with, which compiles for each.
    """
    heads, ragged = [(32, 4, 128), (14, 7, 80)], [2085, 0, 700, 1, 130, 64]
    if device.type == "cpu":
        shapes, stepped, heads, ragged = TINY_SHAPES, TINY_STEPPED, [(7, 7, 24)], [130, 0, 37]
    for counts in heads:
        for name, options in OPTIONS.items():
            past = ragged[:2] if "split_size" in options else ragged  # a program for every row is slow to interpret
            yield attention_options(name, past, *counts, options, device)
    for shape in shapes:
        yield attention(shape, device, flexible=shape in compiled)
    yield kv_append(stepped, device)
    yield kv_compacted(stepped, device)
    yield from passes(stepped, device)
    yield from truncation(stepped, device)
    yield from expansion(stepped, device)
    yield from verification(stepped, device)


def attention(shape: Shape, device: torch.device, *, flexible: bool = False) -> Problem:
    """Equal trees behind equal prefixes; what is checked is the last sample."""
    tree = TreeTopology.from_parents([(node - 1) // 2 if node else -1 for node in range(shape.tree)])
    packed = Packed.random(
        [shape.context] * shape.batch,
        [tree] * shape.batch,
        heads=shape.heads,
        group=shape.group,
        size=shape.size,
        device=device,
    )
    run = _attention(packed)
    peers: dict[str, Callable[[], Callable[[], object]]]
    peers = {"sdpa": partial(sdpa, packed), "flash": partial(flash, packed)}
    if flexible:
        peers["flex"] = partial(flex, packed)
    return Problem(
        ATTENTION,
        str(shape),
        run,
        lambda: _error(run()[-shape.tree :], packed.exact(shape.batch - 1)),
        ROUNDING,
        shape.work(),
        Goal("of copy", 0.7) if shape.context >= 2048 else None,
        peers,
    )


def attention_options(
    name: str,
    past: Sequence[int],
    heads: int,
    group: int,
    size: int,
    options: dict[str, Any],
    device: torch.device,
) -> Problem:
    """Ragged prefixes and trees, with one option or another; every row is checked."""
    options = dict(options)
    causal, split_size = options.pop("causal", False), options.pop("split_size", 0)
    shapes = [TreeTopology.from_k_config((3, 2, 1)), TreeTopology.chain(0), TreeTopology.chain(70)]
    trees = [shapes[sample % len(shapes)] for sample in range(len(past))]
    packed = Packed.random(past, trees, heads=heads, group=group, size=size, device=device, causal=causal)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, heads).to(device)
    run = _attention(packed, split_size=split_size, **options)
    case = f"{name}, {len(past)} samples of 0 to {max(past)} keys, {heads}/{heads // group} heads of {size}"
    return Problem(
        ATTENTION,
        case,
        run,
        lambda: _error(run(), torch.cat([packed.exact(sample, **options) for sample in range(len(past))])),
        ROUNDING,
        work.Work(0, 0),
        timed=False,
    )


def _attention(packed: Packed, **options: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with choice.use("triton"):
            return ragged_tree_attention(
                packed.query, packed.keys, packed.values, packed.batch, scale=packed.scale, **options
            )

    return run


def kv_append(stepped: Stepped, device: torch.device) -> Problem:
    """The rows of all trees, written to every layer."""
    rows, layers = stepped.rows, range(stepped.layers)
    shape = (stepped.kv_heads, stepped.size)
    pools, new = (
        [[torch.randn(count, *shape, device=device).bfloat16() for _ in range(2)] for _ in layers]
        for count in (stepped.samples * stepped.context + rows, rows)
    )
    slots = torch.randperm(len(pools[0][0]), generator=torch.Generator().manual_seed(0))[:rows].to(device)

    def run(path: str = "triton") -> None:
        with choice.use(path):
            for layer in layers:
                (keys, values), (new_keys, new_values) = pools[layer], new[layer]
                append(keys, values, new_keys, new_values, slots)

    def error() -> float:
        expected = [[pool.clone() for pool in pair] for pair in pools]
        for (keys, values), (new_keys, new_values) in zip(expected, new, strict=True):
            append_reference(keys, values, new_keys, new_values, slots)
        run()
        return _differing(pools, expected)

    case, needed = _part(stepped, "kv_append")
    return Problem("kv_append", case, run, error, 0.0, needed, peers={"torch": lambda: partial(run, "reference")})


def kv_compacted(stepped: Stepped, device: torch.device) -> Problem:
    """Every other row of each tree moves towards the front, in every layer."""
    shape = (stepped.samples * stepped.context, stepped.kv_heads, stepped.size)
    pools = [torch.randn(shape, device=device).bfloat16() for _ in range(2 * stepped.layers)]
    ends = [(sample + 1) * stepped.context - 2 * stepped.moves for sample in range(stepped.samples)]
    destination = torch.tensor([end + move for end in ends for move in range(stepped.moves)])
    source = torch.tensor([end + 1 + 2 * move for end in ends for move in range(stepped.moves)])
    first = torch.arange(0, len(source) + 1, stepped.moves)
    source, destination, first = (x.to(device) for x in (source, destination, first))

    def run() -> None:
        kv_compact(pools, source, destination, first)

    def error() -> float:
        expected = [pool.clone() for pool in pools]
        compact_reference(expected, source, destination)
        run()
        return _differing([pools], [expected])

    case, needed = _part(stepped, "kv_compact")
    peers = {"torch": lambda: partial(compact_reference, pools, source, destination)}
    return Problem("kv_compact", case, run, error, 0.0, needed, peers=peers)


def passes(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """The passes over scores of which verification consists, one by one."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, rows, inner = stepped.vocabulary, stepped.rows, stepped.samples * sum(stepped.levels[:-1])
    scores = (3 * torch.randn(rows, vocabulary, generator=generator)).bfloat16().to(device)
    lse = scores.double().logsumexp(dim=-1)

    def stats() -> float:
        highest, place, mass = row_stats(scores)
        best, chunk = highest.max(dim=1, keepdim=True)
        if not torch.equal(best[:, 0], scores.max(dim=-1).values.float()):
            return torch.inf
        if not torch.equal(scores.gather(1, place.gather(1, chunk)).float(), best):
            return torch.inf
        return _error((highest + mass.log()).logsumexp(dim=-1), lse)

    softmax = {"torch": lambda: partial(torch.softmax, scores, -1, torch.float32)}
    case, needed = _part(stepped, "row_stats")
    yield Problem("row_stats", case, lambda: row_stats(scores), stats, 1e-6, needed, FAST, softmax)

    near = scores[:inner].float() + torch.randn(inner, vocabulary, generator=generator).to(device)
    draft = near.softmax(dim=-1)
    special = torch.randint(vocabulary, (inner, max(stepped.tree)), generator=generator).to(device)
    weight, taken = (torch.rand(inner, generator=generator).to(device) for _ in range(2))
    row = torch.arange(inner).to(device)
    arguments = (scores, lse.float(), draft, row, row, weight, taken, special)

    def left(nodes: slice) -> tuple[Tensor, Tensor]:
        """R and q of some nodes in float64, by chunk."""
        p = (scores[row[nodes]].double() - lse[row[nodes], None]).exp() * weight[nodes, None]
        q = draft[row[nodes]].double()
        r = (p - taken[nodes, None] * q).clamp(min=0)
        parts = (x.scatter(1, special[nodes], 0.0) for x in (r, q))
        found = [torch.nn.functional.pad(x, (0, -vocabulary % CHUNK)).unflatten(1, (-1, CHUNK)) for x in parts]
        return found[0], found[1]

    def sums() -> float:
        found = left_mass(*arguments)
        errors = []
        for begin in range(0, inner, 32):  # in float64 a few rows at a time
            nodes = slice(begin, begin + 32)
            errors += [_error(f[nodes], e.sum(dim=-1)) for f, e in zip(found, left(nodes), strict=True)]
        return max(errors)

    case, needed = _part(stepped, "left_mass")
    yield Problem("left_mass", case, lambda: left_mass(*arguments), sums, SUMS, needed)

    few = slice(stepped.samples)
    chunk = torch.randint(-(-vocabulary // CHUNK), (stepped.samples,), generator=generator).to(device)
    mass = left(few)[0][row[few], chunk]
    level = torch.rand(stepped.samples, generator=generator).to(device) * mass.sum(dim=-1)
    several = (*arguments[:3], *(x[few] for x in arguments[3:]), chunk, level.float())

    def draws() -> float:
        return max(map(_miss, mass, level, left_pick(*several) - chunk * CHUNK))

    case, needed = _part(stepped, "left_pick")
    yield Problem("left_pick", case, lambda: left_pick(*several), draws, SUMS, needed)


def truncation(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Thresholds of top-k and of top-p."""
    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(stepped.rows, stepped.vocabulary, generator=generator)).bfloat16().to(device)
    case, needed = _part(stepped, "lowest_kept")

    def error(count: int, mass: float, find: Callable[[], Tensor]) -> float:
        """What is above a threshold must be too little, and with the scores that equal it, enough."""
        lowest = find()[:, None]
        above, kept = scores > lowest, scores >= lowest
        if count:
            right = (above.sum(dim=-1) < count) & (kept.sum(dim=-1) >= count)
            return 0.0 if bool(right.all()) else torch.inf
        p = scores.double().softmax(dim=-1)
        return float(torch.maximum((p * above).sum(dim=-1) - mass, mass - (p * kept).sum(dim=-1)).clamp(min=0).max())

    lse = scores.double().logsumexp(dim=-1).float()
    for name, count, mass in (("top-k 50", 50, 0.0), ("top-p 0.9", 0, 0.9)):
        run = partial(lowest_kept, scores, lse, count, mass)
        peers = {"torch": lambda: partial(torch.sort, scores, dim=-1, descending=True)}
        yield Problem(
            "lowest_kept", f"{name}, {case}", run, partial(error, count, mass, run), SUMS, needed, peers=peers
        )


def expansion(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Children of a level, the most probable and drawn ones."""
    generator, rows, k = torch.Generator().manual_seed(0), stepped.samples * stepped.level, stepped.children
    scores = (3 * torch.randn(rows, stepped.vocabulary, generator=generator)).bfloat16().to(device)
    words, first, seeds = torch.ones(rows, 1, dtype=torch.int64), torch.arange(1, rows + 1), torch.arange(rows)
    words, first, seeds = (x.to(device) for x in (words, first, seeds))
    case, needed = _part(stepped, "tree_expand")

    def error(find: Callable[[], tuple[Tensor, Tensor, Tensor]], keys: Callable[[], Tensor]) -> float:
        """The keys of the children found, against the highest there are; and their log-probabilities."""
        tokens, found, _ = find()
        every = keys()
        exact = scores.double().log_softmax(dim=-1).gather(1, tokens)
        return max(_error(every.gather(1, tokens), every.topk(k, dim=-1).values), _error(found, exact))

    def perturbed() -> Tensor:
        return perturb(scores.double(), uniforms(seeds, stepped.vocabulary).double())

    for name, noise, keys in (("most probable", None, scores.double), ("drawn", seeds, perturbed)):
        run = partial(expand, scores, k, words, first, noise)
        peers = {"torch": lambda: partial(torch.topk, scores, k)} if noise is None else {}
        yield Problem("tree_expand", f"{name}, {case}", run, partial(error, run, keys), SUMS, needed, peers=peers)


def verification(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Whole trees from scores to tokens; the truth is the walk through one tree after the other, in float64."""
    law, topology = WithoutReplacement(max(stepped.tree)), TreeTopology.from_k_config(stepped.tree)
    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(stepped.rows, stepped.vocabulary, generator=generator)).bfloat16()
    trees = [
        _drafted(topology, law, scores[begin : begin + topology.num_nodes], generator)
        for begin in range(0, stepped.rows, topology.num_nodes)
    ]
    noise = Noise.draw([generator] * stepped.samples, topology.num_nodes)
    tables, draft = pack(DraftTree(tuple(trees)), torch.device("cpu"))
    tables, draft = moved(tables, device), draft.to(device)
    there = [x.to(device) for x in (scores, noise.accept.flatten(), noise.final.flatten())]

    def missed(found: tuple[Tensor, Tensor], verifier: TopDown | Lifted) -> float:
        """How far the tokens are from what the noise says, infinitely if a path ends elsewhere."""
        wide = DraftTree(tuple(map(_double, trees)))
        misses = []
        for sample, (drafted, target) in enumerate(wide.split(scores.double().softmax(dim=-1))):
            assert drafted is not None
            node, weights = _walked(verifier, drafted, target, noise.accept[sample].tolist())
            if node != int(found[0][sample]) - sample * topology.num_nodes:
                return torch.inf
            misses.append(_miss(weights, noise.final[sample, node] * weights.sum(), found[1][sample].cpu()))
        return max(misses)

    case, needed = _part(stepped, "verify_tree")
    for name, verifier in (("top-down", TopDown), ("lifted", Lifted)):
        lifted = verifier is Lifted
        run = partial(verify_tree, there[0], draft, tables, *there[1:], lifted=lifted)
        error = partial(lambda run, verifier: missed(run(), verifier(RecursiveRejection())), run, verifier)
        yield Problem("verify_tree", f"{name}, {case}", run, error, SUMS, needed, FAST)


def moved(tables: PackedTree, device: torch.device) -> PackedTree:
    """The tables on another device."""
    tensors: dict[str, Any]
    tensors = {name: value.to(device) for name, value in vars(tables).items() if isinstance(value, Tensor)}
    return replace(tables, **tensors)


def _drafted(topology: TreeTopology, law: WithoutReplacement, scores: Tensor, generator: torch.Generator) -> SampleTree:
    """A full tree whose draft rows resemble the target's."""
    tokens, rows = {0: 0}, {}
    for node, children in enumerate(topology.child_list):
        if children:
            row = (scores[node].float() + torch.randn(scores.shape[1], generator=generator)).softmax(dim=-1)
            uniforms = torch.rand(len(children), generator=generator).tolist()
            tokens |= dict(zip(children, law.narrow(len(children)).draw(row, uniforms), strict=True))
            rows[node] = row
    return SampleTree(topology, law, dict(sorted(tokens.items())), rows)


def _double(tree: SampleTree) -> SampleTree:
    return replace(tree, draft_probs={node: row.double() for node, row in tree.draft_probs.items()})


def _walked(
    verifier: TopDown | Lifted, tree: SampleTree, target: Mapping[int, Tensor], accept: Sequence[float]
) -> tuple[int, Tensor]:
    """The last accepted node, and the ``[V]`` weights of the token behind it."""
    decision = verifier.decide(tree, target)
    try:
        node, chance = next(decision)
        while True:
            node, chance = decision.send(accept[node] < chance)
    except StopIteration as stopped:
        return stopped.value


def _miss(weights: Tensor, level: Tensor, token: Tensor) -> float:
    """How far a token's interval of the running sum is from a level, as a share; infinite for what cannot be drawn."""
    if not 0 <= token < len(weights) or weights[token] <= 0:
        return torch.inf
    above = weights[: int(token) + 1].sum()
    return float(torch.maximum(above - weights[token] - level, level - above).clamp(min=0) / weights.sum())


def _part(stepped: Stepped, kernel: str) -> tuple[str, work.Work]:
    return next((case, needed) for name, case, needed in stepped.parts() if name == kernel)


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).abs().max() / exact.abs().max())


def _differing(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> float:
    pairs = [pair for many in zip(found, expected, strict=True) for pair in zip(*many, strict=True)]
    return max(float((one.double() - other.double()).abs().max()) for one, other in pairs)


__all__ = ["TINY_SHAPES", "TINY_STEPPED", "attention", "attention_options", "chosen"]
