"""The certain tokens of draft rows in Triton: a program takes those of one row, in one launch.

Shapes: D draft rows, V vocabulary, M tops.
"""

import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.triton import block_of

_NOWHERE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def tops_of_row(DRAFT, MOST, LEAST, SPECIAL, stride_d, vocabulary, M: tl.constexpr, BLOCK: tl.constexpr):
    """Takes the tops of one row, each in a pass that also removes the one before."""
    row = tl.program_id(0).to(tl.int64)
    most, threshold = tl.load(MOST + row), tl.load(LEAST + row).to(DRAFT.dtype.element_ty)
    count = tl.full([], 0, tl.int32)
    bad = tl.full([], 0, tl.int32)  # a row with NaN has no tops
    taken = tl.full([], -1, tl.int32)
    for index in tl.static_range(M):
        highest = tl.full([], 0.0, tl.float32).to(DRAFT.dtype.element_ty)
        token = tl.full([], _NOWHERE, tl.int32)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            q = tl.load(DRAFT + row * stride_d + at, mask=at < vocabulary, other=-1.0)
            if index == 0:
                count += tl.sum(((q >= threshold) & (at < vocabulary)).to(tl.int32), 0)
                bad += tl.sum((q != q).to(tl.int32), 0)
            else:
                tl.store(DRAFT + row * stride_d + at, q * 0.0, mask=at == taken)
                q = tl.where(at == taken, 0.0, q)
            above = tl.max(q, 0)
            first = tl.min(tl.where(q == above, at, _NOWHERE), 0)
            token = tl.where(above > highest, first, token)
            highest = tl.maximum(highest, above)
        wanted = (token < _NOWHERE) & (bad == 0) & (index < tl.minimum(count.to(tl.int64), most))
        taken = tl.where(wanted, token, -1)
        tl.store(SPECIAL + row * M + index, taken.to(tl.int64))
    place = taken + tl.arange(0, 1)
    tl.store(DRAFT + row * stride_d + place, (place * 0).to(DRAFT.dtype.element_ty), mask=place >= 0)


def launch_take_tops(draft: Tensor, most: Tensor, threshold: Tensor, rounds: int) -> Tensor:
    """See :func:`arbordraft.kernels.verify.reference.take_tops_reference`."""
    (rows, vocabulary), tops = draft.shape, most.new_empty((len(draft), rounds))
    if tops.numel():
        tops_of_row[(rows,)](
            draft, most.contiguous(), threshold.double().contiguous(), tops, draft.stride(0), vocabulary, M=rounds,
            BLOCK=block_of(vocabulary), num_warps=8,
        )  # fmt: skip
    return tops


__all__ = ["launch_take_tops", "tops_of_row"]
