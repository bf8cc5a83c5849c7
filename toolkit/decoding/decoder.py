"""The decoder: its parts, and Hugging Face's conventions around the steps of a batch.

Shapes: B samples, L prompt columns.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.deciders import Decider, FixedDepth
from arbordraft.decoding import text as texts
from arbordraft.decoding.assemble import AssembledParts, assemble
from arbordraft.decoding.batch import batch_of, decode_batch, samples_of
from arbordraft.decoding.generate import (
    DecodingError,
    check_options,
    check_prompts,
    integral_lengths,
    pack_output,
    per_sample_streamers,
    refuse_unsupported,
    with_stop_strings,
)
from arbordraft.decoding.lengths import check_positions
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.prompts import left_padded
from arbordraft.decoding.settings import SOURCES, changed, own_settings, with_settings
from arbordraft.decoding.state import DecodeState, Emission
from arbordraft.decoding.static.runner import DEFAULT_BUCKETS, StaticStepping
from arbordraft.decoding.step import Stepper
from arbordraft.decoding.warming import warm_up
from arbordraft.drafters import Drafter
from arbordraft.grammars import Grammar, GrammarCompiler
from arbordraft.kernels import choice
from arbordraft.target.equality import EqualityReport, equality_report
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.utils.checks import check_int, check_temperature
from arbordraft.verifiers.coupling import Coupling

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import GenerateDecoderOnlyOutput


class SpeculativeDecoder(nn.Module):
    """Decodes batches of different samples with draft trees, each at its own pace, without padding.

    Args:
        target: the model whose output law is preserved; a model of transformers is wrapped as it is.
        drafter: proposes tokens; a model of transformers, or a wrapped one, is taken for a draft model.
        topology: the largest tree to draft; by default what suits the drafter
            (:meth:`~arbordraft.drafters.Drafter.default_topology`).
        coupling: how children are drawn and how trees are judged. By default what suits the drafter: trees and lookups
            are drafted with the target's own noise and kept where they are the target's own tokens
            (:meth:`Coupling.shared <arbordraft.Coupling.shared>`), chains are drawn at random and judged as a block.
            Either decodes greedily and samples, losslessly.
        decider: how much of the tree is drafted and verified, per sample and step; by default all of it.
            :class:`~arbordraft.CostAware` drafts what pays: :func:`arbordraft.load` and ``builders.fitted`` use it.
        expected_batch: samples that any other request takes its batch to have, all of them like itself, where what pays
            depends on it (:class:`~arbordraft.CostAware`). Its text depends on what is
            verified, and must not depend on what happens to share its batch.
        max_cache_tokens: bound on the rows of each KV cache; unlimited by default.
        buckets: numbers of rows, such as ``(8, 16, 32, 64)``. Each step is then padded to the smallest one that holds
            its trees (above the largest, to the next power of two) and never asks the host between the upload of its
            trees and the download of its verdicts; on a GPU it is recorded once per shape as a CUDA graph, which
            replays. So are the drafts of EAGLE heads and draft models, where the most probable tokens are drafted and
            the decider plans beforehand. ``stats.pad_rows`` counts the target's padding. Sampling then takes shared
            noise or recursive rejection (or ``TopTailRule``), and processors that look at the scores alone. By default
            (``"auto"``) a GPU gets such steps, of 1, 8, 16, 32 and 64 rows, wherever a batch and its requests can take
            them, and other steps have the shapes that they have, which ``None`` makes of all.
        compiler: compile these steps with this backend of ``torch.compile``, such as ``"inductor"``.
        generation_config: where settings come from that a request leaves open: the ``model``'s own
            ``generation_config``, or ``none`` for its special tokens alone.

    Attributes:
        stepper: takes batches a step further, with the parts that the decoder was built with.
        on_step: called as ``on_step(state, tree, verdict)`` in every step, after verification and before anything is
            committed; it must change none of the three. :class:`~arbordraft.StepLog` records steps as a table.

    Raises:
        TypeError: if a part is of another kind.
        ValueError: if the parts do not fit: vocabulary, tokenizer, draft law or topology.
    """

    def __init__(
        self,
        target: "RaggedModel | PreTrainedModel",
        drafter: "Drafter | RaggedModel | PreTrainedModel",
        topology: TreeTopology | None = None,
        coupling: Coupling | None = None,
        decider: Decider | None = None,
        *,
        expected_batch: int = 1,
        max_cache_tokens: int | None = None,
        buckets: Sequence[int] | str | None = "auto",
        compiler: str | None = None,
        generation_config: str = "model",
    ) -> None:
        super().__init__()
        if generation_config not in SOURCES:
            raise ValueError(f"generation_config must be one of {', '.join(SOURCES)}, got {generation_config!r}")
        self.generation_config = generation_config
        self.parts = assemble(target, drafter, topology, coupling, decider)
        self.target, self.drafter, self.topology, self.coupling, self.decider = self.parts
        self.mask = SlicedCausalMask(self.topology)
        self.expected_batch = check_int("expected_batch", expected_batch, 1)
        self.max_cache_tokens = None if max_cache_tokens is None else check_int("max_cache_tokens", max_cache_tokens, 1)
        if isinstance(buckets, str) and buckets != "auto":
            raise ValueError(f"buckets must be auto, None or numbers of rows such as (8, 16, 32, 64), got {buckets!r}")
        if compiler is not None and (buckets is None or isinstance(buckets, str)):
            raise ValueError("compiler is for steps of fixed shapes: say which, with buckets=(8, 16, 32, 64)")
        self.static: StaticStepping | None = None
        if isinstance(buckets, str):
            if self.target.backend != "native":  # which is a CPU's
                self.static = StaticStepping(*self.parts[:4], DEFAULT_BUCKETS, automatic=True)
        elif buckets is not None:
            self.static = StaticStepping(*self.parts[:4], buckets, compiler)
        self.stepper = Stepper(self.parts, self.mask, expected_batch=self.expected_batch, static=self.static)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AssembledParts._fields and "stepper" in self.__dict__:
            raise AttributeError(f"the parts of a decoder fit each other: make another one with {name}=...")
        super().__setattr__(name, value)

    @property
    def on_step(self) -> Callable[[DecodeState, DraftTree, Verdict], None] | None:
        return self.stepper.on_step

    @on_step.setter
    def on_step(self, hook: Callable[[DecodeState, DraftTree, Verdict], None] | None) -> None:
        self.stepper.on_step = hook

    @property
    def own_settings(self) -> "GenerationConfig":
        """Settings of the model itself, for all that a request leaves open."""
        return own_settings(self.target.model, self.generation_config)

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """Makes processors of grammars for the target."""
        return GrammarCompiler(self.target.tokenizer, self.target.vocab_size)

    def equality_report(self) -> EqualityReport:
        """How exactly this decoder's output equals plain decoding of its target, on this machine."""
        return equality_report(self.target, self.coupling.exactness)

    @torch.no_grad()
    def warm_up(self, samples: int = 1, max_tokens: int | None = None) -> None:
        """Compiles kernels and records steps before the first request has to wait for them; ``serve`` begins with it.

        It takes a few steps of a made-up text, with trees of many depths, and teaches the decider nothing. Without
        Triton, as on a CPU, there is nothing to do.

        Args:
            samples: how many will be decoded at a time, at most: steps are recorded for the cache of such a batch.
            max_tokens: bound on the rows of its KV caches, as an :class:`~arbordraft.Engine` is given one; by default
                ``max_cache_tokens``.

        Raises:
            TypeError: if an argument is no whole number.
            ValueError: if one is below 1.
        """
        bound = self.max_cache_tokens if max_tokens is None else check_int("max_tokens", max_tokens, 1)
        check_int("samples", samples, 1)
        if choice.triton_chosen(next(self.target.model.parameters())):
            parts = self.parts._replace(decider=FixedDepth())
            stepper = Stepper(parts, self.mask, expected_batch=self.expected_batch, static=self.static)
            warm_up(stepper, samples, bound)

    def complete(
        self,
        text: str | Sequence[str],
        *,
        max_new_tokens: int = 256,
        temperature: float | None = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stream: bool = False,
        raw: bool = False,
        system: str | None = None,
        stop: str | Sequence[str] | None = None,
        grammar: Grammar | None = None,
    ) -> str | list[str] | texts.TextStream:
        """Text in, text out: what the model answers to a text, or behind it with ``raw=True``.

        All other settings are those of the model's own ``generation_config``.

        Args:
            text: one, or a list of them, which are decoded as one batch.
            max_new_tokens: longest answer, in tokens.
            temperature: 0 decodes greedily, more samples; ``None`` for the model's own, or 0 if it has none.
            top_p: sample from the fewest tokens whose probabilities reach this sum, 0 to 1; by default the model's own,
                or 1.
            top_k: sample from this many most probable tokens, 0 for all; by default the model's own, or all.
            seed: 0 to 2**64 - 1, of the first text; text i gets ``seed + i``. By default torch's generator gives some.
            stream: return the answer in pieces, as they are decoded in a thread of their own; one text only. Closing
                the iterator ends the decoding.
            raw: continue the text itself, without the tokenizer's chat template.
            system: system prompt of the chat template.
            stop: the answer ends before this text, or the first of several. By default it ends with the model's own
                ``stop_strings``, which it keeps.
            grammar: the form that answers have to have.

        Returns:
            The answer, without special tokens; a list of them for a list of texts; with ``stream=True`` an iterator of
            its pieces.

        Raises:
            TypeError: for arguments of another type.
            ValueError: without a tokenizer, for an empty text or one that is too long, and for values out of range.
            DecodingError: as :meth:`generate`.

        Examples:
            >>> from tokenizers import Tokenizer, models
            >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
            >>> from arbordraft import NGramDrafter, RaggedModel
            >>> words = Tokenizer(models.WordLevel({"echo": 0}, unk_token="echo"))
            >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
            >>> config = LlamaConfig(vocab_size=1, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
            >>> target = RaggedModel(LlamaForCausalLM(config).eval(), tokenizer, kernels="torch", self_test=False)
            >>> decoder = SpeculativeDecoder(target, NGramDrafter())
            >>> decoder.complete("hello", max_new_tokens=3)
            'echo echo echo'
        """
        if raw and system is not None:
            raise ValueError("system is for the chat template, which raw=True leaves out: write it into the text")
        if not isinstance(text, Sequence) or isinstance(text, str | bytes):
            conversations = [texts.user_turn(text, system)]  # refuses what is no text
        elif stream:
            raise ValueError("stream=True takes one text at a time: call complete() once for each, or generate()")
        else:
            conversations = [texts.user_turn(one, system) for one in text]
        if not conversations:
            return []
        settings = texts.settings_of(
            max_new_tokens, temperature, top_p, top_k, seed, len(conversations), self.own_settings
        )
        settings["grammar"] = grammar
        answers = self._answer(conversations, settings, raw, stream, stop)
        return answers[0] if isinstance(text, str) and isinstance(answers, list) else answers

    def chat(
        self,
        messages: texts.Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float | None = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stream: bool = False,
        raw: bool = False,
        stop: str | Sequence[str] | None = None,
        grammar: Grammar | None = None,
    ) -> str | texts.TextStream:
        """The next message of a conversation.

        Args:
            messages: the messages so far, each ``{"role": "system" | "user" | "assistant", "content": ...}``.
            max_new_tokens: as in :meth:`complete`, like the others.
            temperature: as there.
            top_p: as there.
            top_k: as there.
            seed: as there.
            stream: as there.
            raw: continue the contents, a blank line between two, without the chat template.
            stop: as there.
            grammar: as there.

        Returns:
            Its content; with ``stream=True`` an iterator of pieces.

        Raises:
            TypeError: for messages that are none, and as :meth:`complete`.
            ValueError: as there, and for messages that the chat template refuses.
        """
        settings = texts.settings_of(max_new_tokens, temperature, top_p, top_k, seed, 1, self.own_settings)
        settings["grammar"] = grammar
        answers = self._answer([texts.check_messages(messages)], settings, raw, stream, stop)
        return answers[0] if isinstance(answers, list) else answers

    def _answer(
        self, conversations: Sequence[texts.Messages], settings: dict[str, Any], raw: bool, streamed: bool, stop: Any
    ) -> list[str] | texts.TextStream:
        tokenizer, ends = self.target.tokenizer, None if stop is None else texts.stops(stop)
        prompts = [texts.encode(tokenizer, messages, raw=raw) for messages in conversations]
        assert tokenizer is not None  # or encode() has raised
        check_positions(self.target, max(map(len, prompts)), settings["max_new_tokens"])
        inputs = {name: tensor.to(self.target.device) for name, tensor in left_padded(prompts).items()}
        answer = texts.stream if streamed else texts.write
        return answer(self.generate, tokenizer, inputs, settings, ends)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        streamer: "BaseStreamer | Sequence[BaseStreamer] | None" = None,
        seeds: Sequence[int] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        **kwargs: Any,
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        """Generates like ``model.generate``, with the same arguments and return types.

        Args:
            input_ids: ``[B, L]``, left-padded if the prompts differ in length; they may lie on another device than the
                model, and so does what is returned then.
            streamer: one, or one per sample; it receives only committed tokens.
            seeds: one whole number from 0 to 2**64 - 1 per sample; they make a sample's output independent of what
                shares its batch.
            grammar: the form that answers have to have: one for all, or one per sample, ``None`` for those that are
                free.
            **kwargs: those of ``transformers``' ``generate``: ``attention_mask``, ``generation_config``,
                ``max_new_tokens``, ``do_sample``, ``temperature`` (at most 1e6; 0 and all below 1e-10 mean greedy),
                ``logits_processor``, ``stopping_criteria``, ``stop_strings`` (spelt by ``tokenizer``, else
                the target's), ``return_dict_in_generate``, ... What they leave open is the model's own.
                ``max_length`` and ``min_length`` count columns, padding included, as
                transformers does; ``max_new_tokens`` and ``min_new_tokens`` count a sample's own tokens.

        Logits processors and stopping criteria see one sample at a time, its own tokens without padding, once per node
        of its tree. Those of users are called with ``[B, L]`` ids and ``[B, V]`` scores whose rows are all this
        sample's, and the row with the sample's number is read: what they do to a row may depend on its tokens, its
        scores and its number, not on other rows and not on earlier calls. One that keeps a state follows
        :class:`~arbordraft.sampling.stateful.StatefulProcessor`.

        Returns:
            ``[B, L + new]`` token ids, or with ``return_dict_in_generate`` an output with ``sequences`` and ``stats``
            (:class:`~arbordraft.decoding.metrics.DecodeStats`).

        Raises:
            TypeError: for prompts, masks and settings of another type.
            ValueError: for arguments that speculative decoding cannot honour, for unusable prompts, and if a processor
                returns scores of another shape.
            CacheOverflow: if the batch cannot fit into ``max_cache_tokens``; nothing was decoded then.
            DecodingError: if the target produced NaN or infinite logits for some sample, or a grammar could not be
                followed to the end of its answer.
        """
        if input_ids is None:
            input_ids = kwargs.pop("inputs", None)  # transformers' own name for it
        kwargs |= integral_lengths(kwargs)
        own = self.own_settings
        settings = check_options(kwargs, own)
        if settings["temperature"] is not None and check_temperature("temperature", settings["temperature"]) == 0:
            kwargs |= {"temperature": None, "do_sample": False}
        if (strings := settings["stop_strings"]) is not None:
            tokenizer = kwargs.pop("tokenizer", None) or self.target.tokenizer
            kwargs["stopping_criteria"] = with_stop_strings(kwargs.get("stopping_criteria"), strings, tokenizer)
            kwargs.pop("stop_strings", None)  # transformers would want the tokenizer, and drop it
            own = changed(own, stop_strings=None)
            if (config := kwargs.get("generation_config")) is not None:
                kwargs["generation_config"] = changed(config, stop_strings=None)
        if input_ids is not None:
            check_prompts(input_ids, kwargs.get("attention_mask"), self.target.vocab_size)
            if kwargs.get("max_new_tokens") == 0:  # transformers takes 0 for a mistake; here it means what it says
                return self._nothing(input_ids, streamer, kwargs)
        model = with_settings(self.target.model, own)
        # Processors of transformers are made where the prompts lie, and called where the model computes.
        home, there = None if input_ids is None else input_ids.device, self.target.device
        if input_ids is not None:
            input_ids = input_ids.to(there)
        if isinstance(mask := kwargs.get("attention_mask"), Tensor):
            kwargs["attention_mask"] = mask.to(there)
        output: Tensor | GenerateDecoderOnlyOutput = model.generate(  # type: ignore[operator]
            input_ids,
            custom_generate=self.decode_loop,
            spec_streamer=streamer,
            seeds=seeds,
            grammar=grammar,
            **kwargs,
        )
        if isinstance(output, Tensor):
            return output if home is None else output.to(home)
        if home is not None:
            output.sequences = output.sequences.to(home)  # type: ignore[assignment]
        return output

    @torch.no_grad()
    def decode_loop(
        self,
        model: nn.Module,
        input_ids: Tensor,
        logits_processor: "LogitsProcessorList",
        stopping_criteria: "StoppingCriteriaList",
        generation_config: "GenerationConfig",
        spec_streamer: "BaseStreamer | Sequence[BaseStreamer] | None" = None,
        seeds: Sequence[int] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        **model_kwargs: Any,
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        """The decoding method behind ``model.generate(..., custom_generate=decoder.decode_loop)``.

        ``streamer`` does not reach a custom method in transformers: pass it as ``spec_streamer``. Neither does
        ``tokenizer``, without which transformers refuses ``stop_strings``: pass ``StopStringCriteria``, or call
        :meth:`generate`. For the other arguments, results and errors see there.
        """
        if model._modules is not self.target.model._modules:  # generate() may call it by a second object
            raise ValueError("this decoder was built for another model than the one whose generate() called it")
        own: Any = model.generation_config
        refuse_unsupported(own, generation_config, model_kwargs.get("attention_mask"), model_kwargs)
        streamers = per_sample_streamers(spec_streamer, len(input_ids))
        # Not a named parameter: transformers would take it for an option of this method and pass it twice.
        mask = model_kwargs.get("attention_mask")
        samples = samples_of(
            input_ids,
            mask,
            logits_processor,
            stopping_criteria,
            generation_config,
            target=self.target,
            constrain=lambda grammar, ends: self.compiler(grammar, ends),
            seeds=seeds,
            grammar=grammar,
        )
        scheduler = batch_of(self.stepper, samples, self.max_cache_tokens)
        for sample, streamer in zip(samples, streamers, strict=False):
            streamer.put(torch.tensor(sample.tokens))
            sample.emit = _told(streamer)
        stats = decode_batch(scheduler, samples)
        for streamer in streamers:
            streamer.end()

        output = pack_output(input_ids, samples, stats, generation_config)
        if failures := {index: str(s.failure) for index, s in enumerate(samples) if s.failure is not None}:
            raise DecodingError(failures, output)
        return output if generation_config.return_dict_in_generate else output.sequences

    def _nothing(
        self, input_ids: Tensor, streamer: Any, kwargs: dict[str, Any]
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        from arbordraft.decoding.output import SpeculativeOutput

        for one in per_sample_streamers(streamer, len(input_ids)):
            one.end()
        zeros = [0] * len(input_ids)
        stats = DecodeStats(self.coupling.exactness.value, zeros, list(zeros))
        output = SpeculativeOutput(sequences=input_ids, stats=stats)  # type: ignore[arg-type]
        return output if kwargs.get("return_dict_in_generate") else input_ids


def _told(streamer: "BaseStreamer") -> Callable[[Emission], None]:
    return lambda gain: streamer.put(torch.tensor(gain.tokens))
