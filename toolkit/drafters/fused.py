"""Drafting models as the native kernels run them: all levels of a step in one call.

Shapes: T packed rows, R rows whose predictions are wanted, F hidden states side by side, H hidden size, V vocabulary.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from arbordraft.drafters.base import Drafter, Garden
from arbordraft.kernels.decoder_layers import LayerRun, LayerWeights, Matrix
from arbordraft.kernels.draft_tree import Drafted, DraftRun, DraftWeights, Growth
from arbordraft.kernels.prepacked_linear import interleave
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear, version_of
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.sampling import GumbelNoise
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.recognition import matrix
from arbordraft.types import DraftContext, DraftTree, Plan

if TYPE_CHECKING:
    from arbordraft.heads.eagle import EagleHead

CHUNK = 2048  # rows of a call, which bounds its memory
Missing = tuple[Sequence[int], Tensor | None]  # committed tokens, and the target's hidden states beside them


def grow_whole(
    context: DraftContext,
    drafter: Drafter,
    run: DraftRun,
    cache: RaggedKVCache,
    handles: Sequence[int],
    missing: Mapping[int, Missing],
) -> "tuple[DraftTree, dict[int, list[int]]] | None":
    """Grows trees in one call, if what is asked for can be told in numbers.

    Args:
        context: the step.
        drafter: who grows them.
        run: its model.
        cache: the drafter's.
        handles: the samples' handles in it.
        missing: of every sample that may draft, the committed tokens that the cache lacks, and the target's hidden
            states beside them, for a model that reads them.

    Returns:
        The trees, and which nodes lie uncommitted behind each sample's rows in the cache, in their order; the tokens
        that were missing are committed for samples that draft. ``None`` if only :func:`~arbordraft.drafters.base.grow`
        can do it: deciders that want to be asked, random draws, processors that look at more than a temperature.
    """
    if context.candidates is not None or not context.law.deterministic or not context.pathwise:
        return None
    noise = context.noise if isinstance(context.noise, GumbelNoise) else None
    if context.temperature is None or not run.usable():
        return None
    garden = Garden(context, context.law, drafter)
    plans = [plan for plan in garden.plans if plan is not None]
    if len(plans) != len(garden.plans):
        return None
    fed: dict[int, list[int]] = {}
    for group, plan in zip(garden.groups, plans, strict=True):
        going = [index for index, levels in enumerate(plan.levels) if levels > 0 and group[index] in missing]
        if going:
            samples = [group[index] for index in going]
            drafted = _run(context, plan, going, samples, run, cache, [handles[s] for s in samples], missing, noise)
            for index, node, token, chance in _described(drafted):
                parent = context.topology.parent_list[node]
                garden.add(samples[index], parent, node, token, chance)
            fed |= {sample: [] for sample in samples}
            for index, node in drafted.fed:
                fed[samples[index]].append(node)
    return garden.tree(), fed


def _described(drafted: Drafted) -> "list[tuple[int, int, int, float]]":
    if drafted.broken:
        warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=4)
    return [(*node, chance) for node, chance in zip(drafted.nodes, drafted.chances, strict=True)]  # type: ignore[misc]


def _run(
    context: DraftContext,
    plan: Plan,
    going: Sequence[int],
    samples: Sequence[int],
    run: DraftRun,
    cache: RaggedKVCache,
    handles: Sequence[int],
    missing: Mapping[int, Missing],
    noise: GumbelNoise | None,
) -> Drafted:
    """One call for the samples of a group that draft, which stand at ``going`` in its plan."""
    topology = context.topology
    counts = [len(missing[sample][0]) for sample in samples]
    growth = Growth(
        topology.child_offsets,
        topology.child_order,
        [plan.levels[index] for index in going],
        [factor for index in going for factor in plan.trust[index]],
        [factor for index in going for factor in plan.next[index]],
        plan.level,
        plan.row,
        -1 if plan.budget is None else plan.budget,
    )
    keys = None if noise is None else noise.source.keys([(sample, noise.lengths[sample]) for sample in samples])
    parts = {handle: missing[sample] for handle, sample in zip(handles, samples, strict=True)}
    if sum(counts) > CHUNK:  # a prompt, of which all but the last token come first
        idle = growth._replace(levels=[0], trust=[1.0], next=[1.0])
        for handle, (tokens, states) in parts.items():
            for first in range(0, len(tokens) - 1, CHUNK):
                last = min(first + CHUNK, len(tokens) - 1)
                _feed(run, cache, {handle: _part((tokens, states), first, last)}, idle)
            parts[handle] = _part((tokens, states), len(tokens) - 1, len(tokens))
    return _feed(run, cache, parts, growth, keys, context.temperature or 1.0)


def _part(missing: Missing, first: int, last: int) -> Missing:
    tokens, states = missing
    return tokens[first:last], None if states is None else states[first:last]


def _feed(
    run: DraftRun,
    cache: RaggedKVCache,
    parts: Mapping[int, Missing],
    growth: Growth,
    noise: tuple[Tensor, Tensor] | None = None,
    temperature: float = 1.0,
) -> Drafted:
    """One call; what was missing is committed."""
    counts = [len(tokens) for tokens, _ in parts.values()]
    inner = sum(before < after for before, after in pairwise(growth.offsets))
    places = cache.reserve(list(parts), [count + inner for count in counts])
    like = run.weights.embedding
    states = [part for _, part in parts.values() if part is not None]
    drafted = run(
        torch.tensor([token for tokens, _ in parts.values() for token in tokens]),
        torch.cat(states).to(like.dtype) if states else None,
        [cache.pools(index, (layer.kv_heads, layer.dim), like) for index, layer in enumerate(run.weights.layers)],
        torch.tensor([[start for start, _ in places], [length for _, length in places], counts]),
        growth,
        noise,
        temperature,
    )
    for handle, count in zip(parts, counts, strict=True):
        cache.wrote(handle, range(count))
        cache.commit({handle: range(count)})
    return drafted


class FusedEagle:
    """An EAGLE head on a CPU, its layer fused: row by row for whoever asks, or whole trees at once.

    Args:
        head: in the target's dtype; its layer's weights are read from a prepacked copy.
        target: gives embeddings.
    """

    chunk = CHUNK

    def __init__(self, head: "EagleHead", target: RaggedModel) -> None:
        self.head, self.target = head, target
        self._prepack()

    @staticmethod
    def fits(head: "EagleHead", target: RaggedModel) -> bool:
        """Whether the kernels know its sizes, and the target's embeddings are a table."""
        config = head.config
        sizes = (config.head_dim, config.hidden_size, config.target_hidden_size, config.intermediate_size)
        return type(target.model.get_input_embeddings()) is nn.Embedding and not any(size % 16 for size in sizes)

    def refresh(self) -> None:
        """Reads weights anew that were written to since."""
        if self._versions != self._current():
            self._prepack()

    def _current(self) -> list[int]:
        return [version_of(parameter) for parameter in self.head.parameters()]

    def _prepack(self) -> None:
        head, config = self.head, self.head.config
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        self._versions = self._current()
        fused = LayerWeights(
            pre_attention=_wide(layer.hidden_norm.weight),
            qkv=matrix(qkv, None, int8=False),
            query_norm=None,
            key_norm=None,
            sinks=None,
            out=matrix(attention.o_proj.weight, None, int8=False),
            post_attention=None,
            pre_mlp=_wide(layer.post_attention_layernorm.weight),
            gate_up=matrix(interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()), None, int8=False),
            down=matrix(mlp.down_proj.weight, None, int8=False),
            post_mlp=None,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            dim=config.head_dim,
            inner=config.intermediate_size,
            activation="silu",
            window=None,
            rotary=True,
            epsilon=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            softcap=None,
            beside_norm=_wide(layer.input_layernorm.weight),
        )
        self._layer = LayerRun([fused])
        self._norm = _wide(head.norm.weight)
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        trimmed = config.draft_vocab_size != config.vocab_size
        self.run = DraftRun(
            DraftWeights(
                embedding=self.target.model.get_input_embeddings().weight.detach(),
                fuse=_matrix(head.fc),
                layers=[fused],
                norm=self._norm,
                head=_matrix(head.lm_head),
                outputs=config.draft_vocab_size,
                vocabulary=head.tokens.contiguous() if trimmed else None,
                frequencies=(config.rope_theta**-half).float(),
                factor=1.0,
                epsilon=config.rms_norm_eps,
            )
        )

    @torch.no_grad()
    def fuse(self, states: Tensor) -> Tensor:
        """``[T, F]`` of the target to ``[T, H]``."""
        return self.head.fuse(states.to(self.head.dtype))

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``[R, V]`` logits, the ``[R, H]`` that they were made from, and the ``[R, H]`` output of the layer."""
        embeddings = self.target.model.get_input_embeddings()(tokens).to(hidden.dtype)
        cosine, sine = (table[:, 0] for table in self.head.rotary(batch.positions, torch.float32))
        layer = self._layer.layers[0]
        pools = [cache.pools(0, (layer.kv_heads, layer.dim), hidden)]
        out, _ = self._layer(hidden[None], pools, (cosine[None], sine[None]), batch, (), embeddings)
        out = out[0] if rows is None else out[0, rows]
        final = self.head.norm(out)
        return self.head.widen(self.head.lm_head(final)), final, out


def _matrix(linear: "PrepackedLinear | nn.Linear") -> Matrix:
    return Matrix(linear.prepacked) if isinstance(linear, PrepackedLinear) else matrix(linear.weight, None, int8=False)


def _wide(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


__all__ = ["FusedEagle", "Missing", "grow_whole"]
