"""Drafting models as the native kernels run them: all levels of a step in one call.

Shapes: T packed rows, R rows whose predictions are wanted, F hidden states side by side, H hidden size, V vocabulary.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.drafters.model_drafter import CHUNK, feed
from arbordraft.kernels.decoder_layers import LayerRun, LayerWeights, Matrix, Norm
from arbordraft.kernels.draft_tree import DraftRun, DraftWeights, Growth
from arbordraft.kernels.prepacked_linear import interleave, pack, prepack
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear, version_of
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.gguf_blocks import in_memory
from arbordraft.target.prepacked.prepacked_modules import PrepackedNorm
from arbordraft.target.prepacked.probing import Unrecognised, plain
from arbordraft.target.prepacked.weight_collector import WeightCollector
from arbordraft.trees.topology import TreeTopology

if TYPE_CHECKING:
    from arbordraft.heads.eagle import EagleHead


def runs_natively(head: "EagleHead", target: RaggedModel) -> bool:
    """Whether there are kernels for the head's layer: they know its sizes, and the target's embeddings are a table."""
    config = head.config
    sizes = (config.head_dim, config.hidden_size, config.target_hidden_size, config.intermediate_size)
    table = type(target.model.get_input_embeddings()) is nn.Embedding
    return target.backend == "native" and table and not any(size % 16 for size in sizes)


class NativeEagle:
    """An EAGLE head on a CPU, its layer fused: row by row for whoever asks, or whole trees at once.

    Args:
        head: in the target's dtype; its layer's weights are read from a prepacked copy.
        target: gives embeddings.
    """

    chunk = CHUNK  # rows of a run, which bounds its memory

    def __init__(self, head: "EagleHead", target: RaggedModel) -> None:
        self.head, self.target = head, target
        self._prepack()

    def refresh(self) -> bool:
        """Reads weights anew that were written to since; says whether there were any."""
        if changed := self._versions != self._current():
            self._prepack()
        return changed

    def _current(self) -> list[int]:
        return [version_of(parameter) for parameter in self.head.parameters()]

    def _prepack(self) -> None:
        head, config = self.head, self.head.config
        layer, attention, mlp = head.midlayer, head.midlayer.self_attn, head.midlayer.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        embeddings: Any = self.target.model.get_input_embeddings()
        self._versions = self._current()
        fused = LayerWeights(
            pre_attention=_norm(layer.hidden_norm),
            qkv=Matrix(prepack(qkv)),
            query_norm=None,
            key_norm=None,
            sinks=None,
            out=Matrix(prepack(attention.o_proj.weight)),
            post_attention=None,
            pre_mlp=_norm(layer.post_attention_layernorm),
            gate_up=Matrix(prepack(interleave(mlp.gate_proj.weight.detach(), mlp.up_proj.weight.detach()))),
            down=Matrix(prepack(mlp.down_proj.weight)),
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
            beside_norm=_norm(layer.input_layernorm),
        )
        self._layer = LayerRun([fused])
        half = torch.arange(0, config.head_dim, 2) / config.head_dim
        trimmed = config.draft_vocab_size != config.vocab_size
        self.run = DraftRun(
            DraftWeights(
                embedding=in_memory(embeddings.weight),
                fuse=matrix_of(head.fc),
                layers=[fused],
                norm=_norm(head.norm),
                head=matrix_of(head.lm_head),
                outputs=config.draft_vocab_size,
                vocabulary=head.tokens.contiguous() if trimmed else None,
                frequencies=(config.rope_theta**-half).float()[None],
                factors=[1.0],
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
        out = self.layer(embeddings, hidden, batch, cache)
        out = out if rows is None else out[rows]
        final = self.head.norm(out)
        return self.head.widen(self.head.lm_head(final)), final, out

    def layer(self, embeddings: Tensor, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache) -> Tensor:
        """``[T, H]`` the layer's output for ``[T, E]`` embeddings beside ``[T, H]`` states."""
        cosine, sine = (table[:, 0] for table in self.head.rotary(batch.positions, torch.float32))
        weights = self._layer.layers[0]
        pools = [cache.pools(0, (weights.kv_heads, weights.dim), hidden)]
        return self._layer(hidden[None], pools, (cosine[None], sine[None]), batch, (), embeddings)[0][0]


