"""Builds samples from an engine's requests.

Shapes: none; samples are counted, not stacked.
"""

import threading
from collections import OrderedDict
from functools import partial
from typing import Any

import torch

from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.detokenizing import TokenDecoder
from arbordraft.decoding.generate import Stopping, StopTexts, with_stop_strings
from arbordraft.decoding.lengths import check_positions
from arbordraft.decoding.requests import Request
from arbordraft.decoding.settings import bound_to_text, changed, check_settings
from arbordraft.decoding.state import Sample
from arbordraft.decoding.streams import Stream
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.stateful import StatefulProcessor

_MOST_PIPELINES = 256


class RequestSamples:
    """Builds samples from requests, with the settings that the model had when this object was built.

    Args:
        decoder: decodes the samples.

    Raises:
        ValueError: if the model's own settings are not supported.
    """

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self.decoder = decoder
        self.own = changed(decoder.own_settings)
        check_settings({**vars(self.own), "return_dict_in_generate": False}, self.own)
        tokenizer = decoder.target.tokenizer
        self._token_decoder = None if tokenizer is None else TokenDecoder(tokenizer)
        self._stopping = with_stop_strings(None, self.own.stop_strings or (), tokenizer)
        self._bound = bound_to_text(self.own)
        self._pipelines: OrderedDict[tuple[Any, ...], LogitsPipeline] = OrderedDict()
        self._mutex = threading.Lock()  # guards the pipelines

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer unless its request names others."""
        known = self.own.eos_token_id
        return () if known is None else (known,) if isinstance(known, int) else tuple(known)

    def __call__(self, request: Request, stream: Stream, first: int) -> list[Sample]:
        """Builds the samples of a request.

        Args:
            request: the request.
            stream: receives the answers.
            first: number of the request's first answer in the stream.

        Raises:
            ValueError: if the request cannot be answered: it has unknown tokens, is too long, or asks for something
                that the decoder's steps do not support.
        """
        decoder, target = self.decoder, self.decoder.target
        if max(request.prompt) >= target.vocab_size:
            raise ValueError(f"the prompt holds ids outside the target's vocabulary of {target.vocab_size} tokens")
        if max(request.logit_bias, default=0) >= target.vocab_size:
            raise ValueError(f"logit_bias names ids outside the target's vocabulary of {target.vocab_size} tokens")
        if max(request.prediction, default=0) >= target.vocab_size:
            raise ValueError(f"prediction holds ids outside the target's vocabulary of {target.vocab_size} tokens")
        check_positions(target, len(request.prompt), request.max_new_tokens)
        if request.stop and target.tokenizer is None:
            raise ValueError("stop needs a tokenizer: build the target as RaggedModel(model, tokenizer)")
        ends = self.ends if request.ends is None else tuple(request.ends)
        if max(request.stop_token_ids, default=0) >= target.vocab_size:
            raise ValueError(f"stop_token_ids names ids outside the target's vocabulary of {target.vocab_size} tokens")
        ends = (*ends, *request.stop_token_ids)
        grammar, limit = request.grammar, request.max_new_tokens
        constraint = None if grammar is None else decoder.grammar_compiler(grammar, ends, limit)
        pipeline = self._pipeline(request, ends, constraint)
        seeds = torch.randint(2**62, (request.n,)).tolist()
        if request.seed is not None:
            seeds = [request.seed + index for index in range(request.n)]
        samples = [
            Sample(
                list(request.prompt),
                request.max_new_tokens,
                seed,
                pipeline,
                Stopping(self._criteria(request), ends=ends),
                emit=stream.on_tokens(index),
                logprobs=request.logprobs,
                prompt_logprobs=request.prompt_logprobs,
                on_prompt_logprobs=stream.on_prompt_logprobs(index),
                max_drafts=request.max_drafts,
                prediction=request.prediction,
                stats=stream.answers[index].stats,
            )
            for index, seed in enumerate(seeds, first)
        ]
        for sample in samples:
            decoder.stepper.check(sample)
        return samples

    def _criteria(self, request: Request) -> list[Any]:
        """Builds the stopping criteria of one answer from its request and the model's own settings."""
        from transformers import MaxTimeCriteria

        limit = [] if self.own.max_time is None else [MaxTimeCriteria(self.own.max_time)]
        texts = [StopTexts(self._token_decoder, request.stop)] if request.stop and self._token_decoder else []
        return [*limit, *(self._stopping if request.stop is None else texts)]

    def _pipeline(
        self, request: Request, ends: tuple[int, ...], constraint: StatefulProcessor | None
    ) -> LogitsPipeline:
        """Returns the processors of a request; requests with equal settings share them and are processed together."""
        make = partial(request.logits_pipeline, self.decoder.target.model, self.own, ends, constraint)
        if self._bound or not request.plain:
            return make()
        names = ("top_k", "top_p", "min_p", "repetition_penalty")
        settings = (request.temperature_of(self.own), *(getattr(request, name) for name in names), constraint)
        with self._mutex:
            pipeline = self._pipelines.pop(settings, None) or make()
            self._pipelines[settings] = pipeline
            if len(self._pipelines) > _MOST_PIPELINES:
                self._pipelines.popitem(last=False)
        return pipeline


__all__ = ["RequestSamples"]
