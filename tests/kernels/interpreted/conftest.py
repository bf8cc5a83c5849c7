"""Tests of the Triton kernels in Triton's interpreter, which a process has from its start or not at all."""

import os
import sys

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("set TRITON_INTERPRET=1 to run these tests")

GUARD = 64


@pytest.fixture(autouse=True)
def compiled_alone():
    """All operators share one frame of torch's, which is compiled for eight of them and no more."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def guarded(monkeypatch):
    """Puts NaN before, behind and into every buffer that kernels write to, and in the end looks at the first two."""
    made, plain = [], torch.Tensor.new_empty

    def new_empty(self, *size, dtype=None, device=None):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        numel = torch.Size(shape).numel()
        dtype = dtype or self.dtype
        buffer = plain(self, numel + 2 * GUARD, dtype=dtype, device=device)
        buffer.fill_(float("nan") if dtype.is_floating_point else -77)
        made.append((buffer, numel))
        return buffer[GUARD : GUARD + numel].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield made
    assert made
    for buffer, numel in made:
        for band in (buffer[:GUARD], buffer[GUARD + numel :]):
            assert band.isnan().all() if buffer.is_floating_point() else (band == -77).all()
