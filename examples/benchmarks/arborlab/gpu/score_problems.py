"""Problems for the kernels that read scores: verification, truncation and tree growth.

Shapes: R rows of scores, N nodes, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from arbordraft.kernels.accepted_paths import (
    accepted_paths,
    accepted_paths_reference,
    matching_ends,
    matching_ends_reference,
)
from arbordraft.kernels.grow_level import grow_level, grow_level_reference
from arbordraft.kernels.gumbel import gumbel, gumbel_argmax, gumbel_argmax_reference, gumbel_reference
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.kernels.verify import (
    keep_lowest,
    left_mass,
    left_pick,
    log_sum_exp,
    row_max,
    row_stats,
    score_rows,
    take_tops,
)
from arbordraft.kernels.verify.reference import CHUNK
from arbordraft.kernels.verify.tree import verify_tree
from arbordraft.sampling.laws import DraftLaw, WithoutReplacement
from arbordraft.sampling.noise import Noise
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import Lifted, RecursiveRejection, TopDown
from arbordraft.verifiers.packed import pack
from arborlab.gpu.problem import Problem, largest_error, unequal
from arborlab.gpu.roofline import Stepped

SUMS = 1e-4  # allowed error of float32 sums over a vocabulary


def passes(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields a problem for each pass over scores that verification consists of."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, rows, inner = stepped.vocabulary, stepped.rows, stepped.samples * sum(stepped.levels[:-1])
    scores = _scores(rows, stepped, device)
    lse = scores.double().logsumexp(dim=-1)

    def stats() -> float:
        highest, place, mass = row_stats(scores)
        best, chunk = highest.max(dim=1, keepdim=True)
        if not torch.equal(best[:, 0], scores.max(dim=-1).values.float()):
            return torch.inf
        if not torch.equal(scores.gather(1, place.gather(1, chunk)).float(), best):
            return torch.inf
        return largest_error((highest + mass.log()).logsumexp(dim=-1), lse)

    softmax = partial(torch.softmax, scores, -1, torch.float32)
    yield stepped.problem("row_stats", lambda: row_stats(scores), stats, 1e-6, peer=softmax)

    def highest() -> float:
        values, place = row_max(scores)
        best, first = scores.max(dim=-1)  # among equal maxima, torch returns any
        right = unequal(values, best.float()) + unequal(scores.gather(1, place[:, None])[:, 0], best)
        return right if bool((place <= first).all()) else torch.inf

    yield stepped.problem("row_max", lambda: row_max(scores), highest, 0.0)
    summed = partial(log_sum_exp, scores)
    yield stepped.problem("log_sum_exp", summed, lambda: largest_error(summed(), lse), 1e-6)

    tokens, sample = torch.zeros(rows, dtype=torch.int64, device=device), torch.arange(rows, device=device) % 3
    temperature = torch.tensor([0.7, 0.0, 1.3], dtype=torch.float64).to(device)
    read = partial(score_rows, scores, tokens, sample, temperature, divide=True)

    def divided() -> float:
        heat = temperature[sample][:, None]
        best, broken, found, total = read()
        if broken.any() or unequal(scores.gather(1, best[:, None]), scores.amax(dim=1, keepdim=True)):
            return torch.inf
        kept = (heat > 0) | (torch.arange(vocabulary, device=device) == best[:, None])
        exact = torch.where(kept, scores.double() / torch.where(heat > 0, heat, 1), -torch.inf)
        errors = [largest_error(found[kept], exact[kept]), largest_error(total, exact.logsumexp(dim=-1))]
        return max(errors) if bool((found[~kept] == -torch.inf).all()) else torch.inf

    yield stepped.problem("score_rows", read, divided, SUMS)

    draft = (scores[:inner].float() + _drawn(inner, vocabulary, device, seed=1)).softmax(dim=-1)
    most = torch.full((inner,), 2, device=device)
    again = draft.clone()
    taken_tops = partial(take_tops, again, most, temperature[:1].expand(inner) * 0, 2)

    def tops() -> float:
        again.copy_(draft)
        found = taken_tops()
        expected = draft.topk(2).values
        removed = draft.scatter(1, found, 0.0)
        return unequal(draft.gather(1, found), expected) + unequal(again, removed)

    yield stepped.problem("take_tops", taken_tops, tops, 0.0)
    special = torch.randint(vocabulary, (inner, max(stepped.tree)), generator=generator).to(device)
    weight, taken = (torch.rand(inner, generator=generator).to(device) for _ in range(2))
    row = torch.arange(inner).to(device)
    arguments = (scores, lse.float(), draft, row, row, weight, taken, special)

    def left(nodes: slice) -> tuple[Tensor, Tensor]:
        """Returns r and q of some nodes in float64, by chunk."""
        p = (scores[row[nodes]].double() - lse[row[nodes], None]).exp() * weight[nodes, None]
        q = draft[row[nodes]].double()
        r = (p - taken[nodes, None] * q).clamp(min=0)
        parts = (x.scatter(1, special[nodes], 0.0) for x in (r, q))
        chunks = [torch.nn.functional.pad(x, (0, -vocabulary % CHUNK)).unflatten(1, (-1, CHUNK)) for x in parts]
        return chunks[0], chunks[1]

    def sums() -> float:
        masses = left_mass(*arguments)
        errors = []
        for begin in range(0, inner, 32):  # a few rows at a time, as float64 takes memory
            nodes = slice(begin, begin + 32)
            errors += [largest_error(f[nodes], e.sum(dim=-1)) for f, e in zip(masses, left(nodes), strict=True)]
        return max(errors)

    yield stepped.problem("left_mass", lambda: left_mass(*arguments), sums, SUMS)

    few = slice(stepped.samples)
    chunk = torch.randint(-(-vocabulary // CHUNK), (stepped.samples,), generator=generator).to(device)
    mass = left(few)[0][row[few], chunk]
    level = torch.rand(stepped.samples, generator=generator).to(device) * mass.sum(dim=-1)
    several = (*arguments[:3], *(x[few] for x in arguments[3:]), chunk, level)

    def draws() -> float:
        return max(map(_miss, mass, level, left_pick(*several) - chunk * CHUNK))

    yield stepped.problem("left_pick", lambda: left_pick(*several), draws, SUMS)


def truncation(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields problems of finding the thresholds of top-k and top-p."""
    scores = _scores(stepped.rows, stepped, device)

    def error(count: int, mass: float, find: Callable[[], Tensor]) -> float:
        """Checks that scores above the threshold are too few, and that scores at or above it are enough."""
        lowest = find()[:, None]
        above, kept = scores > lowest, scores >= lowest
        if count:
            right = (above.sum(dim=-1) < count) & (kept.sum(dim=-1) >= count)
            return 0.0 if bool(right.all()) else torch.inf
        p = scores.double().softmax(dim=-1)
        return float(torch.maximum((p * above).sum(dim=-1) - mass, mass - (p * kept).sum(dim=-1)).clamp(min=0).max())

    lse = scores.double().logsumexp(dim=-1).float()
    for name, count, mass in (("top-k 50", 50, 0.0), ("top-p 0.9", 0, 0.9)):
        run = partial(keep_lowest, scores, lse, count, mass)
        ranked = partial(torch.sort, scores, dim=-1, descending=True)
        parts = run, partial(error, count, mass, run), SUMS
        yield stepped.problem("lowest_kept", *parts, note=f"{name}, ", peer=ranked)


