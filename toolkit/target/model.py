"""Runs any Hugging Face causal LM on the packed rows of a ragged batch.

Shapes: T packed rows, R rows whose logits are returned, F hidden states side by side, V vocabulary, H hidden size.
"""

import logging
import os
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.kernels import native
from arbordraft.kernels.prepacked_linear import check_weights
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.kernels.progress import phase
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import (
    ATTENTION_NAME,
    REQUIREMENT,
    Forward,
    UnsupportedModel,
    register,
    run_layer,
    run_stack,
    unsupported,
)
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.fused_linears import RowInvariant, replace_linears
from arbordraft.target.fused_modules import Recognised, fuse
from arbordraft.target.grouped_linears import GroupedCopies, GroupedCopy
from arbordraft.target.mixers import mixers_of, run_mixers
from arbordraft.target.model_view import ModelView
from arbordraft.target.observation import decoder_list, final_module, observe
from arbordraft.target.prepacked.adapters import check_adapters, unwrapped
from arbordraft.target.prepacked.backend import Choice, choose
from arbordraft.target.prepacked.gguf_blocks import holds_blocks
from arbordraft.target.prepacked.memory import check_movable
from arbordraft.target.prepacked.prepacked_modules import PrepackedLayers
from arbordraft.target.prepacked.probing import vocabulary
from arbordraft.target.prepacked.replace import Prepacking
from arbordraft.target.prepacked.row_wise import RowWise, odd_functions
from arbordraft.target.prepacked.shortcut import Shortcut, is_unhooked
from arbordraft.target.self_test import check_logits
from arbordraft.target.states import MOST_STATES
from arbordraft.target.weight_watch import WeightsChanged, WeightWatch
from arbordraft.utils.allocator import return_freed_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Rotary embeddings whose frequencies change for the whole batch once one sample is long.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
# Layer types with one key and one value per token, whose visibility depends on positions alone.
_LAYERS = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})
_RECURRENT = frozenset({"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba"})  # layer types with states
_ROWWISE = frozenset({"mlp", "moe"})  # layer types that treat every row by itself
_TRAINING = "the model is in training mode, where dropout would change its output: call model.eval()"


@dataclass(frozen=True)
class _Prepared:
    """View of the model whose attention runs our kernels, with its prepacked and fused modules."""

    owner: "RaggedModel"
    view: ModelView
    prepacking: Prepacking | None
    layered: bool  # whether its layers lie in one ModuleList
    weights: WeightWatch
    read: WeightWatch  # the weights that forwards read from the model itself, not from copies
    shortcut: Shortcut | None = None
    fused: Recognised | None = None  # modules that run in Triton, if any may
    copies: list[GroupedCopy] = field(default_factory=list)  # weights of fewer bits on a GPU
    mixers: int = 0  # number of recurrent mixers
    odd: frozenset[str] = frozenset()  # functions around native mixers that may mix rows, or round them by their place

    def current(self) -> bool:
        return self.view.current() and self.weights.current()


