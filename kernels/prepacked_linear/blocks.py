"""Matrices in blocks: kinds of blocks, their values, and the packed form that kernels read, in plain PyTorch.

A row of a matrix is a row of blocks, as a GGUF file has them: codes of few bits, and the scales of these. Packed, 16
rows of one kind make a panel: first the fields of all blocks, scales and minima, then the codes. Panels of different
kinds may follow each other.

Shapes: n rows, B blocks of a row, K weights of a block, F bytes of a block's fields, R bytes of a row's own fields. I
inputs, P panels, G groups of 32 inputs.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16
GROUP = 32
LAYOUT = 0x61726233  # the first number of a packed matrix
_HEADER = 4  # numbers before the places of the panels
_ALIGNED = 64
_CHUNK = 1 << 22  # bytes of blocks whose scales are checked at a time

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # in halves

_Parse = Callable[[Tensor], tuple[Tensor, Tensor]]
_Scales = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class BlockKind:
    """A kind of blocks.

    Args:
        number: the kind's number in packed matrices.
        weights: K.
        nbytes: bytes of a block.
        bits: bits of a packed code; 16 and 32 for floats, which have no scales.
        levels: ``[2 ** bits]`` value of each code, which a scale multiplies; none for floats.
        widths: bytes of each field of a block, F together.
        parse: splits ``[n, B, nbytes]`` blocks into ``[n, B, K]`` codes and ``[n, B, F]`` fields.
        scales: returns ``[n, S]`` float32 scales and minima of S equal parts of a row, from ``[n, B, F]`` fields and
            ``[n, R]`` fields of the row. A weight is ``scale * level``, plus the minimum if there is one.
        halves: places of the float16 fields in a block.
        row_widths: bytes of each field of a row, which precede its blocks.
        dtype: type of floats.
    """

    number: int
    weights: int
    nbytes: int
    bits: int
    parse: _Parse
    levels: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    scales: _Scales | None = None
    halves: tuple[int, ...] = ()
    row_widths: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def group_bytes(self) -> int:
        """Bytes of the codes of 16 rows and 32 inputs."""
        return LANES * GROUP * self.bits // 8

    def panel_bytes(self, groups: int) -> int:
        """Bytes of 16 rows of so many groups in a packed matrix."""
        fields = LANES * (sum(self.row_widths) + groups * GROUP // self.weights * sum(self.widths))
        return fields + -fields % _ALIGNED + groups * self.group_bytes

    def inputs_of(self, bytes_of_row: int) -> int:
        """Returns the inputs of a row of these bytes; rows of floats need not be whole blocks.

        Raises:
            ValueError: if such rows cannot be of this kind.
        """
        size, weights = (self.nbytes, self.weights) if self.dtype is None else (self.dtype.itemsize, 1)
        count, rest = divmod(bytes_of_row - sum(self.row_widths), size)
        if count <= 0 or rest:
            raise ValueError(
                f"rows of {NUMBERED[self.number]} have blocks of {size} bytes each, got {bytes_of_row} bytes"
            )
        return count * weights

    def split(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Splits ``[n, bytes]`` rows into ``[n, R]`` fields of the row and ``[n, B, nbytes]`` blocks."""
        row, rest = raw.split([sum(self.row_widths), raw.shape[1] - sum(self.row_widths)], dim=1)
        return row, rest.unflatten(1, (-1, self.nbytes))

    def numbers(self, codes: Tensor, fields: Tensor, row: Tensor) -> Tensor:
        """Returns the ``[n, B K]`` float32 weights of codes and fields."""
        if self.scales is None:
            assert self.dtype is not None
            return _as(codes.flatten(1), self.dtype).float()
        levels = torch.tensor(self.levels, dtype=torch.float32)[codes.flatten(1).int()]
        scale, minimum = self.scales(fields, row)
        parts = levels.unflatten(1, (scale.shape[1], -1)) * scale[..., None]
        return (parts if minimum is None else parts + minimum[..., None]).flatten(1)


def inputs_of(raws: Sequence[Tensor], kinds: Sequence[str]) -> int:
    """Returns the number of inputs that ``[n, bytes]`` matrices of blocks have in common.

    Raises:
        ValueError: if the numbers differ, or a matrix has no whole rows of a known kind.
    """
    found = set()
    for raw, kind in zip(raws, kinds, strict=True):
        if kind not in BLOCKS:
            raise ValueError(f"kernels read blocks of {', '.join(BLOCKS)}, not of {kind!r}")
        if raw.ndim != 2:
            raise ValueError(f"expected rows of blocks, got {list(raw.shape)}")
        found.add(BLOCKS[kind].inputs_of(raw.shape[1]))
    if len(found) != 1:
        raise ValueError("the rows of a packed matrix must have the same number of inputs")
    return found.pop()


