"""Compiles Triton kernels for GPUs that this machine lacks, and reads their resource use off the binaries."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from arbordraft.kernels.accepted_paths import triton as accepted_paths
from arbordraft.kernels.fused_layers import ACTIVATIONS
from arbordraft.kernels.fused_layers import triton as fused_layers
from arbordraft.kernels.fused_linear import triton as fused_linear
from arbordraft.kernels.grouped_linear import triton as grouped_linear
from arbordraft.kernels.grow_level import triton as grow_level
from arbordraft.kernels.gumbel import triton as gumbel
from arbordraft.kernels.kv_cache import triton as kv_cache
from arbordraft.kernels.ragged_tree_attention import row, softmax
from arbordraft.kernels.ragged_tree_attention import triton as attention
from arbordraft.kernels.ragged_tree_attention.tiling import choose, row_tile
from arbordraft.kernels.recurrent_tree import triton as recurrent_tree
from arbordraft.kernels.tree_expand import triton as tree_expand
from arbordraft.kernels.verify import ends, rejection, tops, truncation
from arbordraft.kernels.verify import triton as verify

GOLDEN = Path(__file__).parent / "golden" / "triton.json"
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}  # bytes per program
POINTERS = {
    **dict.fromkeys(("LEVEL", "NOISE", "CHANCE", "REACH", "BROKEN", "CALIBRATION", "EXPECTED", "COSTS"), "*fp64"),
    "PART": "*fp32",
    "STATS": "*fp32",
    **dict.fromkeys(("ARRIVALS", "COUNTERS"), "*i32"),
    "PART_LSE": "*fp32",
    "SINKS": "*fp32",
    **dict.fromkeys(("LAYOUT", "REGION", "POSITIONS", "WORDS"), "*i64"),
    **dict.fromkeys(
        ("HIGHEST", "MASS", "MAXIMA", "LSE", "WEIGHT", "TAKEN", "LEFT", "DRAWN", "LOWEST", "LOG_PROBS"), "*fp32"
    ),
    **dict.fromkeys(
        ("FROZEN", "ACCEPT", "SHARE", "SPENT", "UNDECIDED", "REMAINS", "SUMS", "UNIFORMS", "TEMPERATURE", "LEAST"),
        "*fp64",
    ),
    **dict.fromkeys(("NUMBER", "INTERVAL", "FOUND", "CHANGED"), "*i32"),
    **dict.fromkeys(("OFFERED", "DIVIDED"), "*fp32"),
    **dict.fromkeys(("TOPS", "MOST", "UNSOUND"), "*i64"),
    **dict.fromkeys(("ABOVE", "HELD", "BOUNDS"), "*fp32"),
    **dict.fromkeys(("PLACE", "ROW", "DRAFT_ROW", "SPECIAL", "WHERE", "TOKEN", "TOKENS"), "*i64"),
    **dict.fromkeys(
        ("END", "ROOTS", "CHILDREN", "INNER", "OWN_ROW", "BEST", "HOME", "SAMPLE", "PATH", "ORDER"), "*i64"
    ),
    **dict.fromkeys(("STATES", "SCRATCH", "RATES", "BIASES", "SCALES"), "*fp32"),
    **dict.fromkeys(
        ("READ", "WRITE", "HISTORY", "LEVELS", "BUDGET", "PARENT", "RANK", "FED", "NEXT", "LEVEL_OF"), "*i64"
    ),
    "VOCABULARY": "*i64",
    "UNITS": "*fp32",
    "FIELDS": "*i32",
    "CODES": "*i16",
    **dict.fromkeys(("SLOTS", "POOLS", "SIZES", "SOURCE", "DESTINATION", "FIRST", "SEEDS"), "*i64"),
}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BYTES = {name: dtype.itemsize for name, dtype in TYPES.items()}


def compiled(kernel, target, dtype, constants, *, warps, stages=2, fusion=True):
    """Compiles a kernel for a target, with the alignments of real calls.

    Args:
        kernel: jitted function.
        target: key of ``TARGETS``.
        dtype: element type of the pointers that ``POINTERS`` does not list.
        constants: compile-time constants. All other arguments with names in lower case are numbers.
        warps: warps per program.
        stages: pipeline stages of its loops.
        fusion: whether products and sums may be contracted.
    """
    signature = {
        name: "constexpr"
        if name in constants
        else POINTERS.get(name, f"*{dtype}")
        if name.isupper()
        else "fp32"
        if name in ("scale", "softcap", "mass", "temperature", "epsilon", "first", "spacing", "least", "most")
        else "i32"
        for name in kernel.arg_names
    }
    aligned = [
        (index,)
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.startswith("stride") or name in ("vocabulary", "size")
    ]
    source = ASTSource(kernel, signature, constants, {index: [["tt.divisibility", 16]] for index in aligned})
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fusion}
    return triton.compile(source, target=TARGETS[target], options=options)


def resources(binary, target):
    """Returns registers per thread, spills, shared memory, matrix instructions, and whether loads are 16 bytes wide."""
    if target == "gfx942":
        text = binary.asm["amdgcn"]
        registers, spilled = (
            int(re.search(rf"\.{name}:\s*(\d+)", text)[1]) for name in ("vgpr_count", "vgpr_spill_count")
        )
        wide, instructions = bool(re.search(r"(global|buffer)_load_dwordx4", text)), re.findall(r"v_mfma", text)
    else:
        text = binary.asm["ptx"]
        usage = _cuobjdump(binary.asm["cubin"])
        registers, spilled = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
        wide = bool(re.search(r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.\S* \[[^\]]*\], \[[^\]]*\], 0x10", text))
        instructions = re.findall(r"wgmma\.mma|tcgen05\.mma|mma\.sync", text)
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": binary.metadata.shared,
        "matrix": sorted(set(instructions)),
        "wide loads": wide,
    }


def _cuobjdump(cubin):
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout


def attention_case(target, rows, size, dtype, group=4, causal=False, options=False):
    hip, exact, key_bytes = target == "gfx942", dtype == "fp32", 2 * size * BYTES[dtype]
    how = choose(rows, group, 8, 4096, 132, key_bytes, exact=exact, options=options, hip=hip)
    constants = {
        **{"G": group, "D": size, "DV": size, "BLOCK_D": size, "BLOCK_DV": size, "W": 1, "SEARCH": 5},
        **{"BLOCK_Q": how.block_q, "BLOCK_M": how.block_m, "BLOCK_N": how.block_n, "SPLITS": how.splits},
        **{"CAUSAL": causal, "WINDOW": options, "SOFTCAP": options, "SINK": options, "FENCED": hip, "UPCAST": False},
        "PRECISION": softmax.precision(torch.float32 if exact else torch.bfloat16, hip),
    }
    name = f"attend {dtype} heads of {size}, {how.block_m} rows x {how.block_n} keys, {how.splits} splits"
    name += ", causal" * causal + ", all options" * options
    return name, (attention.attend, target, dtype, constants), {"warps": how.warps, "stages": how.stages}


def options(launched):
    """Converts the options of a launch to keywords of :func:`compiled`."""
    return {"warps": launched["num_warps"], "fusion": launched["enable_fp_fusion"]}


def fused_cases(target):
    """Yields element-wise parts of layers: norms of few and many channels, rotations of whole or partial heads."""
    exact = fused_layers.EXACT
    for size, add, offset, wide in ((576, True, 0.0, False), (8192, True, 0.0, False), (2304, False, 1.0, True)):
        how = fused_layers.norm_options(size)
        constants = {"ADD": add, "OFFSET": offset, "WIDE": wide, "SIZE": size, "BLOCK": how["BLOCK"]}
        name = f"norm_row of {size}" + ", behind a sum" * add + ", wide" * wide
        yield name, (fused_layers.norm_row, target, "bf16", constants), options(how | exact)
    for activation in ACTIVATIONS:
        constants = {"ACTIVATION": activation, "BLOCK": fused_layers.GATED_BLOCK}
        what = fused_layers.gated_block, target, "bf16", constants
        yield f"gated_block {activation}", what, options(fused_layers.GATED_OPTIONS)
    for size, turning, dtype in ((64, 64, "bf16"), (128, 128, "bf16"), (80, 32, "bf16"), (64, 64, "fp32")):
        how = fused_layers.rotation_options(size, size, turning)
        constants = {"HQ": 9, "HKV": 3, **{k: v for k, v in how.items() if k.isupper()}}
        name = f"rotate_append_row {dtype} {turning} of {size}"
        yield name, (fused_layers.rotate_append_row, target, dtype, constants), options(how | exact)


def grouped_cases(target):
    """Yields products with weights of 4 bits, for one row, a tree, several samples, and gated."""
    for rows, dtype, activation, kind in (
        (1, "bf16", None, "INT4"),
        (16, "bf16", None, "INT4"),
        (64, "bf16", None, "INT4"),
        (1, "fp16", "silu", "INT4"),
        (1, "fp32", None, "INT4"),
        (1, "bf16", None, "MXFP4"),
    ):
        how = grouped_linear.tile(rows, TYPES[dtype], target == "gfx942")
        constants = {"KIND": kind, "ACTIVATION": activation, "BIAS": True, "UPCAST": False}
        constants |= {"PRECISION": softmax.precision(TYPES[dtype], target == "gfx942")}
        constants |= {key: value for key, value in how.items() if key.isupper()}
        name = f"grouped_tile {dtype} {kind}, {rows} rows" + f", {activation}" * bool(activation)
        yield name, (grouped_linear.grouped_tile, target, dtype, constants), {"warps": how["num_warps"]}


def recurrent_cases(target):
    """Yields scans and their ends, of Qwen3-Next, Kimi Linear, Falcon-H1, Granite 4 and Mamba; the rest of a layer."""
    for name, heads, key_heads, keys, values, per, delta in (
        ("gated delta", 32, 16, 128, 128, "head", True),
        ("gated delta", 32, 32, 128, 128, "key", True),
        ("selective", 32, 2, 256, 128, "step", False),
        ("selective", 48, 1, 128, 64, "step", False),
        ("selective", 1, 1, 16, 4096, "element", False),
    ):
        constants = {"H": heads, "G": key_heads, "K": keys, "V": values, "PER": per, "DELTA": delta, "NORMAL": delta}
        constants |= {"BIASED": per == "step", **recurrent_tree.scan_blocks(keys, values)}
        for kernel in (recurrent_tree.scan_block, recurrent_tree.advance_state):
            skips = {"SKIPS": per == "step"} if kernel is recurrent_tree.scan_block else {}
            what, how = (kernel, target, "bf16", constants | skips), options(recurrent_tree.SCAN_OPTIONS)
            yield f"{kernel.__name__} {name} of {keys} x {values}, decay per {per}", what, how
    constants = {"C": 8192, "W": 4, "WIDE": 8, "BLOCK": recurrent_tree.BLOCK}
    yield "advance_window", (recurrent_tree.advance_window, target, "bf16", constants), options(recurrent_tree.OPTIONS)
    constants = {"C": 8192, "W": 4, "BIASED": True, "ACTIVATE": True, "BLOCK": recurrent_tree.BLOCK}
    yield "convolve_row", (recurrent_tree.convolve_row, target, "bf16", constants), options(recurrent_tree.OPTIONS)
    constants = {"C": 4096, "ACTIVATION": 0, "BIASED": True, "SCALED": True, "BLOCK": recurrent_tree.BLOCK}
    yield "gate_block", (recurrent_tree.gate_block, target, "bf16", constants), options(recurrent_tree.OPTIONS)


def row_cases(target):
    """Yields products and attention with batch-invariant rows; only the instructions of NVIDIA GPUs allow them."""
    if target == "gfx942":
        return

    def case(name, kernel, dtype, constants, how):
        numbers = {"UPCAST": False, "PRECISION": softmax.precision(TYPES[dtype], False)}
        constants = constants | {key: value for key, value in how.items() if key.isupper()} | numbers
        return (
            name,
            (kernel, target, dtype, constants),
            {"warps": how["num_warps"], "stages": how["num_stages"], "fusion": False},
        )

    for rows, dtype in ((1, "bf16"), (32, "bf16"), (64, "bf16"), (64, "fp32")):
        how = fused_linear.tile(rows, TYPES[dtype])
        yield case(f"linear_tile {dtype}, {rows} rows", fused_linear.linear_tile, dtype, {"BIAS": True}, how)
    constants = {"ACTIVATION": "silu", "BIAS": False}
    yield case("gated_tile", fused_linear.gated_tile, "bf16", constants, fused_linear.tile(1, torch.bfloat16))
    for dim, normed, rows, dtype in ((64, False, 1, "bf16"), (128, True, 64, "bf16"), (256, True, 1, "fp32")):
        constants = {"HQ": 8, "HKV": 2, "D": dim, "BIAS": True, "NORM": normed, "OFFSET": 0.0, "WIDE": False}
        how = fused_linear.head_tile(rows, dim, TYPES[dtype], normed)
        name = f"rotated_tile {dtype}, {rows} rows, heads of {dim}" + ", normed" * normed
        yield case(name, fused_linear.rotated_tile, dtype, constants, how)
    for dim, causal, options, dtype, split in (
        (64, False, False, "bf16", True),
        (128, False, False, "bf16", False),
        (128, False, False, "bf16", True),
        (128, True, False, "bf16", False),
        (128, False, True, "bf16", True),
        (256, False, False, "fp32", False),
    ):
        constants = {"G": 4, "D": dim, "DV": dim, "W": 1, "SEARCH": 5, "CAUSAL": causal, "SINK": options}
        constants |= {"WINDOW": options, "SOFTCAP": options, "SPLIT": split}
        name = f"attend_row {dtype} heads of {dim}" + ", causal" * causal + ", all options" * options
        name += ", in segments" * split
        yield case(name, row.attend_row, dtype, constants, row_tile(4, dim, dim, TYPES[dtype]))


def cases(target):
    """Yields all launched kernels in the configurations that :func:`choose` gives."""
    for size in (64, 128):
        for rows in (4, 8, 16, 64):
            yield attention_case(target, rows, size, "bf16")
    for dtype, size, rows in (
        ("bf16", 256, 4),
        ("bf16", 256, 64),
        ("fp16", 128, 4),
        ("fp32", 128, 4),
        ("fp32", 64, 64),
        ("fp32", 256, 64),
    ):
        yield attention_case(target, rows, size, dtype)
    for rows in (4, 64):
        yield attention_case(target, rows, 128, "bf16", causal=True)
        yield attention_case(target, rows, 128, "bf16", options=True)
    sizes = {"KEY_SIZE": 1024, "VALUE_SIZE": 1024, "BLOCK": 1024}
    yield "append_rows", (kv_cache.append_rows, target, "bf16", sizes), {"warps": 2}
    rows = {"CHUNKS": 32, "BLOCK": verify.CHUNK}
    yield "row_stats", (verify.row_stats, target, "bf16", rows | {"HEATED": True}), {"warps": 8}
    best = {"HEATED": True, "CHUNKS": 32, "COLUMNS": 32}
    yield "best_of_row", (verify.best_of_row, target, "bf16", best), {"warps": 1}
    yield "divided_scores", (verify.divided_scores, target, "bf16", {"BLOCK": verify.CHUNK}), {"warps": 8}
    yield "add_chunks", (verify.add_chunks, target, "fp32", {"CHUNKS": 32, "COLUMNS": 32}), {"warps": 1}
    yield "left_mass", (verify.left_mass, target, "fp32", rows | {"K": 4}), {"warps": 8}
    yield "left_pick", (verify.left_pick, target, "fp32", {"K": 4, "BLOCK": verify.CHUNK}), {"warps": 8}
    columns = {"CHUNKS": 32, "COLUMNS": 32}
    of_tree = columns | {"K": 3, "WIDE": 4, "M": 2, "NODES": 512, "ROWS": 512, "BLOCK": verify.CHUNK}
    for lifted in (False, True):
        how = {"REPLACEMENT": False, "LIFTED": lifted, "FENCED": target == "gfx942"}
        name = "reject_in_turn" + ", lifted" * lifted
        yield name, (rejection.reject_in_turn, target, "bf16", of_tree | how), {"warps": 8, "fusion": False}
    yield "tops_of_row", (tops.tops_of_row, target, "fp32", {"M": 2, "BLOCK": verify.CHUNK}), {"warps": 8}
    behind = columns | {"K": 3, "NODES": 512, "BLOCK": verify.CHUNK}
    yield "mass_behind", (ends.mass_behind, target, "bf16", behind), {"warps": 8}
    yield "pick_behind", (ends.pick_behind, target, "bf16", behind), {"warps": 8}
    search = {"COUNTED": True, "MASSED": True, "CHUNKS": 32}
    summed = search | {"PIVOTS": truncation.PIVOTS}
    yield "sum_above", (truncation.sum_above, target, "bf16", summed | {"BLOCK": verify.CHUNK}), {"warps": 4}
    listed = summed | {"SHIFT": 16, "PARTS": 32, "ROOM": truncation.ROOM, "SEGMENT": truncation.SEGMENT}
    listed |= {"SEGMENTS": verify.CHUNK // truncation.SEGMENT, "GROUP": truncation.GROUP}
    yield "collect", (truncation.collect, target, "bf16", listed), {"warps": 4}
    tiles = {"SHIFT": 0, "DIRECT": False, "PARTS": 32, "ROOM": truncation.ROOM, "SIZE": verify.CHUNK, "WIDE": 128}
    yield "lowest_kept", (truncation.lowest_kept, target, "fp32", search | tiles), {"warps": 8}
    top = {"CHUNKS": 32, "SEGMENT": tree_expand.SEGMENT}
    chunk = top | {"BLOCK": tree_expand.BLOCK}
    yield "maxima_of_chunk", (tree_expand.maxima_of_chunk, target, "bf16", chunk), {"warps": 4}
    best = top | {"K": 8, "SEGMENTS": 4096, "WIDE": 4096, "PARTS": 32}
    yield "children_of_row", (tree_expand.children_of_row, target, "bf16", best), {"warps": 8}
    made = {"BLOCK": gumbel.NOISE_BLOCK}
    yield "gumbel_noise", (gumbel.gumbel_noise, target, "fp64", made), options(gumbel.NOISE_OPTIONS)
    drawn = {"TRUNCATED": True, "CHUNKS": 32, "BLOCK": gumbel.DRAW_BLOCK}
    yield "gumbel_bound", (gumbel.gumbel_bound, target, "bf16", drawn), options(gumbel.DRAW_OPTIONS)
    drawn |= {"PARTS": 32}
    yield "gumbel_draw", (gumbel.gumbel_draw, target, "bf16", drawn), options(gumbel.DRAW_OPTIONS)
    rows = {"BLOCK": 64}
    yield "follow_matches", (accepted_paths.follow_matches, target, "fp32", rows), {"warps": 1}
    yield "trace_path", (accepted_paths.trace_path, target, "fp32", {"WIDE": 8}), {"warps": 1}
    grown = {"TRIMMED": True, "S": 8, "M": 16, "F": 8, "DRAFTS": grow_level.drafts_of(8, 16)}
    yield "grow_trees", (grow_level.grow_trees, target, "fp32", grown), {"warps": 4, "fusion": False}
    yield from fused_cases(target)
    yield from row_cases(target)
    yield from grouped_cases(target)
    yield from recurrent_cases(target)
    yield "compact_rows", (kv_cache.compact_rows, target, "bf16", {"ALIGNED": True, "BLOCK": 1024}), {"warps": 2}


def table(target):
    """Returns the resources of all kernels, by name."""
    return {name: resources(compiled(*what, **how), target) for name, what, how in cases(target)}


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    found = {"triton": triton.__version__, **{target: table(target) for target in sys.argv[1:] or TARGETS}}
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
