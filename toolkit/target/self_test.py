"""Tests whether packed rows give the logits that the model itself gives for each path alone.

Shapes: V vocabulary.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from arbordraft.checkpoints.reader import check_finite
from arbordraft.target.attention import ATTENTION_NAME, UnsupportedModel, current, unsupported
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.hf_cache import cache_argument, empty_cache, returned_cache
from arbordraft.target.model_view import ModelView, is_config
from arbordraft.target.observation import decoder_list, forget
from arbordraft.target.prepacked.gguf_blocks import FileBlocks
from arbordraft.target.prepacked.recognition import settings
from arbordraft.trees.topology import TreeTopology, ancestor_words

TREE = TreeTopology.from_parents([-1, 0, 0, 1])
PROMPTS = (5, 2)  # tokens
SPANS = ("attention_chunk_size", "sliding_window")  # settings that bound the reach of a layer's attention
SHORT = 4  # tokens of a shortened span, so that the test's texts exceed it
HEAD_ROWS = 2048  # rows of a head in blocks of a file that are compared
PERTURBATIONS = 16  # forwards that look for steps in a model's output, as quantised activations cause them
_MOST_OUTCOMES = 64  # outcomes of rounding that are compared in 16 bits
PERTURBATION = 3e-6  # relative noise of these forwards, or the rounding of the model's type if that is greater
WIDE = (torch.float32, torch.float64)
ROUNDING = 1e-3  # bound on the rounding of float32 and float64 logits, relative to their spread
MOST_INFLUENCE = 0.2  # bound on the effect of other rows or rounding on the model's logits, relative to their spread


class PackedModel(Protocol):
    """The parts of :class:`~arbordraft.target.model.RaggedModel` that the test runs."""

    model: Any
    weights: str | None
    vocab_size: int
    max_positions: int | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the logits of packed rows."""

    def prefill(self, prompts: Mapping[int, Sequence[int]], cache: RaggedKVCache) -> Any:
        """Reads prompts into a cache."""

    def prepared(self, view: ModelView) -> Any:
        """Returns the model's weights as forwards through this view read them."""


def check_logits(target: PackedModel, given: Any = None) -> None:
    """Compares packed logits of two prompts and a small tree with those of single texts.

    Within a window or chunk of the model's attention the logits may agree, and beyond it differ. If texts may be longer
    than that, copies of the modules with windows and chunks of a few tokens are compared, too.

    Args:
        target: the model to test.
        given: the wrapper from which the model was taken; it must give the same logits.

    Raises:
        ValueError: if the weights are on the meta device, or hold NaN or infinities.
        UnsupportedModel: if the logits differ by more than rounding.
    """
    if any(parameter.is_meta for parameter in target.model.parameters()):
        raise ValueError("the model's weights are on the meta device, which holds no numbers: load it onto another")
    name = type(target.model).__name__
    fault = (
        f"{name} has something that packed trees do not support (positions that it counts by itself, scores that are "
        "more than one softmax, a mask or state of its own): packed logits differ from single ones"
    )
    cache, own = RaggedKVCache(), ModelView(target.model).model
    for layer in _layers(own):
        layer.register_forward_hook(forget)
    if target.weights:  # the model's own weights tell whether it can be packed
        own, packed = thinned(target.model)
        cache.weights = target.prepared(packed)
        _check_weights(target, fault)
    _compare(target, own, cache, fault)
    if given is not None and given is not target.model:
        cache = RaggedKVCache()
        cache.weights = target.prepared(ModelView(target.model, ATTENTION_NAME))
        outside = f"{type(given).__name__} computes something outside of the {name} that it wraps: the logits differ"
        _compare(target, given, cache, outside)

    spans = exceeded_spans(target)
    if not spans:
        return
    own, packed = thinned(target.model)
    for model in (own, packed.model):
        _shorten(model, spans)
    cache = RaggedKVCache()
    cache.weights = target.prepared(packed)
    named = ", ".join(f"{span}={length}" for span, length in spans.items())
    fault = (
        f"{name}: beyond {named} packed logits would differ from single ones. It does not tell transformers' "
        "AttentionInterface about that limit, or keeps to it with a cache only; for texts within it, set "
        f"model.config.max_position_embeddings = {min(spans.values())} before it is wrapped. With a limit of {SHORT} "
        "tokens they differ"
    )
    _compare(target, own, cache, fault, cached=True)


