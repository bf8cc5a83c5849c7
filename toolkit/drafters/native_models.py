"""Converts weights of causal LMs and heads for the native kernels, which run all levels of a step in one call.

Shapes: H hidden size, E embedding size.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from arbordraft.drafters.feeding import feed
from arbordraft.kernels.decoder_layers import LayerWeights, Matrix, Norm
from arbordraft.kernels.draft_tree import DraftRun, DraftWeights, Limits, TreesToGrow
from arbordraft.kernels.prepacked_linear import interleave, pack_rows, prepack
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.gguf_blocks import blocks_of, in_memory
from arbordraft.target.prepacked.memory import FEW_BITS
from arbordraft.target.prepacked.prepacked_modules import PrepackedNorm
from arbordraft.target.prepacked.probing import Unrecognised, plain
from arbordraft.target.prepacked.weight_collector import WeightCollector
from arbordraft.trees.forest import Forest
from arbordraft.trees.topology import TreeTopology

if TYPE_CHECKING:
    from arbordraft.heads.layers import Layer, LayeredHead, LayersConfig


def runs_natively(head: "LayeredHead", target: RaggedModel) -> bool:
    """Tells whether kernels can run the head: they support its sizes, and its embeddings are a plain table."""
    config, embeddings = head.config, embeddings_of(head, target)
    if getattr(config, "first_generation", False):
        return False
    if target.backend != "native" or type(embeddings) is not nn.Embedding:
        return False
    sizes = (config.head_dim, config.hidden_size, embeddings.embedding_dim, config.intermediate_size)
    return not any(size % 16 for size in sizes)


def embeddings_of(head: "LayeredHead", target: RaggedModel) -> Any:
    """Returns a head's embeddings of tokens, or the target's if the head has none."""
    return getattr(head, "embed_tokens", None) or target.model.get_input_embeddings()


def layer_weights(
    config: "LayersConfig", layer: "Layer", before: Norm | None = None, beside: Norm | None = None
) -> LayerWeights:
    """Converts a head's layer for native kernels.

    Args:
        config: settings of the head.
        layer: the layer.
        before: ``[H]`` norm of its input.
        beside: ``[E]`` norm of embeddings, if it reads these beside its input.
    """
    attention, mlp = layer.self_attn, layer.mlp
    parts = attention.q_proj, attention.k_proj, attention.v_proj
    bias = torch.cat([part.bias for part in parts]).detach().float() if config.attention_bias else None
    return LayerWeights(
        pre_attention=before,
        qkv=Matrix(prepack(torch.cat([part.weight for part in parts])), bias=bias),
        query_norm=norm_of(attention.q_norm) if config.qk_norm else None,
        key_norm=norm_of(attention.k_norm) if config.qk_norm else None,
        sinks=None,
        out=Matrix(prepack(attention.o_proj.weight), bias=_wide(attention.o_proj.bias)),
        post_attention=None,
        pre_mlp=norm_of(layer.post_attention_layernorm),
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
        beside_norm=beside,
    )


def native_model(model: RaggedModel, *, screen: bool = False) -> DraftRun | None:
    """Converts a causal LM for one-call drafting; ``None`` if a part is not recognised or its drafts deviate.

    Args:
        model: the model.
        screen: let a 4-bit copy of its head preselect tokens, of which the head itself finds the best. This is ignored
            if the head has few bits already, or the layers are not quantised.
    """
    prepacking = model.prepacking
    found = None if prepacking is None else prepacking.layers()
    ends: Any = model.network()
    embedding, head = ends.get_input_embeddings(), ends.get_output_embeddings()
    if found is None or not isinstance(head, PrepackedLinear) or head.bias is not None:
        return None
    layers, tables = found
    # The head's copy must be of the type of the layers' matrices; routers keep their numbers.
    firsts = [layer.qkv or layer.gate_up for layer in layers]
    in_panels = all(first and first.weight.dtype == torch.uint8 for first in firsts)
    screen = screen and in_panels and _can_be_screened(head)
    rotary = [made for table in tables if (made := table.made_by(model.model))]
    if len(rotary) < len(tables):
        return None
    try:
        norm, epsilon = WeightCollector().norm(nn.ModuleDict({"norm": model.final_norm}), "norm")
        scale, after = _factors(model, embedding, head)
    except (Unrecognised, UnsupportedModel):
        return None
    if scale is None:
        return None
    norm = Norm(norm.weight * after, None if norm.offset is None else norm.offset * after)
    weights = DraftWeights(
        embedding=in_memory(embedding.weight),
        fuse=None,
        layers=layers,
        norm=norm,
        head=_screen_of(head) if screen else Matrix(*head.prepacked),
        outputs=model.vocab_size,
        vocabulary=None,
        frequencies=torch.stack([frequencies for frequencies, _ in rotary]) if rotary else torch.empty(0, 0),
        factors=[factor for _, factor in rotary],
        epsilon=epsilon,
        scale=scale,
        exact=Matrix(*head.prepacked) if screen else None,
    )
    run = DraftRun(weights)
    return run if _drafts_alike(model, run) else None


def _can_be_screened(head: PrepackedLinear) -> bool:
    """Tells whether a 4-bit copy of a head would be read much faster, and kernels can rank its tokens anew."""
    packed, scale = head.prepacked
    bits = 8 * packed.nbytes / (head.out_features * head.in_features)
    return bits > FEW_BITS and scale is None and not head.transposed and plain(head.weight)


def _screen_of(head: PrepackedLinear) -> Matrix:
    raw, kind, rows = blocks_of(head.weight.detach())
    return Matrix(*pack_rows([raw], [kind], "int4", head.weight.dtype, rows))


def _factors(model: RaggedModel, embedding: nn.Module, head: nn.Module) -> tuple[float | None, float]:
    """Returns factors of embeddings before the layers and of logits.

    The former is ``None`` unless the layers read scaled rows of a table. The latter is 1 if logits are no multiples of
    the head's output.
    """
    if not isinstance(embedding, nn.Embedding) or not plain(embedding.weight):
        return None, 1.0
    tokens, cache = torch.arange(min(16, embedding.num_embeddings)), RaggedKVCache()
    batch = cache.lay_out([cache.open(len(tokens))], [range(len(tokens))])
    ends = 0, model.num_layers
    logits, states = model.run(tokens, batch, cache, hidden=ends)
    given, last = states.tensor_split(2, dim=-1)
    rows = in_memory(embedding.weight)[tokens]
    return _factor_of(given, rows), _factor_of(logits, head(last)) or 1.0


def _factor_of(product: Tensor, rows: Tensor) -> float | None:
    """Returns the factor by which all rows were multiplied; ``None`` if they are no such product."""
    if product.shape != rows.shape:
        return None
    near, product, rows = 2 * torch.finfo(rows.dtype).eps, product.detach().float(), rows.detach().float()
    factor = float((rows * product).sum() / rows.square().sum().clamp_min(1e-30))
    factor = 1.0 if abs(factor - 1) < near else factor
    return factor if torch.allclose(factor * rows, product, rtol=near, atol=0) else None


def _drafts_alike(model: RaggedModel, run: DraftRun) -> bool:
    """Tells whether a chain drafted in one call agrees with the model's own forwards."""
    source = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.vocab_size, (5,), generator=source).tolist()
    levels = 3
    chain = TreeTopology.chain(levels)
    forest = Forest.of_roots(chain, prompt[-1:], [None])
    forest.reach[:, 0] = 1
    trees = TreesToGrow(forest, [0], chain.child_offsets, chain.child_order, Limits.everything([levels]))
    cache = RaggedKVCache()
    sample = cache.open(len(prompt) + levels)
    feed(run, cache, {sample: (prompt, None)}, trees, chain, np.full((1, levels + 1), -1))
    tokens = [token for token in forest.token[0, 1:].tolist() if token >= 0]
    own = RaggedKVCache()
    text = [*prompt, *tokens[:-1]]
    rows = model(torch.tensor(text), own.lay_out([own.open(len(text))], [range(len(text))]), own).float()
    chances = rows[len(prompt) - 1 :].softmax(dim=-1)
    stated = torch.from_numpy(forest.chance[0, 1:]).float()
    best = chances.max(dim=-1).values
    if len(tokens) < levels:
        return False
    drawn = chances[range(levels), tokens]
    if model.weights is not None or run.weights.exact is not None:  # one different rounding changes all later values
        return bool(torch.cat([drawn / best, drawn / stated, stated / drawn]).min() > 0.25)
    near = 1e-3 if model.model.dtype == torch.float32 else 0.05
    return all(torch.allclose(theirs, stated, rtol=near, atol=near) for theirs in (drawn, best))


def matrix_of(linear: "PrepackedLinear | nn.Linear") -> Matrix:
    """Converts a linear layer's weights for native kernels, without its bias."""
    return Matrix(*linear.prepacked) if isinstance(linear, PrepackedLinear) else Matrix(prepack(linear.weight))


def _wide(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().float()


def norm_of(module: nn.RMSNorm | PrepackedNorm) -> Norm:
    """Converts a norm for native kernels."""
    return module.norm if isinstance(module, PrepackedNorm) else Norm(module.weight.detach().float().contiguous())


__all__ = ["embeddings_of", "layer_weights", "matrix_of", "native_model", "norm_of", "runs_natively"]
