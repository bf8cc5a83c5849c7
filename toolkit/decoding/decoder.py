"""The decoder: its parts and its interface, which follows Hugging Face's conventions.

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
from arbordraft.decoding.metrics import AnswerStats, DecodeStats
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
    """Decodes batches with one draft tree per sample; each sample advances at its own pace, without padding.

    Args:
        target: the model whose output law is preserved; a transformers model is wrapped.
        drafter: proposes tokens; a transformers model or a :class:`RaggedModel` serves as a draft model.
        topology: the largest tree to draft; by default the drafter's
            (:meth:`~arbordraft.drafters.Drafter.default_topology`).
        coupling: how children are drawn and trees are verified; by default derived from the drafter. Trees and lookups
            are drafted with the target's noise (:meth:`Coupling.shared <arbordraft.Coupling.shared>`): a draft is
            accepted if the target draws the same token. Chains are drawn at random and verified as a block. Both
            defaults are lossless, for greedy decoding and for sampling.
        decider: how much of the tree is drafted and verified, per sample and step; by default all of it.
            :class:`~arbordraft.CostAware` drafts only as far as it pays; :func:`arbordraft.load` and
            ``builders.cost_aware`` use it.
        expected_batch: batch size that :class:`~arbordraft.CostAware` assumes for a request whose text depends on the
            verified drafts. All samples of that batch count as equal. So the text does not depend on the real batch.
        max_cache_tokens: most rows of each KV cache; unlimited by default.
        buckets: row counts of fixed step shapes, such as ``(8, 16, 32, 64)``. Each step is padded to the smallest
            bucket that holds its trees; beyond the largest bucket, to the next power of two. From the
            upload of its trees to the download of its verdicts, such a step runs without the host. On a GPU each shape
            is recorded once as a CUDA graph and replayed. Drafts of EAGLE heads and draft models are recorded, too, if
            the most probable tokens are drafted and the decider plans beforehand. ``stats.pad_rows`` counts the
            target's padding. In such steps, sampling needs shared noise, recursive rejection or ``TopTailRule``, and
            processors that read only the scores. By default (``"auto"``) a GPU takes steps of 1, 8, 16, 32 and 64 rows,
            if the batch and its requests allow them. All other steps run unpadded. ``None`` runs every step unpadded.
        compile_backend: ``torch.compile`` backend for these steps, such as ``"inductor"``.
        generation_config: source of the settings that a request leaves open: ``model`` for the model's own
            ``generation_config``, ``none`` for its special tokens alone.

    Attributes:
        stepper: runs the steps of batches with the decoder's parts.
        on_step: called as ``on_step(state, tree, verdict)`` in every step, after verification and before anything is
            committed; it must change none of the three. :class:`~arbordraft.StepLog` records steps as a table.

    Raises:
        TypeError: if a part has the wrong type.
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
        compile_backend: str | None = None,
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
        if compile_backend is not None and (buckets is None or isinstance(buckets, str)):
            raise ValueError(
                "compile_backend is for steps of fixed shapes: give their row counts, buckets=(8, 16, 32, 64)"
            )
        self.static: StaticStepping | None = None
        if isinstance(buckets, str):
            if self.target.backend != "native":  # "native" runs on a CPU alone
                self.static = StaticStepping(*self.parts[:4], DEFAULT_BUCKETS, automatic=True)
        elif buckets is not None:
            self.static = StaticStepping(*self.parts[:4], buckets, compile_backend)
        self.stepper = Stepper(self.parts, self.mask, expected_batch=self.expected_batch, static=self.static)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in AssembledParts._fields and "stepper" in self.__dict__:
            raise AttributeError(f"a decoder keeps its parts: make another one with {name}=...")
        super().__setattr__(name, value)

    @property
    def on_step(self) -> Callable[[DecodeState, DraftTree, Verdict], None] | None:
        return self.stepper.on_step

    @on_step.setter
    def on_step(self, hook: Callable[[DecodeState, DraftTree, Verdict], None] | None) -> None:
        self.stepper.on_step = hook

    @property
    def own_settings(self) -> "GenerationConfig":
        """The model's own generation settings, which apply where a request leaves a setting open."""
        return own_settings(self.target.model, self.generation_config)

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        """Builds grammar processors for the target."""
        return GrammarCompiler(self.target.tokenizer, self.target.vocab_size)

    def equality_report(self) -> EqualityReport:
        """Reports how exactly this decoder's output equals plain decoding of its target on this machine."""
        return equality_report(self.target, self.coupling.exactness)

    @torch.no_grad()
    def warm_up(self, samples: int = 1, max_cache_tokens: int | None = None) -> None:
        """Compiles kernels and records steps, so that the first request does not wait; ``serve`` calls it at start.

        It decodes a few steps of a made-up text with trees of many depths. The decider learns nothing from them.
        Without Triton, as on a CPU, it does nothing.

        Args:
            samples: largest batch that will be decoded; steps are recorded for the cache of such a batch.
            max_cache_tokens: most rows of its KV caches, as in :class:`~arbordraft.Engine`; by default the decoder's.

        Raises:
            TypeError: if an argument is not an integer.
            ValueError: if an argument is below 1.
        """
        bound = self.max_cache_tokens
        if max_cache_tokens is not None:
            bound = check_int("max_cache_tokens", max_cache_tokens, 1)
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
        """Answers a text as a chat message, or continues it with ``raw=True``; takes and returns text.

        All other settings come from the model's own ``generation_config``.

        Args:
            text: one text, or a list of texts, which is decoded as one batch.
            max_new_tokens: longest answer, in tokens.
            temperature: 0 decodes greedily, greater values sample; ``None`` takes the model's own, or 0 if it has none.
            top_p: sample from the fewest tokens whose probabilities reach this sum, 0 to 1; by default the model's own,
                or 1.
            top_k: number of most probable tokens to sample from, 0 for all; by default the model's own, or all.
            seed: seed of the first text, 0 to 2**64 - 1; text i gets ``seed + i``. By default torch's generator draws
                the seeds.
            stream: return an iterator of the answer's pieces; one text only. A separate thread decodes them. Closing
                the iterator ends the decoding.
            raw: continue the text itself, without the tokenizer's chat template.
            system: system prompt of the chat template.
            stop: text or texts before which the answer ends. By default the answer ends with the model's own
                ``stop_strings`` and includes them.
            grammar: grammar that the answers follow.

        Returns:
            The answer without special tokens; for a list of texts a list of answers; with ``stream=True`` an iterator
            of the answer's pieces.

        Raises:
            TypeError: for arguments of the wrong type.
            ValueError: without a tokenizer, for empty or too long texts, and for values out of range.
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
            conversations = [texts.user_turn(text, system)]  # raises TypeError unless it is a str
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
        """Writes the next message of a conversation.

        Args:
            messages: the messages so far, each ``{"role": "system" | "user" | "assistant", "content": ...}``.
            max_new_tokens: as in :meth:`complete`.
            temperature: as in :meth:`complete`.
            top_p: as in :meth:`complete`.
            top_k: as in :meth:`complete`.
            seed: as in :meth:`complete`.
            stream: as in :meth:`complete`.
            raw: continue the contents, joined by blank lines, without the chat template.
            stop: as in :meth:`complete`.
            grammar: as in :meth:`complete`.

        Returns:
            The content of the message; with ``stream=True`` an iterator of its pieces.

        Raises:
            TypeError: for malformed messages, and as :meth:`complete`.
            ValueError: as :meth:`complete`, and for messages that the chat template refuses.
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
        assert tokenizer is not None  # else encode() would have raised
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
        max_drafts: int | Sequence[int | None] | None = None,
        predictions: Sequence[Sequence[int] | None] | None = None,
        **kwargs: Any,
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        """Generates like ``model.generate``, with the same arguments and return types.

        Args:
            input_ids: ``[B, L]``, left-padded if the prompts differ in length. They may be on another device than the
                model; the output is returned on their device.
            streamer: one streamer, or one per sample; receives only committed tokens.
            seeds: one integer from 0 to 2**64 - 1 per sample. With seeds, a sample's output does not depend on the
                other samples of its batch.
            grammar: grammar that the answers follow: one for all samples, or one per sample, ``None`` where a sample
                has none.
            max_drafts: most drafts per step, 0 or more, for all samples or one per sample; see
                :class:`~arbordraft.decoding.requests.Request`. ``None`` sets no bound.
            predictions: one per sample, ``None`` for a sample without one: token ids that its answer is expected to
                contain; see ``prediction`` of :class:`~arbordraft.decoding.requests.Request`.
            **kwargs: arguments of ``transformers``' ``generate``, such as ``attention_mask``, ``generation_config``,
                ``max_new_tokens``, ``do_sample``, ``temperature``, ``logits_processor``, ``stopping_criteria``,
                ``stop_strings`` and ``return_dict_in_generate``. Settings left open are the model's own.
                ``temperature`` is at most 1e6; values below 1e-10 decode greedily. ``stop_strings`` are matched
                in the spelling of ``tokenizer``, by default the target's. ``max_length`` and ``min_length`` count
                columns, padding included, as in transformers. ``max_new_tokens`` and ``min_new_tokens`` count a
                sample's own tokens.

        Logits processors and stopping criteria see one sample at a time: its tokens without padding, once per node of
        its tree. User-defined ones are called with ``[B, L]`` ids and ``[B, V]`` scores whose rows are all copies of
        this sample's row. Only the row with the sample's number is read. A processor may use a row's tokens, scores and
        number, but neither other rows nor earlier calls. A processor with state implements
        :class:`~arbordraft.sampling.stateful.StatefulProcessor`.

        Returns:
            ``[B, L + new]`` token ids; with ``return_dict_in_generate`` an output with ``sequences`` and ``stats``
            (:class:`~arbordraft.decoding.metrics.DecodeStats`).

        Raises:
            TypeError: for prompts, masks and settings of the wrong type.
            ValueError: for arguments that speculative decoding cannot honour, for unusable prompts, and if a processor
                returns scores of another shape.
            CacheOverflow: if the batch does not fit into ``max_cache_tokens``; nothing is decoded then.
            DecodingError: if the target gives NaN or infinite logits for a sample, or an answer cannot follow its
                grammar to the end.
        """
        if input_ids is None:
            input_ids = kwargs.pop("inputs", None)  # the name that transformers uses
        kwargs |= integral_lengths(kwargs)
        own = self.own_settings
        settings = check_options(kwargs, own)
        if settings["temperature"] is not None and check_temperature("temperature", settings["temperature"]) == 0:
            kwargs |= {"temperature": None, "do_sample": False}
        if (strings := settings["stop_strings"]) is not None:
            tokenizer = kwargs.pop("tokenizer", None) or self.target.tokenizer
            kwargs["stopping_criteria"] = with_stop_strings(kwargs.get("stopping_criteria"), strings, tokenizer)
            kwargs.pop("stop_strings", None)  # transformers would demand the tokenizer, then drop it
            own = changed(own, stop_strings=None)
            if (config := kwargs.get("generation_config")) is not None:
                kwargs["generation_config"] = changed(config, stop_strings=None)
        if input_ids is not None:
            check_prompts(input_ids, kwargs.get("attention_mask"), self.target.vocab_size)
            if kwargs.get("max_new_tokens") == 0:  # transformers refuses 0; here it decodes nothing
                return self._without_new_tokens(input_ids, streamer, kwargs)
        model = with_settings(self.target.model, own)
        # transformers builds its processors on the prompts' device, but they are called on the model's.
        prompt_device, model_device = None if input_ids is None else input_ids.device, self.target.device
        if input_ids is not None:
            input_ids = input_ids.to(model_device)
        if isinstance(mask := kwargs.get("attention_mask"), Tensor):
            kwargs["attention_mask"] = mask.to(model_device)
        output: Tensor | GenerateDecoderOnlyOutput = model.generate(  # type: ignore[operator]
            input_ids,
            custom_generate=self.decode_loop,
            spec_streamer=streamer,
            seeds=seeds,
            grammar=grammar,
            max_drafts=max_drafts,
            predictions=predictions,
            **kwargs,
        )
        if isinstance(output, Tensor):
            return output if prompt_device is None else output.to(prompt_device)
        if prompt_device is not None:
            output.sequences = output.sequences.to(prompt_device)  # type: ignore[assignment]
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
        max_drafts: int | Sequence[int | None] | None = None,
        predictions: Sequence[Sequence[int] | None] | None = None,
        **model_kwargs: Any,
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        """Decodes for ``model.generate(..., custom_generate=decoder.decode_loop)``.

        transformers does not pass ``streamer`` to a custom method: use ``spec_streamer``. It does not pass
        ``tokenizer`` either, and refuses ``stop_strings`` without one: pass ``StopStringCriteria``, or call
        :meth:`generate`. Other arguments, results and errors are those of :meth:`generate`.
        """
        if model._modules is not self.target.model._modules:  # with_settings() may have copied the model object
            raise ValueError("this decoder was built for another model than the one whose generate() called it")
        own: Any = model.generation_config
        refuse_unsupported(own, generation_config, model_kwargs.get("attention_mask"), model_kwargs)
        streamers = per_sample_streamers(spec_streamer, len(input_ids))
        # Not a named parameter: transformers would then pass it twice.
        mask = model_kwargs.get("attention_mask")
        samples = samples_of(
            input_ids,
            mask,
            logits_processor,
            stopping_criteria,
            generation_config,
            target=self.target,
            constrain=lambda grammar, ends, limit: self.grammar_compiler(grammar, ends, limit),
            seeds=seeds,
            grammar=grammar,
            max_drafts=max_drafts,
            predictions=predictions,
        )
        scheduler = batch_of(self.stepper, samples, self.max_cache_tokens)
        for sample, streamer in zip(samples, streamers, strict=False):
            streamer.put(torch.tensor(sample.tokens))
            sample.emit = _emitter(streamer)
        stats = decode_batch(scheduler, samples)
        for streamer in streamers:
            streamer.end()

        output = pack_output(input_ids, samples, stats, generation_config)
        if failures := {index: str(s.failure) for index, s in enumerate(samples) if s.failure is not None}:
            raise DecodingError(failures, output)
        return output if generation_config.return_dict_in_generate else output.sequences

    def _without_new_tokens(
        self, input_ids: Tensor, streamer: Any, kwargs: dict[str, Any]
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        from arbordraft.decoding.output import SpeculativeOutput

        for one in per_sample_streamers(streamer, len(input_ids)):
            one.end()
        zeros = [0] * len(input_ids)
        stats, answers = DecodeStats(self.coupling.exactness.value, zeros, list(zeros)), [AnswerStats() for _ in zeros]
        output = SpeculativeOutput(sequences=input_ids, stats=stats, answers=answers)  # type: ignore[arg-type]
        return output if kwargs.get("return_dict_in_generate") else input_ids


def _emitter(streamer: "BaseStreamer") -> Callable[[Emission], None]:
    return lambda gain: streamer.put(torch.tensor(gain.tokens))
