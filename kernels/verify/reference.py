"""Operators of verification on rows of scores in plain PyTorch: the truth for every other implementation.

Shapes: R rows, N nodes, D draft rows, V vocabulary, C chunks of a row, K special tokens of a node.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 4096  # tokens of a chunk
NEVER = 2**62  # after every row in post-order


def wide(scores: Tensor) -> torch.dtype:
    """Returns the precision of all results computed from scores: float32, or float64 if the scores are."""
    return torch.promote_types(scores.dtype, torch.float32)


def row_max_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.verify.row_max`."""
    values, tokens = logits.max(dim=-1)
    return values.to(wide(values)), tokens


def lowest_kept_reference(scores: Tensor, count: int, mass: float) -> Tensor:
    """See :func:`arbordraft.kernels.verify.lowest_kept`."""
    ordered = scores.to(wide(scores)).sort(dim=-1, descending=True).values
    probs = ordered.softmax(dim=-1)
    above = probs.double().cumsum(dim=-1) - probs
    # Equal scores stay together: each uses the mass above the first of them.
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(ordered)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(begins, place, 0).cummax(dim=-1).values
    kept = (first < count) | (above.gather(1, first) < mass)
    return ordered.gather(1, kept.sum(dim=-1, keepdim=True) - 1)[:, 0]


def chunked(x: Tensor, fill: float) -> Tensor:
    """Splits ``[..., V]`` into ``[..., C, CHUNK]``; a row that is shorter than a chunk is one unpadded chunk."""
    size = min(x.shape[-1], CHUNK)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=fill)
    return padded.unflatten(-1, (-1, size))


