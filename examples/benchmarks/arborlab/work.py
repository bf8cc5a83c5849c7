"""Bytes that every kernel moves and operations that it does, computed from shapes alone.

Bytes count every input and every output once, without regard to caches. Flops count a multiplication and an addition as
two. Intermediate results, such as the partial results of split prefixes, are counted and named. The READMEs beside the
kernels derive the formulas. In Triton's interpreter a test counts the addresses that the kernels touch.

Arguments have the same meaning in all functions:

- ``rows`` are the rows of all samples.
- ``vocabulary`` is V.
- ``itemsize`` is the bytes of a number.
- ``row_size`` is the numbers in a row of all heads.
- ``special`` is the special tokens of a node.
- ``drawn`` is the nodes that have a draft row.
"""

from collections.abc import Sequence
from typing import NamedTuple

from arbordraft.kernels.verify.reference import CHUNK

_INDEX = 8  # bytes of an int64
_FLOAT = 4  # bytes of a float32, the type of draft probabilities
_SCORES = 4096  # scores that a program of tree_expand or gumbel_draw reads
_SEGMENT = 32  # scores of a segment of tree_expand, whose first pass keeps the highest
_PIVOTS = 4  # pivots of lowest_kept
_DIRECT = 2 * CHUNK  # the largest vocabulary that lowest_kept searches in one launch
_BOUNDS = 10  # float32 operations per token to bound its noise; integer operations are not counted
_NOISE = 68  # float64 operations per token, three of them quotients


class Work(NamedTuple):
    """Bytes to move and operations to do.

    Args:
        bytes: bytes moved to and from memory.
        flops: floating-point operations.
        matrix: whether the flops are those of matrix products.
    """

    bytes: int
    flops: int
    matrix: bool = False

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def seconds(self, bandwidth: float, throughput: float) -> float:
        """Returns the least time on a device, given its bandwidth and throughput in bytes and flops per second."""
        return max(self.bytes / bandwidth, self.flops / throughput)

    def plus(self, *others: "Work") -> "Work":
        """Adds the work of other kernels."""
        works = [self, *others]
        return Work(sum(work.bytes for work in works), sum(work.flops for work in works))


