"""Lower bounds of the Triton kernels' times: the larger of bytes / bandwidth and operations / throughput.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from arbordraft.kernels import choice
from arbordraft.kernels.ragged_tree_attention.tiling import choose
from arborlab import work
from arborlab.gpu.problem import ATTENTION, Goal, Problem
from arborlab.gpu.sizes import DEPTH, SHAPES
from arborlab.work import Work

QUERY_HEADS = 32
FEW_ROWS = 32  # rows of products with weights, about those of one tree
FAST = Goal("us", 100)
Out = TypeVar("Out")


class Device(NamedTuple):
    """Figures of a GPU's data sheet.

    Args:
        bandwidth: bytes per second of its memory.
        throughput: operations per second of its matrix units in bfloat16, dense.
        vector: operations per second of all other units, one per lane and clock: half the float32 flops of the sheet.
        processors: streaming multiprocessors or compute units.
        hip: whether it is an AMD GPU.
    """

    name: str
    bandwidth: float
    throughput: float
    vector: float
    processors: int
    hip: bool = False


H100 = Device("H100", 3.35e12, 989e12, 33.5e12, 132)
A100 = Device("A100", 2.04e12, 312e12, 9.75e12, 108)
MI300X = Device("MI300X", 5.3e12, 1307e12, 81.7e12, 304, hip=True)
DEVICES = (H100, A100, MI300X)


class Shape(NamedTuple):
    """One attention problem: ``batch`` trees of one size, each after ``context`` committed keys.

    Args:
        tree: rows of each tree.
        group: query heads that share a key head.
        size: head size.
        heads: query heads.
    """

    context: int
    batch: int
    tree: int
    group: int
    size: int
    heads: int = QUERY_HEADS
    dtype: torch.dtype = torch.bfloat16
    row_invariant: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.heads // self.group} heads of {self.size}"
        by_row = ", row by row" * self.row_invariant
        return f"{self.batch} x {self.context} keys, trees of {self.tree}, {heads}{by_row}"

    def work(self, splits: int = 1) -> Work:
        """Returns bytes and operations."""
        return work.attention(
            [self.tree] * self.batch,
            [self.context] * self.batch,
            [self.tree] * self.batch,
            heads=self.heads,
            kv_heads=self.heads // self.group,
            size=self.size,
            value_size=self.size,
            itemsize=self.dtype.itemsize,
            splits=splits,
        )

    def splits(self, processors: int, hip: bool = False) -> int:
        """Returns the number of parts that each prefix is split into on a device."""
        tiles, key_bytes = self.batch * self.heads // self.group, 2 * self.size * self.dtype.itemsize
        return choose(self.tree, self.group, tiles, self.context, processors, key_bytes, hip=hip).splits


class Stepped(NamedTuple):
    """Shapes for the kernels other than attention: a batch of equal trees to grow, verify and compact.

    Args:
        tree: children of every node of each level, as for ``TreeTopology.from_k_config``.
        context: pool rows of a sample.
        moves: rows of a sample that compaction moves.
        level: nodes of a sample that get their ``children`` at a time.
        heads: query heads of a layer.
        hidden: hidden size of the model.
        inner: inner size of an MLP.
        dtype: type of scores and rows.
    """

    samples: int = 32
    tree: tuple[int, ...] = (3, 2, 1)
    vocabulary: int = 128256
    layers: int = 32
    context: int = 128
    kv_heads: int = 8
    size: int = 128
    moves: int = 3
    level: int = 4
    children: int = 8
    heads: int = QUERY_HEADS
    hidden: int = 4096
    inner: int = 14336
    dtype: torch.dtype = torch.bfloat16

    @property
    def levels(self) -> list[int]:
        """Nodes of a tree by depth."""
        levels = [1]
        for children in self.tree:
            levels.append(levels[-1] * children)
        return levels

    @property
    def rows(self) -> int:
        """Nodes of all trees."""
        return self.samples * sum(self.levels)

    def parts(self) -> Iterator[tuple[str, str, Work]]:
        """Yields ``(kernel, case, work)`` of every kernel, and of a whole verification."""
        inner, children, row_size = self.samples * sum(self.levels[:-1]), max(self.tree), self.kv_heads * self.size
        cache = f"{self.layers} layers of {self.kv_heads} heads of {self.size}"
        rows = f"V={self.vocabulary}"
        itemsize = self.dtype.itemsize
        scores = (self.vocabulary, itemsize)
        added = work.append(self.rows, 2 * row_size, itemsize, self.layers)
        yield "kv_append", f"{self.rows} rows, {cache}", added
        moved = work.compact(self.samples * self.moves, self.samples, row_size, itemsize, 2 * self.layers)
        yield "kv_compact", f"{self.samples * self.moves} rows, {cache}", moved
        yield "row_stats", f"{self.rows} rows, {rows}", work.row_stats(self.rows, *scores)
        yield "score_rows", f"{self.rows} rows, {rows}", work.score_rows(self.rows, *scores)
        yield "take_tops", f"{inner} nodes, 2 tops, {rows}", work.take_tops(inner, self.vocabulary, 2)
        one = work.left_mass(inner, inner, self.vocabulary, children, itemsize)
        yield "left_mass", f"{inner} nodes, {children} special tokens, {rows}", one
        picked = work.left_pick(self.samples, self.samples, children, itemsize)
        yield "left_pick", f"{self.samples} nodes, {rows}", picked
        yield "lowest_kept", f"{self.rows} rows, {rows}", work.lowest_kept(self.rows, *scores)
        grown = work.tree_expand(self.samples * self.level, self.vocabulary, self.children, itemsize)
        yield "tree_expand", f"{self.samples * self.level} rows, {self.children} children, {rows}", grown
        yield "gumbel_draw", f"{self.rows} rows, {rows}", work.gumbel_draw(self.rows, *scores)
        yield "gumbel", f"{self.samples} rows, {rows}", work.gumbel_noise(self.samples, self.vocabulary)
        levels = list(zip(self.levels, self.tree, strict=False))
        turns = [self.samples * sum(nodes for nodes, width in levels if width > turn) for turn in range(children)]
        whole = work.recursive_rejection(self.rows, turns, self.samples, *scores)
        yield "verify_tree", f"{self.samples} trees of {sum(self.levels)}, {children} children, {rows}", whole
        size, rotated = f"{self.rows} rows of {self.hidden}", f"{self.rows} rows, {self.heads}/{self.kv_heads} heads"
        yield "rms_norm", size, work.rms_norm(self.rows, self.hidden, itemsize)
        yield "add_rms_norm", size, work.rms_norm(self.rows, self.hidden, itemsize, added=True)
        yield (
            "gated_activation",
            f"{self.rows} rows of {self.inner}",
            work.gated_activation(self.rows, self.inner, itemsize),
        )
        rotated_work = work.rotate_append(self.rows, self.heads, self.kv_heads, self.size, self.size, itemsize)
        yield "rotate_append", f"{rotated} of {self.size}", rotated_work
        few, wide = min(self.rows, FEW_ROWS), f"{self.hidden} to {self.inner}"
        yield "linear", f"{few} rows, {wide}", work.linear(few, self.hidden, self.inner, itemsize)
        yield "gated_linear", f"{few} rows, {wide}", work.gated_linear(few, self.hidden, self.inner, itemsize)
        yield "grouped_linear", f"{few} rows, {wide}", work.grouped_linear(few, self.hidden, self.inner, itemsize)
        one = work.grouped_linear(1, self.hidden, 2 * self.inner, itemsize, gated=True)
        yield "gated_grouped_linear", f"1 row, {wide}", one  # a row of one sample's draft
        made = work.project_rotate_append(few, self.hidden, self.heads, self.kv_heads, self.size, itemsize)
        yield "project_rotate_append", f"{few} rows of {self.hidden}, {self.heads}/{self.kv_heads} heads", made

    def problem(
        self,
        kernel: str,
        run: Callable[[], object],
        error: Callable[[], float],
        allowed: float,
        *,
        note: str = "",
        peer: Callable[[], object] | None = None,
    ) -> Problem:
        """Builds the problem of one kernel in Triton; ``peer`` does the same work with PyTorch's operators."""
        case, needed = {name: (case, needed) for name, case, needed in self.parts()}.get(kernel, ("", None))
        goal = FAST if kernel in ("row_stats", "verify_tree") else None
        peers = {"torch": lambda: peer} if peer is not None else {}
        return Problem(kernel, note + case, in_triton(run), in_triton(error), allowed, self.dtype, needed, goal, peers)


