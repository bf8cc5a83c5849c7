"""A drafter that runs a smaller causal LM.

Shapes: n missing tokens.
"""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.checkpoints.vocabulary import check_tokenizers, fit_logits, fit_tokens
from arbordraft.drafters.agreement import acceptance_at, agreement
from arbordraft.drafters.base import Predictions, check_ragged, num_unprefilled, within_positions
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.feeding import Missing
from arbordraft.drafters.model_drafter import ModelState, OwnCacheDrafter
from arbordraft.drafters.network import ModelNetwork
from arbordraft.drafters.onnx_networks import OnnxModel
from arbordraft.drafters.vocabulary import FREQUENT, LARGE
from arbordraft.sampling.laws import DraftLaw
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.observation import decoder_list
from arbordraft.target.prepacked.memory import FEW_BITS, bits_per_weight
from arbordraft.target.sources import read_model, read_tokenizer, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Options of from_pretrained that locate files, of weights and of tokenizers.
_PLACES = ("cache_dir", "gguf_file", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")


@dataclass
class _State(ModelState):
    """State of a batch.

    Args:
        target: the target's cache.
        sources: by sample, its handle in the target's cache.
        prompts: by sample, its tokens.
        behind: by sample, number of tokens that were copied for the target and not for this model.
    """

    target: RaggedKVCache = field(kw_only=True)
    sources: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, Sequence[int]] = field(default_factory=dict)
    behind: dict[int, int] = field(default_factory=dict)


class LanguageModelDrafter(OwnCacheDrafter):
    """Drafts with any causal LM that shares the target's tokenizer, on its own ragged cache.

    Its vocabulary may be padded to another size than the target's. Ids that the target lacks are never proposed, and
    ids that the drafter lacks have draft probability 0. If a text exceeds its positions, the target decodes alone;
    longer prompts are not read.

    Args:
        model: the draft model, which may be exported; a model of transformers is wrapped.
        same_tokenizer: skip the comparison of tokenizers and sizes, as the user knows that ids agree. If they do not,
            decoding stays lossless but gains nothing.

    Raises:
        TypeError: if ``model`` is not a model.
    """

    reads_later = True

    def __init__(self, model: "RaggedModel | PreTrainedModel | OnnxModel", *, same_tokenizer: bool = False) -> None:
        super().__init__()
        self.model = model if isinstance(model, RaggedModel | OnnxModel) else RaggedModel(model)
        self.same_tokenizer = same_tokenizer
        self.max_positions = self.model.max_positions  # longest text, drafts included, that it can process
        self._network = self.model if isinstance(self.model, OnnxModel) else ModelNetwork(self.model)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        target: RaggedModel,
        *,
        same_tokenizer: bool = False,
        weights: str | None = None,
        **kwargs: Any,
    ) -> "LanguageModelDrafter":
        """Loads a causal LM with the target's tokenizer, from a folder, a hub or a GGUF file.

        Args:
            path: folder, hub name or GGUF file.
            target: the model it drafts for, which sets device, dtype and kernels.
            same_tokenizer: as for the class.
            weights: kind of reduced weights, see :class:`~arbordraft.RaggedModel`; by default those of the checkpoint.
            **kwargs: passed on to ``AutoModelForCausalLM.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged or incomplete, or has another tokenizer than the target.
        """
        check_ragged(target)
        places = {name: value for name, value in kwargs.items() if name in _PLACES}
        source = source_of(path)
        tokenizer = read_tokenizer(source, **places)
        if not same_tokenizer and tokenizer is not None and target.tokenizer is not None:
            check_tokenizers(tokenizer, target.tokenizer)  # before the weights are read
        model = read_model(source, target.model.dtype, as_stored=target.backend == "native", **kwargs)
        model.to(target.device)  # type: ignore[arg-type]
        wrapped = RaggedModel(model, tokenizer, kernels=target.backend, weights=weights)
        return cls(wrapped, same_tokenizer=same_tokenizer)

    @classmethod
    def fitted(cls, path: str | os.PathLike[str], target: RaggedModel) -> "LanguageModelDrafter":
        """Loads a causal LM as :meth:`from_pretrained` does, with the weights that promise most: its own, or 4 bits.

        Weights of 4 bits are tried where native kernels run and the checkpoint has more than 6. Drafts are guesses, so
        fewer bits cost acceptance alone. Both are compared with the target on a short text
        (:func:`~arbordraft.drafters.agreement.agreement`). The rate of agreement sets the drafter's ``acceptance``.

        Args:
            path: see :meth:`from_pretrained`.
            target: see :meth:`from_pretrained`.

        Raises:
            ValueError: see :meth:`from_pretrained`.
        """
        own = cls.from_pretrained(path, target)._compared(target)
        model: Any = own.model
        if model.prepacking is None or bits_per_weight(model.prepacking.nbytes, model.model) < FEW_BITS:
            return own
        copy = RaggedModel(model.model, model.tokenizer, kernels="native", weights="int4", self_test=False)
        return max(own, cls(copy)._compared(target), key=lambda drafter: drafter.gain(target))

    def _compared(self, target: RaggedModel) -> "LanguageModelDrafter":
        assert isinstance(self.model, RaggedModel)
        self.acceptance = acceptance_at(agreement(target, self.model), type(self).acceptance)
        return self

    def effort(self, target: RaggedModel) -> float:
        if isinstance(self.model, OnnxModel) or self.model.prepacking is None or target.prepacking is None:
            return super().effort(target)
        read = float(self.model.prepacking.nbytes)
        if (run := self._network.native) is not None and (exact := run.weights.exact) is not None:
            size, head = run.weights.outputs, run.weights.head.weight.nbytes
            read += head * (FREQUENT / size if size >= LARGE else 1) - exact.weight.nbytes
        return read / max(1, target.prepacking.nbytes)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if self.same_tokenizer:
            return
        if isinstance(self.model, OnnxModel):
            self.model.check_target(target)
            return
        ours, theirs = self.model.tokenizer, target.tokenizer
        if ours is not None and theirs is not None:
            check_tokenizers(ours, theirs)
        elif self.model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the drafter has {self.model.vocab_size} token ids, the target {target.vocab_size}: both must share "
                "one tokenizer. If only padding differs, wrap both with their tokenizers, RaggedModel(model, "
                "tokenizer), or pass same_tokenizer=True to LanguageModelDrafter"
            )

    def open(self, target_cache: RaggedKVCache) -> _State:
        return _State(target_cache.beside(self), target=target_cache)

    def add(self, state: _State, sample: int, tokens: Sequence[int], handle: int) -> None:
        if self.max_positions is None or len(tokens) < self.max_positions:
            state.handles[sample] = state.cache.open(state.target.capacity(handle))
            state.prompts[sample], state.sources[sample] = tokens, handle

    def share(self, state: _State, source: int, sample: int, tokens: int) -> None:
        if sample not in state.handles:
            return
        filled = 0
        if source in state.handles:
            filled = state.cache.reusable(state.handles[source], tokens)
            state.cache.share(state.handles[source], state.handles[sample], filled)
        state.behind[sample] = tokens - filled

    def prefill(self, state: _State, tokens: Mapping[int, Sequence[int]]) -> None:
        known: dict[int, list[int]] = {}
        for sample, read in tokens.items():
            if (handle := state.handles.get(sample)) is None:
                continue
            if (branch := state.target.branch(state.sources[sample])) is not None:
                state.cache.keep(handle, branch)  # where the target keeps a state, so does this model
            begin, count = state.cache.length(handle), state.behind.pop(sample, 0) + len(read)
            part = torch.as_tensor(state.prompts[sample][begin : begin + count], dtype=torch.int64)
            known[handle] = fit_tokens(part, self.model.vocab_size).tolist()
        self.model.prefill(known, state.cache)

    def remove(self, state: _State, sample: int) -> None:
        state.prompts.pop(sample, None)
        state.behind.pop(sample, None)
        state.sources.pop(sample, None)
        if (handle := state.handles.pop(sample, None)) is not None:
            state.cache.close(handle)

    def depths(self, state: _State, context: DraftContext) -> list[int]:
        return within_positions(super().depths(state, context), context, self.max_positions)

    def lag(self, state: _State, context: DraftContext) -> Sequence[int]:
        return num_unprefilled(state.cache, state.handles, context)

    def scores(self, state: _State, frontier: Frontier) -> Predictions:
        logits, _ = super().scores(state, frontier)
        size = frontier.context.vocab_size
        return Predictions(logits if size is None else fit_logits(logits, size))

    def missing(self, state: _State, context: DraftContext, sample: int) -> Missing:
        handle, tokens = state.handles[sample], context.tokens(sample)
        state.cache.shorten(handle, len(tokens) - 1)  # a repeated step has already read the last token
        return tokens[state.cache.length(handle) :], None


