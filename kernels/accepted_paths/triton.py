"""Accepted paths in Triton: one program per sample, one launch each.

Shapes: T rows, B samples, P longest path.
"""

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 1024  # rows that a program compares at a time
_NOWHERE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit(do_not_specialize=["depth"])
def follow_matches(TOKENS, BEST, PARENT, ROOTS, END, TOKEN, rows, depth, BLOCK: tl.constexpr):
    """Finds the last accepted node of a sample and the token after it."""
    sample = tl.program_id(0)
    end = tl.load(ROOTS + sample)
    for _ in range(depth):
        best = tl.load(BEST + end)
        first = tl.full([], _NOWHERE, tl.int32)
        for start in range(0, rows, BLOCK):
            row = start + tl.arange(0, BLOCK)
            parent = tl.load(PARENT + row, mask=row < rows, other=-1)
            token = tl.load(TOKENS + row, mask=row < rows, other=-1)
            first = tl.minimum(first, tl.min(tl.where((parent == end) & (token == best), row, _NOWHERE), 0))
        end = tl.where(first < _NOWHERE, first.to(tl.int64), end)
    tl.store(END + sample, end)
    tl.store(TOKEN + sample, tl.load(BEST + end))


@triton.jit(do_not_specialize=["depth"])
def trace_path(
    END, PARENT, LEVEL_OF, SLOTS, HOME, SAMPLE, ROOTS, PATH, SOURCE, DESTINATION, depth, WIDE: tl.constexpr
):  # fmt: skip
    """Writes the path of a sample, and the moves of its rows."""
    sample = tl.program_id(0)
    place = tl.arange(0, WIDE)
    path = tl.full([WIDE], -1, tl.int64)
    row = tl.load(END + sample)
    for _ in range(depth + 1):
        path = tl.where(place == tl.load(LEVEL_OF + row), row, path)
        above = tl.load(PARENT + row)
        row = tl.where(above < 0, row, above)
    tl.store(PATH + sample * (depth + 1) + place, path, mask=place <= depth)
    home = tl.load(HOME + sample)
    taking = (tl.load(SAMPLE + tl.load(ROOTS + sample)) + 0 * place) == sample
    kept = (path >= 0) & taking
    slot = tl.load(SLOTS + path, mask=kept, other=0)
    moved = (place > 0) & (place <= depth)
    at = sample * depth + place - 1
    tl.store(SOURCE + at, tl.where(kept, slot, home), mask=moved)
    tl.store(DESTINATION + at, tl.where(kept, home + place, home), mask=moved)


def launch_ends(tokens: Tensor, best: Tensor, parent: Tensor, roots: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.accepted_paths.matching_ends`."""
    end, token = roots.new_empty(roots.shape), roots.new_empty(roots.shape)
    if len(roots):
        block = min(_ROWS, triton.next_power_of_2(len(tokens)))
        given = tokens.contiguous(), best.contiguous(), parent.contiguous(), roots.contiguous()
        follow_matches[(len(roots),)](*given, end, token, len(tokens), depth, BLOCK=block, num_warps=1)
    return end, token


def launch_paths(
    end: Tensor, parent: Tensor, level: Tensor, slots: Tensor, home: Tensor, sample: Tensor, roots: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`arbordraft.kernels.accepted_paths.accepted_paths`."""
    path = end.new_empty((len(end), depth + 1))
    source, destination = (end.new_empty(len(end) * depth) for _ in range(2))
    if len(end):
        given = (part.contiguous() for part in (end, parent, level, slots, home, sample, roots))
        wide = triton.next_power_of_2(depth + 1)
        trace_path[(len(end),)](*given, path, source, destination, depth, WIDE=wide, num_warps=1)
    return path, source, destination


__all__ = ["follow_matches", "launch_ends", "launch_paths", "trace_path"]