def expansion(stepped: Stepped, device: torch.device) -> Problem:
    """Builds the problem of finding the most probable children of a level."""
    rows, k = stepped.samples * stepped.level, stepped.children
    scores = _scores(rows, stepped, device)
    run = partial(tree_expand, scores, k)

    def error() -> float:
        """Compares the children's scores with the highest scores, and their log-probabilities with exact ones."""
        tokens, log_probs = run()
        exact = scores.double()
        chosen, best = exact.gather(1, tokens), exact.topk(k, dim=-1).values
        return max(largest_error(chosen, best), largest_error(log_probs, exact.log_softmax(dim=-1).gather(1, tokens)))

    return stepped.problem("tree_expand", run, error, SUMS, peer=partial(torch.topk, scores, k))


def growth(stepped: Stepped, device: torch.device) -> Problem:
    """Builds the problem of growing the first levels of all trees; tokens must be those of the reference."""
    topology, samples = TreeTopology.from_k_config(stepped.tree), stepped.samples
    plan = (
        *(torch.full((samples,), len(stepped.tree)), torch.full((samples, 1), 0.9), torch.full((samples, 1), 0.8)),
        *(torch.tensor([0.01, 0.02]), torch.tensor([samples * topology.num_nodes])),
    )
    limits = [(part.double() if part.is_floating_point() else part).to(device) for part in plan]
    levels = []
    for depth in range(len(stepped.tree)):
        level, inner = topology.tree_levels[depth], [*topology.inner, []]
        constants = [torch.tensor(part) for part in (level.inner, level.parent, level.rank, inner[depth + 1])]
        scores = _scores(samples * len(level.inner), stepped._replace(vocabulary=max(stepped.tree) + 70), device)
        constants = [part.to(device, torch.int64) for part in constants]
        levels.append((*constants, *tree_expand(scores, max(stepped.tree)), None, depth, level.below.start))

    def run(grow: Callable[..., Tensor] = grow_level) -> list[Tensor]:
        token = torch.full((samples, topology.num_nodes), -1, device=device)
        chance, reach = torch.zeros(2, *token.shape, dtype=torch.float64, device=device)
        token[:, 0], reach[:] = 7, -1
        reach[:, 0] = 1
        broken = torch.zeros(samples, dtype=torch.float64, device=device)
        return [token, *(grow(token, chance, reach, broken, *limits, *level) for level in levels)]

    def error() -> float:
        return max(map(unequal, run(), run(grow_level_reference)))

    return stepped.problem("grow_level", run, error, 0.0, note=f"{samples} trees of {topology.num_nodes}")


