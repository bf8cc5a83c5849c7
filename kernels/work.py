"""How much every kernel has to move and to compute, from shapes alone.

Bytes count every input that is read once and every output once, whatever caches do; flops count a multiplication and an
addition as two. What a kernel moves besides is named: the partial results of split prefixes. The READMEs beside the
kernels derive the formulas; in Triton's interpreter a test counts the addresses that the kernels really touch.

Everywhere ``rows`` are those of all samples, ``vocabulary`` is V, ``itemsize`` the bytes of a number, ``row_size`` the
numbers of a row of all heads, ``special`` the special tokens of a node and ``drawn`` the nodes that have a draft row.
"""

from collections.abc import Sequence
from typing import NamedTuple

from arbordraft.kernels.verify.reference import CHUNK

_INDEX = 8  # bytes of an int64
_FLOAT = 4  # bytes of a float32, draft probabilities among them
_SCORES = 4096  # that a program of tree_expand or gumbel_draw reads
_SEGMENT = 32  # scores of which tree_expand keeps the highest at first
_PIVOTS = 4  # of lowest_kept
_DIRECT = 2 * CHUNK  # the largest vocabulary that lowest_kept searches at once
_BOUNDS = 10  # float32 operations per token to bound its noise; those of integers are not counted
_NOISE = 68  # float64 operations per token, three of which are quotients