def packed_bytes(numbers: Tensor, inputs: int) -> int:
    """Returns the bytes of a packed matrix whose panels are of the kinds with these numbers."""
    groups, counts = -(-inputs // GROUP), numbers.bincount().tolist()
    panels = sum(count * BLOCKS[NUMBERED[number]].panel_bytes(groups) for number, count in enumerate(counts) if count)
    return _header(len(numbers)) + panels


def kinds_of_panels(raws: Sequence[Tensor], kinds: Sequence[str], places: Tensor) -> Tensor:
    """Returns the ``[P]`` numbers of the kinds of panels, whose rows lie at these places; see :func:`places_of`.

    Raises:
        ValueError: if 16 rows of a panel are not of one kind.
    """
    if len(set(kinds)) == 1:
        return torch.full((len(places) // LANES,), BLOCKS[kinds[0]].number)
    numbers = torch.tensor([BLOCKS[kind].number for kind in kinds])
    each = numbers.repeat_interleave(torch.tensor([len(raw) for raw in raws]))[places.clamp_min(0)].unflatten(
        0, (-1, LANES)
    )
    if ((each != each[:, :1]) & (places.unflatten(0, (-1, LANES)) >= 0)).any():
        raise ValueError("the 16 rows of a panel must be blocks of one kind")
    return each[:, 0]


def dequantize_blocks_reference(raw: Tensor, kind: str) -> Tensor:
    """See :func:`arbordraft.kernels.prepacked_linear.dequantize_blocks`."""
    known = BLOCKS[kind]
    if known.dtype is not None:
        return raw.view(known.dtype).float()
    row, blocks = known.split(raw)
    return known.numbers(*known.parse(blocks), row)


def check_finite_blocks(raw: Tensor, kind: str) -> None:
    """Checks the scales and minima of ``[n, bytes]`` rows of blocks; codes are not looked at.

    Raises:
        ValueError: if one is NaN or infinite, or so large that weights are. Callers add the name of the matrix.
    """
    known = BLOCKS[kind]
    for rows in raw.split(max(1, _CHUNK // max(1, raw.shape[1]))):
        if known.dtype is not None:  # NaN is both minimum and maximum; takes no memory
            sound = all(bool(end.isfinite()) for end in rows.view(known.dtype).aminmax())
            if not sound:
                raise ValueError(f"{kind} numbers are infinite or NaN: the file is damaged")
            continue
        row, blocks = known.split(rows)
        if kind == "MXFP4":
            sound = not bool((blocks[..., 0] > 252).any())
        elif known.row_widths:
            sound = bool(_as(row, torch.float32).isfinite().all())
        else:  # halves lie at even places of blocks of even bytes, so nothing is copied
            halves = rows.flatten().view(torch.int16).unflatten(0, (-1, known.nbytes // 2))
            sound = not any(bool((halves[:, place // 2] & 0x7C00 == 0x7C00).any()) for place in known.halves)
        if not sound:
            raise ValueError(f"{kind} blocks have scales that are infinite or NaN: the file is damaged")


def pack_blocks_reference(raws: Sequence[Tensor], kinds: Sequence[str], rows: Tensor | None = None) -> Tensor:
    """See :func:`arbordraft.kernels.prepacked_linear.pack_blocks`; rounds nothing."""
    places = places_of(raws, rows)
    groups = -(-inputs_of(raws, kinds) // GROUP)
    everything = [row for raw in raws for row in raw]
    panels = []
    numbers = kinds_of_panels(raws, kinds, places).tolist()
    for number, held in zip(numbers, places.unflatten(0, (-1, LANES)), strict=True):
        known, raw = BLOCKS[NUMBERED[number]], torch.zeros(LANES, len(everything[int(held[0])]), dtype=torch.uint8)
        for lane, place in enumerate(held.tolist()):
            if place >= 0:
                raw[lane] = everything[place]
        panels.append((known, _panel(known, raw)))
    return _joined(panels, groups)


def places_of(raws: Sequence[Tensor], rows: Tensor | None) -> Tensor:
    """Returns the place of each packed row in the concatenated matrices, padded with -1 to whole panels."""
    total = sum(len(raw) for raw in raws)
    places = torch.arange(total) if rows is None else rows
    if rows is not None and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < total:
        raise ValueError(f"rows must be among 0 to {total - 1}")
    return F.pad(places, (0, -len(places) % LANES), value=-1)


def outputs_of(packed: Tensor) -> int:
    """Returns the outputs of a packed matrix, padded to whole panels."""
    return LANES * int(packed[8:16].view(torch.int64))


def is_float(packed: Tensor) -> Tensor:
    """Returns ``[O]`` bool, whether each output of a packed matrix has floats as weights, with its padding."""
    return torch.tensor([known.dtype is not None for known, _ in _panels(packed)[0]]).repeat_interleave(LANES)


def restore_blocks(packed: Tensor, outputs: int | None = None, inputs: int | None = None) -> Tensor:
    """Returns the ``[O, I]`` float32 weights of a packed matrix, by default with its padding."""
    panels, groups = _panels(packed)
    return torch.cat([_weights(known, panel, groups) for known, panel in panels])[:outputs, :inputs].contiguous()


def select_panels(packed: Tensor, first: int, count: int) -> Tensor:
    """Returns ``count`` panels as a packed matrix of their own."""
    panels, groups = _panels(packed)
    return _joined(panels[first : first + count], groups)


def _panel(known: BlockKind, raw: Tensor) -> Tensor:
    """Lays 16 rows of blocks out as a panel."""
    row, blocks = known.split(raw)
    codes, fields = known.parse(blocks)
    parts = [field.flatten() for field in row.split(list(known.row_widths), dim=1)]
    parts += [field.flatten() for block in fields.unbind(1) for field in block.split(list(known.widths), dim=1)]
    scales = torch.cat([raw.new_empty(0), *parts])
    return torch.cat([F.pad(scales, (0, -len(scales) % _ALIGNED)), _lay(known, codes.flatten(1)).flatten()])


def _lay(known: BlockKind, codes: Tensor) -> Tensor:
    """Lays the codes of 16 rows out: ``[G, ...]`` bytes."""
    if known.dtype is not None:
        return codes.unflatten(1, (-1, GROUP, known.bits // 8)).permute(1, 2, 0, 3).contiguous()
    quads = codes.unflatten(1, (-1, 8, 4)).permute(1, 2, 0, 3)
    if known.bits == 8:
        return quads.contiguous()
    high = quads >> 4
    lines = [quads[:, 0::2] & 15 | (quads[:, 1::2] & 15) << 4]
    each = known.bits - 4
    for start in range(0, 8 if each else 0, 8 // each if each else 1):
        shares = [high[:, start + n] << each * n for n in range(8 // each)]
        lines.append(torch.stack(shares).sum(dim=0, dtype=torch.uint8)[:, None])
    return torch.cat(lines, dim=1)


def _weights(known: BlockKind, panel: Tensor, groups: int) -> Tensor:
    """Returns the ``[16, I]`` weights of a panel."""
    blocks, bytes_of_row = groups * GROUP // known.weights, sum(known.row_widths) * LANES
    scales = panel[: bytes_of_row + blocks * sum(known.widths) * LANES]
    codes = panel[len(panel) - groups * known.group_bytes :].unflatten(0, (groups, -1))
    row = _fields(scales[None, :bytes_of_row], known.row_widths)[:, 0]
    fields = _fields(scales[bytes_of_row:].unflatten(0, (blocks, -1)), known.widths)
    return known.numbers(_taken(known, codes), fields, row)


def _fields(laid: Tensor, widths: Sequence[int]) -> Tensor:
    """Returns ``[16, B, F]`` fields of ``[B, 16 F]`` bytes."""
    parts = [part.unflatten(1, (LANES, -1)) for part in laid.split([LANES * width for width in widths], dim=1)]
    return torch.cat([laid.new_empty(len(laid), LANES, 0), *parts], dim=2).transpose(0, 1)


def _taken(known: BlockKind, laid: Tensor) -> Tensor:
    """Returns the codes of 16 rows that :func:`_lay` laid out, ``[16, I]``, or ``[16, I w]`` bytes of floats."""
    if known.dtype is not None:
        return laid.unflatten(1, (GROUP, LANES, -1)).permute(2, 0, 1, 3).flatten(1)
    lines = laid.unflatten(1, (-1, LANES, 4))
    if known.bits < 8:
        each = known.bits - 4
        low = torch.stack([lines[:, :4] & 15, lines[:, :4] >> 4], dim=2).flatten(1, 2)
        if each:
            shares = [lines[:, 4:] >> each * n & (1 << each) - 1 for n in range(8 // each)]
            low = low | torch.stack(shares, dim=2).flatten(1, 2) << 4
        lines = low
    return lines.permute(2, 0, 1, 3).flatten(1)


def _joined(panels: Sequence[tuple[BlockKind, Tensor]], groups: int) -> Tensor:
    """Returns a packed matrix: its layout, panels, groups and bytes, the place of each panel, and the panels.

    A place is a multiple of 64, to which the number of the panel's kind is added. The last one is the end.
    """
    header = _header(len(panels))
    places = torch.tensor([header, *(len(panel) for _, panel in panels)]).cumsum(0)
    numbers = torch.tensor([*(known.number for known, _ in panels), 0])
    about = torch.tensor([LAYOUT, len(panels), groups, int(places[-1])])
    table = torch.cat([about, places + numbers]).view(torch.uint8)
    return torch.cat([F.pad(table, (0, header - len(table))), *(panel for _, panel in panels)])


def _header(panels: int) -> int:
    """Returns the bytes before the first panel."""
    size = 8 * (_HEADER + panels + 1)
    return size + -size % _ALIGNED


def _panels(packed: Tensor) -> tuple[list[tuple[BlockKind, Tensor]], int]:
    """Returns the panels of a packed matrix with their kinds, and the number of groups."""
    layout, count, groups, size = packed[: 8 * _HEADER].view(torch.int64).tolist()
    if layout != LAYOUT or size != len(packed):
        raise ValueError("this is no matrix that pack_blocks returned")
    table = packed[8 * _HEADER : 8 * (_HEADER + count + 1)].view(torch.int64).tolist()
    places = [(place % _ALIGNED, place - place % _ALIGNED) for place in table]
    bounds = itertools.pairwise(places)
    return [(BLOCKS[NUMBERED[kind]], packed[start:end]) for (kind, start), (_, end) in bounds], groups


# The kinds. Blocks of 32 hold the weights j and j + 16 in byte j.


def _as(fields: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns bytes as numbers of another type; copies them, as parts of blocks are not aligned."""
    return fields.clone(memory_format=torch.contiguous_format).view(dtype)


def _halves(fields: Tensor) -> Tensor:
    """Returns the float32 values of the float16 numbers in ``[..., 2]`` bytes."""
    return _as(fields, torch.float16)[..., 0].float()


def _nibbles(raw: Tensor) -> Tensor:
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _bits(raw: Tensor) -> Tensor:
    """Returns the bits of ``[..., k]`` bytes, ``[..., 8 k]``, the lowest first."""
    return (raw[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)


def _simple(scales: int, high: bool = False) -> _Parse:
    """Parses blocks of 32 nibbles that follow ``scales`` bytes; ``high`` bits stand between, one per weight."""

    def parse(raw: Tensor) -> tuple[Tensor, Tensor]:
        codes = _nibbles(raw[..., -16:])
        return codes | _bits(raw[..., scales : scales + 4]) << 4 if high else codes, raw[..., :scales]

    return parse


def _parse_q8_0(raw: Tensor) -> tuple[Tensor, Tensor]:
    return raw[..., 2:] ^ 128, raw[..., :2]


def _parse_k(fifth: bool) -> _Parse:
    """Parses Q4_K, or Q5_K with its fifth bits. The minimum's factor changes its sign: kernels add minima."""

    def parse(raw: Tensor) -> tuple[Tensor, Tensor]:
        low, high, rest = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
        scale = torch.cat([low & 63, rest & 15 | low >> 6 << 4], dim=-1)
        minimum = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], dim=-1)
        factors = raw[..., :4] ^ torch.tensor([0, 0, 0, 128], dtype=torch.uint8)
        fields = torch.cat([factors, torch.stack([scale, minimum], dim=-1).flatten(-2)], dim=-1)
        codes = _nibbles(raw[..., -128:].unflatten(-1, (4, 32))).flatten(-2)
        if fifth:
            bits = raw[..., 16:48, None] >> torch.arange(8, dtype=torch.uint8) & 1
            codes = codes | bits.transpose(-1, -2).flatten(-2) << 4
        return codes, fields

    return parse


def _parse_q6_k(raw: Tensor) -> tuple[Tensor, Tensor]:
    low = _nibbles(raw[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    high = raw[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    return (low | high << 4).flatten(-3), torch.cat([raw[..., 208:], raw[..., 192:208]], dim=-1)


def _parse_iq4_xs(raw: Tensor) -> tuple[Tensor, Tensor]:
    low = torch.stack([raw[..., 4:8] & 15, raw[..., 4:8] >> 4], dim=-1).flatten(-2)
    high = (raw[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(-2)
    scales = ((low | high << 4).view(torch.int8) - 32).view(torch.uint8)
    return _nibbles(raw[..., 8:].unflatten(-1, (8, 16))).flatten(-2), torch.cat([raw[..., :2], scales], dim=-1)


def _parse_floats(raw: Tensor) -> tuple[Tensor, Tensor]:
    return raw, raw[..., :0]


def _scale(fields: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
    return _halves(fields), None


def _scale_and_minimum(fields: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
    return _halves(fields[..., :2]), _halves(fields[..., 2:])


def _power(fields: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
    exponent = fields[..., 0].int()
    return torch.where(exponent < 2, 0x200000 << exponent.clamp_max(1), exponent - 1 << 23).view(torch.float32), None


def _bytes_of_row(fields: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
    factors = _as(row, torch.float32)
    return fields[..., 0].float() * factors[:, :1], fields[..., 1].float() * factors[:, 1:]


def _bytes_of_block(fields: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = fields[..., 4:].float().unflatten(-1, (8, 2))
    scale, minimum = (_halves(fields[..., 2 * n : 2 * n + 2])[..., None] * scales[..., n] for n in range(2))
    return scale.flatten(1), minimum.flatten(1)


def _signed_bytes(fields: Tensor, row: Tensor) -> tuple[Tensor, Tensor | None]:
    scales = _as(fields[..., 2:], torch.int8).float()
    return (_halves(fields[..., :2])[..., None] * scales).flatten(1), None


def _centred(bits: int, centre: int) -> tuple[int, ...]:
    return tuple(code - centre for code in range(1 << bits))


_K, _PAIRS = (2, 2, *[1] * 16), (0, 2)
_FOUR, _FIVE = _centred(4, 0), _centred(5, 0)
BLOCKS = {
    # 4 bits with the scales of 32 weights in bytes, times two float32 factors of their row: not a GGUF file's.
    "INT4": BlockKind(0, 32, 18, 4, _simple(2), _FOUR, (1, 1), _bytes_of_row, row_widths=(4, 4)),
    "Q8_0": BlockKind(1, 32, 34, 8, _parse_q8_0, _centred(8, 128), (2,), _scale, (0,)),
    "Q4_0": BlockKind(2, 32, 18, 4, _simple(2), _centred(4, 8), (2,), _scale, (0,)),
    "Q4_1": BlockKind(3, 32, 20, 4, _simple(4), _FOUR, (2, 2), _scale_and_minimum, _PAIRS),
    "Q5_0": BlockKind(4, 32, 22, 5, _simple(2, high=True), _centred(5, 16), (2,), _scale, (0,)),
    "Q5_1": BlockKind(5, 32, 24, 5, _simple(4, high=True), _FIVE, (2, 2), _scale_and_minimum, _PAIRS),
    "IQ4_NL": BlockKind(6, 32, 18, 4, _simple(2), IQ4, (2,), _scale, (0,)),
    "MXFP4": BlockKind(7, 32, 17, 4, _simple(1), E2M1, (1,), _power),
    "Q4_K": BlockKind(8, 256, 144, 4, _parse_k(False), _FOUR, _K, _bytes_of_block, _PAIRS),
    "Q5_K": BlockKind(9, 256, 176, 5, _parse_k(True), _FIVE, _K, _bytes_of_block, _PAIRS),
    "Q6_K": BlockKind(10, 256, 210, 6, _parse_q6_k, _centred(6, 32), (2, *[1] * 16), _signed_bytes, (208,)),
    "IQ4_XS": BlockKind(11, 256, 136, 4, _parse_iq4_xs, IQ4, (2, *[1] * 8), _signed_bytes, (0,)),
    "F32": BlockKind(12, 32, 128, 32, _parse_floats, dtype=torch.float32),
    "F16": BlockKind(13, 32, 64, 16, _parse_floats, dtype=torch.float16),
    "BF16": BlockKind(14, 32, 64, 16, _parse_floats, dtype=torch.bfloat16),
}
NUMBERED = {kind.number: name for name, kind in BLOCKS.items()}
