"""Types that a device is fast at, and the line about a slower choice."""

import logging

import pytest
import torch

from arbordraft.kernels import native, precision
from arbordraft.kernels.precision import fast_dtype, warn_if_slow


@pytest.fixture(params=[False, True], ids=["slow", "fast"])
def fast(request, monkeypatch):
    """Pretends that processor and GPU lack, or have, instructions for bfloat16."""

    def supported(including_emulation=True):
        return including_emulation or request.param

    monkeypatch.setattr(native, "fast_bfloat16", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    precision._warn.cache_clear()
    return request.param


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1", torch.device("cpu")], ids=str)
def test_bfloat16_is_the_default_where_it_has_instructions(fast, device):
    """A GPU that emulates bfloat16 does not count."""
    assert fast_dtype(device) == (torch.bfloat16 if fast else torch.float32)


@pytest.mark.parametrize(("device", "place"), [("cpu", "processor"), ("cuda", "GPU")])
def test_a_slow_choice_is_said_once(fast, device, place, caplog):
    with caplog.at_level(logging.WARNING, "arbordraft"):
        for _ in range(2):
            warn_if_slow(torch.bfloat16, device, "dtype")
            warn_if_slow(torch.float32, device, "dtype")
    line = f"bfloat16 is slow here, because this {place} has no instructions for it; float32, the default, is faster"
    assert caplog.messages == ([] if fast else [f"dtype: {line}"])


@pytest.mark.parametrize(("features", "said"), [({"avx2"}, True), ({"avx512_fp16"}, False), ({"asimdhp"}, False)])
def test_float16_has_instructions_of_its_own(fast, features, said, monkeypatch, caplog):
    monkeypatch.setattr(precision, "cpu_features", lambda: features)
    with caplog.at_level(logging.WARNING, "arbordraft"):
        warn_if_slow(torch.float16, "cpu", "dtype")
        warn_if_slow(torch.float16, "cuda", "dtype")
    assert ["float16 is slow here" in message for message in caplog.messages] == [True] * said
