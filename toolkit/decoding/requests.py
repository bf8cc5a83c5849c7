"""Requests to an engine.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from arbordraft.decoding.settings import biased, own_temperature, processors_of
from arbordraft.decoding.text import stops
from arbordraft.grammars import Grammar
from arbordraft.sampling.corrections import CountPenalty
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.stateful import StatefulProcessor
from arbordraft.utils.checks import (
    check_float,
    check_instance,
    check_int,
    check_penalty,
    check_sequence,
    check_temperature,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and the settings of its answers.

    A field that is ``None`` takes the value of the model's own ``generation_config``. So do all settings of
    transformers that have no field here. A setting that is missing there, too, is off.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: longest answer, in tokens; 0 only with ``prompt_logprobs``.
        temperature: 0 to 1e6. 0 decodes greedily, higher values sample; values below 1e-10 are stored as 0. ``None``
            for the model's own, or 0 if it has none.
        top_k: sample from this many most probable tokens; 0 for all.
        top_p: sample from the fewest tokens whose probabilities reach this sum, 0 to 1.
        min_p: sample from tokens whose probability is at least this share of the highest, 0 to 1.
        repetition_penalty: 1e-5 to 1e5; divides positive scores of tokens that occurred, and multiplies negative ones.
        presence_penalty: -2 to 2, subtracted from the score of every token that occurs in the answer.
        frequency_penalty: -2 to 2, subtracted once per occurrence of the token in the answer.
        logit_bias: -100 to 100 by token, added to its score.
        processors: further logits processors of transformers, which see this sample's own tokens, or
            :class:`~arbordraft.sampling.stateful.StatefulProcessor` objects. A processor replaces the one that a
            setting would create of its class.
        grammar: grammar that the answer follows.
        stop: text, or several; the first that occurs ends the answer. Needs the target's tokenizer. By default the
            model's own ``stop_strings``.
        ends: token ids that end an answer; by default those of the model's ``generation_config``.
        stop_token_ids: further token ids that end an answer.
        min_new_tokens: 0 to ``max_new_tokens``; shortest answer, in tokens. Not with ``grammar`` or ``stop``.
        seed: 0 to 2**64 - 1; answer i gets ``seed + i``. By default torch's generator draws the seeds.
        n: number of answers.
        logprobs: number of most probable tokens, 0 or more, to report with each token of the answer. All of them, and
            the token itself, come with log-probabilities under the model's raw logits. ``None`` reports none.
        prompt_logprobs: as ``logprobs``, for the prompt's tokens after the first; the whole prompt is read for them.
        priority: requests with higher priority are admitted first.
        max_drafts: most drafts per step, 0 or more; 0 turns drafting off for this request, ``None`` sets no bound. Of a
            tree the likeliest drafts are kept. A tree that is drawn at random ends at the last level that fits.
        prediction: token ids that the answer is expected to contain, such as a file before it is edited. Lookups draft
            from them as from the prompt, for this request alone. The target does not read them.

    Raises:
        TypeError: for values of the wrong type.
        ValueError: for values out of range.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 256
    temperature: float | None = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: "Sequence[LogitsProcessor | StatefulProcessor]" = ()
    grammar: Grammar | None = None
    stop: str | Sequence[str] | None = None
    ends: Sequence[int] | None = None
    stop_token_ids: Sequence[int] = ()
    min_new_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    priority: int = 0
    max_drafts: int | None = None
    prediction: Sequence[int] = ()

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "prompt": check_sequence("prompt", self.prompt, lambda name, token: check_int(name, token, 0)),
            "max_new_tokens": check_int(
                "max_new_tokens", self.max_new_tokens, 1 if self.prompt_logprobs is None else 0
            ),
            "presence_penalty": check_float("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": check_float("frequency_penalty", self.frequency_penalty, -2, 2),
            "logit_bias": {
                check_int("logit_bias", token, 0): check_float(f"logit_bias[{token}]", bias, -100, 100)
                for token, bias in self.logit_bias.items()
            },
            "stop_token_ids": check_sequence(
                "stop_token_ids", self.stop_token_ids, lambda name, token: check_int(name, token, 0)
            ),
            "n": check_int("n", self.n, 1),
            "priority": check_int("priority", self.priority),
            "prediction": check_sequence("prediction", self.prediction, lambda name, token: check_int(name, token, 0)),
        }
        for name, check in _OPEN.items():
            if (value := getattr(self, name)) is not None:
                checked[name] = check(name, value)
        if self.min_new_tokens is not None:
            checked["min_new_tokens"] = check_int("min_new_tokens", self.min_new_tokens, 0, checked["max_new_tokens"])
        if self.grammar is not None:
            check_instance("grammar", self.grammar, Grammar)
        if self.min_new_tokens and (self.grammar is not None or checked.get("stop")):
            raise ValueError("min_new_tokens: a grammar or a stop says where an answer ends: ask for one of the two")
        if self.ends is not None:
            checked["ends"] = check_sequence("ends", self.ends, lambda name, token: check_int(name, token, 0))
        if self.seed is not None:
            checked["seed"] = check_int("seed", self.seed, 0, 2**64 - checked["n"])
        for name in ("logprobs", "prompt_logprobs", "max_drafts"):
            if getattr(self, name) is not None:
                checked[name] = check_int(name, getattr(self, name), 0)
        if not checked["prompt"]:
            raise ValueError("the prompt is empty: there is nothing to go on from")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def plain(self) -> bool:
        """Whether scores are changed only by a grammar, temperature, top-k, top-p and min-p."""
        penalties = self.repetition_penalty not in (None, 1) or self.presence_penalty or self.frequency_penalty
        return not (penalties or self.logit_bias or self.processors or self.min_new_tokens)

    def temperature_of(self, own: "GenerationConfig") -> float:
        """Returns the request's temperature, else the model's own, else 0 for greedy decoding."""
        return self.temperature if self.temperature is not None else own_temperature(own) or 0.0

    def logits_pipeline(
        self,
        model: "PreTrainedModel",
        own: "GenerationConfig",
        ends: Sequence[int],
        constraint: StatefulProcessor | None = None,
    ) -> LogitsPipeline:
        """Builds the processors of the request and of the model's own settings, in transformers' order.

        Args:
            model: the target's transformers model.
            own: the model's own settings.
            ends: tokens that end the answer.
            constraint: processor of the grammar, if any; comes first, so that truncation and draws see only allowed
                tokens.

        Raises:
            TypeError: if a user's processor is not a logits processor.
            ValueError: if a processor cannot handle the nodes of a tree, or the model's own settings are invalid.
        """
        temperature = self.temperature_of(own)
        names = ("top_k", "top_p", "min_p", "repetition_penalty", "min_new_tokens")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias:
            changes["sequence_bias"] = biased(own, self.logit_bias)
        changes |= {
            "do_sample": temperature > 0,
            "temperature": temperature,
            "max_length": len(self.prompt) + self.max_new_tokens,
            "eos_token_id": list(ends),
        }
        processors: list[Any] = list(self.processors)
        if self.presence_penalty or self.frequency_penalty:
            processors.insert(0, CountPenalty(len(self.prompt), self.presence_penalty, self.frequency_penalty))
        chain: list[Any] = [] if constraint is None else [constraint]
        chain += processors_of(model, own, changes, self.prompt, processors)
        return LogitsPipeline(chain, greedy=temperature == 0)


_OPEN: dict[str, Callable[[str, Any], Any]] = {
    "temperature": check_temperature,
    "top_k": partial(check_int, least=0),
    "top_p": partial(check_float, least=0, most=1),
    "min_p": partial(check_float, least=0, most=1),
    "repetition_penalty": check_penalty,
    "stop": lambda _, value: stops(value),
}


__all__ = ["Request"]
