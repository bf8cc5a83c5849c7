"""Specifies the graphs of an export: network, names, axes, examples to compare on, and metadata of the file.

Shapes: B samples, n rows of each, P keys before them.
"""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from arbordraft import EarlyExitDrafter, RaggedModel
from arbordraft.checkpoints.vocabulary import tokenizer_hashes
from arbordraft.drafters.language_model import shrink
from arbordraft.exports.onnx import networks
from arbordraft.exports.onnx.cases import Inputs, Shape, chain, padded, past_of, trees
from arbordraft.exports.onnx.checks import cache_sizes, check_against
from arbordraft.heads.base import DraftHead, fingerprint
from arbordraft.heads.block import BlockHead
from arbordraft.heads.eagle import EagleHead
from arbordraft.heads.exit_adapter import ExitAdapter
from arbordraft.heads.medusa import MedusaHead
from arbordraft.onnx.graph import FUSE, MARKOV, MODEL, PAST, PRESENT
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.observation import decoder_list

_ROWS: Mapping[str, Mapping[int, str]] = {
    "input_ids": {0: "batch_size", 1: "sequence_length"},
    "attention_mask": {0: "batch_size", 2: "sequence_length", 3: "total_sequence_length"},
    "position_ids": {0: "batch_size", 1: "sequence_length"},
}
_PAST_AXES = {0: "batch_size", 2: "past_sequence_length"}


@dataclass(frozen=True)
class GraphSpec:
    """The specification of one graph.

    Args:
        file: name of the file.
        network: the network to trace; takes the example's tensors in their order, returns a list.
        outputs: names of the outputs.
        axes: names of the sizes that may vary, for every input.
        example: makes inputs of a shape, from a generator.
        about: metadata of the file.
        real: makes realistic inputs, to measure the acceptance of a quantised graph; ``None`` if it predicts no tokens.
        quantizable: whether its matrices are worth quantising.
        build: makes the ``onnx.ModelProto`` for an opset where torch's exporter would not trace the network faithfully.
    """

    file: str
    network: nn.Module
    outputs: Sequence[str]
    axes: Mapping[str, Mapping[int, str]]
    example: Callable[[Shape, torch.Generator], Inputs]
    about: Mapping[str, Any]
    real: Callable[[], Iterable[Inputs]] | None = None
    quantizable: bool = True
    build: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Origin:
    """The target that an export belongs to, in float32, and token ids to measure quantised graphs on."""

    target: RaggedModel
    name: str | None = None
    texts: Sequence[Sequence[int]] = ()

    def about(self) -> dict[str, Any]:
        """Returns the metadata that every file has about its target."""
        tokenizer = self.target.tokenizer
        return {
            "vocab_size": self.target.vocab_size,
            "target_name": self.name,
            "target_revision": getattr(self.target.model.config, "_commit_hash", None),
            "target_fingerprint": fingerprint(self.target.model),
            **({"tokenizer_sha256": None} if tokenizer is None else tokenizer_hashes(tokenizer)),
        }


def causal_lm(
    model: RaggedModel, origin: Origin, hidden_layers: Sequence[int] = (), *, causal: bool = False
) -> GraphSpec:
    """Specifies a causal LM that drafts for a target, or is the target and verifies trees.

    Args:
        model: the model.
        origin: the target that it serves, or is.
        hidden_layers: hidden states to return, as transformers numbers them.
        causal: whether to take chains only, with the padding mask of runtimes for chains.

    Raises:
        UnsupportedModel: if its cache or its mask is of another kind.
        ValueError: if there is no such layer.
    """
    if not all(0 <= layer <= model.num_layers for layer in hidden_layers):
        raise ValueError(f"hidden states are numbered 0..{model.num_layers}, got {list(hidden_layers)}")
    network = networks.CausalNetwork(model.model, hidden_layers, causal=causal)
    sizes = cache_sizes(model.model)
    check_against(network, model.model, sizes)

    def example(shape: Shape, generator: torch.Generator) -> Inputs:
        rows = trees(shape, model.vocab_size, generator)
        if causal:
            rows |= padded(shape, generator)
        empty = past_of(Shape(shape.batch, 0, 0), sizes, generator)
        if not shape.past:
            return rows | empty
        # Made by the model: with random keys and values, rounding in float32 grows tenfold.
        texts = torch.randint(model.vocab_size, (shape.batch, shape.past), generator=generator)
        before = chain(texts, causal=causal) | empty
        with torch.no_grad():
            present = network(*before.values())[-len(empty) :]
        return rows | dict(zip(empty, present, strict=True))

    def real() -> Iterable[Inputs]:
        for text in origin.texts:
            yield chain([text], causal=causal) | past_of(Shape(1, 0, 0), sizes, torch.Generator())

    axes: dict[str, Mapping[int, str]] = dict(_ROWS)
    if causal:
        axes["attention_mask"] = {0: "batch_size", 1: "total_sequence_length"}
    return GraphSpec(
        file=MODEL,
        network=network,
        outputs=["logits", *["hidden_states"] * bool(hidden_layers), *_names(PRESENT, sizes)],
        axes=axes | dict.fromkeys(_names(PAST, sizes), _PAST_AXES),
        example=example,
        about={
            **origin.about(),
            "kind": "causal-lm",
            # A model that shares no weights with the target serves any target with its tokenizer.
            "target_fingerprint": None,
            "fingerprint": fingerprint(model.model),
            "vocab_size": model.vocab_size,
            "hidden_layers": list(hidden_layers),
            "max_positions": model.max_positions,
        },
        real=real,
    )


