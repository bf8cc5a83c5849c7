"""Every Triton kernel is compiled for GPUs that are not here: nothing spills, everything fits.

``python tests/kernels/ahead_of_time.py`` writes the golden table anew.
"""

import json

import pytest

triton = pytest.importorskip("triton", reason="Triton is made for Linux only")
from ahead_of_time import GOLDEN, SHARED, TARGETS, cases, compiled, resources, table  # noqa: E402

REGISTERS = 65536  # of a processor


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit(target):
    found = table(target)
    golden = json.loads(GOLDEN.read_text())
    if golden["triton"] == triton.__version__:
        assert found == golden[target]
    for name, needs in found.items():
        assert needs["spilled"] == 0, name
        assert needs["shared"] <= SHARED[target], name
        # The first three read a few numbers each, and the last one compares for much longer than it reads.
        assert needs["wide loads"] or name in ("combine", "left_pick", "merge_chunks", "lowest_kept"), name
    warps = {name: how["warps"] for name, _, how in cases(target)}
    for name, needs in found.items():
        if not name.startswith("attend"):
            continue
        assert needs["matrix"], name
        if target == "sm_90" and warps[name] == 8 and "fp32" not in name:
            assert needs["matrix"] == ["wgmma.mma"], name
        if target == "sm_100" and warps[name] == 8 and "fp32" not in name:
            assert needs["matrix"] == ["tcgen05.mma"], name
        if target != "gfx942":
            # Two programs of few rows share a processor: while one waits for keys the other one computes.
            programs = 2 if warps[name] == 4 else 1
            assert programs * needs["registers"] * warps[name] * 32 <= REGISTERS, name
            assert programs * needs["shared"] <= SHARED[target], name


def test_a_spill_would_be_seen():
    """Negative control: twice as many rows of wide heads as there are registers for."""
    _, (kernel, target, dtype, constants), how = next(
        case for case in cases("sm_80") if "bf16 heads of 256, 32 rows" in case[0]
    )
    wide = constants | {"BLOCK_M": 256, "BLOCK_Q": 64}
    assert resources(compiled(kernel, target, dtype, wide, **how | {"warps": 4}), target)["spilled"] > 0


@pytest.mark.parametrize("target", TARGETS)
def test_threads_that_move_rows_do_not_exchange_them(target):
    """What makes moving rows onto each other safe without a barrier; in attention threads do exchange scores."""
    exchanges = {}
    for name, what, how in cases(target):
        if name == "compact_rows" or (name.startswith("attend bf16 heads of 64, 16 rows")):
            exchanges[name.split()[0]] = compiled(*what, **how).asm["ttgir"].count("convert_layout")
    assert exchanges["compact_rows"] == 0
    assert exchanges["attend"] > 0  # negative control