def in_triton(call: Callable[[], Out]) -> Callable[[], Out]:
    """Wraps a call so that all operators run in Triton."""

    def run() -> Out:
        with choice.use("triton"):
            return call()

    return run


STEPPED = Stepped()


@dataclass(frozen=True)
class Prediction:
    """The least microseconds of one kernel on an H100 SXM, an A100 SXM 80GB and an MI300X.

    Args:
        intensity: flops per byte.
        bound: ``memory``, or the devices on which compute bounds the kernel.
        splits: parts of each prefix on the three devices, for attention.
        partial: partial results that the H100 writes and reads, as a share of ``megabytes``, which excludes them. The
            L2 cache may hold them.
    """

    kernel: str
    case: str
    megabytes: float
    gigaflops: float
    intensity: float
    h100_us: float
    a100_us: float
    mi300x_us: float
    bound: str
    splits: str | None = None
    partial: float | None = None

    @property
    def table(self) -> str:
        """Title of the row's table: only attention has splits."""
        return "bounds of attention" if self.kernel == ATTENTION else "bounds of other kernels"


def weights_of_forward(shape: Mapping[str, Any], rows: int, *, copied: bool = False) -> Work:
    """Counts the products of a forward with the weights of a Llama, or with their copy of 4 bits."""
    hidden, inner, count = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    size = shape.get("head_dim", hidden // heads)
    layer = [(hidden, (heads + 2 * kv_heads) * size), (heads * size, hidden), (hidden, 2 * inner), (inner, hidden)]
    product: Callable[[int, int, int, int], Work] = work.grouped_linear if copied else work.linear
    sizes = [*count * layer, (hidden, shape["vocab_size"])]
    works = [product(rows, inputs, outputs, 2) for inputs, outputs in sizes]
    return Work(sum(each.bytes for each in works), sum(each.flops for each in works), matrix=True)


def self_drafting(name: str) -> Iterator[tuple[str, str, Work]]:
    """Yields ``(part, case, work)`` of a step in which a shape of bfloat16 weights drafts a chain for itself."""
    target = weights_of_forward(SHAPES[name], DEPTH + 1)
    copy = weights_of_forward(SHAPES[name], 1, copied=True)
    yield "weights of a forward", f"{name}, {DEPTH + 1} rows", target
    yield "weights of the copy's forward", f"{name}, 1 row", copy
    step = Work(target.bytes + DEPTH * copy.bytes, target.flops + DEPTH * copy.flops, matrix=True)
    yield "weights of a step that drafts for itself", f"{name}, chain of {DEPTH}", step


def predictions(shapes: Sequence[Shape], stepped: Stepped) -> Iterator[Prediction]:
    """Yields the lower bounds of every attention problem, every other kernel, and a step that drafts for itself."""
    for shape in shapes:
        cuts = [shape.splits(device.processors, device.hip) for device in DEVICES]
        needed = shape.work()
        bound = _predicted(ATTENTION, str(shape), needed)
        partial = shape.work(cuts[0]).bytes / needed.bytes - 1
        yield replace(bound, splits="/".join(map(str, cuts)), partial=partial)
    for kernel, case, needed in (*stepped.parts(), *self_drafting("llama-3.1-8b")):
        yield _predicted(kernel, case, needed)


def _predicted(kernel: str, case: str, needed: Work) -> Prediction:
    rates = [device.throughput if needed.matrix else device.vector for device in DEVICES]
    times = [1e6 * needed.seconds(device.bandwidth, rate) for device, rate in zip(DEVICES, rates, strict=True)]
    compute = [
        device.name
        for device, rate in zip(DEVICES, rates, strict=True)
        if needed.flops / rate > needed.bytes / device.bandwidth
    ]
    return Prediction(
        kernel,
        case,
        megabytes=needed.bytes / 1e6,
        gigaflops=needed.flops / 1e9,
        intensity=needed.intensity,
        h100_us=times[0],
        a100_us=times[1],
        mi300x_us=times[2],
        bound=f"compute on {', '.join(compute)}" if compute else "memory",
    )


def fitting_shapes(shapes: Sequence[Shape], memory: int, log: Callable[[str], object]) -> list[Shape]:
    """Returns the shapes whose keys fit into ``memory`` bytes twice, packed and padded, with a fifth to spare."""
    small = [shape for shape in shapes if 2.5 * shape.work().bytes < memory]
    for shape in set(shapes) - set(small):
        log(f"left out, as it does not fit into {memory / 1e9:.0f} GB: {shape}")
    return small