def early_exit(origin: Origin, layers: int, adapter: ExitAdapter | None = None, *, causal: bool = False) -> GraphSpec:
    """Specifies the target's first layers with its norm and head, and an adapter, if any; see :func:`causal_lm`.

    Raises:
        UnsupportedModel: if the architecture cannot be shortened.
        ValueError: if there are no such layers, or the adapter belongs to another target.
    """
    target = origin.target
    EarlyExitDrafter(target, layers, None if adapter is None else deepcopy(adapter))  # checks
    small = shrink(target.model, range(layers))
    place = decoder_list(small, layers)
    if adapter is not None and place is not None:
        getattr(*place)[-1].register_forward_hook(_through(adapter.float().eval()))
    model = RaggedModel(small, target.tokenizer, self_test=False, kernels="torch")
    spec = causal_lm(model, origin, causal=causal)
    own = {"kind": "early-exit", "layers": layers, "target_fingerprint": fingerprint(target.model)}
    return replace(spec, about={**spec.about, **own})


def _through(module: nn.Module) -> Callable[..., Any]:
    """Returns a hook that applies a module after a decoder layer."""

    def take_first(_: nn.Module, __: Any, output: Any) -> Any:
        return module(output) if isinstance(output, Tensor) else (module(output[0]), *output[1:])

    return take_first


def eagle(head: EagleHead, origin: Origin) -> list[GraphSpec]:
    """Specifies an EAGLE head: the graph that fuses the target's hidden states, and the graph that drafts.

    Raises:
        ValueError: if it belongs to another target, or is not a plain head of one layer.
    """
    head.config.check_plain("the export to ONNX")
    head.check_target(origin.target.model)
    config, layers = head.config, tuple(head.config.hidden_layers or ())
    width = len(layers) * config.target_hidden_size
    sizes = [(config.num_key_value_heads, config.head_dim, config.head_dim)]
    about = {**origin.about(), **_of_head(head), "max_positions": config.max_position_embeddings}

    def example(shape: Shape, generator: torch.Generator) -> Inputs:
        rows = trees(shape, config.vocab_size, generator)
        states = torch.randn(shape.batch, shape.rows, config.hidden_size, generator=generator)
        return _with_states(rows, states) | past_of(shape, sizes, generator)

    @torch.no_grad()
    def real() -> Iterable[Inputs]:
        for text in origin.texts:
            fused = head.fuse(_states(origin.target, text, layers)[:-1])[None]
            yield _with_states(chain([text[1:]]), fused) | past_of(Shape(1, 0, 0), sizes, torch.Generator())

    def states(shape: Shape, generator: torch.Generator) -> Inputs:
        return {"hidden_states": torch.randn(shape.batch, shape.rows, width, generator=generator)}

    plain = {0: "batch_size", 1: "sequence_length"}
    return [
        GraphSpec(
            file=FUSE,
            network=networks.FuseNetwork(head),
            outputs=["fused"],
            axes={"hidden_states": plain},
            example=states,
            about={**about, "kind": "eagle-fuse"},
            quantizable=False,  # a thousandth of the work
        ),
        GraphSpec(
            file=MODEL,
            network=networks.EagleNetwork(head, origin.target.model.get_input_embeddings()),
            outputs=["logits", "last_hidden_state", "hidden_states_out", *_names(PRESENT, sizes)],
            axes=_with_states(_ROWS, plain) | dict.fromkeys(_names(PAST, sizes), _PAST_AXES),
            example=example,
            about={**about, "kind": "eagle"},
            real=real,
        ),
    ]


