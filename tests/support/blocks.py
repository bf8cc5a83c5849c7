"""Random blocks of every kind, of ordinary and of extreme values."""

import torch
import torch.nn.functional as F

from arbordraft.kernels.prepacked_linear import BLOCKS, QUANTIZED, quantize_groups
from arbordraft.kernels.prepacked_linear.blocks import GROUP

SMALL = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL"}  # for rows that are no multiples of 256
FILE_KINDS = tuple(kind for kind in BLOCKS if kind != "INT4")


def fitting(kind, inputs):
    """Returns the kind that a file has in rows of so many inputs instead of this kind."""
    if inputs % 32:
        return "F32"
    return kind if inputs % BLOCKS[kind].weights == 0 else SMALL[kind]


def ordinary_blocks(kind, outputs, inputs, generator):
    """Returns ``[O, bytes]`` blocks with random codes and scales, whose weights have mean squares of about 1 / I."""
    known, size = BLOCKS[kind], inputs**-0.5
    if kind in QUANTIZED.values():
        bits = next(bits for bits, name in QUANTIZED.items() if name == kind)
        return quantize_groups(size * torch.randn(outputs, inputs, generator=generator), bits)
    if known.dtype is not None:
        return padded_floats(size * torch.randn(outputs, inputs, generator=generator), kind)
    raw = torch.randint(256, (outputs, inputs // known.weights, known.nbytes), dtype=torch.uint8, generator=generator)
    if kind == "MXFP4":
        raw[..., 0] = 126 - round(torch.tensor(inputs).log2().item() / 2) + raw[..., 0] % 3
        return raw.flatten(1)
    scale = 0.5 + torch.rand(*raw.shape[:2], generator=generator)
    centre = (1 << known.bits) / 2 * (1 if known.weights == 256 else -1)  # K-quants subtract their minima
    for factor in (1.0, None):
        if factor is None:
            factor = size / BLOCKS[kind].numbers(*known.parse(raw), raw[:, 0, :0]).square().mean().sqrt().item()
        for place, each in zip(known.halves, (scale, centre * scale), strict=False):
            raw[..., place : place + 2] = (factor * each).half()[..., None].view(torch.uint8)
    return raw.flatten(1)


def extreme_blocks(kind, generator):
    """Returns ``[O, bytes]`` blocks of any bytes, with halves among the greatest, least, denormal and zero ones."""
    known = BLOCKS[kind]
    raw = torch.randint(256, (48, 512 // known.weights, known.nbytes), dtype=torch.uint8, generator=generator)
    if known.dtype is not None:
        floats = torch.randn(48, 512, generator=generator) * 10.0 ** torch.randint(
            -6, 5, (48, 512), generator=generator
        )
        return floats.to(known.dtype).view(torch.uint8)
    odd = torch.tensor([0, -0.0, 65504, -65504, 2**-24, -(2**-24), 2**-14, 1, -1], dtype=torch.float16)
    for place in known.halves:
        raw[..., place + 1] &= 0xBF  # finite
        chosen = odd[torch.randint(len(odd), (24, raw.shape[1]), generator=generator)]
        raw[:24, :, place : place + 2] = chosen[..., None].view(torch.uint8)
    if kind == "MXFP4":
        raw[..., 0] %= 253
        raw[:8, :, 0] = torch.arange(8, dtype=torch.uint8)[:, None]  # the first two are denormal
    for value, rows in ((0, slice(40, 44)), (255, slice(44, 48))):  # all codes and scales least or greatest
        halves = raw[rows].clone()
        raw[rows] = value
        for place in (*known.halves, *(place + 1 for place in known.halves)):
            raw[rows, :, place] = halves[..., place]
        if kind == "MXFP4":
            raw[rows, :, 0] = halves[..., 0]
    return raw.flatten(1)


def padded_floats(weight, kind):
    """Returns float32 weights as rows of F32, F16 or BF16 blocks."""
    padded = F.pad(weight, (0, -weight.shape[1] % GROUP))
    return padded.to(BLOCKS[kind].dtype).view(torch.uint8)
