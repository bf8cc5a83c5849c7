"""Continues texts, with the target in this process or with a server that runs it.

Shapes: n tokens of a text and its continuation, F hidden states side by side.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from arbordraft import NoDrafter, RaggedModel, SpeculativeDecoder, builders
from arbordraft.decoding.prompts import left_padded
from arbordraft.training.chat import ids_after
from arbordraft.training.loops import LoopCriteria, before_loop

if TYPE_CHECKING:
    import httpx
    from transformers import PreTrainedTokenizerBase

_PAUSE = 1.0  # seconds before the first retry; doubled for every further one


class Sampling(NamedTuple):
    """Settings of continuations, which are drawn from the target's own law: nothing is cut off or penalised.

    Args:
        temperature: 0 for greedy.
        max_new_tokens: bound on the new tokens of each text.
    """

    temperature: float
    max_new_tokens: int


class Completion(NamedTuple):
    """A continuation.

    Args:
        tokens: the new tokens, with the stop token that ended them, if any; no loops
            (:mod:`arbordraft.training.loops`).
        ended: whether it ended with a stop token.
        hidden: ``[n - 1, F]`` states of all tokens but the last, prompt included, if requested.
    """

    tokens: list[int]
    ended: bool
    hidden: Tensor | None = None

    def without_loop(self) -> "Completion":
        """Returns the continuation up to its first loop."""
        kept = before_loop(self.tokens)
        if len(kept) == len(self.tokens):
            return self
        hidden = None if self.hidden is None else self.hidden[: len(kept) - len(self.tokens)]
        return Completion([*kept], False, hidden)


# Continues prompts with a sampling and a seed, and returns continuations in their order. The last argument is called
# with the number of tokens since its last call.
Completer = Callable[[Sequence[Sequence[int]], Sampling, int, Callable[[int], object]], list[Completion]]


class _Recorder(NoDrafter):
    """Drafts nothing and keeps the hidden states that a drafter would have received."""

    def __init__(self, layers: Sequence[int]) -> None:
        super().__init__()
        self.hidden_layers = tuple(layers)
        self._seen: dict[int, list[Tensor]] = {}

    def add(self, state: Any, sample: int, tokens: Sequence[int], handle: int) -> None:
        self._seen[sample] = []

    def share(self, state: Any, source: int, sample: int, tokens: int) -> None:
        self._seen[sample] = [torch.cat(self._seen[source])[:tokens]]

    def take_hidden(self, state: Any, hidden: Mapping[int, Tensor]) -> None:
        for sample, states in hidden.items():
            self._seen[sample].append(states.clone())  # a view would keep the whole batch in memory

    def take(self, sample: int) -> Tensor | None:
        return torch.cat(self._seen.pop(sample)) if self.hidden_layers else None


class DecoderCompleter:
    """Continues texts with the target in this process, in unpadded batches; texts that run into a loop are stopped.

    Args:
        target: the model; ``kernels="auto"`` makes it about twice as fast on a CPU.
        batch: texts at a time; continuations do not depend on it, except by rounding.
        hidden_layers: hidden states to keep, as transformers numbers them.

    Raises:
        ValueError: if the target does not say which tokens end an answer.
    """

    def __init__(self, target: RaggedModel, batch: int = 64, hidden_layers: Sequence[int] = ()) -> None:
        ends = target.model.generation_config.eos_token_id
        if ends is None:
            raise ValueError("the target names no token that ends an answer; set model.generation_config.eos_token_id")
        self.batch = batch
        self._ends = [ends] if isinstance(ends, int) else list(ends)
        self._recorder = _Recorder(hidden_layers)
        plain = builders.plain(target)
        self._decoder = SpeculativeDecoder(target, self._recorder, plain.topology, plain.coupling)

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, done: Callable[[int], object]
    ) -> list[Completion]:
        completions: list[Completion] = []
        for start in range(0, len(prompts), self.batch):
            part = prompts[start : start + self.batch]
            completions += self._run(part, sampling, range(seed + start, seed + start + len(part)))
            done(sum(len(completion.tokens) for completion in completions[start:]))
        return completions

    def _run(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seeds: Sequence[int]) -> list[Completion]:
        from transformers import (
            EosTokenCriteria,
            GenerationConfig,
            LogitsProcessorList,
            MaxLengthCriteria,
            StoppingCriteriaList,
            TemperatureLogitsWarper,
        )

        greedy = sampling.temperature == 0
        inputs = left_padded(prompts)
        longest = inputs["input_ids"].shape[1]
        # Not by generate(), which would add the model's own top_p, penalties and other processors to the law.
        output: Any = self._decoder.decode_loop(
            self._decoder.target.model,
            inputs["input_ids"],
            LogitsProcessorList([] if greedy else [TemperatureLogitsWarper(float(sampling.temperature))]),
            StoppingCriteriaList(
                [
                    MaxLengthCriteria(longest + sampling.max_new_tokens),
                    EosTokenCriteria(self._ends),
                    LoopCriteria(),
                ]
            ),
            GenerationConfig(do_sample=not greedy, pad_token_id=0, return_dict_in_generate=True),
            seeds=seeds,
            attention_mask=inputs["attention_mask"],
        )
        completions = []
        for sample, count in enumerate(output.stats.emitted):
            tokens = output.sequences[sample, longest : longest + count].tolist()
            written = Completion(tokens, tokens[-1] in self._ends, self._recorder.take(sample))
            completions.append(written.without_loop())
        return completions


class ServerCompleter:
    """Continues texts with any server that offers OpenAI's ``/v1/completions`` for prompts of token ids.

    vLLM, SGLang and llama.cpp do. The server must run the same target. Only vLLM returns token ids; the text of other
    servers is tokenised again. Loops are cut off only after the server has written them: its interface has no way to
    stop there.

    Args:
        url: address of the API, for instance ``http://localhost:8000/v1``.
        model: the model's name on the server.
        tokenizer: the target's tokenizer.
        parallel: requests at a time.
        timeout: seconds until a request counts as failed.
        retries: how often a request is sent again if the server does not answer or has an error of its own (HTTP 5xx).

    Raises:
        ValueError: if the tokenizer has no token that ends an answer.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        parallel: int = 64,
        timeout: float = 600.0,
        retries: int = 3,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer names no token that ends an answer; set tokenizer.eos_token")
        self.url, self.model, self.tokenizer = url.rstrip("/"), model, tokenizer
        self.parallel, self.timeout, self.retries = parallel, timeout, retries

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, done: Callable[[int], object]
    ) -> list[Completion]:
        """Continues every text.

        Raises:
            ConnectionError: if the server fails.
        """
        import httpx

        completions = []
        limits = httpx.Limits(max_connections=self.parallel)
        with httpx.Client(timeout=self.timeout, limits=limits) as client, ThreadPoolExecutor(self.parallel) as pool:
            requests = [
                pool.submit(self._ask, client, prompt, sampling, seed + index) for index, prompt in enumerate(prompts)
            ]
            try:
                for request in requests:
                    completions.append(request.result())
                    done(len(completions[-1].tokens))
            except (httpx.HTTPError, httpx.InvalidURL, ConnectionError, KeyError, TypeError, ValueError) as error:
                raise ConnectionError(
                    f"{self.url} does not answer as an OpenAI-compatible server with the model {self.model!r} should "
                    f"({type(error).__name__}: {error}); earlier text is kept: correct the cause and run the "
                    "same command again"
                ) from error
            finally:
                pool.shutdown(cancel_futures=True)  # requests that wait after an error or an interrupt
        return completions

    def _ask(self, client: "httpx.Client", prompt: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        response = self._post(
            client,
            {
                "model": self.model,
                "prompt": list(prompt),
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_new_tokens,
                "seed": seed,
                # Servers have defaults of their own for these, or take them from the model.
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "return_token_ids": True,
            },
        )
        if response.is_error:
            raise ConnectionError(f"HTTP {response.status_code}, {response.text:.300}")
        (choice,) = response.json()["choices"]
        tokens: list[int] | None = choice.get("token_ids")
        if tokens is None:
            tokens = ids_after(self.tokenizer, choice["text"])
        if ended := choice["finish_reason"] == "stop":
            reason = choice.get("stop_reason")  # a stop token other than the tokenizer's, from vLLM
            end = reason if isinstance(reason, int) else self.tokenizer.eos_token_id
            tokens = tokens if tokens[-1:] == [end] else [*tokens, end]
        most = sampling.max_new_tokens  # tokenising again may give more tokens
        return Completion(tokens[:most], ended and len(tokens) <= most).without_loop()

    def _post(self, client: "httpx.Client", request: dict[str, Any]) -> "httpx.Response":
        import httpx

        for retry in range(self.retries):
            try:
                response = client.post(f"{self.url}/completions", json=request)
                if not response.is_server_error:
                    return response
            except httpx.TransportError:
                pass
            time.sleep(_PAUSE * 2**retry)
        return client.post(f"{self.url}/completions", json=request)