class Work(NamedTuple):
    """Bytes to move and operations to do.

    Args:
        bytes: to and from memory.
        flops: floating-point operations.
        matrix: whether they are those of matrix products.
    """

    bytes: int
    flops: int
    matrix: bool = False

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes

    def seconds(self, bandwidth: float, throughput: float) -> float:
        """The least time on a device of this bandwidth and throughput, in bytes and flops per second."""
        return max(self.bytes / bandwidth, self.flops / throughput)

    def plus(self, *others: "Work") -> "Work":
        """The work of several kernels."""
        works = [self, *others]
        return Work(sum(work.bytes for work in works), sum(work.flops for work in works))

    def times(self, count: int) -> "Work":
        """The work of several runs."""
        return Work(self.bytes * count, self.flops * count)


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
    """Ragged tree attention without a window.

    Args:
        rows: packed rows of every sample.
        past: committed keys of every sample.
        tree: keys of the tree region of every sample.
        heads: of the queries.
        kv_heads: of the keys.
        size: of a head.
        value_size: of a head's values.
        itemsize: bytes of a number.
        causal: every row sees the rows before it; there are no ancestor words.
        splits: parts of the prefix. More than one write partial results and read them again.
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
    """Writing new rows, ``row_size`` for key and value together, to the pools of some layers, in a launch each."""
    return Work(layers * rows * (2 * row_size * itemsize + _INDEX), 0)


def compact(moves: int, samples: int, row_size: int, itemsize: int, pools: int) -> Work:
    """Moving rows of some samples within all pools, keys and values of every layer, in one launch."""
    return Work(2 * pools * moves * row_size * itemsize + (2 * moves + samples + 1 + 2 * pools) * _INDEX, 0)


def rms_norm(rows: int, hidden: int, itemsize: int, *, added: bool = False) -> Work:
    """A norm of every row, perhaps behind a sum: a square, a sum and two products per number."""
    return Work((rows * (4 if added else 2) + 1) * hidden * itemsize, (4 + added) * rows * hidden)


def gated_activation(rows: int, inner: int, itemsize: int) -> Work:
    """SiLU times another number: an exponential, a sum, a quotient and a product."""
    return Work(3 * rows * inner * itemsize, 4 * rows * inner)


def rotate_append(
    rows: int, heads: int, kv_heads: int, size: int, value_size: int, itemsize: int, turning: int | None = None
) -> Work:
    """Rotating ``turning`` channels of queries and keys, by default all, and writing keys and values to their pools."""
    turning = size if turning is None else turning
    numbers = (heads + kv_heads) * size + kv_heads * value_size + turning
    return Work(rows * (2 * numbers * itemsize + _INDEX), 3 * rows * (heads + kv_heads) * turning)


def linear(rows: int, inputs: int, outputs: int, itemsize: int) -> Work:
    """A product of rows with the weights of a linear."""
    numbers = rows * (inputs + outputs) + inputs * outputs
    return Work(numbers * itemsize, 2 * rows * inputs * outputs, matrix=True)


def gated_linear(rows: int, inputs: int, outputs: int, itemsize: int) -> Work:
    """Two products with the same rows, of which one gates the other."""
    numbers = rows * (inputs + outputs) + 2 * inputs * outputs
    return Work(numbers * itemsize, 4 * rows * inputs * outputs, matrix=True)


def project_rotate_append(rows: int, inputs: int, heads: int, kv_heads: int, size: int, itemsize: int) -> Work:
    """Products that make queries, keys and values, which are rotated, but for the last, and written."""
    outputs = (heads + 2 * kv_heads) * size
    numbers = rows * (inputs + outputs + 2 * size) + inputs * outputs
    return Work(numbers * itemsize + rows * _INDEX, 2 * rows * inputs * outputs, matrix=True)


def row_stats(rows: int, vocabulary: int, itemsize: int) -> Work:
    """Highest score, its place and the mass below it, by chunk: a comparison, a difference, an exponential, a sum."""
    chunks = -(-vocabulary // CHUNK)
    return Work(rows * (vocabulary * itemsize + chunks * (2 * _FLOAT + _INDEX)), 4 * rows * vocabulary)


def left_mass(nodes: int, drawn: int, vocabulary: int, special: int, itemsize: int) -> Work:
    """Sums of ``R = max(w p - t q, 0)`` and of q at inner nodes, by chunk: eight operations per token."""
    chunks = -(-vocabulary // CHUNK)
    rows = vocabulary * (nodes * itemsize + drawn * _FLOAT)
    scalars = nodes * (2 * _INDEX + 3 * _FLOAT + special * _INDEX)  # rows, lse, weight, taken, special
    return Work(rows + scalars + nodes * chunks * 2 * _FLOAT, 8 * nodes * vocabulary)


def left_pick(nodes: int, drawn: int, special: int, itemsize: int) -> Work:
    """A draw from one full chunk of R: what :func:`left_mass` reads of it, where and how far to go, and a token."""
    scalars = nodes * (5 * _INDEX + 3 * _FLOAT + special * _INDEX)  # the level is float64
    return Work(CHUNK * (nodes * itemsize + drawn * _FLOAT) + scalars, 8 * nodes * CHUNK)


def lowest_kept(rows: int, vocabulary: int, itemsize: int) -> Work:
    """Thresholds of top-k or top-p: three operations per token and pivot, two for its probability, six to collect it.

    The scores that are collected are written and read besides: how many there are depends on them.
    """
    chunks = -(-vocabulary // CHUNK)
    between = 2 * (_PIVOTS * chunks + chunks + 4) * _FLOAT  # sums above pivots, sizes of lists, an interval
    moved = vocabulary * itemsize + 2 * _FLOAT + (between if vocabulary > _DIRECT else 0)
    return Work(rows * moved, (3 * _PIVOTS + 8) * rows * vocabulary)


def gumbel_noise(rows: int, vocabulary: int) -> Work:
    """Noise in float64, whose operations are of float64 too: devices do half as many of those, or far fewer."""
    return Work(rows * (vocabulary * 8 + 2 * _INDEX), _NOISE * rows * vocabulary)


def gumbel_draw(rows: int, vocabulary: int, itemsize: int, *, truncated: bool = False) -> Work:
    """A token of every row: a quotient, a bound and comparisons per token; a few of each chunk are drawn in float64."""
    chunks = -(-vocabulary // _SCORES)
    keys = 2 * _INDEX + truncated * _FLOAT
    return Work(rows * (vocabulary * itemsize + keys + chunks * 2 * _INDEX), (_BOUNDS + 5) * rows * vocabulary)


def tree_expand(rows: int, vocabulary: int, children: int, itemsize: int) -> Work:
    """Children of the nodes of a level: four operations per score, and those of sorting are comparisons."""
    chunks = -(-vocabulary // _SCORES)
    block = max(_SEGMENT, min(_SCORES, 1 << (vocabulary - 1).bit_length()))
    between = 2 * chunks * (block // _SEGMENT + 2) * _FLOAT  # maxima of segments; maxima and sums of chunks
    made = children * (_INDEX + _FLOAT)
    return Work(rows * (vocabulary * itemsize + between + made), 4 * rows * vocabulary)


def recursive_rejection(rows: int, turns: Sequence[int], samples: int, vocabulary: int, itemsize: int) -> Work:
    """A batch of trees verified by recursive rejection: a pass over all rows, then over those of nodes with children.

    The first of these reads the draft rows alone, and each other one what has a child to try. Numbers of single nodes
    are not counted.

    Args:
        rows: nodes of all trees.
        turns: how many nodes have a first child, a second one and so on, all drawn without replacement.
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
