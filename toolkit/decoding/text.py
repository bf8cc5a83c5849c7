"""Connects a tokenizer and a decoder: encodes conversations, decodes answers."""

import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.decoding.detokenizing import IncrementalDetokenizer
from arbordraft.decoding.generate import StopTexts
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.settings import EXTRA_OUTPUTS, own_temperature
from arbordraft.utils.checks import check_float, check_int, check_temperature

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    Generate = Callable[..., Any]  # SpeculativeDecoder.generate, in a higher layer

Messages = Sequence[Mapping[str, Any]]


def user_turn(text: Any, system: str | None) -> list[dict[str, str]]:
    """Builds a conversation of one user message, after a system prompt if given.

    Raises:
        TypeError: if ``text`` or ``system`` is not a str.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str or a list of them, got {type(text).__name__}")
    if not isinstance(system, str | None):
        raise TypeError(f"system must be a str, got {type(system).__name__}")
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def check_messages(messages: Any) -> Messages:
    """Returns messages as given; raises TypeError unless each has role and content, ValueError if there are none."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages must be a list of dicts with a role and a content, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages must hold at least one message, got none")
    for index, message in enumerate(messages):
        keys = ("role", "content")
        if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in keys):
            raise TypeError(
                f'messages[{index}] must be {{"role": ..., "content": ...}} with two texts, got {message!r}'
            )
    return messages


def encode(
    tokenizer: "PreTrainedTokenizerBase | None",
    messages: Messages,
    *,
    raw: bool,
    name: str = "the text",
    tools: Sequence[Mapping[str, Any]] = (),
    turn: bool = True,
    begun: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
    check: Callable[[str], object] = lambda text: None,
) -> list[int]:
    """Encodes a conversation that the model is to continue as token ids.

    Args:
        tokenizer: the model's tokenizer. Without a chat template it takes a single user message as it is.
        messages: the conversation.
        raw: join the contents with blank lines, instead of using the chat template.
        name: name of the text in error messages.
        tools: tools for the chat template, if it supports them.
        turn: whether the model's own turn begins after the messages.
        begun: whether the last message is the beginning of the answer, so that no turn ends or begins after it.
        variables: further variables of the chat template.
        check: called with the text before it is tokenised; may raise to refuse it.

    Raises:
        ValueError: without a tokenizer; if the chat template is missing or refuses the messages; for a text without
            tokens, or with half of a surrogate pair.
    """
    if tokenizer is None:
        raise ValueError(
            "text needs a tokenizer: load the model with arbordraft.load(...), or build RaggedModel(model, tokenizer)"
        )
    if raw or (not tokenizer.chat_template and [message["role"] for message in messages] == ["user"]):
        text, special = "\n\n".join(message["content"] for message in messages), True
    elif not tokenizer.chat_template:
        raise ValueError(
            "the tokenizer has no chat template, which says how roles are written: set tokenizer.chat_template, or "
            "pass raw=True"
        )
    else:
        try:
            text = tokenizer.apply_chat_template(  # type: ignore[assignment]
                list(messages),  # type: ignore[arg-type]
                tools=list(tools) or None,  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=turn and not begun,
                continue_final_message=begun,
                **variables,
            )
        except Exception as error:  # templates may raise any type of error
            if begun and "continue_final_message" in str(error):
                reason = "the chat template does not show the last message as it is, so it cannot be continued"
                raise ValueError(reason) from error
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        special = False
    check(text)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair, which is no text: leave it out") from error
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    if not ids:
        raise ValueError(f"{name} is empty: there is nothing to go on from")
    return list(ids)


def settings_of(
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    batch: int,
    own: "GenerationConfig | None" = None,
) -> dict[str, Any]:
    """Converts settings to arguments of ``generate``; sample i of the batch gets ``seed + i``.

    Args:
        max_new_tokens: longest answer, in tokens.
        temperature: 0 for greedy decoding; ``None`` for the model's own, or 0 if it has none.
        top_p: ``None`` for the model's own, or 1 if it has none.
        top_k: 0 for all tokens; ``None`` for the model's own, or all if it has none.
        seed: seed of the first sample.
        batch: number of samples.
        own: the model's own settings, which :meth:`~arbordraft.SpeculativeDecoder.generate` adds; by default none.

    Raises:
        TypeError: if a value is not a number of the right type.
        ValueError: if a value is out of range.
    """
    settings: dict[str, Any] = {"max_new_tokens": check_int("max_new_tokens", max_new_tokens, 0)}
    settings |= {"num_return_sequences": 1, **dict.fromkeys(EXTRA_OUTPUTS, False)}
    if seed is not None:
        seed = check_int("seed", seed, 0, 2**64 - batch)
        settings["seeds"] = [seed + sample for sample in range(batch)]
    truncation: dict[str, Any] = {}
    if top_p is not None:
        truncation["top_p"] = check_float("top_p", top_p, 0, 1)
    if top_k is not None or own is None or own.top_k is None:  # transformers would take 50
        truncation["top_k"] = check_int("top_k", top_k or 0, 0)
    if temperature is None:
        temperature = 0.0 if own is None else own_temperature(own) or 0.0
    temperature = check_temperature("temperature", temperature)  # transformers rejects integers such as 1
    if temperature == 0:
        return {**settings, "do_sample": False}
    return {**settings, "do_sample": True, "temperature": temperature, **truncation}


