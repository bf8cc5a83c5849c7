"""Every Triton kernel compiles for GPUs that this machine lacks: nothing spills, everything fits.

``python tests/kernels/ahead_of_time.py`` rewrites the golden table.
"""

import json
import re
import struct

import pytest

triton = pytest.importorskip("triton", reason="Triton is made for Linux only")
from ahead_of_time import GOLDEN, SHARED, TARGETS, cases, compiled, resources, table  # noqa: E402

from arbordraft.kernels.gumbel.reference import LN2, ROOT_HALF, TERMS  # noqa: E402

REGISTERS = 65536  # per multiprocessor
FEW = 16  # bytes or registers that other versions of the compiler may spill


# All kernels of a target take half a minute, so every run compiles only for the newest widespread GPU.
SOAKED = ("sm_80", "sm_100", "gfx942")


@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=pytest.mark.soak if name in SOAKED else ()) for name in TARGETS]
)
def test_kernels_fit(target):
    found = table(target)
    golden = json.loads(GOLDEN.read_text())
    spilled = FEW
    if golden["triton"] == triton.__version__:
        assert found == golden[target]
        spilled = 0
    for name, needs in found.items():
        assert needs["spilled"] <= spilled, name
        assert needs["shared"] <= SHARED[target], name
        # Kernels of the first line read few numbers. `collect` stores single scores, so it reads single scores.
        # The last three kernels compute more than they read.
        narrow = {"add_chunks", "best_of_row", "left_pick", "lowest_kept"}
        narrow |= {"grow_trees", "follow_matches", "trace_path"}
        narrow |= {"collect", "gumbel_noise", "gumbel_bound", "gumbel_draw"}
        assert needs["wide loads"] or name in narrow, name
        if name.startswith(("linear", "gated_tile", "rotated_tile", "attend_row")):
            # Every tile must use the same matrix instruction: another one would sum in another order.
            assert needs["matrix"] == ["mma.sync"], name
        if name.startswith("grouped_tile"):
            assert needs["matrix"], name
    warps = {name: how["warps"] for name, _, how in cases(target)}
    for name, needs in found.items():
        if not name.startswith("attend"):
            continue
        assert needs["matrix"], name
        whole_tiles = warps[name] == 8 and "fp32" not in name and not name.startswith("attend_row")
        if target == "sm_90" and whole_tiles:
            assert needs["matrix"] == ["wgmma.mma"], name
        if target == "sm_100" and whole_tiles:
            assert needs["matrix"] == ["tcgen05.mma"], name
        if target != "gfx942":
            # Two programs of few rows share a multiprocessor: one computes while the other waits for keys.
            programs = 2 if warps[name] == 4 else 1
            assert programs * needs["registers"] * warps[name] * 32 <= REGISTERS, name
            assert programs * needs["shared"] <= SHARED[target], name


def test_a_spill_would_be_seen():
    """Negative control: the registers hold half of these rows of wide heads."""
    _, (kernel, target, dtype, constants), how = next(
        case for case in cases("sm_80") if "bf16 heads of 256, 32 rows" in case[0]
    )
    wide = constants | {"BLOCK_M": 256, "BLOCK_Q": 64}
    assert resources(compiled(kernel, target, dtype, wide, **how | {"warps": 4}), target)["spilled"] > FEW


@pytest.mark.parametrize("target", TARGETS)
def test_threads_that_move_rows_do_not_exchange_them(target):
    """Rows may overwrite each other without a barrier only if threads exchange none; attention does exchange scores."""
    exchanges = {}
    for name, what, how in cases(target):
        if name == "compact_rows" or (name.startswith("attend bf16 heads of 64, 16 rows")):
            exchanges[name.split()[0]] = compiled(*what, **how).asm["ttgir"].count("convert_layout")
    assert exchanges["compact_rows"] == 0
    assert exchanges["attend"] > 0  # negative control


def contracted(assembly):
    """Counts contracted float64 products and sums, except those of divisions on gfx942, which have five each."""
    divisions = len(re.findall("v_div_fmas_f64", assembly))
    return len(re.findall(r"fma\.rn\.f64|v_fmac?_f64", assembly)) - 5 * divisions


@pytest.mark.one_in(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", ["gumbel_noise", "gumbel_draw"])
def test_the_noise_is_rounded_as_it_is_defined(kernel, target):
    """No product is contracted with a sum, quotients are rounded correctly, and constants keep all digits."""
    what, how = next((what, how) for name, what, how in cases(target) if name == kernel)
    kind = "amdgcn" if target == "gfx942" else "ptx"
    exact, fused = (compiled(*what, **how | {"fusion": fusion}).asm for fusion in (False, True))
    assert contracted(exact[kind]) == 0
    assert contracted(fused[kind]) > 0  # negative control
    if kind == "ptx":
        # The assembler may contract operations without an explicit rounding mode.
        assert set(re.findall(r"(?:mul|add|sub|div)\.(\w+\.)?f64", exact[kind])) == {"rn."}
        assert set(re.findall(r"div\.(\w+)\.f32", exact[kind])) <= {"rn"}
        for constant in (LN2, *(1 / odd for odd in range(3, 2 * TERMS, 2))):
            assert f"0d{struct.pack('>d', constant).hex().upper()}" in exact[kind]
        mantissa = int(ROOT_HALF * 2**53) - 2**52  # the kernel compares mantissas as integers
        assert {str(mantissa), str(mantissa - 1)} & set(re.findall(r"setp\.\w+\.[su]64.* (\d+);", exact[kind]))