def shrink(model: "PreTrainedModel", layers: int | Sequence[int]) -> "PreTrainedModel":
    """Copies a model with only some of its layers; the copy shares no weights and is saved like any model.

    Args:
        model: a causal LM with one list of decoder layers.
        layers: which layers, or how many; that many are spread evenly from the first to the last.

    Raises:
        ValueError: if there are no such layers.
        UnsupportedModel: if the depth of the architecture cannot be changed.
    """
    count = model.config.get_text_config().num_hidden_layers
    if isinstance(layers, int):
        if not 2 <= layers <= count:
            raise ValueError(f"2 to {count} layers can be spread from first to last, got {layers}; name them")
        layers = [index * (count - 1) // (layers - 1) for index in range(layers)]
    kept = {layer: index for index, layer in enumerate(layers)}
    if not kept or list(kept) != sorted(layers) or not all(0 <= layer < count for layer in kept):
        raise ValueError(f"layers must ascend within 0..{count - 1}, got {list(layers)}")
    place = decoder_list(model, count)
    if place is None:
        raise UnsupportedModel(f"{type(model).__name__} does not keep its {count} layers in one list")
    path = next(name for name, module in model.named_modules() if module is getattr(*place))

    config = deepcopy(model.config)
    text: Any = config.get_text_config()
    for name, value in list(vars(text).items()):
        if "layer" in name and isinstance(value, list | tuple) and len(value) == count:
            setattr(text, name, [value[layer] for layer in kept])  # one entry per layer
    text.num_hidden_layers = len(kept)
    weights = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(f"{path}."):
            layer, _, rest = name.removeprefix(f"{path}.").partition(".")
            if int(layer) in kept:
                weights[f"{path}.{kept[int(layer)]}.{rest}"] = tensor
        else:
            weights[name] = tensor
    small: Any = type(model)(config)
    small.to(model.device, model.dtype).eval()
    try:
        small.load_state_dict(weights)
    except RuntimeError as error:
        raise UnsupportedModel(f"the layers {list(kept)} of this {type(model).__name__} do not fit: {error}") from error
    small.generation_config = deepcopy(model.generation_config)
    return small