def paths(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields problems of following the target's tokens through all trees, and of the moves that keep these rows."""
    topology, samples = TreeTopology.from_k_config(stepped.tree), stepped.samples
    firsts = torch.arange(samples) * topology.num_nodes
    parent = torch.tensor(topology.parent_list)
    parent = torch.where(parent < 0, -1, parent + firsts[:, None]).flatten().to(device)
    level = torch.tensor(topology.depth_list).repeat(samples).to(device)
    generator = torch.Generator().manual_seed(0)
    tokens, best = (torch.randint(2, (stepped.rows,), generator=generator).to(device) for _ in range(2))
    roots, rows = firsts.to(device), torch.arange(stepped.rows, device=device)
    depth, sample = topology.max_depth, rows // topology.num_nodes
    given = tokens, best, parent, roots, depth
    ends = partial(matching_ends, *given)
    exact, _ = expected_ends = matching_ends_reference(*given)
    note = f"{samples} trees of {topology.num_nodes}"
    error = partial(lambda run: max(map(unequal, run(), expected_ends)), ends)
    yield stepped.problem("matching_ends", ends, error, 0.0, note=note)
    tree = exact, parent, level, rows + 7, roots + 7, sample, roots, depth
    found, expected = partial(accepted_paths, *tree), accepted_paths_reference(*tree)
    error = partial(lambda run: max(map(unequal, run(), expected)), found)
    yield stepped.problem("accepted_paths", found, error, 0.0, note=note)


def drawing(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields problems of drawing a token per row with shared noise, from all tokens and from the 50 most probable.

    The first rows are compared with the definition.
    """
    seeds, scores = torch.arange(stepped.rows, device=device), _scores(stepped.rows, stepped, device)
    few = keep_lowest.reference(scores / 0.7, scores[:, 0].float(), 50, 0.0)

    def missed(run: Callable[[], Tensor], lowest: Tensor | None) -> float:
        some = slice(8)
        kept = None if lowest is None else lowest[some]
        expected = gumbel_argmax_reference(scores[some], seeds[some], seeds[some], 0.7, kept)
        return 0.0 if torch.equal(run()[some], expected) else torch.inf

    def peer() -> Tensor:
        return (scores.float() / 0.7).softmax(dim=-1).multinomial(1)

    for note, lowest in (("", None), ("top 50, ", few)):
        run = partial(gumbel_argmax, scores, seeds, seeds, 0.7, lowest)
        yield stepped.problem("gumbel_draw", run, partial(missed, run, lowest), 0.0, note=note, peer=peer)


def noise(stepped: Stepped, device: torch.device) -> Problem:
    """Builds the problem of computing shared noise, bit for bit."""
    seeds, positions = (torch.arange(stepped.samples, device=device) + start for start in (-1, 2**31))
    run = partial(gumbel, seeds, positions, stepped.vocabulary)
    expected = partial(gumbel_reference, seeds, positions, stepped.vocabulary)
    return stepped.problem("gumbel", run, lambda: unequal(run(), expected()), 0.0)


def verification(stepped: Stepped, device: torch.device) -> Iterator[Problem]:
    """Yields problems of verifying whole trees, from scores to tokens; the truth is a float64 walk, tree by tree."""
    law, topology = WithoutReplacement(max(stepped.tree)), TreeTopology.from_k_config(stepped.tree)
    generator = torch.Generator().manual_seed(0)
    scores = (3 * torch.randn(stepped.rows, stepped.vocabulary, generator=generator)).to(stepped.dtype)
    tree = drafted_trees(topology, law, scores, generator)
    noise = Noise.draw([Noise.source(0)] * stepped.samples, topology.num_nodes)
    there = scores.to(device)
    tables, draft, accept, final = pack(replace(tree, draft_rows=tree.draft_rows.to(device)), noise, device)

    def verified(*, lifted: bool) -> tuple[Tensor, Tensor]:
        return verify_tree(there, log_sum_exp(there), draft, tables, accept, final, lifted=lifted)

    def missed(verdicts: tuple[Tensor, Tensor], verifier: TopDown | Lifted) -> float:
        """Returns the distance of the tokens from those that the noise picks; infinite if a path ends elsewhere."""
        wide, target = replace(tree, draft_rows=tree.draft_rows.double()), scores.double().softmax(dim=-1)
        misses = []
        for sample in wide.living:
            row, weights = _walked(verifier, wide[sample], target, noise.accept.flatten().tolist())
            if row != int(verdicts[0][sample]):
                return torch.inf
            misses.append(_miss(weights, noise.final.flatten()[row] * weights.sum(), verdicts[1][sample].cpu()))
        return max(misses)

    for name, verifier in (("top-down", TopDown), ("lifted", Lifted)):
        lifted = verifier is Lifted
        run = partial(verified, lifted=lifted)
        error = partial(lambda run, verifier: missed(run(), verifier(RecursiveRejection())), run, verifier)
        yield stepped.problem("verify_tree", run, error, SUMS, note=f"{name}, ")


def drafted_trees(topology: TreeTopology, law: DraftLaw, scores: Tensor, generator: torch.Generator) -> DraftTree:
    """Draws full trees whose draft rows resemble the target's ``[B * N, V]`` scores."""
    drafted = []
    for own in scores.split(topology.num_nodes):
        tokens, rows = {0: 0}, {}
        for node, children in enumerate(topology.child_list):
            if children:
                row = (own[node].float() + torch.randn(own.shape[1], generator=generator)).softmax(dim=-1)
                uniforms = torch.rand(len(children), generator=generator).tolist()
                tokens |= dict(zip(children, law.narrow(len(children)).draw(row, uniforms), strict=True))
                rows[node] = row
        drafted.append((dict(sorted(tokens.items())), rows))
    return DraftTree.of(topology, law, [tokens for tokens, _ in drafted], [rows for _, rows in drafted])


def _scores(rows: int, stepped: Stepped, device: torch.device) -> Tensor:
    return (3 * _drawn(rows, stepped.vocabulary, device)).to(device, stepped.dtype)


def _drawn(rows: int, columns: int, device: torch.device, seed: int = 0) -> Tensor:
    """Draws normal numbers, on the GPU itself if ``device`` is one."""
    here = device if device.type == "cuda" else torch.device("cpu")
    drawn = torch.randn(rows, columns, generator=torch.Generator(here).manual_seed(seed), device=here)
    return drawn.to(device)


def _walked(
    verifier: TopDown | Lifted, tree: SampleTree, target: Tensor, accept: Sequence[float]
) -> tuple[int, Tensor]:
    """Returns the row of the last accepted node, and the ``[V]`` weights of the token after it."""
    decision = verifier.decide(tree, target)
    try:
        row, chance = next(decision)
        while True:
            row, chance = decision.send(accept[row] < chance)
    except StopIteration as stopped:
        return stopped.value


def _miss(weights: Tensor, level: Tensor, token: Tensor) -> float:
    """Returns the relative distance of a level from a token's interval of the running sum; infinite for weight 0."""
    if not 0 <= token < len(weights) or weights[token] <= 0:
        return torch.inf
    above = weights[: int(token) + 1].sum()
    return float(torch.maximum(above - weights[token] - level, level - above).clamp(min=0) / weights.sum())
