"""Any Hugging Face causal LM, run on the packed rows of a ragged batch.

Shapes: T packed rows, R rows whose logits are wanted, V vocabulary, Hq/Hkv heads, D head size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.cache import RaggedKVCache
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention
from arbordraft.topology import TreeTopology, ancestor_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_HOOK = "arbordraft_ragged"
# Arguments that models hand to their attention although they concern the caller only.
_IGNORED = frozenset({"cache_position", "dropout", "is_causal", "logits_to_keep", "position_ids", "use_cache"})
# Rotary embeddings whose frequencies change for the whole batch once one sample is long.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_TRAINING = "the model is in training mode, where dropout would change its output: call model.eval()"
_REQUIREMENT = (
    "arbordraft needs every layer to be softmax attention that goes through transformers' AttentionInterface "
    "(falcon, bloom, linear-attention and state-space models do not)"
)


class UnsupportedModel(ValueError):
    """The model cannot be run on packed rows."""


@dataclass
class _Forward:
    """What one forward hands to its attention layers."""

    batch: RaggedBatch
    cache: RaggedKVCache
    layers: set[int] = field(default_factory=set)


class RaggedModel(nn.Module):
    """Runs a causal LM on packed tokens ``[1, T]`` of many samples at once, for prompts and for draft trees.

    The model itself is not changed: for the duration of a forward its attention is answered by
    :func:`~arbordraft.kernels.ragged_tree_attention.ragged_tree_attention` instead of its own implementation.

    Args:
        model: a causal LM of transformers whose attention follows the ``AttentionInterface``, in eval mode.
        tokenizer: its tokenizer; lets a decoder check that target and drafter agree.
        self_test: compare packed with single logits on a few random tokens now.

    Raises:
        UnsupportedModel: if the architecture does not route all its attention through the interface, or the
            self-test finds different logits.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        self_test: bool = True,
    ) -> None:
        super().__init__()
        if model.training:
            raise ValueError(_TRAINING)
        _register_hook()
        self.model = model
        self.tokenizer = tokenizer
        config = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.max_positions = _max_positions(config)
        # Composite models have several configurations; each tells its layers which attention to call.
        self._configs: list[Any] = list(
            {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values()
        )
        if self_test:
            self.self_test()

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return self.model.device

    def forward(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor | None = None,
        layers: int | None = None,
    ) -> Tensor:
        """Logits of packed rows; their keys and values are written behind each sample's committed length.

        Args:
            tokens: ``[T]`` int64.
            batch: what ``cache.plan`` returned for these rows.
            cache: the KV cache to read and write.
            rows: ``[R]`` rows whose logits are wanted, all T by default.
            layers: run only the first so many layers (early exit).

        Returns:
            ``[R, V]``.
        """
        if self.model.training:
            raise ValueError(_TRAINING)
        batch = batch.to(self.device)
        inputs = {
            "input_ids": tokens.to(self.device)[None],
            "position_ids": batch.positions[None],
            "use_cache": False,
            "logits_to_keep": slice(None) if rows is None else rows.to(self.device),
        }
        run = _Forward(batch, cache)
        with torch.no_grad(), self._hooked(layers):
            logits: Tensor = self.model(**inputs, ragged=run).logits[0]
        expected = layers or self.num_layers
        if len(run.layers) != expected:
            raise UnsupportedModel(
                f"{type(self.model).__name__} called the attention interface in {len(run.layers)} of {expected} "
                f"layers: {_REQUIREMENT}"
            )
        return logits

    def prefill(
        self,
        prompts: Mapping[int, Sequence[int]],
        cache: RaggedKVCache,
        *,
        chunk: int = 2048,
        layers: int | None = None,
    ) -> None:
        """Runs and commits tokens of several samples, packed, at most ``chunk`` rows at a time.

        Args:
            prompts: tokens to append to each sample of the cache; may be empty.
            cache: the KV cache.
            chunk: bound on the rows of one forward, and so on its memory.
            layers: run only the first so many layers.
        """
        left = {sample: list(tokens) for sample, tokens in prompts.items() if tokens}
        while left:
            room, part = chunk, {}
            for sample in list(left):
                if room == 0:
                    break
                part[sample] = left[sample][:room]
                room -= len(part[sample])
                left[sample] = left[sample][len(part[sample]) :]
                if not left[sample]:
                    del left[sample]
            batch = cache.plan(list(part), [range(len(tokens)) for tokens in part.values()])
            packed = torch.tensor([token for tokens in part.values() for token in tokens])
            self(packed, batch, cache, rows=torch.zeros(1, dtype=torch.long), layers=layers)
            cache.commit({sample: range(len(tokens)) for sample, tokens in part.items()})

    def self_test(self) -> None:
        """Compares packed logits, of two prompts and a small tree, with the model's own single-path logits.

        Raises:
            UnsupportedModel: if they differ by more than rounding.
        """
        generator = torch.Generator().manual_seed(0)
        prompts = [torch.randint(self.vocab_size, (n,), generator=generator).tolist() for n in (5, 2)]
        topology = TreeTopology.from_parents([-1, 0, 0, 1])
        tree = torch.randint(self.vocab_size, (topology.num_nodes,), generator=generator).tolist()

        cache = RaggedKVCache()
        samples = [cache.open() for _ in prompts]
        try:
            self.prefill(dict(zip(samples, prompts, strict=True)), cache)
            words = ancestor_words(topology.visible.cpu()).repeat(2, 1)
            packed = self(torch.tensor(tree * 2), cache.plan(samples, [topology.depth_list] * 2, words), cache)
        except UnsupportedModel:
            raise
        except Exception as failure:
            raise UnsupportedModel(
                f"{type(self.model).__name__} failed on packed tokens ({failure}): {_REQUIREMENT}"
            ) from failure
        single = []
        for prompt in prompts:
            for node in range(topology.num_nodes):
                path = [tree[n] for n in topology.path(node)]
                ids = torch.tensor([prompt + path], device=self.device)
                with torch.no_grad():
                    single.append(self.model(ids, use_cache=False).logits[0, -1])
        expected = torch.stack(single).double()
        spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
        error = ((packed.double() - expected).square().mean().sqrt() / spread).item()
        # Half precision rounds differently for every shape; a wrong mask or position is far above either bound.
        bound = 1e-3 if packed.dtype in (torch.float32, torch.float64) else 0.1
        if not error < bound:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: packed logits differ from single ones by {error:.1e} of their spread "
                f"(bound {bound:.0e}); its attention uses something that packed trees do not support"
            )

    @contextmanager
    def _hooked(self, layers: int | None) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        owner, name = _decoder_layers(self.model, self.num_layers) if layers else (self.model, "")
        all_layers = getattr(owner, name) if layers else None
        try:
            for config in self._configs:
                config._attn_implementation = _HOOK
            if all_layers is not None:
                setattr(owner, name, all_layers[:layers])
            yield
        finally:
            if all_layers is not None:
                setattr(owner, name, all_layers)
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation


def _decoder_layers(model: nn.Module, count: int) -> tuple[nn.Module, str]:
    """The module that holds the list of decoder layers, and the list's name: the outermost list of that length."""
    for owner in model.modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return owner, name
    raise UnsupportedModel(f"{type(model).__name__} does not keep its {count} layers in one list: no early exit")


def _register_hook() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(_HOOK, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ragged: _Forward | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every attention layer: ``[1, H, T, D]`` in, ``[1, T, Hq, D]`` out."""
    unknown = [name for name, given in others.items() if not (given is None or given is False or name in _IGNORED)]
    if ragged is None or attention_mask is not None or unknown:
        raise UnsupportedModel(
            f"{type(module).__name__} asks its attention for something packed rows do not offer: "
            f"{unknown or 'a mask of its own'}"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    ragged.layers.add(layer)
    batch = ragged.batch
    keys, values = ragged.cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), batch.slots)
    out = ragged_tree_attention(
        query[0].transpose(0, 1),
        keys,
        values,
        batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


def _max_positions(config: Any) -> int | None:
    """Greatest number of positions for which a sample's logits do not depend on its batch."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(v, dict) for v in rope.values()) else [rope]:
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = parameters.get("original_max_position_embeddings", limit)
    return limit
