"""Models of known shapes with random weights, made on their device, and decodes whose steps are timed.

Shapes: B samples, L tokens of a prompt.
"""

import gc
import time
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from arbordraft import Coupling, Lifted, RecursiveRejection, WithoutReplacement
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.drafters import Drafter, EagleDrafter, NoDrafter, SelfDrafter
from arbordraft.heads.eagle import EagleHead
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arborlab.gpu.hybrids import HYBRIDS, attention_settings, random_model
from arborlab.gpu.sizes import DEPTH, SHAPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ON_GPU = ("llama-3.1-8b", "smollm2-135m", "qwen3-0.6b")
BESIDE = "attention beside "  # begins the name of an attention model of as many bytes as a hybrid
DRAFT_VOCABULARY = 32000  # most tokens that a head drafts
CHAIN, TREE = TreeTopology.chain(4), TreeTopology.from_k_config((4, 2, 1))
LONG_CHAIN = TreeTopology.chain(DEPTH)
_SPARE = 128  # rows of a long text for its new tokens
_WARM = 3  # tokens of a first decode, which compiles and records


class Decoded(NamedTuple):
    """A decode with the times of its steps.

    Args:
        times: ends of all steps, in seconds.
        text: tokens of the first sample, its prompt included.
        stats: counts; ``None`` for transformers' own ``generate``.
    """

    times: list[float]
    text: list[int]
    stats: DecodeStats | None

    @property
    def ms(self) -> float:
        """Median milliseconds between steps, without the first interval if there are enough; 0 for one step."""
        times = self.times[1:] if len(self.times) > 3 else self.times
        return 1e3 * median(end - begin for begin, end in pairwise(times)) if len(times) > 1 else 0.0


Decode = Callable[[int], Decoded]


class Unread(RaggedModel):
    """A target that reads no prompts: it commits their rows as they lie in the cache, with zeros or older numbers.

    Steps take the time that they take after prompts which were read.
    """

    def portions(self, prompts: Any, cache: Any, *, chunk: int = 2048, hidden: Any = (), logits_of: Any = ()) -> Any:
        if next(cache.buffers(), None) is None:  # the first forward makes the pools
            yield from super().portions(prompts, cache, chunk=chunk, hidden=hidden, logits_of=logits_of)
            return
        for part, _, _ in cache.portions(prompts, chunk):
            nothing = torch.empty(chunk, 0, device=self.device)
            yield {sample: (nothing[: len(tokens)], nothing[:0]) for sample, tokens in part.items()}