def stops(stop: Any) -> tuple[str, ...]:
    """Returns the stop texts as a tuple.

    Raises:
        TypeError: if ``stop`` is neither a text nor a list of texts.
        ValueError: if a text is empty.
    """
    texts = () if stop is None else (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"stop must be a str or a list of them, got {stop!r}")
    if "" in texts:
        raise ValueError("stop must not hold an empty text, which stands everywhere")
    return tuple(texts)


class TextStream(Iterator[str]):
    """Iterator of an answer's pieces, which a separate thread decodes while the stream is read.

    Decoding begins when the first piece is requested. :meth:`close` ends it early; so does dropping the stream. Errors
    of the decoding are raised when the next piece is requested.
    """

    def __init__(self, generate: "Generate", detokenizer: IncrementalDetokenizer, criteria: Sequence[Any] = ()) -> None:
        self._stats: list[DecodeStats] = []
        # _follow must hold no reference to self, or a dropped stream would stay alive.
        self._texts = _follow(generate, detokenizer, criteria, self._stats)

    @property
    def stats(self) -> DecodeStats | None:
        """Counts of the decoding, once it has ended; ``None`` before."""
        return self._stats[0] if self._stats else None

    def __next__(self) -> str:
        return next(self._texts)

    def close(self) -> None:
        """Ends the decoding within one step, and waits until it has ended."""
        self._texts.close()


def _follow(
    generate: "Generate", detokenizer: IncrementalDetokenizer, criteria: Sequence[Any], stats: list[DecodeStats]
) -> Generator[str]:
    arrived, closed = _TokenQueue(), threading.Event()

    def over(input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), closed.is_set() or not threading.main_thread().is_alive())

    def work() -> None:
        try:
            stats.append(generate(streamer=arrived, stopping_criteria=[*criteria, over]).stats)
        except BaseException as error:  # raised in the reading thread
            arrived.put(error)
        finally:
            arrived.put(None)

    thread = threading.Thread(target=work, name="arbordraft-text")
    thread.start()
    begun = False  # the first item is the prompt
    try:
        while (item := arrived.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if begun and (text := detokenizer.add(item.tolist())):
                yield text
            begun = True
        if text := detokenizer.end():
            yield text
    finally:
        closed.set()
        thread.join()


class _TokenQueue(SimpleQueue[Any]):
    """Streamer that another thread reads: tokens, perhaps an error, and ``None`` at the end."""

    def end(self) -> None:
        """Does nothing: the thread itself puts ``None`` when it ends, also after an error."""


def write(
    generate: "Generate",
    tokenizer: "PreTrainedTokenizerBase",
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    stop: Sequence[str] | None,
) -> list[str]:
    """Decodes prompts as one ragged batch and returns the answers as texts."""
    output = generate(**_request(tokenizer, inputs, settings, stop))
    columns, answers = inputs["input_ids"].shape[1], []
    for row, emitted in zip(output.sequences.tolist(), output.stats.emitted, strict=True):
        detokenizer = IncrementalDetokenizer(tokenizer, stop or ())
        answers.append(detokenizer.add(row[columns : columns + emitted]) + detokenizer.end())
    return answers


def stream(
    generate: "Generate",
    tokenizer: "PreTrainedTokenizerBase",
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    stop: Sequence[str] | None,
) -> TextStream:
    """Decodes one prompt and returns a stream of the answer's pieces."""
    request = _request(tokenizer, inputs, settings, stop)
    criteria = request.pop("stopping_criteria", ())
    return TextStream(partial(generate, **request), IncrementalDetokenizer(tokenizer, stop or ()), criteria)


def _request(
    tokenizer: "PreTrainedTokenizerBase",
    inputs: Mapping[str, Tensor],
    settings: Mapping[str, Any],
    stop: Sequence[str] | None,
) -> dict[str, Any]:
    return {**inputs, **settings, **ending(tokenizer, stop), "return_dict_in_generate": True}


def ending(tokenizer: "PreTrainedTokenizerBase", stop: Sequence[str] | None) -> dict[str, Any]:
    """Returns settings that end answers before these texts; ``None`` keeps the model's own ``stop_strings``."""
    if stop is None:
        return {}
    return {"stop_strings": [], "stopping_criteria": [StopTexts(tokenizer, stop)] if stop else []}
