"""Properties of transformers' logits processors, by class identity: other classes may have the same names.

Shapes: none; processors are inspected, not called.
"""

import math
from copy import copy
from importlib import import_module
from typing import Any

from arbordraft.sampling.stateful import StatefulProcessor
from arbordraft.utils.checks import check_temperature

_MODULES = ("transformers.generation.logits_process", "transformers.generation.stopping_criteria")
_NAMES: dict[type, str] = {}  # filled on the first read, which must not happen in compiled code
# Class names of transformers' own processors; subclasses do not count, since they may behave differently.
# These read only the scores, so they run once over all rows. Any other one runs per row, on the row's path.
_PATH_FREE = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
_TRUNCATING = frozenset({"TopKLogitsWarper", "TopPLogitsWarper"})
# Those of `_PATH_FREE` that are plain arithmetic with a few numbers. The others check their arguments, which needs the
# host, or index with a mask.
_STATIC = _PATH_FREE - {"EtaLogitsWarper", "SuppressTokensLogitsProcessor", "TopHLogitsWarper"}
# Processors that keep state between calls, or expect a second, unconditional row. The rows of a tree are neither one
# sequence nor such a pair.
_NOT_FOR_TREES = frozenset(
    {
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
    }
)
# Libraries whose processors follow one text token by token, as a grammar matcher does.
_FOLLOWING = frozenset({"guidance", "llguidance", "outlines", "outlines_core", "transformers_cfg", "xgrammar"})
# Processors that count columns from the first one of the batch, and the attribute with the column they count to.
_COUNTING = {
    "ExponentialDecayLengthPenalty": "regulation_start",
    "ForcedEOSTokenLogitsProcessor": "max_length",
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "prompt_length_to_skip",
    "RepetitionPenaltyLogitsProcessor": "prompt_ignore_length",
    "SuppressTokensAtBeginLogitsProcessor": "begin_index",
}
# Processors that store the prompts of the batch they were built for, padding included.
_KEEPING_PROMPTS = frozenset({"EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor"})
# Processors that depend on the number of the row in the batch. User-defined ones may, too.
_INDEXING = _KEEPING_PROMPTS | {"PrefixConstrainedLogitsProcessor"}


def transformers_name(cls: type) -> str:
    """Returns the name of transformers' own processor or stopping criterion; empty for other and derived classes."""
    if not _NAMES:
        known = (entry for module in _MODULES for entry in vars(import_module(module)).values())
        _NAMES.update((one, one.__name__) for one in known if isinstance(one, type) and one.__module__ in _MODULES)
    return _NAMES.get(cls, "")


def is_path_free(processor: Any) -> bool:
    """Returns whether a processor reads only the scores."""
    return transformers_name(type(processor)) in _PATH_FREE


def is_static(processor: Any) -> bool:
    """Returns whether a processor reads only the scores and never needs the host for it."""
    return transformers_name(type(processor)) in _STATIC


def is_truncating(processor: Any) -> bool:
    """Returns whether a processor is top-k or top-p."""
    return transformers_name(type(processor)) in _TRUNCATING


def counts_padding(processor: Any) -> bool:
    """Returns whether a processor counts the padding before a prompt, or stores it."""
    counting = _COUNTING.keys() | _KEEPING_PROMPTS
    return any(transformers_name(cls) in counting for cls in type(processor).__mro__)


def counting_less(processor: Any, columns: int) -> Any:
    """Returns the processor for texts without the batch's first ``columns`` columns."""
    attribute = _COUNTING.get(transformers_name(type(processor)))
    if not columns or attribute is None or getattr(processor, attribute) is None:
        return processor
    own = copy(processor)
    setattr(own, attribute, max(0, getattr(processor, attribute) - columns))
    return own


def check_for_trees(processor: Any, padding: int) -> None:
    """Raises TypeError or ValueError if a processor cannot be applied to rows of draft trees."""
    if not callable(processor):
        raise TypeError(f"a logits processor is a function of input_ids and scores, got {processor!r}")
    if isinstance(processor, StatefulProcessor):
        return
    if (library := type(processor).__module__.partition(".")[0]) in _FOLLOWING:
        raise ValueError(
            f"{library}'s {name_of(processor)} follows one text token by token; it cannot judge the nodes of a "
            "tree, which branch: pass a grammar=, or make it a StatefulProcessor, with fork() and accept(token)"
        )
    names = set(map(transformers_name, type(processor).__mro__))
    if refused := names & _NOT_FOR_TREES:
        raise ValueError(f"{refused.pop()} cannot judge the nodes of a tree: they are not one sequence")
    if padding and (keeping := names & _KEEPING_PROMPTS):
        raise ValueError(
            f"{keeping.pop()} takes padding for a part of the prompts; decode one prompt at a time with it"
        )


def may_index(processor: Any) -> bool:
    """Returns whether a processor's effect on a row may depend on the row's number in the batch."""
    return not isinstance(processor, StatefulProcessor) and transformers_name(type(processor)) in {"", *_INDEXING}


def is_freezing(processor: Any) -> bool:
    """Returns whether a processor divides by so low a temperature that the most probable token always wins."""
    if transformers_name(type(processor)) != "TemperatureLogitsWarper":
        return False
    return check_temperature("temperature", processor.temperature) == 0


def name_of(processor: Any) -> str:
    """Returns a function's own name, otherwise the class's."""
    return str(getattr(processor, "__name__", type(processor).__name__))


def truncates(processor: Any) -> bool:
    """Returns whether a processor is top-k or top-p and bans every token that it does not keep."""
    return is_truncating(processor) and processor.filter_value == -math.inf