class ShapeModel:
    """One model of random weights, its targets, a random head and a prompt of random tokens.

    Args:
        name: a key of ``SHAPES`` or ``HYBRIDS``; of the latter also behind ``BESIDE``.
        device: device of the weights, which are bfloat16 on a GPU and float32 elsewhere.
        seed: seed of weights and prompt.
        layers: number of layers; by default the shape's own.
    """

    def __init__(self, name: str, device: torch.device, seed: int, layers: int | None = None) -> None:
        self.name, self.device = name, device
        torch.manual_seed(seed)
        self.model = _model(name, device, layers)
        self.context = 512 if device.type == "cuda" else 8
        self.ids = torch.randint(10, self.model.config.vocab_size, (1, self.context), device=device)

    @cached_property
    def own(self) -> RaggedModel:
        """The target with the model's own modules."""
        return RaggedModel(self.model, kernels="torch", self_test=False)

    @cached_property
    def target(self) -> RaggedModel:
        """The target with Triton kernels on a GPU."""
        return RaggedModel(self.model, kernels="triton", self_test=False) if self.device.type == "cuda" else self.own

    @cached_property
    def invariant(self) -> RaggedModel:
        """The target with row-invariant Triton kernels: every row has the bits that it has alone."""
        return RaggedModel(self.model, kernels="triton", row_invariant=True, self_test=False)

    @cached_property
    def head(self) -> EagleHead:
        """An EAGLE head for the first tokens of the vocabulary, with random weights."""
        layers, tokens = self.model.config.num_hidden_layers, min(DRAFT_VOCABULARY, self.model.config.vocab_size)
        shown = sorted({1, layers // 2, layers - 1})
        head: Any = EagleHead.for_target(self.model, list(range(tokens)), hidden_layers=shown)
        return head.to(self.device, self.model.dtype)

    @cached_property
    def unread(self) -> RaggedModel:
        """The target with its usual kernels, which reads no prompts."""
        return Unread(self.model, kernels=self.target.backend, self_test=False)

    @cached_property
    def copied(self) -> SelfDrafter:
        """The target's copy of 4 bits, which drafts for it."""
        return SelfDrafter(self.target)

    def request(self, count: int, ids: Tensor | None = None, drawn: bool = False) -> dict[str, Any]:
        """Returns arguments of ``generate`` for ``count`` greedy or drawn tokens; by default after its own prompt."""
        fixed = {"do_sample": drawn, "eos_token_id": None, "pad_token_id": 0}
        mask = torch.ones_like(self.ids if ids is None else ids)
        return {"attention_mask": mask, "max_new_tokens": count, **fixed}

    def generated(self, count: int) -> Decoded:
        """Decodes with transformers' own ``generate``."""
        clock, generate = _clock(), self.model.generate
        text: Tensor = generate(  # type: ignore[operator]
            self.ids, streamer=clock, min_new_tokens=count, **self.request(count)
        )
        return Decoded(clock.times[1:], text[0].tolist(), None)  # the prompt comes first

    def by(self, decoder: SpeculativeDecoder, ids: Tensor | None = None, drawn: bool = False) -> Decode:
        """Returns a function that decodes with ``decoder`` after ``[B, L]`` prompts, by default the model's own.

        Tokens are greedy, or ``drawn`` at temperature 1.
        """
        given = self.ids if ids is None else ids

        def decode(count: int) -> Decoded:
            times: list[float] = []
            decoder.on_step = lambda *_: times.append(time.perf_counter())
            output: Any = decoder.generate(given, return_dict_in_generate=True, **self.request(count, given, drawn))
            return Decoded(times, output.sequences[0].tolist(), output.stats)

        return decode

    def plain(self, rows: int | None = 1, target: RaggedModel | None = None) -> SpeculativeDecoder:
        """Builds a decoder without drafts whose steps have ``rows`` rows; ``None`` leaves steps unrecorded."""
        return SpeculativeDecoder(target or self.target, NoDrafter(), buckets=None if rows is None else (rows,))

    def long(self, samples: int, keys: int, drafts: bool) -> Decode:
        """Returns a function that decodes after long prompts, which are not read, if wanted with drafts of a copy."""
        ids = torch.randint(10, self.model.config.vocab_size, (samples, keys), device=self.device)
        drafter: Drafter = SelfDrafter(self.unread) if drafts else NoDrafter()
        tree = LONG_CHAIN if drafts else TreeTopology.chain(0)
        rows = samples * tree.num_nodes
        # A bound, as pools without one grow to twice their need.
        bound = samples * (keys + _SPARE) + 4 * rows
        decoder = SpeculativeDecoder(self.unread, drafter, tree, buckets=(rows,), max_cache_tokens=bound)
        return self.by(decoder, ids)

    def drafting(self, tree: TreeTopology, coupling: Coupling | None = None) -> SpeculativeDecoder:
        """Builds a decoder that drafts with the head, by default with the usual coupling."""
        drafter = EagleDrafter(self.head, self.target)
        return SpeculativeDecoder(self.target, drafter, tree, coupling, buckets=(tree.num_nodes,))

    def drawing(self, tree: TreeTopology) -> Decode:
        """Returns a function that decodes at temperature 1, with drafts that the head draws and lifted rejection."""
        law = WithoutReplacement(max(map(len, tree.child_list)))
        return self.by(self.drafting(tree, Coupling(law, Lifted(RecursiveRejection()))), drawn=True)

    def warm_up(self) -> None:
        """Compiles all kernels that the decoders of this model need."""
        plain = [self.plain(rows) for rows in (1, 8, 32, 128)]
        if self.device.type == "cuda":
            plain += [self.plain(rows, self.invariant) for rows in (1, 32)]
            plain.append(SpeculativeDecoder(self.target, self.copied, LONG_CHAIN, buckets=(LONG_CHAIN.num_nodes,)))
        for decoder in (*plain, self.drafting(CHAIN), self.drafting(TREE)):
            self.by(decoder)(_WARM)
        for tree in (CHAIN, TREE):
            self.drawing(tree)(_WARM)


class ShapeModels:
    """Makes models on demand and keeps only the last one; for arguments see :class:`ShapeModel`."""

    def __init__(self, device: torch.device, seed: int, layers: int | None = None) -> None:
        self.device, self.seed, self.layers = device, seed, layers
        self._kept: ShapeModel | None = None

    def get(self, name: str) -> ShapeModel:
        """Returns the model of a name."""
        if self._kept is None or self._kept.name != name:
            self._kept = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._kept = ShapeModel(name, self.device, self.seed, self.layers)
        return self._kept


def _model(name: str, device: torch.device, layers: int | None) -> "PreTrainedModel":
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if (hybrid := name.removeprefix(BESIDE)) in HYBRIDS and name not in SHAPES:
        kind, settings = HYBRIDS[hybrid]
        if hybrid != name:
            kind, settings = "Llama", attention_settings(random_model(kind, settings, dtype, "meta"))
        made = random_model(kind, settings, dtype, device)
        made.generation_config.eos_token_id = None
        return made.requires_grad_(False)
    shape = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            if name.startswith("qwen3"):
                model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, max_position_embeddings=65536))
            else:
                model = LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=65536))
    finally:
        torch.set_default_dtype(kept)
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def _clock() -> Any:
    """Returns a streamer that notes the times of tokens."""
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Tensor) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    return Clock()