def thinned(model: Any) -> tuple[Any, ModelView]:
    """Returns two views of a model that skip most layers, the second one with our attention.

    Layers of one kind differ in weights alone, so one shows how all of them see rows. Of each kind the first and the
    last layer stay, and the model's middle layer. Of a head in blocks of a file, only some rows stay. Models with other
    lists of layers stay whole.
    """
    own, packed = ModelView(model), ModelView(model, ATTENTION_NAME)
    for view in (own, packed):
        layers = _layers(view.model)
        kinds: dict[Any, list[int]] = {}
        for index, layer in enumerate(layers):
            kinds.setdefault(settings(view.original(layer)), []).append(index)
        kept = {len(layers) // 2, *(end for alike in kinds.values() for end in (alike[0], alike[-1]))}
        outputs: list[type] = []
        for index, layer in enumerate(layers):
            vars(layer)["forward"] = (
                partial(_skip, index, outputs) if index not in kept else partial(_note, outputs, layer.forward)
            )
        _shrink_head(view.model)
    return own.model, packed


def _layers(model: Any) -> list[nn.Module]:
    """Returns the decoder layers of a model; none if they are not in one list."""
    place = decoder_list(model, model.config.get_text_config().num_hidden_layers)
    return [] if place is None else list(getattr(*place))


def _note(outputs: list[type], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a layer and records the type of its output."""
    found = forward(*args, **kwargs)
    outputs.append(type(found))
    return found


def _skip(index: int, outputs: list[type], *args: Any, **kwargs: Any) -> Any:
    """Returns the input of a skipped layer, in the form in which the layers before it returned theirs."""
    hidden = args[0] if args else kwargs["hidden_states"]
    if (ragged := kwargs.get("ragged") or current()) is not None:
        ragged.layers.setdefault(index, None)
    return (hidden,) if issubclass(outputs[-1], tuple) else hidden


def _shrink_head(model: Any) -> None:
    """Replaces a view's head in blocks of a file by one with the first rows of it, as its whole is large."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not isinstance(head.weight, FileBlocks):
        return
    rows = torch.arange(min(HEAD_ROWS, len(head.weight)))
    small = nn.utils.skip_init(nn.Linear, head.in_features, len(rows), bias=head.bias is not None)
    small.weight = nn.Parameter(head.weight.rows(rows), requires_grad=False)
    if head.bias is not None:
        small.bias = nn.Parameter(head.bias.detach()[rows], requires_grad=False)
    for module in model.modules():
        for name, child in module._modules.items():
            if child is head:
                module._modules[name] = small.eval()


def _check_weights(target: PackedModel, fault: str) -> None:
    """Compares packed logits of weights with fewer bits with those of single texts and the same weights."""
    prompts, tree, paths = _texts(target)
    packed = _packed_logits(target, prompts, tree, TREE, RaggedKVCache())
    rows = []
    for text in (prompt + path for prompt in prompts for path in paths):
        cache = RaggedKVCache()
        batch = cache.lay_out([cache.open(len(text))], [range(len(text))])
        rows.append(target(torch.tensor(text), batch, cache, torch.tensor([len(text) - 1]))[0])
    _check(target, packed, torch.stack(rows), f"{fault} with {target.weights} weights")


def exceeded_spans(target: PackedModel) -> dict[str, int]:
    """Returns the windows and chunks of a model's attention that are shorter than its longest text."""
    config = target.model.config.get_text_config()
    lengths = {span: getattr(config, span, None) for span in SPANS}
    longest = target.max_positions or float("inf")
    return {span: length for span, length in lengths.items() if isinstance(length, int) and 0 < length < longest}


def _shorten(model: nn.Module, spans: dict[str, int]) -> None:
    """Shortens windows and chunks in all modules and configurations of a view."""
    places: dict[int, Any] = {}
    for module in model.modules():
        places |= {id(place): place for place in (module, *filter(is_config, vars(module).values()))}
    for place in places.values():
        for span, length in spans.items():
            kept = vars(place).get(span)
            if isinstance(kept, int) and kept >= length:  # some modules count one token more than the configuration
                setattr(place, span, SHORT + kept - length)


def _compare(target: PackedModel, model: Any, cache: RaggedKVCache, fault: str, *, cached: bool = False) -> None:
    """Raises unless packed rows give the logits of ``model`` for single paths; with ``cached``, from its own cache."""
    prompts, tree, paths = _texts(target)
    texts = [prompt + path for prompt in prompts for path in paths]

    def own(model: Any) -> Tensor:
        if cached:
            return torch.stack([_cached_logits(model, prompt, path) for prompt in prompts for path in paths])
        return _own_logits(model, texts)

    packed, expected = _packed_logits(target, prompts, tree, TREE, cache), own(model)
    if _distance(target, packed, expected) < _bound(target):
        return
    alone = batched = expected
    if not cached:
        alone = torch.cat([_own_logits(model, [text]) for text in texts])
        batched = torch.cat([_own_logits(model, [text, text[::-1]])[:1] for text in texts])
    perturbed = _perturbed(model)
    _explain(target, type(model).__name__, packed, expected, alone, batched, lambda: own(perturbed), fault)


def _explain(
    target: PackedModel,
    name: str,
    packed: Tensor,
    expected: Tensor,
    alone: Tensor,
    batched: Tensor,
    rounded: Callable[[], Tensor],
    fault: str,
) -> None:
    """Raises the reason why packed logits differ; only warns if the model itself rounds that coarsely.

    Args:
        target: the model to test.
        name: name of the model's class.
        packed: ``[R, V]`` packed logits.
        expected: the model's own logits, all texts in one forward.
        alone: the same logits, one text at a time.
        batched: the same logits, each text beside another one.
        rounded: returns the model's own logits, rounded in another way at each call.
        fault: message if the model is not at fault.
    """
    moved, known = _distance(target, batched, alone), False
    if _is_wide(target):
        moved = max(moved, *(_distance(target, rounded(), expected) for _ in range(PERTURBATIONS)))
    else:  # rounding moves tokens to other experts, which gives a text one of a few outcomes
        known = all(is_outcome(rows, [expected, alone], rounded, _bound(target)) for rows in (packed, batched))
    if moved < _bound(target) and not known:
        if not _distance(target, expected, alone) < _bound(target):
            raise UnsupportedModel(f"{name} is not causal: its tokens see later ones (is_decoder=False?)")
        _check(target, packed, expected, fault)
    if not moved < MOST_INFLUENCE and not known:
        raise UnsupportedModel(
            f"{name} itself gives a text other logits when other texts run beside it or a sum is rounded otherwise, by "
            f"{moved:.1e} of their spread: its rows depend on each other, as where activations are quantised with one "
            "scale for all rows, or draw random numbers. Drafts would change its output: quantise weights only, or "
            "activations row by row"
        )
    if not known:
        _check(target, packed, expected, fault, 3 * moved)
    moved = max(moved, _distance(target, packed, expected))
    warnings.warn(
        f"{name} itself gives a text other logits when other texts run beside it or a sum is rounded otherwise, by "
        f"{moved:.1e} of their spread, as where activations are quantised, or 16 bits decide between experts: drafts "
        "have the same effect",
        stacklevel=6,
    )


def _perturbed(model: Any) -> Any:
    """Returns a view of a model whose embeddings carry noise of the size of rounding, new in each forward."""
    view = ModelView(model).model
    noise = torch.Generator(model.device).manual_seed(0)

    view.get_input_embeddings().register_forward_hook(lambda _, __, out: perturb(out, noise))
    return view


def perturb(values: Tensor, generator: torch.Generator) -> Tensor:
    """Returns values that carry noise of the size of rounding."""
    size = max(PERTURBATION, torch.finfo(values.dtype).eps)  # a smaller one would be rounded away
    wide = torch.promote_types(values.dtype, torch.float32)
    noise = torch.randn(values.shape, generator=generator, device=values.device, dtype=wide)
    return (values * (1 + size * noise)).to(values.dtype)


def _texts(target: PackedModel) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """Returns prompts, the tokens of a tree that follows each of them, and the paths of the tree."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(target.vocab_size, (n,), generator=generator).tolist() for n in PROMPTS]
    tree = torch.randint(target.vocab_size, (TREE.num_nodes,), generator=generator).tolist()
    return prompts, tree, [[tree[node] for node in TREE.path(end)] for end in range(TREE.num_nodes)]


def _check(target: PackedModel, packed: Tensor, expected: Tensor, fault: str, bound: float | None = None) -> None:
    """Raises if ``[R, V]`` logits differ by more than rounding."""
    bound = _bound(target) if bound is None else bound
    if not (error := _distance(target, packed, expected)) < bound:
        raise UnsupportedModel(f"{fault} by {error:.1e} of their spread (bound {bound:.0e})")


def _bound(target: PackedModel) -> float:
    """Returns how far rounding may move the model's logits, relative to their spread."""
    return bound_of(target.model.dtype)


def bound_of(dtype: torch.dtype) -> float:
    """Returns how far rounding in a type may move logits, relative to their spread."""
    # Half precision rounds differently for every shape; a wrong mask or position is far above any of these bounds.
    return ROUNDING if dtype in WIDE else 0.1


def _is_wide(target: PackedModel) -> bool:
    return target.model.dtype in WIDE


def _distance(target: PackedModel, actual: Tensor, expected: Tensor) -> float:
    """Returns the distance of ``[R, V]`` logits as :func:`apart` does; raises unless those expected are finite."""
    if not expected.isfinite().all():
        check_finite(target.model.state_dict(), "the model")
        raise ValueError(
            f"{type(target.model).__name__} itself gives NaN or infinite logits in {target.model.dtype}, though its "
            "weights are finite: load it with another dtype"
        )
    return apart(actual, expected)


def apart(actual: Tensor, expected: Tensor) -> float:
    """Returns the root mean square distance of ``[R, V]`` logits, relative to the spread of those expected."""
    actual, expected = actual.double(), expected.double()
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    return ((actual - expected).square().mean().sqrt() / spread).item()


def is_outcome(found: Tensor, known: Sequence[Tensor], rounded: Callable[[], Tensor], bound: float) -> bool:
    """Returns whether each row of logits is one that a model gives, apart from rounding.

    Args:
        found: ``[R, V]`` logits.
        known: ``[R, V]`` logits of the model.
        rounded: returns logits of the model, rounded in another way at each call.
        bound: greatest distance of a row, relative to its spread.
    """
    nearest, outcomes = [float("inf")] * len(found), list(known)
    for _ in range(_MOST_OUTCOMES):
        for outcome in outcomes:
            rows = zip(nearest, found, outcome, strict=True)
            nearest = [min(least, apart(row[None], other[None])) for least, row, other in rows]
        if max(nearest) < bound:
            return True
        outcomes = [rounded()]
    return False


def _packed_logits(
    target: PackedModel, prompts: list[list[int]], tree: list[int], topology: TreeTopology, cache: RaggedKVCache
) -> Tensor:
    """Returns ``[prompts * nodes, V]`` logits of the same tree after every prompt, in one forward."""
    samples = [cache.open() for _ in prompts]
    try:
        target.prefill(dict(zip(samples, prompts, strict=True)), cache)
        words = ancestor_words(topology.visible.cpu()).repeat(len(prompts), 1)
        batch = cache.lay_out(samples, [topology.depth_list] * len(prompts), words)
        return target(torch.tensor(tree * len(prompts)), batch, cache)
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as failure:
        raise unsupported(target.model, failure) from failure


def _own_logits(model: Any, texts: list[list[int]]) -> Tensor:
    """Returns the model's own ``[texts, V]`` logits after each text, in one forward; padding lies after each text."""
    longest = max(map(len, texts))
    rows = [text + text[-1:] * (longest - len(text)) for text in texts]
    ends = [len(text) - 1 for text in texts]
    try:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor(rows, device=model.device), use_cache=False).logits
    except Exception as failure:  # modules of users may fail in any way
        raise UnsupportedModel(
            f"{type(model).__name__} itself fails on texts of a few tokens: {failure!r}"
        ) from failure
    return logits[range(len(texts)), ends]


def _cached_logits(model: Any, prompt: list[int], path: list[int]) -> Tensor:
    """Returns the model's own ``[V]`` logits after a path, token by token from its own cache of the prompt."""
    name, past = cache_argument(model), None
    with torch.no_grad():
        for tokens in (prompt, *([token] for token in path)):
            output = model(torch.tensor([tokens], device=model.device), use_cache=True, **{name: past})
            if past is None and (past := returned_cache(output)) is None:  # it fills a cache, but returns none
                past = empty_cache(model)
                output = model(torch.tensor([tokens], device=model.device), use_cache=True, **{name: past})
    logits: Tensor = output.logits[0, -1]
    return logits
