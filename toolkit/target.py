"""Any Hugging Face causal LM, run on the packed rows of a ragged batch.

Shapes: T packed rows, R rows whose logits are wanted, F hidden states side by side, V vocabulary, H hidden size.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.attention import HOOK, REQUIREMENT, UnsupportedModel, register
from arbordraft.cache import RaggedKVCache
from arbordraft.kernels import native
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.observation import Forward, decoder_list, final_module, insert, observe, tap
from arbordraft.packing import Packing, Swap, choose_backend
from arbordraft.topology import TreeTopology, ancestor_words

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Rotary embeddings whose frequencies change for the whole batch once one sample is long.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
_TRAINING = "the model is in training mode, where dropout would change its output: call model.eval()"


class RaggedModel(nn.Module):
    """Runs a causal LM on packed tokens ``[1, T]`` of many samples at once, for prompts and for draft trees.

    The model itself is not changed: for the duration of a forward its attention is answered by
    :func:`~arbordraft.kernels.ragged_tree_attention.ragged_tree_attention` instead of its own implementation.

    Args:
        model: a causal LM of transformers whose attention follows the ``AttentionInterface``, in eval mode.
        tokenizer: its tokenizer; lets a decoder check that target and drafter agree.
        linears: how the model's weights are read on a CPU. ``"plain"``: by its own modules. ``"native"``: from a packed
            copy by C++ kernels, built on first use, which fuse the decoder layers they recognise and give every row
            the same bits whatever rows run beside it. ``"onednn"``: linears only, prepacked by PyTorch. ``"packed"``:
            the first of these that works here. A copy takes as much memory as the weights; it is renewed, with a
            warning, if they have changed when a new cache is begun.
        int8: keep 8-bit copies with one scale per output. Twice as fast to read, but another model: its output law is
            what decoding preserves.
        self_test: compare packed with single logits on a few random tokens now.

    Raises:
        ValueError: if the backend asked for cannot be used here.
        UnsupportedModel: if the architecture does not route all its attention through the interface, or the
            self-test finds different logits.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        linears: str = "plain",
        int8: bool = False,
        self_test: bool = True,
    ) -> None:
        super().__init__()
        if model.training:
            raise ValueError(_TRAINING)
        self.backend = choose_backend(linears, model)
        if int8 and self.backend != "native":
            raise ValueError(f"int8 weights need the native kernels: {native.problem() or 'use linears=native'}")
        register()
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
        self.int8 = int8
        self._packing: Packing | None = None
        if self.backend != "plain":
            self._packing = self._pack()
        if self_test:
            self.self_test()

    @property
    def row_invariant(self) -> bool:
        """Whether every part of a forward promises each row the same bits, whatever rows run beside it."""
        return self._packing is not None and self._packing.row_invariant

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return self.model.device

    @cached_property
    def final_norm(self) -> nn.Module:
        """What stands between the last decoder layer and the head.

        Raises:
            UnsupportedModel: if that is more than one module.
        """
        if norm := final_module(self.model, self._place):
            return norm
        raise UnsupportedModel(f"{type(self.model).__name__} has more than a norm behind its decoder layers")

    def forward(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor | None = None,
        layers: int | None = None,
        behind: nn.Module | None = None,
    ) -> Tensor:
        """Logits of packed rows; their keys and values are written behind each sample's committed length.

        Args:
            tokens: ``[T]`` int64.
            batch: what ``cache.plan`` returned for these rows.
            cache: the KV cache to read and write.
            rows: ``[R]`` rows whose logits are wanted, all T by default.
            layers: run only the first so many layers (early exit).
            behind: put this behind them, in front of the final norm; maps ``[1, T, H]`` to the same.

        Returns:
            ``[R, V]``.
        """
        return self.run(tokens, batch, cache, rows, layers, behind=behind)[0]

    def run(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor | None = None,
        layers: int | None = None,
        hidden: Sequence[int] = (),
        behind: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The same as :meth:`forward`, with hidden states of all rows; asking for them changes no bit of the logits.

        Args:
            hidden: which ones, as transformers numbers its ``hidden_states``: the input of each decoder layer, and
                behind the last layer the output of the final norm.

        Returns:
            ``[R, V]`` logits and ``[T, F]`` hidden states, side by side in the order asked for.

        Raises:
            ValueError: if there is no such layer.
            UnsupportedModel: if the architecture does not show them.
        """
        batch = batch.to(self.device)
        inputs = {
            "input_ids": tokens.to(self.device)[None],
            "position_ids": batch.positions[None],
            "use_cache": False,
            "logits_to_keep": slice(None) if rows is None else rows.to(self.device),
        }
        self._check_weights(cache)
        run = Forward(batch, cache, self.backend == "native", hidden=dict.fromkeys(hidden))
        if not all(0 <= index <= self.num_layers for index in hidden):
            raise ValueError(f"hidden states are numbered 0..{self.num_layers}, got {tuple(hidden)}")
        with torch.no_grad(), self.hooked(layers, run.hidden, behind):
            logits: Tensor = self.model(**inputs, ragged=run).logits[0]
        expected = layers or self.num_layers
        if len(run.layers) != expected:
            raise UnsupportedModel(
                f"{type(self.model).__name__} called the attention interface in {len(run.layers)} of {expected} "
                f"layers: {REQUIREMENT}"
            )
        found = [run.hidden[index] for index in hidden]
        if any(states is None for states in found):
            raise UnsupportedModel(f"{type(self.model).__name__} does not show the hidden states {tuple(hidden)}")
        return logits, torch.cat(found, dim=-1) if found else logits.new_empty(len(tokens), 0)  # type: ignore[arg-type]

    def prefill(
        self,
        prompts: Mapping[int, Sequence[int]],
        cache: RaggedKVCache,
        *,
        chunk: int = 2048,
        layers: int | None = None,
        hidden: Sequence[int] = (),
    ) -> dict[int, Tensor]:
        """Runs and commits tokens of several samples, packed, at most ``chunk`` rows at a time.

        Args:
            prompts: tokens to append to each sample of the cache; may be empty.
            cache: the KV cache.
            chunk: bound on the rows of one forward, and so on its memory.
            layers: run only the first so many layers.
            hidden: hidden states that are wanted, see :meth:`run`.

        Returns:
            The ``[n, F]`` hidden states of every sample with tokens.
        """
        found: dict[int, list[Tensor]] = {sample: [] for sample, tokens in prompts.items() if tokens}
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
            _, states = self.run(packed, batch, cache, torch.zeros(1, dtype=torch.long), layers, hidden)
            cache.commit({sample: range(len(tokens)) for sample, tokens in part.items()})
            for sample, share in zip(part, states.split(list(map(len, part.values()))), strict=True):
                found[sample].append(share)
        return {sample: torch.cat(parts) for sample, parts in found.items()}

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
            raise self._unsupported(failure) from failure
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
        # Half precision rounds differently for every shape, and 8-bit weights are others; a wrong mask or position is
        # far above any of these bounds.
        bound = 0.3 if self.int8 else 1e-3 if packed.dtype in (torch.float32, torch.float64) else 0.1
        if not error < bound:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: packed logits differ from single ones by {error:.1e} of their spread "
                f"(bound {bound:.0e}); its attention uses something that packed trees do not support"
            )

    def _check_weights(self, cache: RaggedKVCache) -> None:
        """Packs changed weights again before the first forward on a cache, which holds results of one set of them."""
        if self._packing is None or cache.weights is self._packing:
            return
        if not self._packing.current():
            warnings.warn(
                "the model's weights or modules changed after they were packed; packing them again", stacklevel=3
            )
            self._packing = self._pack()
        cache.weights = self._packing

    def _pack(self) -> Packing:
        """Observes a forward and packs what it saw."""
        self._packing = None  # or its stand-ins would be observed
        with self.hooked():
            try:
                seen = observe(self.model, self.num_layers, self.vocab_size)
            except UnsupportedModel:
                raise
            except Exception as failure:
                raise self._unsupported(failure) from failure
            packing = Packing(self.model, seen, self.backend, int8=self.int8)
        if packing.left:
            warnings.warn(f"not packed, as they are not plain linears: {'; '.join(packing.left)}", stacklevel=4)
        return packing

    def _unsupported(self, failure: Exception) -> UnsupportedModel:
        return UnsupportedModel(f"{type(self.model).__name__} failed on packed tokens ({failure}): {REQUIREMENT}")

    @contextmanager
    def hooked(
        self,
        layers: int | None = None,
        hidden: dict[int, Tensor | None] | None = None,
        behind: nn.Module | None = None,
    ) -> Iterator[None]:
        """Puts our attention and the stand-ins into the model, and listens for the hidden states that are wanted.

        Args:
            layers: leave only the first so many layers.
            hidden: filled in as the layers run; see :meth:`run` for their numbers.
            behind: put this behind the last layer.

        Raises:
            ValueError: if the model is in training mode.
        """
        if self.model.training:
            raise ValueError(_TRAINING)
        before = [config._attn_implementation for config in self._configs]
        swaps = self._swaps(layers)
        originals = [modules[name] for modules, name, _ in swaps]
        listeners = tap(self._place, hidden) if hidden else []
        try:
            for config in self._configs:
                config._attn_implementation = HOOK
            for modules, name, stand_in in swaps:
                modules[name] = stand_in
            if behind is not None:
                listeners.append(insert(self._place, behind))
            yield
        finally:
            for listener in listeners:
                listener.remove()
            for (modules, name, _), original in zip(swaps, originals, strict=True):
                modules[name] = original
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation

    def _swaps(self, layers: int | None) -> list[Swap]:
        owner, name = self._place if layers else (None, "")
        if self._packing is not None:
            return self._packing.swaps(layers)
        return [(owner._modules, name, getattr(owner, name)[:layers])] if owner else []

    @cached_property
    def _place(self) -> tuple[nn.Module, str]:
        """The module that holds the list of decoder layers, and the list's name.

        Raises:
            UnsupportedModel: if there is no such list.
        """
        if place := decoder_list(self.model, self.num_layers):
            return place
        raise UnsupportedModel(
            f"{type(self.model).__name__} does not keep its {self.num_layers} layers in one list: neither early exit "
            "nor hidden states"
        )


def _max_positions(config: Any) -> int | None:
    """Greatest number of positions for which a sample's logits do not depend on its batch."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(v, dict) for v in rope.values()) else [rope]:
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = parameters.get("original_max_position_embeddings", limit)
    return limit