class RaggedModel(nn.Module):
    """Runs a causal LM on packed tokens ``[1, T]`` of many samples at once, for prompts and for draft trees.

    The model itself stays as it is. Forwards run a second set of modules around the same parameters, whose attention is
    :func:`~arbordraft.kernels.ragged_tree_attention.ragged_tree_attention`. Any number of threads may decode with it,
    and with the model, at once. Changes of the model's weights and modules are noticed when a new cache is begun (see
    :meth:`refresh` for the one exception). A running decode keeps the modules and prepacked layers that it began with.
    If weights change that it reads from the model itself, it ends with :class:`WeightsChanged`.

    Args:
        model: a causal LM of transformers in eval mode whose attention follows the ``AttentionInterface``. It may have
            recurrent layers: short convolutions, Mamba, Mamba-2 and gated delta rules. A PEFT model is accepted if its
            adapters act within layers.
        tokenizer: its tokenizer; lets a decoder check that target and drafter agree.
        kernels: runner of the model's layers.
            ``"torch"``: the model's own modules.
            ``"native"``: C++ kernels on a CPU, built on first use. They read a prepacked copy of the weights and fuse
            the decoder layers they recognise. Every row gets the same bits regardless of the other rows. Active
            adapters of PEFT are merged into this copy, not into the model. The copy takes as much memory as the
            weights. If the weights change, it is renewed with a warning.
            ``"triton"``: the model's own linears on a GPU, and Triton kernels between them. Kernels exist for the
            norms, rotary embeddings and gated activations that are recognised. They round where the modules do, and
            read the model's own weights.
            ``"auto"``: on a CPU, native kernels if they work and a copy fits into memory; on a GPU, Triton if it is
            installed; else torch. :attr:`chosen` and a log line of the logger ``arbordraft`` (level INFO) give the
            choice and its reason.
        weights: bits of the copies that native kernels read; by default the model's own. ``"int8"``: groups of 32
            weights with one scale each, as in GGUF's Q8_0. ``"int4"``: such groups with a scale and a minimum each, as
            in its Q4_1. Both quantise activations to 8 bits, separately for every group of every row.
            ``"int8-weight-only"``: one scale per output, activations as they are. ``"dense"``: the model's dtype. It is
            the default, unless matrices lie in the blocks of a GGUF file (see :func:`~arbordraft.load`). Then these
            blocks are the default, and all other matrices keep their numbers. Fewer bits are read faster, but make
            another model: decoding preserves the output law of that one.
        keep_weights: keep the original weights of prepacked modules in memory, if they are there. Weights that lie
            unchanged in a mapped file are always left to it: transformers maps safetensors that have the model's dtype.
            Otherwise the originals move to a file of the same size in the cache folder, which is read on access.
            ``state_dict``, LoRA and ``model.generate`` then give the same results, at first more slowly. If nothing is
            prepacked, this has no effect.
        row_invariant: require equal bits for every row, regardless of the other rows. Speculative output then
            equals plain output in 16 bits, too. Native kernels guarantee this if they recognise all of a model. On an
            NVIDIA GPU, the model's linears then run in Triton as well, and attention runs row by row.
        head_of: another RaggedModel around the same model, whose prepacked head is shared, in that head's precision.
        self_test: compare packed logits with those of single texts now, on a few random tokens.

    Examples:
        >>> import transformers
        >>> config = transformers.LlamaConfig(
        ...     vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> target = RaggedModel(transformers.LlamaForCausalLM(config).eval(), kernels="torch")
        >>> target.chosen
        "torch: the model's own modules (asked for)"

    Raises:
        ValueError: if the backend asked for cannot be used here, or ``keep_weights=False`` is given for weights that
            this process does not own.
        UnsupportedModel: if some attention does not go through the interface, or an adapter of PEFT acts outside
            layers. Also if the self-test finds different logits, or ``row_invariant`` is set and a module has no
            row-invariant kernel.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        *,
        kernels: str = "auto",
        weights: str | None = None,
        keep_weights: bool = True,
        row_invariant: bool = False,
        head_of: "RaggedModel | None" = None,
        self_test: bool = True,
    ) -> None:
        super().__init__()
        given, model = model, unwrapped(model)
        check_model(model)
        if weights != "dense":
            check_weights(weights)
        self.weights = None if weights == "dense" else "file" if weights is None and holds_blocks(model) else weights
        self._choice = choose(kernels, model, weights=self.weights)
        self.keep_weights, self._invariant = keep_weights, row_invariant
        vars(self)["_head_of"] = head_of  # not registered as a submodule
        if row_invariant and (self.backend == "torch" or (self.backend == "triton" and torch.version.hip is not None)):
            why = self._choice.reason or "Triton's products are row-invariant on NVIDIA's GPUs only"
            raise ValueError(f"row_invariant=True needs kernels='native' on a CPU or 'triton' on an NVIDIA GPU: {why}")
        if not keep_weights and self.backend == "native":
            check_movable(model)
        grouped = self.backend == "triton" and self.weights == "int4"
        if self.weights and self.backend != "native" and not grouped:
            why = native.problem() or "use kernels='native'"
            raise ValueError(f"{self.weights} weights need the native kernels: {why}")
        if grouped and row_invariant:
            raise ValueError("int4 weights have no row-invariant products on a GPU: choose one of the two")
        register()
        self.model = model
        self.tokenizer = tokenizer
        self.num_layers, self.vocab_size, self.max_positions = _sizes(model)
        self._rowwise = sum(kind in _ROWWISE for kind in _kinds(model))
        self._process = os.getpid()
        self._lock = threading.Lock()
        tested = given if self_test else None
        try:
            self._begin(tested)
        except UnsupportedModel as failure:
            if kernels != "auto" or self.backend == "torch" or self.weights or row_invariant:
                raise
            subject = "prepacked weights do" if self.backend == "native" else "Triton's kernels do"
            self._choice = Choice("torch", f"{subject} not fit the model: {failure}")
            self._begin(tested)  # raises again if the copy is not at fault
            warnings.warn(f"kernels='auto' uses the model's own modules: {failure}", stacklevel=2)
        logging.getLogger("arbordraft").info("kernels: %s", self.chosen)

    def _begin(self, tested: Any) -> None:
        """Prepares for the first forward; compares logits with those of ``tested`` unless it is ``None``."""
        self._prepared = self._prepare()
        if tested is not None:
            with phase("comparing packed logits with the model's own"):
                check_logits(self, tested)
        if self.prepacking is not None:
            self.prepacking.drop_originals()
        return_freed_memory()

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the view: a copy, in this process or another, views its own model."""
        return {name: value for name, value in vars(self).items() if name not in ("_prepared", "_lock", "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        register()
        self._process, self._lock = os.getpid(), threading.Lock()
        self._prepared = self._prepare()

    @property
    def backend(self) -> str:
        """Runner of the model's layers: ``"torch"``, ``"native"`` or ``"triton"``."""
        return self._choice.backend

    @property
    def chosen(self) -> str:
        """Readable summary: the backend, the modules it computes, and the reason against a faster one."""
        prepared = self._prepared
        summary = "the model's own modules" if prepared.prepacking is None else str(prepared.prepacking)
        if prepared.fused is not None and str(prepared.fused):
            summary = f"{prepared.fused} fused" + ", all linears with them" * self._invariant
            summary += ", linears in 4 bits" * bool(prepared.copies)
        if self.prepacking is not None and not self.keep_weights:
            summary += ", originals in a file"
        return f"{self.backend}: {summary}" + (f" ({self._choice.reason})" if self._choice.reason else "")

    @property
    def row_invariant(self) -> bool:
        """Whether every part of a forward gives each row the same bits, regardless of the other rows."""
        if self.backend == "triton":
            return self._invariant
        prepared = self._prepared
        if prepared.prepacking is None:
            return False
        return prepared.prepacking.row_invariant or (prepared.mixers > 0 and not prepared.odd)

    @property
    def prepacking(self) -> Prepacking | None:
        """Prepacked modules that replace the model's own layers and linears, as of the last forward."""
        return self._prepared.prepacking

    @property
    def copies(self) -> Sequence[GroupedCopy]:
        """Copies of weights of fewer bits that a GPU reads instead of the model's own, as of the last forward."""
        return self._prepared.copies

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state, which a text can be cut back to at some places only."""
        return self._prepared.mixers > 0

    @cached_property
    def state_tokens(self) -> int:
        """Tokens whose keys and values take as many bytes as a sample's states, rounded up; 0 without such layers.

        A sample has up to four states. If the model has no attention layers, each of them counts as one token.
        """
        if not self.recurrent:
            return 0
        cache = RaggedKVCache()
        self.prefill({cache.open(1): [0]}, cache)
        return -(-cache.state_bytes // cache.row_bytes) if cache.row_bytes else MOST_STATES

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return self.model.device

    @cached_property
    def final_norm(self) -> nn.Module:
        """Module between the last decoder layer and the head.

        Raises:
            UnsupportedModel: if there are several.
        """
        view = ModelView(self.model, ATTENTION_NAME)  # a private view, as `final_module` adds hooks
        run_mixers(view.model, self.num_layers)
        if norm := final_module(view.model, self.num_layers):
            return view.original(norm)
        raise UnsupportedModel(f"{type(self.model).__name__} has more than a norm between its decoder layers and head")

    def forward(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor | None = None,
        layers: int | None = None,
        after_layers: nn.Module | None = None,
    ) -> Tensor:
        """Returns logits of packed rows, and writes keys and values after each sample's committed length.

        Args:
            tokens: ``[T]`` int64.
            batch: layout of these rows, from ``cache.lay_out``.
            cache: the KV cache to read and write.
            rows: ``[R]`` rows whose logits are returned, all T by default.
            layers: number of first layers to run (early exit), all by default.
            after_layers: module to run between these layers and the final norm; maps ``[1, T, H]`` to ``[1, T, H]``.

        Returns:
            ``[R, V]``.
        """
        return self.run(tokens, batch, cache, rows, layers, after_layers=after_layers)[0]

    def run(
        self,
        tokens: Tensor,
        batch: RaggedBatch,
        cache: RaggedKVCache,
        rows: Tensor | None = None,
        layers: int | None = None,
        hidden: Sequence[int] = (),
        after_layers: nn.Module | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Runs :meth:`forward` and also returns hidden states of all rows; the logits' bits are the same without them.

        Args:
            hidden: indices of hidden states, as transformers numbers its ``hidden_states``: the input of each decoder
                layer, then the output of the final norm.

        Returns:
            ``[R, V]`` logits and ``[T, F]`` hidden states, side by side in the order of ``hidden``.

        Raises:
            ValueError: if an index in ``hidden`` is out of range.
            UnsupportedModel: if the architecture does not expose its layers or hidden states.
        """
        device = self.device  # read once: transformers searches all parameters for it
        batch, (tokens, *wanted) = batch.upload(device, tokens, *(() if rows is None else (rows,)))
        rows = wanted[0] if wanted else None
        tokens, positions = tokens[None], batch.positions[None]
        if not all(0 <= index <= self.num_layers for index in hidden):
            raise ValueError(f"hidden states are numbered 0..{self.num_layers}, got {tuple(hidden)}")
        prepared = self._prepared_for(cache)
        if not prepared.layered and (hidden or layers is not None or after_layers is not None):
            raise UnsupportedModel(
                f"{type(self.model).__name__} does not keep its {self.num_layers} layers in one list: neither early "
                "exit nor hidden states"
            )
        if prepared.mixers and (layers is not None or after_layers is not None):
            raise UnsupportedModel(
                f"{type(self.model).__name__} has recurrent layers, whose states an early exit would leave undefined: "
                "choose a drafter that runs all layers, or none"
            )
        depth = self.num_layers if layers is None and after_layers is not None else layers
        run = Forward(
            batch,
            cache,
            self.backend == "native",
            self._invariant,
            hidden=dict.fromkeys(hidden),
            depth=depth,
            after_layers=after_layers,
        )
        with torch.no_grad(), ExitStack() as functions:
            if prepared.shortcut is not None and depth is None:
                logits: Tensor = prepared.shortcut(tokens, positions, run, rows)
            else:
                kept = slice(None) if rows is None else rows
                if prepared.mixers and prepared.prepacking is not None and not prepared.prepacking.row_invariant:
                    functions.enter_context(RowWise())
                logits = prepared.view.model(
                    input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=kept, ragged=run
                ).logits[0]
        expected = layers or self.num_layers - self._rowwise
        if len(run.layers) != expected:
            raise UnsupportedModel(
                f"{type(self.model).__name__} called the attention interface or a known recurrent layer in "
                f"{len(run.layers)} of {expected} layers: {REQUIREMENT}"
            )
        features = [run.hidden[index] for index in hidden]
        if any(states is None for states in features):
            raise UnsupportedModel(f"{type(self.model).__name__} does not show the hidden states {tuple(hidden)}")
        return logits, torch.cat(features, dim=-1) if features else logits.new_empty(tokens.shape[1], 0)  # type: ignore[arg-type]

    def prefill(
        self,
        prompts: Mapping[int, Sequence[int]],
        cache: RaggedKVCache,
        *,
        chunk: int = 2048,
        hidden: Sequence[int] = (),
    ) -> dict[int, Tensor]:
        """Runs and commits tokens of several samples, packed, at most ``chunk`` rows at a time.

        Args:
            prompts: tokens to append to each sample of the cache; may be empty.
            cache: the KV cache.
            chunk: bound on the rows of one forward, and so on its memory.
            hidden: hidden states to return, see :meth:`run`.

        Returns:
            The ``[n, F]`` hidden states of every sample with tokens.
        """
        features: dict[int, list[Tensor]] = {sample: [] for sample, tokens in prompts.items() if tokens}
        for portion in self.portions(prompts, cache, chunk=chunk, hidden=hidden):
            for sample, (states, _) in portion.items():
                features[sample].append(states)
        return {sample: torch.cat(parts) for sample, parts in features.items()}

    def portions(
        self,
        prompts: Mapping[int, Sequence[int]],
        cache: RaggedKVCache,
        *,
        chunk: int = 2048,
        hidden: Sequence[int] = (),
        logits_of: Collection[int] = (),
    ) -> Iterator[dict[int, tuple[Tensor, Tensor]]]:
        """Runs :meth:`prefill` one forward at a time.

        Args:
            prompts: tokens to append to each sample of the cache; may be empty.
            cache: the KV cache.
            chunk: bound on the rows of one forward, and so on its memory.
            hidden: hidden states to return, see :meth:`run`.
            logits_of: samples whose logits are returned.

        Yields:
            For each sample of a forward, the ``[n, F]`` hidden states and ``[n, V]`` logits of its next tokens. Samples
            that are not in ``logits_of`` get ``[0, V]``. The tokens are committed when the next forward is asked for.
        """
        for part, packed, batch in cache.portions(prompts, chunk):
            lengths = [len(tokens) for tokens in part.values()]
            wanted = torch.tensor([sample in logits_of for sample in part]).repeat_interleave(torch.tensor(lengths))
            rows = wanted.nonzero().flatten()
            few = rows if len(rows) else torch.zeros(1, dtype=torch.long)  # a model computes logits of at least one row
            logits, states = self.run(packed, batch, cache, few, hidden=hidden)
            counts = [length if sample in logits_of else 0 for sample, length in zip(part, lengths, strict=True)]
            shares = zip(states.split(lengths), logits[: len(rows)].split(counts), strict=True)
            yield dict(zip(part, shares, strict=True))

    def refresh(self) -> None:
        """Reads the model's weights and modules again, for caches that are begun from now on.

        Needed only after single elements of prepacked weights were written through ``.data``, through numpy or in
        inference mode. Torch does not count such changes, and only a few elements of each tensor are compared.
        """
        with self._lock:
            self._prepared = self._prepare()

    def begin(self, cache: RaggedKVCache) -> None:
        """Ties a cache without samples to the current weights; its first forward would do that otherwise.

        Raises:
            ValueError: if the model is in training mode, or its vocabulary or other sizes changed after it was wrapped.
        """
        cache.weights = self._latest()

    def current(self, cache: RaggedKVCache) -> bool:
        """Returns whether the model still has the weights and modules that a cache was begun with."""
        return cache.weights is self._latest()

    def check_unchanged(self, cache: RaggedKVCache) -> None:
        """Raises WeightsChanged if weights were changed or replaced that the cache's next forward would read.

        It compares no elements, so it notices only changes that torch counts.
        """
        prepared = self._prepared_for(cache)
        if not prepared.read.unchanged():
            raise WeightsChanged(
                "the model's weights changed while answers were decoded with them: change weights only when nothing is "
                "being decoded, and ask again"
            )

    def network(self) -> nn.Module:
        """Returns the modules that run; a call takes ``ragged=``, a :class:`~arbordraft.target.attention.Forward`.

        Raises:
            ValueError: if the model is in training mode.
        """
        return self._latest().view.model

    def prepared(self, view: ModelView) -> Any:
        """Returns the value for a cache's ``weights`` that makes its rows run in another view of the model."""
        run_mixers(view.model, self.num_layers)
        return replace(self._prepared, view=view, prepacking=None, layered=False, shortcut=None, fused=None, copies=[])

    def _prepared_for(self, cache: RaggedKVCache) -> _Prepared:
        """Returns the modules that a cache began with, on which its rows depend; a new cache gets the current ones."""
        prepared = cache.weights
        if not isinstance(prepared, _Prepared) or prepared.owner is not self:
            prepared = cache.weights = self._latest()
        return prepared

    def _latest(self) -> _Prepared:
        if self.model.training:
            raise ValueError(_TRAINING)
        if os.getpid() != self._process and torch.get_num_threads() > 1:
            raise RuntimeError(
                "this process was forked without its parent's OpenMP threads, and would wait for them for "
                "ever: start it with multiprocessing's 'spawn' or 'forkserver', load the model in it, or call "
                "torch.set_num_threads(1) in it first"
            )
        known = (self.num_layers, self.vocab_size, self.max_positions)
        if (found := _sizes(self.model)) != known:
            pairs = zip(("layers", "vocabulary", "positions"), known, found, strict=True)
            changes = ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)
            raise ValueError(
                f"the model's sizes changed after it was wrapped ({changes}): build RaggedModel anew, and all that was "
                "built with it"
            )
        with self._lock:
            before = self._prepared
            if before.current():
                return before
            copied = before.prepacking is not None or before.copies
            if not copied and before.view.current():  # its modules follow the weights
                watch = WeightWatch(self.model.modules())
                self._prepared = replace(before, weights=watch, read=watch)
                return self._prepared
            if copied:
                warnings.warn(
                    "the model's weights or modules changed after they were prepacked; prepacking them again",
                    stacklevel=5,
                )
            self._prepared = self._prepare()
            return self._prepared

    def _prepare(self) -> _Prepared:
        work = "prepacking weights" if self.backend == "native" else "preparing the model"
        with phase(f"{work} in {self.weights}" if self.weights else work):
            return self._build()

    def _build(self) -> _Prepared:
        check_adapters(self.model)
        view = ModelView(self.model, ATTENTION_NAME)
        place = decoder_list(view.model, self.num_layers)
        plain = place is not None and is_unhooked(view.model, getattr(*place))
        mixers = run_mixers(view.model, self.num_layers)
        prepacking, shortcut = None, None
        fused = fuse(view.model) if self.backend == "triton" else None
        layers, copies = getattr(*place) if place is not None else (), list[GroupedCopy]()
        if fused is not None and self._invariant:
            replace_linears(view.model, fused, layers, RowInvariant(), "row_invariant=True")
        if fused is not None and self.weights:
            products = GroupedCopies()
            replace_linears(view.model, fused, layers, products, f"weights={self.weights!r} on a GPU")
            copies = products.copies
        if self.backend == "native":
            prepacking = self._prepack(view)
            if self._invariant and not (mixers or prepacking.row_invariant):
                raise UnsupportedModel(
                    f"row_invariant=True needs native kernels for all of {type(self.model).__name__}: {prepacking}"
                )
            if not self.keep_weights:
                prepacking.move_originals()
            for owner, name, prepacked_module in prepacking.places:
                owner._modules[name] = prepacked_module
        if place is not None:
            for index, layer in enumerate(getattr(*place)):
                if not isinstance(layer, PrepackedLayers):
                    vars(layer)["forward"] = partial(run_layer, index, layer.forward)
            vars(place[0])["forward"] = partial(run_stack, self.num_layers, place[0].forward)
        if prepacking is not None and prepacking.stack is not None and place is not None and plain:
            shortcut = Shortcut.of(view.model, place[0])
        odd = frozenset[str]()
        if prepacking is not None and mixers and not prepacking.row_invariant:
            odd = frozenset(odd_functions(view.model, self.vocab_size))
            if self._invariant and odd:
                raise UnsupportedModel(
                    f"row_invariant=True needs row-wise functions for all of {type(self.model).__name__}, which calls "
                    f"{', '.join(sorted(odd))}"
                )
        weights = read = WeightWatch(self.model.modules())
        if prepacking is not None:
            read = WeightWatch(self.model.modules(), leave=prepacking.copied)
            prepacking.drop_originals()  # whose few elements that are watched have mapped large parts of their files
        return _Prepared(self, view, prepacking, place is not None, weights, read, shortcut, fused, copies, mixers, odd)

    def _shared_head(self) -> PrepackedLinear | None:
        other: RaggedModel | None = vars(self)["_head_of"]
        head: Any = None if other is None else other.network().get_output_embeddings()  # type: ignore[operator]
        return head if isinstance(head, PrepackedLinear) else None

    def _prepack(self, view: ModelView) -> Prepacking:
        """Observes a forward and prepacks the modules it called."""
        try:
            seen = observe(view.model, self.num_layers, self.vocab_size)
        except UnsupportedModel:
            raise
        except Exception as failure:  # modules of users may fail in any way
            raise unsupported(self.model, failure) from failure
        prepacking = Prepacking(view.model, seen, weights=self.weights, head=self._shared_head())
        if prepacking.left:
            warnings.warn(f"not prepacked, as they are not plain linears: {'; '.join(prepacking.left)}", stacklevel=6)
        return prepacking


def check_model(model: Any) -> None:
    """Raises TypeError or ValueError unless this is a causal LM of transformers that can decode as it is."""
    if isinstance(model, RaggedModel):
        raise TypeError("model is a RaggedModel already: use it as it is")
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise TypeError(
            "model must be a causal LM of transformers (AutoModelForCausalLM.from_pretrained), got "
            f"{type(model).__name__}"
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            "model was compiled by torch.compile, which would trace it anew for every step: pass the model itself "
            "(compiled._orig_mod), and buckets= with compile_backend= to the decoder for compiled steps"
        )
    head: Any = getattr(model, "get_output_embeddings", None)
    if head is None or head() is None:
        raise TypeError(
            f"{type(model).__name__} has no language-model head, so it gives no logits of next tokens: load the "
            "checkpoint with AutoModelForCausalLM"
        )
    if model.training:
        raise ValueError(_TRAINING)
    if (shards := max(getattr(model, name, None) or 1 for name in ("tp_size", "fsdp_size"))) > 1:
        raise UnsupportedModel(
            f"{type(model).__name__} is split over {shards} processes (tensor parallelism or FSDP), each with a part "
            "of it: load it whole on one device, without tp_plan= and distributed_config="
        )
    known = _LAYERS | _ROWWISE | (_RECURRENT if mixers_of(model) else frozenset())
    if others := sorted(set(_kinds(model)) - known):
        raise UnsupportedModel(
            f"{type(model).__name__} has layers of {', '.join(others)} (config.layer_types), which keep a state of an "
            f"unknown kind, or choose or compress the keys that a row sees: {REQUIREMENT}"
        )


def _kinds(model: Any) -> Sequence[str]:
    """Returns the kind of every layer, if the model's configuration has them."""
    return getattr(model.config.get_text_config(), "layer_types", None) or ()


def _sizes(model: Any) -> tuple[int, int, int | None]:
    """Returns the numbers of layers, of tokens in the vocabulary and of positions."""
    config = model.config.get_text_config()
    return config.num_hidden_layers, vocabulary(model), _max_positions(config)


def _max_positions(config: Any) -> int | None:
    """Returns the greatest number of positions for which a sample's logits do not depend on its batch."""
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in rope.values() if all(isinstance(v, dict) for v in rope.values()) else [rope]:
        if parameters.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = parameters.get("original_max_position_embeddings", limit)
    return limit