def attention(
    rows: Sequence[int],
    past: Sequence[int],
    tree: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    size: int,
    value_size: int,
    itemsize: int,
    causal: bool = False,
    splits: int = 1,
) -> Work:
    """Counts ragged tree attention without a window.

    Args:
        rows: packed rows of every sample.
        past: committed keys of every sample.
        tree: keys of the tree region of every sample.
        heads: query heads.
        kv_heads: key heads.
        size: head size.
        value_size: size of a head's values.
        itemsize: bytes of a number.
        causal: every row sees the rows before it; there are no ancestor words.
        splits: parts of the prefix. With more than one, partial results are written and read again. The counters with
            which their programs count each other are not counted, 8 bytes per tile.
    """
    total, samples = sum(rows), len(rows)
    alive = [(n, p, t) for n, p, t in zip(rows, past, tree, strict=True) if n]
    per_row = heads * (size + value_size)
    queries = total * per_row * itemsize
    keys = sum(p + t for _, p, t in alive) * kv_heads * (size + value_size) * itemsize
    words = 0 if causal else sum(n * -(-t // 64) for n, _, t in alive)
    tables = (total + words + 4 * samples + 2) * _INDEX  # positions, words, layout
    partial = 2 * total * heads * splits * (value_size + 1) * _FLOAT if splits > 1 else 0
    pairs = sum(n * p + (n * (t - n) + n * (n + 1) // 2 if causal else n * t) for n, p, t in alive)
    return Work(queries + keys + tables + partial, 2 * pairs * per_row, matrix=True)


def append(rows: int, row_size: int, itemsize: int, layers: int = 1) -> Work:
    """Counts appending rows to the pools of some layers, a launch each; ``row_size`` covers key and value together."""
    return Work(layers * rows * (2 * row_size * itemsize + _INDEX), 0)


def compact(moves: int, samples: int, row_size: int, itemsize: int, pools: int) -> Work:
    """Counts moving rows of some samples within all pools, keys and values of every layer, in one launch."""
    return Work(2 * pools * moves * row_size * itemsize + (2 * moves + samples + 1 + 2 * pools) * _INDEX, 0)


def rms_norm(rows: int, hidden: int, itemsize: int, *, added: bool = False) -> Work:
    """Counts a norm of every row, after a sum if ``added``: a square, a sum and two products per number."""
    return Work((rows * (4 if added else 2) + 1) * hidden * itemsize, (4 + added) * rows * hidden)


def gated_activation(rows: int, inner: int, itemsize: int) -> Work:
    """Counts a gated SiLU: an exponential, a sum, a quotient and a product per number."""
    return Work(3 * rows * inner * itemsize, 4 * rows * inner)


def rotate_append(
    rows: int, heads: int, kv_heads: int, size: int, value_size: int, itemsize: int, rotary_size: int | None = None
) -> Work:
    """Counts rotating ``rotary_size`` channels of queries and keys, by default all, and writing keys and values."""
    rotary_size = size if rotary_size is None else rotary_size
    numbers = (heads + kv_heads) * size + kv_heads * value_size + rotary_size
    return Work(rows * (2 * numbers * itemsize + _INDEX), 3 * rows * (heads + kv_heads) * rotary_size)


def linear(rows: int, inputs: int, outputs: int, itemsize: int) -> Work:
    """Counts the product of rows with the weights of a linear layer."""
    numbers = rows * (inputs + outputs) + inputs * outputs
    return Work(numbers * itemsize, 2 * rows * inputs * outputs, matrix=True)


def gated_linear(rows: int, inputs: int, outputs: int, itemsize: int) -> Work:
    """Counts two products with the same rows, one of which gates the other."""
    numbers = rows * (inputs + outputs) + 2 * inputs * outputs
    return Work(numbers * itemsize, 4 * rows * inputs * outputs, matrix=True)


def grouped_linear(rows: int, inputs: int, outputs: int, itemsize: int, *, gated: bool = False) -> Work:
    """Counts the product of rows with ``outputs`` outputs of weights of 4 bits; a gate and its input are two."""
    panels, pairs = -(-outputs // 16), -(-inputs // 64)  # of 16 outputs, and of two groups of 32 inputs
    weights = panels * (2 * 16 * _FLOAT + pairs * (2 * 2 * 16 + 64 * 16 // 2))
    numbers = rows * (inputs + (outputs // 2 if gated else outputs))
    return Work(numbers * itemsize + weights, 2 * rows * inputs * outputs, matrix=True)


def project_rotate_append(rows: int, inputs: int, heads: int, kv_heads: int, size: int, itemsize: int) -> Work:
    """Counts computing queries, keys and values, rotating queries and keys, and writing all three."""
    outputs = (heads + 2 * kv_heads) * size
    numbers = rows * (inputs + outputs + 2 * size) + inputs * outputs
    return Work(numbers * itemsize + rows * _INDEX, 2 * rows * inputs * outputs, matrix=True)


def row_stats(rows: int, vocabulary: int, itemsize: int) -> Work:
    """Counts highest score, its place and the mass by chunk: a comparison, a difference, an exponential, a sum."""
    chunks = -(-vocabulary // CHUNK)
    return Work(rows * (vocabulary * itemsize + chunks * (2 * _FLOAT + _INDEX)), 4 * rows * vocabulary)


def score_rows(rows: int, vocabulary: int, itemsize: int) -> Work:
    """Counts scores divided by temperatures, in float32, their best and their log-sum-exp."""
    return Work(rows * vocabulary * (itemsize + _FLOAT), 5 * rows * vocabulary)


def take_tops(nodes: int, vocabulary: int, tops: int) -> Work:
    """Counts reading draft rows for their most probable tokens: a comparison per token and top."""
    return Work(nodes * (vocabulary + tops) * _FLOAT, nodes * vocabulary * tops)


def left_mass(nodes: int, drawn: int, vocabulary: int, special: int, itemsize: int) -> Work:
    """Counts sums of ``R = max(w p - t q, 0)`` and of q at inner nodes, by chunk: eight operations per token."""
    chunks = -(-vocabulary // CHUNK)
    rows = vocabulary * (nodes * itemsize + drawn * _FLOAT)
    scalars = nodes * (2 * _INDEX + 3 * _FLOAT + special * _INDEX)  # rows, lse, weight, taken, special
    return Work(rows + scalars + nodes * chunks * 2 * _FLOAT, 8 * nodes * vocabulary)


def left_pick(nodes: int, drawn: int, special: int, itemsize: int) -> Work:
    """Counts a draw from one full chunk of R: the reads of :func:`left_mass`, a chunk index, a level and a token."""
    scalars = nodes * (5 * _INDEX + 3 * _FLOAT + special * _INDEX)  # the level is float64
    return Work(CHUNK * (nodes * itemsize + drawn * _FLOAT) + scalars, 8 * nodes * CHUNK)


def lowest_kept(rows: int, vocabulary: int, itemsize: int) -> Work:
    """Counts top-k or top-p thresholds: per token 3 operations per pivot, 2 for its probability, 6 to collect it.

    The collected scores are also written and read. Their number depends on the scores, so they are not counted.
    """
    chunks = -(-vocabulary // CHUNK)
    between = 2 * (_PIVOTS * chunks + chunks + 4) * _FLOAT  # sums above pivots, sizes of lists, an interval
    moved = vocabulary * itemsize + 2 * _FLOAT + (between if vocabulary > _DIRECT else 0)
    return Work(rows * moved, (3 * _PIVOTS + 8) * rows * vocabulary)


def gumbel_noise(rows: int, vocabulary: int) -> Work:
    """Counts noise in float64, with float64 operations: devices do half as many per second of these, or far fewer."""
    return Work(rows * (vocabulary * 8 + 2 * _INDEX), _NOISE * rows * vocabulary)


def gumbel_draw(rows: int, vocabulary: int, itemsize: int, *, truncated: bool = False) -> Work:
    """Counts drawing a token per row: a quotient, a bound and comparisons per score, without the few float64 draws.

    Two bounds and a counter of each chunk are written and read.
    """
    chunks = -(-vocabulary // _SCORES)
    keys = 2 * _INDEX + truncated * _FLOAT
    between = 2 * chunks * 3 * _FLOAT
    return Work(rows * (vocabulary * itemsize + keys + between + _INDEX), (_BOUNDS + 5) * rows * vocabulary)


def tree_expand(rows: int, vocabulary: int, children: int, itemsize: int) -> Work:
    """Counts finding the children of a level: four operations per score; the comparisons of sorting are not counted."""
    chunks = -(-vocabulary // _SCORES)
    block = max(_SEGMENT, min(_SCORES, 1 << (vocabulary - 1).bit_length()))
    between = 2 * chunks * (block // _SEGMENT + 2) * _FLOAT  # maxima of segments; maxima and sums of chunks
    made = children * (_INDEX + _FLOAT)
    return Work(rows * (vocabulary * itemsize + between + made), 4 * rows * vocabulary)


def recursive_rejection(rows: int, turns: Sequence[int], samples: int, vocabulary: int, itemsize: int) -> Work:
    """Counts recursive rejection of a batch of trees: a pass over all rows, then passes over nodes with children.

    The first of the latter passes reads only draft rows. Each other one reads the nodes that have a child to try.
    Per-node scalars are not counted.

    Args:
        rows: nodes of all trees.
        turns: numbers of nodes that have a first child, a second child and so on, all drawn without replacement.
        samples: trees.
        vocabulary: V.
        itemsize: bytes of a score.
    """
    kinds = vocabulary, len(turns), itemsize
    first = left_mass(turns[0], turns[0], *kinds)
    first = Work(first.bytes - turns[0] * vocabulary * itemsize, first.flops)
    passes = [left_mass(nodes, nodes, *kinds) for nodes in turns]
    end = left_mass(samples, samples, *kinds)
    pick = left_pick(samples, samples, len(turns), itemsize)
    return row_stats(rows, vocabulary, itemsize).plus(first, *passes, end, pick)
