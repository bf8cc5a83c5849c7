"""The equality report claims only guarantees that hold."""

import pytest
import torch
from support.models import ragged, tiny

from arbordraft import Coupling, RaggedModel, builders
from arbordraft.kernels import native
from arbordraft.target.equality import Equality, equality_report
from arbordraft.trees.verdict import Exactness
from arbordraft.verifiers import TypicalAcceptance

SIZES = {"head_dim": 16, "hidden_size": 64}
EXACT = Coupling.matching(2)
needs_kernels = pytest.mark.skipif(not native.load(), reason=f"no native kernels: {native.problem()}")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_kernels_are_bitwise(dtype):
    report = equality_report(RaggedModel(tiny(**SIZES).to(dtype), kernels="native"), EXACT.exactness)
    assert report.equality == Equality.bitwise
    assert report.equal == report.rows > 0


@pytest.mark.parametrize(("dtype", "level"), [(torch.float32, Equality.tokens), (torch.bfloat16, Equality.law)])
def test_plain_kernels_guarantee_less(dtype, level):
    report = builders.plain(RaggedModel(tiny(**SIZES).to(dtype), kernels="torch")).equality_report()
    assert report.equality == level
    assert "kernels" in report.reason


@needs_kernels
def test_unknown_modules_give_no_guarantee():
    """OPT's layer norms are those of torch, which does not guarantee that rows agree."""
    model = tiny("opt", hidden_size=64, word_embed_proj_dim=64)
    report = equality_report(RaggedModel(model, kernels="native"), EXACT.exactness)
    assert report.equality == Equality.tokens
    assert "not known" in report.reason


@needs_kernels
def test_a_broken_guarantee_is_reported():
    """Negative control: the output of the head depends on the number of rows."""
    target = RaggedModel(tiny(**SIZES), kernels="native")
    prepacking = target.prepacking
    head = next(prepacked_module for _, name, prepacked_module in prepacking.places if name == "lm_head")
    head.register_forward_hook(lambda module, args, out: out + 1e-3 * args[0].shape[-2])
    report = equality_report(target, EXACT.exactness)
    assert report.equality == Equality.law  # the error is far larger than rounding
    assert report.equal < report.rows
    assert "please report" in report.reason


def test_a_lossy_verifier_is_lossy_with_any_kernels():
    assert equality_report(ragged(), TypicalAcceptance().exactness).equality == Equality.lossy


def test_plain_rows_differ_in_their_bits():
    """Negative control: the bits of torch's own kernels depend on the number of rows."""
    found = equality_report(RaggedModel(tiny(**SIZES).to(torch.bfloat16), kernels="torch"), Exactness.EXACT)
    assert found.equal < found.rows