def block(head: BlockHead, origin: Origin) -> list[GraphSpec]:
    """Specifies a block head: an EAGLE head's graphs with depths among the inputs, and the Markov term, if any.

    Raises:
        ValueError: if it belongs to another target.
    """
    fuse, slots = eagle(head, origin)
    config, embeddings = head.config, origin.target.model.get_input_embeddings()
    own = {"kind": "block", **{name: getattr(config, name) for name in ("block_size", "markov_rank", "mask_token_id")}}

    def example(shape: Shape, generator: torch.Generator) -> Inputs:
        depths = torch.randint(config.block_size, (shape.batch, shape.rows), generator=generator)
        return _with_depths(slots.example(shape, generator), depths)

    def nodes(shape: Shape, generator: torch.Generator) -> Inputs:
        rows = shape.batch * shape.rows
        tokens = torch.randint(config.vocab_size, (rows,), generator=generator)
        return {"input_ids": tokens, "gates": 2 * torch.rand(rows, config.markov_rank, generator=generator)}

    def real() -> Iterable[Inputs]:
        for inputs in slots.real() if slots.real else ():
            yield _with_depths(inputs, torch.zeros_like(inputs["input_ids"]))

    found = [
        replace(fuse, about={**fuse.about, "kind": "block-fuse"}),
        replace(
            slots,
            network=networks.BlockNetwork(head, embeddings),
            outputs=["logits", "last_hidden_state", *["gates"] * bool(config.markov_rank), *slots.outputs[3:]],
            axes=_with_depths(slots.axes, slots.axes["input_ids"]),
            example=example,
            about={**slots.about, **own},
            real=real,
        ),
    ]
    if config.markov_rank:
        term = GraphSpec(
            file=MARKOV,
            network=networks.MarkovNetwork(head, embeddings, origin.target.vocab_size),
            outputs=["logits"],
            axes={name: {0: "batch_size"} for name in ("input_ids", "gates")},
            example=nodes,
            about={**fuse.about, "kind": "block-markov"},
            quantizable=False,  # a tenth of the head
        )
        found.append(term)
    return found


def medusa(head: MedusaHead, origin: Origin) -> GraphSpec:
    """Specifies Medusa heads.

    Raises:
        ValueError: if they belong to another target.
    """
    head.check_target(origin.target.model)
    layers = (origin.target.num_layers,)

    def real() -> Iterable[Inputs]:
        for text in origin.texts:
            yield {"hidden_states": _states(origin.target, text, layers)}

    return GraphSpec(
        file=MODEL,
        network=networks.MedusaNetwork(head),
        outputs=["logits"],
        axes={"hidden_states": {0: "batch_size"}},
        example=lambda shape, generator: {
            "hidden_states": torch.randn(shape.batch * shape.rows, head.config.target_hidden_size, generator=generator)
        },
        about={**origin.about(), **_of_head(head), "kind": "medusa", "num_heads": head.config.num_heads}
        | {"hidden_layers": list(layers)},
        real=real,
    )


def _with_states(rows: Mapping[str, Any], states: Any) -> dict[str, Any]:
    """Puts hidden states after the tokens, their place among the inputs."""
    return {"input_ids": rows["input_ids"], "hidden_states": states, **rows}


def _with_depths(inputs: Mapping[str, Any], depths: Any) -> dict[str, Any]:
    """Puts depths after the hidden states."""
    first = ("input_ids", "hidden_states")
    return {**{name: inputs[name] for name in first}, "depths": depths, **inputs}


def _names(pattern: str, sizes: Sequence[Any]) -> list[str]:
    return [pattern.format(layer, part) for layer in range(len(sizes)) for part in ("key", "value")]


def _states(target: RaggedModel, text: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Computes ``[n, F]`` hidden states of the target along a text."""
    cache = RaggedKVCache()
    handle = cache.open(len(text))
    return target.prefill({handle: text}, cache, hidden=layers)[handle]


def _of_head(head: DraftHead) -> dict[str, Any]:
    marks = numpy.packbits(head.t2d.numpy(), bitorder="little").tobytes()
    return {
        "hidden_layers": list(head.config.hidden_layers or ()),
        "acceptance": head.config.acceptance,
        "d2t": head.d2t.tolist(),
        "t2d": base64.b64encode(marks).decode(),  # one bit per token, the lowest first
    }