def native_model(model: RaggedModel, *, screen: bool = False) -> DraftRun | None:
    """A causal LM as one call runs it; ``None`` unless all of it is recognised, and drafts as the model itself does.

    Args:
        model: the model.
        screen: have a copy of its head of 4 bits choose some tokens, of which the head itself then finds the best,
            unless it has few bits itself.
    """
    prepacking = model.prepacking
    found = None if prepacking is None else prepacking.layers()
    ends: Any = model.network()
    embedding, head = ends.get_input_embeddings(), ends.get_output_embeddings()
    if found is None or not isinstance(head, PrepackedLinear) or head.bias is not None:
        return None
    layers, tables = found
    screen = screen and head.weights is None and not head.transposed and plain(head.weight)
    rotary = [made for table in tables if (made := table.made_by(model.model))]
    if len(rotary) < len(tables) or (scale := _scale_of(embedding)) is None:
        return None
    try:
        norm, epsilon = WeightCollector().norm(nn.ModuleDict({"norm": model.final_norm}), "norm")
    except (Unrecognised, UnsupportedModel):
        return None
    weights = DraftWeights(
        embedding=in_memory(embedding.weight),
        fuse=None,
        layers=layers,
        norm=norm,
        head=Matrix(*pack(head.weight.detach(), "int4")) if screen else Matrix(*head.prepacked),
        outputs=model.vocab_size,
        vocabulary=None,
        frequencies=torch.stack([frequencies for frequencies, _ in rotary]),
        factors=[factor for _, factor in rotary],
        epsilon=epsilon,
        scale=scale,
        exact=Matrix(*head.prepacked) if screen else None,
    )
    run = DraftRun(weights)
    return run if _drafts_alike(model, run) else None


def _scale_of(embedding: nn.Module) -> float | None:
    """By which a table of embeddings multiplies its rows; ``None`` if it is no such table."""
    if not isinstance(embedding, nn.Embedding) or not plain(embedding.weight):
        return None
    tokens = torch.arange(min(16, embedding.num_embeddings))
    rows, given = in_memory(embedding.weight)[tokens].float(), embedding(tokens).detach().float()
    scale = float((rows * given).sum() / rows.square().sum().clamp_min(1e-30))
    near = 2 * torch.finfo(embedding.weight.dtype).eps
    return scale if torch.allclose(scale * rows, given, rtol=near, atol=0) else None


def _drafts_alike(model: RaggedModel, run: DraftRun) -> bool:
    """Whether a chain that was drafted in one call is what the model's own forwards predict."""
    source = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.vocab_size, (5,), generator=source).tolist()
    levels = 3
    chain = TreeTopology.chain(levels)
    growth = Growth(chain.child_offsets, chain.child_order, [levels], [1.0], [1.0], [1.0], 0.0, 0.0, -1)
    cache = RaggedKVCache()
    sample = cache.open(len(prompt) + levels)
    drafted = feed(run, cache, {sample: (prompt, None)}, growth, None)
    tokens = drafted.tokens
    own = RaggedKVCache()
    text = [*prompt, *tokens[:-1]]
    rows = model(torch.tensor(text), own.lay_out([own.open(len(text))], [range(len(text))]), own).float()
    chances = rows[len(prompt) - 1 :].softmax(dim=-1)
    stated = torch.tensor(drafted.chances)
    best = chances.max(dim=-1).values
    if len(tokens) < levels:
        return False
    drawn = chances[range(levels), tokens]
    if model.weights is not None:  # a rounding that goes the other way shows itself in all that follows
        return bool(torch.cat([drawn / best, drawn / stated, stated / drawn]).min() > 0.25)
    near = 1e-3 if model.model.dtype == torch.float32 else 0.05
    return all(torch.allclose(theirs, stated, rtol=near, atol=near) for theirs in (drawn, best))


def matrix_of(linear: "PrepackedLinear | nn.Linear") -> Matrix:
    """A linear's weights as native kernels read them, without its bias."""
    return Matrix(*linear.prepacked) if isinstance(linear, PrepackedLinear) else Matrix(prepack(linear.weight))


def _norm(module: nn.RMSNorm | PrepackedNorm) -> Norm:
    return module.norm if isinstance(module, PrepackedNorm) else Norm(module.weight.detach().float().contiguous())


__all__ = ["NativeEagle", "matrix_of", "native_model", "runs_natively"]