def row_stats_reference(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the statistics of ``[R, V]`` scores in one pass, chunk by chunk.

    Returns:
        ``[R, C]`` highest scores, NaN if a chunk holds one; ``[R, C]`` int64 first places of these; ``[R, C]`` sums of
        ``exp(score - highest)``. Scores and sums are float32, or float64 if the scores are.
    """
    parts = chunked(scores.to(wide(scores)), -torch.inf)
    highest, place = parts.max(dim=-1)
    first = torch.arange(parts.shape[-2], device=scores.device) * CHUNK
    below = highest.masked_fill(highest == -torch.inf, 0)
    return highest, place + first, (parts - below[..., None]).exp().sum(dim=-1)


def log_sum_exp_reference(scores: Tensor) -> Tensor:
    """See :func:`arbordraft.kernels.verify.log_sum_exp`."""
    highest, _, mass = row_stats_reference(scores)
    return (highest + mass.log()).logsumexp(dim=-1)


def score_rows_reference(
    logits: Tensor, tokens: Tensor, sample: Tensor, temperature: Tensor, divide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`arbordraft.kernels.verify.score_rows`."""
    highest, best = row_max_reference(logits)
    unsound = (~highest.isfinite() & (tokens >= 0)).to(torch.int64)
    broken = torch.zeros(len(temperature), dtype=torch.int64, device=logits.device).index_add_(0, sample, unsound)
    x = logits.to(wide(logits))
    if not divide:
        return best, broken, x.new_empty(0, 0), x.new_empty(0)
    heat = temperature[sample].to(x.dtype)[:, None]
    kept = (heat > 0) | (torch.arange(x.shape[1], device=x.device) == best[:, None])
    scores = torch.where(kept, x / torch.where(heat > 0, heat, 1), -torch.inf)
    return best, broken, scores, log_sum_exp_reference(scores)


def left_mass_reference(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    row: Tensor,
    draft_row: Tensor,
    weight: Tensor,
    taken: Tensor,
    special: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sums ``R(x) = max(w p(x) - t q(x), 0)`` and q(x) over chunks, without the special tokens of a node.

    Args:
        scores: ``[R, V]``.
        lse: ``[R]`` log-sum-exp of the scores; float32, or float64 if the scores are.
        draft: ``[D, V]`` probabilities.
        row: ``[N]`` int64 row of scores of every node.
        draft_row: ``[N]`` int64 draft row of a node's children, -1 for none: q is 0 then.
        weight: ``[N]`` w, of the dtype of ``lse``.
        taken: ``[N]`` t, of the dtype of ``lse``.
        special: ``[N, K]`` int64 tokens to leave out, -1 for none.

    Returns:
        ``[N, C]`` sums of R and ``[N, C]`` sums of q, of the dtype of ``lse``.
    """
    left, drawn = _left(scores, lse, draft, row, draft_row, weight, taken, special)
    return chunked(left, 0).sum(dim=-1), chunked(drawn, 0).sum(dim=-1)


def left_pick_reference(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    row: Tensor,
    draft_row: Tensor,
    weight: Tensor,
    taken: Tensor,
    special: Tensor,
    chunk: Tensor,
    level: Tensor,
) -> Tensor:
    """Returns a chunk's token at which the running sum of R exceeds a level, or else the last token with R > 0.

    Args:
        scores: as for :func:`left_mass_reference`; so are the arguments up to ``special``.
        lse: as above.
        draft: as above.
        row: as above.
        draft_row: as above.
        weight: as above.
        taken: as above.
        special: as above.
        chunk: ``[N]`` int64 chunk to read.
        level: ``[N]`` float64 level of the running sum.

    Returns:
        ``[N]`` int64 tokens, -1 if R is 0 in the whole chunk.
    """
    left, _ = _left(scores, lse, draft, row, draft_row, weight, taken, special)
    part = chunked(left, 0)[torch.arange(len(row), device=row.device), chunk]
    reached = (part.double().cumsum(dim=-1) > level[:, None]) & (part > 0)
    place = torch.arange(part.shape[-1], device=scores.device)
    first = torch.where(reached, place, CHUNK).amin(dim=-1)
    last = torch.where(part > 0, place, -1).amax(dim=-1)
    place = torch.where(first == CHUNK, last, first)
    return torch.where(place < 0, place, place + chunk * CHUNK)


def _left(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    row: Tensor,
    draft_row: Tensor,
    weight: Tensor,
    taken: Tensor,
    special: Tensor,
) -> tuple[Tensor, Tensor]:
    p = (scores[row].to(lse.dtype) - lse[row][:, None]).exp() * weight[:, None]
    q = draft[draft_row.clamp(min=0)].to(p.dtype) if len(draft) else torch.zeros_like(p)
    q = q * (draft_row >= 0)[:, None]
    vocabulary = p.shape[1]
    ordinary = torch.ones(len(p), vocabulary + 1, dtype=torch.bool, device=p.device)  # -1 marks one past the last
    ordinary = ordinary.scatter_(1, torch.where(special < 0, vocabulary, special), False)[:, :vocabulary]
    return (p - taken[:, None] * q).clamp(min=0) * ordinary, q * ordinary


def rejection_ends_reference(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    inner: Tensor,
    draft_row: Tensor,
    children: Tensor,
    tokens: Tensor,
    tops: Tensor,
    roots: Tensor,
    uniforms: Tensor,
    order: Tensor,
    sample: Tensor,
    levels: Sequence[int],
    replacement: bool,
    lifted: bool,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Finds the ends of paths by recursive rejection; :mod:`arbordraft.kernels.verify.tree` derives it.

    Args:
        scores: as for :func:`left_mass_reference`; so are ``lse`` and ``draft``.
        lse: as above.
        draft: as above.
        inner: ``[N]`` int64 rows of the nodes with children, levels closer to the root first; -1 for unused places.
        draft_row: ``[N]`` int64, -1 for none: all children of such a node are certain.
        children: ``[N, K]`` int64 rows of the children in the order of their verification, -1 after the last.
        tokens: ``[N, K]`` int64 tokens of the children, -1 after the last.
        tops: ``[D, M]`` int64 certain tokens of the draft rows, padded with -1.
        roots: ``[B]`` int64 rows of the roots.
        uniforms: ``[T]`` uniforms that decide about rows.
        order: ``[T]`` int64 numbers that ascend in the post-order of a sample's rows, below 2^31.
        sample: ``[T]`` int64 sample of a row.
        levels: number of nodes at each depth, unused places included.
        replacement: whether draws may repeat a token.
        lifted: whether to verify paths lifted, from their end, instead of top-down.
        counters: int32 zeros with which programs on a GPU count each other, and which they leave as zeros. Others are
            made if these are ``None`` or too few.

    Returns:
        ``[B]`` int64 rows of the last accepted nodes. ``[N]`` float64 weights of the nodes and ``[N]`` float64 t after
        the last child. ``[N, C]`` float64 masses of the tokens that may be emitted there, by chunk. Unused places have
        results without meaning.
    """
    row, real = inner.clamp(min=0), children >= 0
    certain = torch.zeros_like(real)
    if tops.numel():
        certain = (tokens[:, :, None] == tops[draft_row.clamp(min=0)][:, None, :]).any(dim=2)

    def laws(nodes: slice, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_nodes = weight, tokens[nodes], real[nodes], certain[nodes]
        return rejection_laws_reference(scores, lse, draft, row[nodes], draft_row[nodes], *of_nodes, replacement)

    if not lifted:
        weight = torch.ones(len(inner), dtype=torch.float64, device=scores.device)
        taken, accept, _, mass = laws(slice(None), weight)
        end = last_top_down_reference(accept, children, inner, roots, uniforms, len(levels))
        return end, weight, taken, mass
    # A leaf ends the path with its weight, an inner node with the mass that its children left.
    chance = torch.ones(len(order), dtype=torch.float64, device=scores.device)
    reached = torch.zeros_like(chance, dtype=torch.bool).index_fill_(0, roots, True)
    found, begin = [], 0
    for size in levels:
        nodes = slice(begin, begin + size)
        begin += size
        weight = chance[row[nodes]]
        taken, accept, stop, mass = laws(nodes, weight)
        lift_level_reference(chance, reached, weight, accept, stop, inner[nodes], children[nodes])
        found.append((weight, taken, mass))
    weight, taken, mass = map(torch.cat, zip(*found, strict=True))
    return lifted_ends_reference(chance, reached, uniforms, order, sample, roots), weight, taken, mass


def rejection_laws_reference(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    row: Tensor,
    draft_row: Tensor,
    weight: Tensor,
    tokens: Tensor,
    real: Tensor,
    certain: Tensor,
    replacement: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes chances of children that are tried in turn; :mod:`arbordraft.kernels.verify.tree` derives them.

    Args:
        scores: as for :func:`left_mass_reference`; so are the arguments up to ``draft_row``.
        lse: as above.
        draft: as above.
        row: as above.
        draft_row: as above; children of a node without a draft row are all certain.
        weight: ``[N]`` float64 w.
        tokens: ``[N, K]`` int64 tokens of the children, in their order, -1 after the last.
        real: ``[N, K]`` bool: whether there is a child.
        certain: ``[N, K]`` bool: whether the child was not drawn at random.
        replacement: whether draws may repeat a token.

    Returns:
        Four float64 tensors: ``[N]`` t after the last child, ``[N, K]`` chances to go on with a child, ``[N]`` chances
        to end at the node. ``[N, C]`` masses of the tokens that may be emitted there, by chunk.
    """
    certain = (certain | (draft_row < 0)[:, None]) & real
    place = tokens.clamp(min=0)
    p = (scores[row[:, None], place].double() - lse[row][:, None].double()).exp() * weight[:, None]
    q = draft[draft_row.clamp(min=0)[:, None], place].double() if len(draft) else torch.zeros_like(p)

    def sums(taken: Tensor, special: Tensor) -> tuple[Tensor, Tensor]:
        nodes = row, draft_row, weight.to(lse.dtype), taken.to(lse.dtype), special
        return left_mass_reference(scores, lse, draft, *nodes)

    taken, null = torch.zeros_like(weight), 1 - weight
    mass, left = torch.ones_like(weight), torch.ones_like(weight)
    frozen = torch.where(_first_of(tokens, certain), p, 0.0)  # R of special tokens
    special = torch.where(certain, tokens, -1)
    accept = torch.zeros_like(p)
    chunks, drawable = sums(taken, special)
    for child in range(tokens.shape[1]):
        sure, here = certain[:, child], real[:, child]
        proposed = torch.where(sure, 1.0, q[:, child] / positive(drawable.double().sum(dim=-1)))
        held = torch.where(sure, frozen[:, child], (p[:, child] - taken * q[:, child]).clamp(min=0))
        ratio = torch.where(here & (mass > 0), (held / positive(mass * proposed)).clamp(max=1), 0.0)
        accept[:, child] = left * ratio
        left = left * (1 - ratio)
        # After a rejection a certain token has no mass left, and the proposal of a drawn one is subtracted from all.
        drawn = here & ~sure
        taken = torch.where(drawn, taken + mass / positive(drawable.double().sum(dim=-1)), taken)
        kept = torch.where(drawn, (p[:, child] - taken * q[:, child]).clamp(min=0), 0.0)
        if not replacement:
            frozen[:, child] = kept
            special[:, child] = torch.where(drawn, tokens[:, child], special[:, child])
        else:
            frozen[:, child] = torch.where(sure, 0.0, frozen[:, child])
        chunks, drawable = sums(taken, special)
        mass = torch.where(left > 0, chunks.double().sum(dim=-1) + frozen.sum(dim=-1) + null, 0.0)
    if replacement:  # the path goes on with a drafted token instead of emitting it
        held = (p - taken[:, None] * q).clamp(min=0)
        frozen = torch.where(_first_of(tokens, real & ~certain), held, frozen)
        special = torch.where(real, tokens, -1)
        chunks, _ = sums(taken, special)
    scale = left / positive(mass)
    return taken, accept + scale[:, None] * frozen, scale * chunks.double().sum(dim=-1), chunks.double()


def _first_of(tokens: Tensor, among: Tensor) -> Tensor:
    """Returns ``[N, K]``: which of the children ``among`` are the first with their token."""
    same = (tokens[:, :, None] == tokens[:, None, :]) & among[:, None, :]
    return among & (same.int().argmax(dim=2) == torch.arange(tokens.shape[1], device=tokens.device))


def positive(x: Tensor) -> Tensor:
    """Raises numbers to the smallest positive normal one, so that they can be divisors."""
    return x.clamp(min=torch.finfo(x.dtype).tiny)


def before(accept: Tensor) -> Tensor:
    """Returns the ``[N, K]`` chance that a child's turn comes, given the chances to go on with each."""
    return 1 - (accept.cumsum(dim=1) - accept)


def share(part: Tensor, whole: Tensor) -> Tensor:
    """Returns ``part / whole`` as a probability; a positive part is certain if rounding leaves no more than it."""
    return torch.where(whole <= part, (part > 0).to(part.dtype), part / positive(whole))


def last_top_down_reference(
    chances: Tensor, children: Tensor, inner: Tensor, roots: Tensor, uniforms: Tensor, depth: int
) -> Tensor:
    """Returns the rows at which paths end if nodes are decided from the roots downwards.

    Args:
        chances: ``[N, K]`` float64 chances to go on with a child.
        children: ``[N, K]`` int64 rows of the children, -1 after the last.
        inner: ``[N]`` int64 rows of the nodes, -1 for none.
        roots: ``[B]`` int64 rows of the roots.
        uniforms: ``[T]`` uniforms that decide about rows.
        depth: length of the longest path.

    Returns:
        ``[B]`` int64 rows.
    """
    rows, below = len(uniforms), children.flatten()
    chance = _by_row(below, rows, share(chances, before(chances)).flatten(), 0.0)
    parent = _by_row(below, rows, inner[:, None].expand_as(children).flatten(), -1)
    return walk(uniforms < chance, parent, roots, depth)


def lift_level_reference(
    chance: Tensor, reached: Tensor, weight: Tensor, accept: Tensor, stop: Tensor, inner: Tensor, children: Tensor
) -> None:
    """Hands the chances of nodes of one depth on to their children, given the laws of these nodes, in place.

    Args:
        chance: ``[T]`` float64 weight of each row; afterwards, for these nodes, the chance that the path ends there if
            it ends at none of their descendants.
        reached: ``[T]`` bool: whether a row's turn may come.
        weight: ``[N]`` float64 weights of the nodes.
        accept: ``[N, K]`` float64 chances to go on with a child.
        stop: ``[N]`` float64 chances to end at the node.
        inner: ``[N]`` int64 rows of the nodes, -1 for none.
        children: ``[N, K]`` int64 rows of the children, -1 after the last.
    """
    rows = len(chance)
    here, below = torch.where(inner < 0, rows, inner), torch.where(children < 0, rows, children).flatten()
    # Entries without a row go to an extra row after the last: to leave them out, the host would have to count.
    wide, known = F.pad(chance, (0, 1)), F.pad(reached, (0, 1))
    wide.scatter_(0, below, share(accept, before(accept)).flatten())
    visited = known[here][:, None] & (accept > 0)  # a node is visited if its parent is and its turn may come
    known.scatter_(0, torch.where(visited.flatten(), below, rows), True)
    rest = 1 - accept.sum(dim=1)
    wide.scatter_(0, here, torch.where(weight >= 1, 1.0, share(stop, rest)))
    chance.copy_(wide[:-1])
    reached.copy_(known[:-1])


def lifted_ends_reference(
    chance: Tensor, reached: Tensor, uniforms: Tensor, order: Tensor, sample: Tensor, roots: Tensor
) -> Tensor:
    """Returns the first rows in post-order, of those reached, whose uniforms are below their chances; else the roots.

    Args:
        chance: ``[T]`` float64.
        reached: ``[T]`` bool.
        uniforms: ``[T]`` uniforms that decide about rows.
        order: ``[T]`` int64 numbers that ascend in the post-order of a sample's rows, below 2^31.
        sample: ``[T]`` int64 sample of a row.
        roots: ``[B]`` int64 rows of the roots.

    Returns:
        ``[B]`` int64 rows.
    """
    rows = len(order)
    hit = reached & (uniforms < chance)
    place = torch.where(hit, order * rows + torch.arange(rows, device=hit.device), NEVER)
    first = torch.full_like(roots, NEVER).scatter_reduce(0, sample, place, "amin")
    return torch.where(first == NEVER, roots, first % rows)


def walk(taken: Tensor, parent: Tensor, roots: Tensor, depth: int) -> Tensor:
    """Returns where paths from the roots end; a path goes on with the first child that is taken.

    Args:
        taken: ``[T]`` bool, by row.
        parent: ``[T]`` int64 row of the parent, -1 for none.
        roots: ``[B]`` int64 rows of the roots.
        depth: length of the longest path.

    Returns:
        ``[B]`` int64 rows.
    """
    row, rows = torch.arange(len(parent), device=parent.device), len(parent)
    child = torch.where(taken & (parent >= 0), row, rows)
    first = torch.full_like(row, rows).scatter_reduce(0, parent.clamp(min=0), child, "amin")
    following = torch.where(first < rows, first, row)
    end = roots
    for _ in range(depth):
        end = following[end]
    return end


def draw_behind_reference(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    inner: Tensor,
    draft_row: Tensor,
    tokens: Tensor,
    weight: Tensor,
    taken: Tensor,
    mass: Tensor,
    end: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Draws the token after each end: at a leaf from the target's row, elsewhere from the residual of the children.

    Args:
        scores: as for :func:`left_mass_reference`.
        lse: as above.
        draft: as above.
        inner: ``[N]`` int64 rows of the nodes with children, -1 for none.
        draft_row: ``[N]`` int64, -1 for none.
        tokens: ``[N, K]`` int64 tokens of the children.
        weight: ``[N]`` float64 w.
        taken: ``[N]`` float64 t after the last child.
        mass: ``[N, C]`` float64 masses of the tokens that may be emitted there, by chunk.
        end: ``[B]`` int64 rows of the ends.
        uniforms: ``[T]`` uniforms that draw the tokens after rows.

    Returns:
        ``[B]`` int64 tokens.
    """
    # All leaves share one more node after the others: the target's whole row, without drafts.
    count = len(inner)
    node = _by_row(inner, len(scores), torch.arange(count, device=end.device), count)[end]
    # The mass is 0 only by rounding: stopping had probability 0.
    node = torch.where(F.pad(mass.sum(dim=-1), (0, 1))[node] > 0, node, count)
    own_row = F.pad(draft_row, (0, 1), value=-1)[node]
    own_weight = F.pad(weight, (0, 1), value=1.0)[node].to(lse.dtype)
    own_taken = F.pad(taken, (0, 1))[node].to(lse.dtype)
    special = F.pad(tokens, (0, 0, 0, 1), value=-1)[node]
    arguments = (scores, lse, draft, end, own_row, own_weight, own_taken, special)
    parts = left_mass_reference(*arguments)[0].double()
    sums = parts.cumsum(dim=-1)
    level = uniforms[end] * sums[:, -1]
    chunk = (sums <= level[:, None]).sum(dim=-1)
    last = torch.where(parts > 0, torch.arange(parts.shape[1], device=parts.device), -1).amax(dim=-1)
    chunk = torch.minimum(chunk, last)
    passed = torch.where(chunk > 0, sums.gather(1, (chunk - 1).clamp(min=0)[:, None])[:, 0], 0.0)
    return left_pick_reference(*arguments, chunk, level - passed)


def _by_row(row: Tensor, rows: int, values: Tensor, fill: float) -> Tensor:
    """Scatters values to ``[T]`` rows, except those whose row is -1; other rows get ``fill``."""
    filled = values.new_full((rows + 1,), fill)
    return filled.scatter_(0, torch.where(row < 0, rows, row), values)[:rows]


def take_tops_reference(draft: Tensor, most: Tensor, threshold: Tensor, rounds: int) -> Tensor:
    """Takes the most probable tokens from every row; their probabilities become 0, in place.

    Args:
        draft: ``[D, V]`` draft probabilities.
        most: ``[D]`` int64 maximum number of tops of a row.
        threshold: ``[D]`` minimum probability of a top.
        rounds: M, the maximum of ``most``.

    Returns:
        ``[D, M]`` int64 tokens, -1 after the last one. Among equally probable tokens the first is taken first.
    """
    tops = most.new_full((len(draft), rounds), -1)
    if rounds == 0:
        return tops
    count = torch.minimum((draft >= threshold.to(draft.dtype)[:, None]).sum(dim=1), most)
    for index in range(rounds):
        token = draft.argmax(dim=1, keepdim=True)
        chance = draft.gather(1, token)
        top = (index < count)[:, None] & (chance > 0)
        tops[:, index : index + 1] = torch.where(top, token, -1)
        draft.scatter_(1, token, torch.where(top, 0.0, chance))
    return tops
