"""Random packed rows for attention, which the Triton kernel, its float64 reference and its peers share.

Shapes: T packed rows, B samples, P pool rows, n most rows of a sample, L most keys, Hq/Hkv query and key heads,
G = Hq / Hkv, D head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention_reference
from arbordraft.trees.masks import stack_words
from arbordraft.trees.topology import TreeTopology, ancestor_words

_WIDE = 64  # masks whose width is a multiple of this are read without changes


@dataclass
class Packed:
    """Packed rows of some trees, and their keys in adjacent slabs.

    If ``causal``, the trees are prompts instead: every row sees the rows before it.
    """

    query: Tensor  # [T, Hq, D]
    keys: Tensor  # [P, Hkv, D]
    values: Tensor  # [P, Hkv, D]
    batch: RaggedBatch
    trees: Sequence[TreeTopology]
    causal: bool

    @classmethod
    def random(
        cls,
        past: Sequence[int],
        trees: Sequence[TreeTopology],
        *,
        heads: int,
        group: int,
        size: int,
        device: torch.device,
        causal: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> "Packed":
        """Draws normal numbers."""
        batch = _layout(past, trees, causal, device)
        pool = sum(past) + sum(batch.rows)
        query, keys, values = (
            torch.randn(count, among, size, dtype=dtype, device=device)
            for count, among in ((sum(batch.rows), heads), (pool, heads // group), (pool, heads // group))
        )
        return cls(query, keys, values, batch, trees, causal)

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.query.shape[-1]) ** -0.5

    def lengths(self) -> list[int]:
        """Returns the number of keys of every sample."""
        return [p + n for p, n in zip(self.batch.past, self.batch.rows, strict=True)]

    def exact(self, sample: int, **options: Any) -> Tensor:
        """Computes ``[n_b, Hq, D]`` attention of one sample in float64."""
        first, rows, start = sum(self.batch.rows[:sample]), self.batch.rows[sample], self.batch.starts[sample]
        slab = slice(start, start + self.lengths()[sample])
        batch = _layout([self.batch.past[sample]], [self.trees[sample]], self.causal, self.query.device)
        query, keys, values = (
            x.double() for x in (self.query[first : first + rows], self.keys[slab], self.values[slab])
        )
        return ragged_tree_attention_reference(query, keys, values, batch, scale=self.scale, **options)

    def padded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns ``[B, Hq, n, D]`` queries, ``[B, Hkv, L, D]`` keys and values, and their ``[B, n, L]`` mask."""
        batch, lengths = self.batch, self.lengths()
        query = pad_sequence(self.query.split(list(batch.rows)), batch_first=True).transpose(1, 2).contiguous()
        more = -max(lengths) % _WIDE
        pools = (pad_sequence(pool.split(lengths), batch_first=True) for pool in (self.keys, self.values))
        keys, values = (F.pad(pool, (0, 0, 0, 0, 0, more)).transpose(1, 2).contiguous() for pool in pools)
        visible = query.new_zeros(len(lengths), query.shape[2], keys.shape[2], dtype=torch.bool)
        visible[:, :, 0].fill_(True)  # padding rows must see a key, or they become NaN
        for sample, (n, past) in enumerate(zip(batch.rows, batch.past, strict=True)):
            visible[sample, :n, :past].fill_(True)
            visible[sample, :n, past : past + n].copy_(self.visible(sample))
        return query, keys, values, visible

    def visible(self, sample: int) -> Tensor:
        """Returns ``[n_b, n_b]`` bool: which rows of a sample each of its rows sees."""
        visible = self.trees[sample].visible
        return torch.ones_like(visible).tril() if self.causal else visible


def _layout(past: Sequence[int], trees: Sequence[TreeTopology], causal: bool, device: torch.device) -> RaggedBatch:
    rows = [tree.num_nodes for tree in trees]
    starts = [0, *accumulate(p + n for p, n in zip(past, rows, strict=True))]
    offsets = [range(tree.num_nodes) if causal else tree.depth_list for tree in trees]
    positions = [[p + offset for offset in below] for p, below in zip(past, offsets, strict=True)]
    slots = [end - n + row for end, n in zip(starts[1:], rows, strict=True) for row in range(n)]
    return RaggedBatch(
        rows=rows,
        starts=starts[:-1],
        past=list(past),
        tree_positions=positions,
        positions=torch.tensor([position for below in positions for position in below]).to(device),
        slots=torch.tensor(slots).to(device),
        words=None if causal else stack_words([ancestor_words(tree.visible) for tree in trees]).to(device),
    )


def sdpa(packed: Packed) -> Callable[[], Tensor]:
    """Returns a call of PyTorch's attention, ``[B, Hkv, G * n, D]``, on a padded batch with a dense mask.

    The heads of a group are stacked as rows.
    """
    query, keys, values, visible = packed.padded()
    group = query.shape[1] // keys.shape[1]
    stacked = query.unflatten(1, (-1, group)).flatten(2, 3)
    mask = visible[:, None].repeat(1, 1, group, 1)
    return lambda: F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask, scale=packed.scale)


def flash(packed: Packed) -> Callable[[], object]:
    """Returns a call of flash-attention, ``[T, Hq, D]``, on packed samples; causal, as it supports no trees.

    The call uses the package ``flash_attn`` if it is installed, or else PyTorch's own build.
    """
    device, batch = packed.query.device, packed.batch
    rows, keys = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device)
        for lengths in (batch.rows, packed.lengths())
    )
    most = max(batch.rows), max(packed.lengths())
    tensors = (packed.query, packed.keys, packed.values, rows, keys, *most)
    try:
        from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        from torch.nn.attention.varlen import varlen_attn

        options: dict[str, Any] = {"scale": packed.scale, "window_size": (-1, 0)}
        if "enable_gqa" in signature(varlen_attn).parameters:  # torch 2.11 shares key heads without this option
            options["enable_gqa"] = True
        return lambda: varlen_attn(*tensors, **options)
    return lambda: flash_attn_varlen_func(*tensors, softmax_scale=packed.scale, causal=True)
