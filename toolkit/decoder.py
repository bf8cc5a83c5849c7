"""The decoder: one step reads as the algorithm, the rest keeps Hugging Face's conventions.

Shapes: B samples, n_b nodes of sample b, T = sum of n_b packed rows, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft import texts
from arbordraft.checks import each, instance, whole
from arbordraft.coupling import Coupling
from arbordraft.deciders import Decider, FixedDepth
from arbordraft.drafters import Drafter, LanguageModelDrafter
from arbordraft.huggingface import (
    DecodingError,
    Stopping,
    check_options,
    check_prompts,
    pack_output,
    per_sample_streamers,
    refuse_unsupported,
    with_stop_strings,
    without_padding,
)
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.kernels.verify import row_max
from arbordraft.laws import Fixed
from arbordraft.masks import SlicedCausalMask, stack_words
from arbordraft.metrics import DecodeStats
from arbordraft.processors import Warp
from arbordraft.prompts import left_padded
from arbordraft.sampling import GumbelNoise, Noise, SharedSource, SoftmaxRows
from arbordraft.state import DecodeState
from arbordraft.static.runner import StaticStepping
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.exactness import ExactnessReport, exactness_report
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftContext, DraftTree, SampleVerdict, Verdict
from arbordraft.verifiers import matching_verdict

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer
    from transformers.generation.utils import GenerateDecoderOnlyOutput

_AHEAD = 256  # new tokens for which a sample's slab has room from the start


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
            replays. ``stats.pad_rows`` counts the padding. Sampling then takes shared noise or recursive rejection (or
            ``TopTailRule``), and processors that look at the scores alone.
        compiler: compile these steps with this backend of ``torch.compile``, such as ``"inductor"``.

    Attributes:
        on_step: is told of every step before it is committed: the batch, the drafts and what became of them. For those
            who watch; it must change none of the three.

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
        buckets: Sequence[int] | None = None,
        compiler: str | None = None,
    ) -> None:
        super().__init__()
        target, drafter = _wrapped(target), as_drafter(drafter)
        topology = drafter.default_topology() if topology is None else topology
        instance("topology", topology, TreeTopology)
        coupling = Coupling.of(drafter.default_law(topology.width)) if coupling is None else coupling
        instance("coupling", coupling, Coupling)
        decider = FixedDepth() if decider is None else decider
        instance("decider", decider, Decider)
        if max_cache_tokens is not None:
            max_cache_tokens = whole("max_cache_tokens", max_cache_tokens, 1)
        drafter.check(target, coupling.law)
        coupling.check(topology)
        for law in drafter.laws(coupling.law):
            if not coupling.verifier.supports(law):
                raise ValueError(f"{drafter} also proposes by {law}, for which {coupling.verifier} is not valid")
        if decider.anticipating and not coupling.verifier.shared:
            raise ValueError(
                f"{decider} looks at tokens that are still to be verified, which would bias the output unless target "
                "and drafter share their noise: Coupling.shared(k)"
            )
        self.target: RaggedModel = target
        self.drafter: Drafter = drafter
        self.topology = topology
        self.mask = SlicedCausalMask(topology)
        self.coupling = coupling
        self.decider = decider
        self.expected_batch = whole("expected_batch", expected_batch, 1)
        self.max_cache_tokens = max_cache_tokens
        self.on_step: Callable[[DecodeState, DraftTree, Verdict], None] | None = None
        if compiler is not None and buckets is None:
            raise ValueError("compiler is for steps of fixed shapes: say which, with buckets=(8, 16, 32, 64)")
        self.static = None
        if buckets is not None:
            self.static = StaticStepping(target, drafter, topology, coupling, buckets, compiler)

    def step(self, state: DecodeState) -> Verdict:
        """One round: draft a tree per sample, run the target once over all of them, keep what it accepts.

        Args:
            state: advanced in place; every active sample gains at least one token.
        """
        noise = self._noise(state)
        with state.stats.phase("draft"):
            tree = self.drafter.propose(state.drafts, self._context(state, noise))
        if self.static is not None:
            return self._static_step(self.static, state, tree, noise)
        with state.stats.phase("target"):
            logits, hidden = self._run_target(state, tree)
        with state.stats.phase("verify"):
            tree, logits, hidden, best = self._drop_failed(state, tree, logits, hidden)
            verdict = self._judge(state, tree, logits, best, noise)
        with state.stats.phase("commit"):
            shares = hidden.split(tree.lengths)
            self._commit(state, tree, verdict, lambda sample, path: shares[sample][path], state.cache.commit)
        return verdict

    def _noise(self, state: DecodeState) -> Noise | GumbelNoise | None:
        if state.greedy:
            return None
        if self.coupling.verifier.shared:
            return state.shared.at([len(tokens) for tokens in state.tokens])
        return Noise.draw(state.generators, self.topology.num_nodes)

    def _static_step(
        self, static: StaticStepping, state: DecodeState, tree: DraftTree, noise: Noise | GumbelNoise | None
    ) -> Verdict:
        """The same in fixed shapes; the target's forward, verification and compaction are one phase."""
        with state.stats.phase("target"):
            result = static(tree, self._plan(state, tree), noise, state.cache, state.warp)
            state.stats.count_padding(result.rows - sum(tree.lengths))
        with state.stats.phase("commit"):
            self._give_up(state, result.failed)
            accepted = result.hidden  # of roots and paths already
            self._commit(
                state, tree, result.verdict, lambda sample, path: accepted[sample, : len(path)], state.cache.advance
            )
        return result.verdict

    def exactness_report(self) -> ExactnessReport:
        """How exactly this decoder's output equals plain decoding of its target, on this machine."""
        return exactness_report(self.target, self.coupling.exactness)

    def complete(
        self,
        text: str | Sequence[str],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stream: bool = False,
        raw: bool = False,
        system: str | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> str | list[str] | texts.TextStream:
        """Text in, text out: what the model answers to a text, or behind it with ``raw=True``.

        Args:
            text: one, or a list of them, which are decoded as one batch.
            max_new_tokens: longest answer, in tokens.
            temperature: 0 decodes greedily, more samples.
            top_p: sample from the fewest tokens whose probabilities reach this sum, 0 to 1.
            top_k: sample from this many most probable tokens; 0 or ``None`` for all.
            seed: 0 to 2**64 - 1, of the first text; text i gets ``seed + i``. By default torch's generator gives some.
            stream: return the answer in pieces, as they are decoded in a thread of their own; one text only. Closing
                the iterator ends the decoding.
            raw: continue the text itself, without the tokenizer's chat template.
            system: system prompt of the chat template.
            stop: the answer ends before this text, or the first of several.

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
            >>> from arbordraft import NGramDrafter
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
        if isinstance(text, str):
            conversations = [texts.user_turn(text, system)]
        elif not isinstance(text, Sequence) or isinstance(text, bytes):
            raise TypeError(f"text must be a str or a list of them, got {type(text).__name__}")
        elif stream:
            raise ValueError("stream=True takes one text at a time: call complete() once for each, or generate()")
        else:
            conversations = [texts.user_turn(one, system) for one in text]
        if not conversations:
            return []
        settings = texts.settings_of(max_new_tokens, temperature, top_p, top_k, seed, len(conversations))
        answers = self._answer(conversations, settings, raw, stream, stop)
        return answers[0] if isinstance(text, str) and isinstance(answers, list) else answers

    def chat(
        self,
        messages: texts.Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stream: bool = False,
        raw: bool = False,
        stop: str | Sequence[str] | None = None,
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

        Returns:
            Its content; with ``stream=True`` an iterator of pieces.

        Raises:
            TypeError: for messages that are none, and as :meth:`complete`.
            ValueError: as there, and for messages that the chat template refuses.

        Examples:
            >>> from tokenizers import Tokenizer, models
            >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
            >>> from arbordraft import NGramDrafter
            >>> words = Tokenizer(models.WordLevel({"echo": 0}, unk_token="echo"))
            >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
            >>> config = LlamaConfig(vocab_size=1, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
            >>> target = RaggedModel(LlamaForCausalLM(config).eval(), tokenizer, kernels="torch", self_test=False)
            >>> decoder = SpeculativeDecoder(target, NGramDrafter())
            >>> tokenizer.chat_template = "{{ messages[-1].content }}"
            >>> decoder.chat([{"role": "user", "content": "hello"}], max_new_tokens=2)
            'echo echo'
        """
        settings = texts.settings_of(max_new_tokens, temperature, top_p, top_k, seed, 1)
        answers = self._answer([texts.check_messages(messages)], settings, raw, stream, stop)
        return answers[0] if isinstance(answers, list) else answers

    def _answer(
        self, conversations: Sequence[texts.Messages], settings: dict[str, Any], raw: bool, streamed: bool, stop: Any
    ) -> list[str] | texts.TextStream:
        tokenizer, ends = self.target.tokenizer, texts.stops(stop)
        prompts = [texts.encode(tokenizer, messages, raw=raw) for messages in conversations]
        assert tokenizer is not None  # or encode() has raised
        self._check_positions(prompts, settings["max_new_tokens"])
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
        **kwargs: Any,
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        """Generates like ``model.generate``, with the same arguments and return types.

        Args:
            input_ids: ``[B, L]``, left-padded if the prompts differ in length.
            streamer: one, or one per sample; it receives only committed tokens.
            seeds: one whole number from 0 to 2**64 - 1 per sample; they make a sample's output independent of what
                shares its batch.
            **kwargs: those of ``transformers``' ``generate``: ``attention_mask``, ``generation_config``,
                ``max_new_tokens``, ``do_sample``, ``temperature`` (0 means greedy), ``logits_processor``,
                ``stopping_criteria``, ``stop_strings`` with ``tokenizer``, ``return_dict_in_generate``, ...

        Returns:
            ``[B, L + new]`` token ids, or with ``return_dict_in_generate`` an output with ``sequences`` and ``stats``
            (:class:`~arbordraft.metrics.DecodeStats`).

        Raises:
            TypeError: for prompts, masks and settings of another type.
            ValueError: for arguments that speculative decoding cannot honour, and for unusable prompts.
            CacheOverflow: if the batch cannot fit into ``max_cache_tokens``; nothing was decoded then.
            DecodingError: if the target produced NaN or infinite logits for some sample.
        """
        if input_ids is None:
            input_ids = kwargs.pop("inputs", None)  # transformers' own name for it
        check_options(kwargs)
        if kwargs.get("temperature") == 0:
            kwargs |= {"temperature": None, "do_sample": False}
        if (strings := kwargs.pop("stop_strings", None)) is not None:
            kwargs["stopping_criteria"] = with_stop_strings(
                kwargs.get("stopping_criteria"), strings, kwargs.pop("tokenizer", None) or self.target.tokenizer
            )
        if input_ids is not None:
            check_prompts(input_ids, kwargs.get("attention_mask"), self.target.vocab_size)
            if kwargs.get("max_new_tokens") == 0:  # transformers takes 0 for a mistake; here it means what it says
                return self._nothing(input_ids, streamer, kwargs)
        output: Tensor | GenerateDecoderOnlyOutput = self.target.model.generate(  # type: ignore[operator]
            input_ids,
            custom_generate=self.decode_loop,
            spec_streamer=streamer,
            seeds=seeds,
            **kwargs,
        )
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
        **model_kwargs: Any,
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        """The decoding method behind ``model.generate(..., custom_generate=decoder.decode_loop)``.

        ``streamer`` does not reach a custom method in transformers: pass it as ``spec_streamer``. For the other
        arguments, results and errors see :meth:`generate`.
        """
        if model is not self.target.model:
            raise ValueError("this decoder was built for another model than the one whose generate() called it")
        refuse_unsupported(self.target.model, generation_config, model_kwargs.get("attention_mask"), model_kwargs)
        streamers = per_sample_streamers(spec_streamer, len(input_ids))
        # Not a named parameter: transformers would take it for an option of this method and pass it twice.
        mask = model_kwargs.get("attention_mask")
        state = self._start(input_ids, mask, logits_processor, stopping_criteria, generation_config, seeds, streamers)
        while state.active:
            self.step(state)
        for streamer in streamers:
            streamer.end()
        if self.static is not None:
            self.static.close(state.cache)

        output = pack_output(input_ids, state, generation_config)
        if state.failures:
            raise DecodingError(state.failures, output)
        return output if generation_config.return_dict_in_generate else output.sequences

    def _nothing(
        self, input_ids: Tensor, streamer: Any, kwargs: dict[str, Any]
    ) -> "Tensor | GenerateDecoderOnlyOutput":
        from arbordraft.output import SpeculativeOutput

        for one in per_sample_streamers(streamer, len(input_ids)):
            one.end()
        output = SpeculativeOutput(sequences=input_ids, stats=self._stats(len(input_ids)))  # type: ignore[arg-type]
        return output if kwargs.get("return_dict_in_generate") else input_ids

    def _stats(self, batch: int) -> DecodeStats:
        return DecodeStats(self.coupling.exactness.value, [0] * batch, [0] * batch)

    def _open_cache(self, batch: int) -> RaggedKVCache:
        if self.static is not None:
            return self.static.open(batch, self.max_cache_tokens)
        return RaggedKVCache(self.max_cache_tokens)

    def _start(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        processors: "LogitsProcessorList",
        criteria: "StoppingCriteriaList",
        config: "GenerationConfig",
        seeds: Sequence[int] | None,
        streamers: Sequence["BaseStreamer"],
    ) -> DecodeState:
        check_prompts(input_ids, attention_mask, self.target.vocab_size)
        batch, padded = input_ids.shape
        padding = [0] * batch if attention_mask is None else (attention_mask == 0).sum(dim=1).tolist()
        prompts = [row[pad:] for row, pad in zip(input_ids.tolist(), padding, strict=True)]
        stopping = Stopping(criteria)
        budget = stopping.max_length - padded
        self._check_positions(prompts, budget)
        if seeds is None:
            seeds = torch.randint(2**62, (batch,)).tolist()  # follows torch.manual_seed
        generators = each("seeds", seeds, lambda _, seed: Noise.source(seed))
        if len(generators) != batch:
            raise ValueError(f"{len(generators)} seeds for {batch} samples")

        stats = self._stats(batch)
        warp = Warp(without_padding(processors, padding, config), batch, padding)
        if self.static is not None:
            self.static.check(warp, greedy=not config.do_sample)
        cache = self._open_cache(batch)
        with stats.phase("prefill"):
            # Under a limit a sample gets all it can need at once, so that an overflow comes now or never.
            likely = budget if self.max_cache_tokens is not None else min(budget, _AHEAD)
            ahead = self.topology.num_nodes + likely
            handles = [cache.open(len(prompt) + ahead) for prompt in prompts]
            known = {handle: prompt[:-1] for handle, prompt in zip(handles, prompts, strict=True)}
            hidden = self.target.prefill(known, cache, hidden=self.drafter.hidden_layers)
            drafts = self.drafter.start(prompts, cache, handles)
            if self.drafter.hidden_layers:
                seen = {sample: hidden[handle] for sample, handle in enumerate(handles) if handle in hidden}
                self.drafter.take_hidden(drafts, seen)

        state = DecodeState(
            tokens=prompts,
            budget=[budget] * batch,
            handles=handles,
            cache=cache,
            drafts=drafts,
            generators=generators,
            shared=SharedSource(seeds),
            warp=warp,
            greedy=not config.do_sample,
            stopping=stopping,
            stats=stats,
            padding=padding,
            streamers=streamers,
            memory=[self.decider.start() for _ in prompts],
        )
        for sample, prompt in enumerate(prompts):
            state.stream(sample, prompt)
        return state

    def _context(self, state: DecodeState, noise: Noise | GumbelNoise | None) -> DraftContext:
        shared = isinstance(noise, GumbelNoise)
        warp = state.warp.untruncated if shared else state.warp
        return DraftContext(
            tokens=state.tokens,
            # The last token of a verdict is not drafted, so a tree need not be deeper than the budget less one.
            room=[budget - 1 if budget > 0 else None for budget in state.budget],
            topology=self.topology,
            mask=self.mask,
            law=Fixed(self.coupling.law.k) if state.greedy else self.coupling.law,
            pathwise=state.greedy or shared,
            warp=lambda logits, place_of: warp(
                logits, lambda row: state.path(*place_of(row)), lambda row: place_of(row)[0]
            ),
            temperature=state.warp.untruncated_temperature if shared else state.warp.temperature,
            plan=self.decider.plan,
            decide=self.decider,
            memory=state.memory,
            noise=noise,
            expected_batch=self.expected_batch,
            vocab_size=self.target.vocab_size,
        )

    def _plan(self, state: DecodeState, tree: DraftTree) -> RaggedBatch:
        depths = self.topology.depth_list
        living = [(handle, sample) for handle, sample in zip(state.handles, tree.samples, strict=True) if sample]
        batch = state.cache.plan(
            [handle for handle, _ in living],
            [[depths[node] for node in sample.tokens] for _, sample in living],
            stack_words([self.mask.select(list(sample.tokens), list(sample.tokens)) for _, sample in living]),
        )
        needed = sum(len(state.tokens[index]) - 1 + nodes for index, nodes in enumerate(tree.lengths) if nodes)
        state.stats.count_forward(batch, rows=sum(tree.lengths), keys=needed)
        return batch

    def _run_target(self, state: DecodeState, tree: DraftTree) -> tuple[Tensor, Tensor]:
        batch = self._plan(state, tree)
        return self.target.run(tree.packed_tokens(), batch, state.cache, hidden=self.drafter.hidden_layers)

    def _drop_failed(
        self, state: DecodeState, tree: DraftTree, logits: Tensor, hidden: Tensor
    ) -> tuple[DraftTree, Tensor, Tensor, Tensor]:
        """Ends samples whose logits are not numbers, so that they cannot disturb or lose the others.

        Returns:
            What is left of the tree, its logits and hidden states, and the most probable tokens, which came up on the
            way.
        """
        highest, best = row_max(logits)
        # NaN and +inf reach the maximum; -inf alone is a banned token. Plain numbers: an operator takes longer.
        sound = [math.isfinite(value) for value in highest.tolist()]
        if all(sound):
            return tree, logits, hidden, best
        owner = [sample for sample, _, _ in tree.rows()]
        self._give_up(state, sorted({sample for sample, good in zip(owner, sound, strict=True) if not good}))
        kept = torch.tensor([sample not in state.failures for sample in owner])
        samples = (None if index in state.failures else sample for index, sample in enumerate(tree.samples))
        return DraftTree(tuple(samples)), logits[kept], hidden[kept], best[kept]

    def _give_up(self, state: DecodeState, samples: Sequence[int]) -> None:
        for sample in samples:
            state.failures[sample] = "the target's logits are NaN or infinite"
            state.budget[sample] = 0
            state.cache.close(state.handles[sample])

    def _judge(
        self, state: DecodeState, tree: DraftTree, logits: Tensor, best: Tensor, noise: Noise | GumbelNoise | None
    ) -> Verdict:
        target = self._target_rows(state, tree, logits)
        if noise is not None:
            return self.coupling(tree, target, noise)
        if state.warp.processors:
            return matching_verdict(tree, lambda rows, _: row_max(target.scores_of(rows))[1].tolist())
        tokens = best.tolist()
        return matching_verdict(tree, lambda rows, _: [tokens[row] for row in rows])

    def _target_rows(self, state: DecodeState, tree: DraftTree, logits: Tensor) -> SoftmaxRows:
        """The target's rows, put through the request's processors where they are read, each along its own path."""
        if (temperature := state.warp.temperature) is not None:
            return SoftmaxRows(logits, temperature=temperature)
        places = list(tree.rows())

        def along_paths(processing: Callable[..., Any]) -> Callable[[Tensor, Sequence[int]], Any]:
            def process(logits: Tensor, rows: Sequence[int]) -> Any:
                def path_of(index: int) -> list[int]:
                    sample, node, _ = places[rows[index]]
                    return state.path(sample, tree.samples[sample].path(node))  # type: ignore[union-attr]

                return processing(logits, path_of, lambda index: places[rows[index]][0])

            return process

        return SoftmaxRows(logits, along_paths(state.warp), along_paths(state.warp.trimmed))

    def _commit(
        self,
        state: DecodeState,
        tree: DraftTree,
        verdict: Verdict,
        accepted: Callable[[int, list[int]], Tensor],
        keep: Callable[[Mapping[int, Sequence[int]]], None],
    ) -> None:
        """Takes over what was accepted.

        Args:
            state: the batch.
            tree: the drafts.
            verdict: what became of them.
            accepted: the hidden states of some of a sample's rows, which begin with its root and follow its path.
            keep: commits rows of the cache.
        """
        if self.on_step is not None:
            self.on_step(state, tree, verdict)
        kept: dict[int, list[int]] = {}
        seen: dict[int, Tensor] = {}
        remaining: list[SampleVerdict | None] = []
        for sample, (drafted, judged) in enumerate(zip(tree.samples, verdict.samples, strict=True)):
            remaining.append(None)
            if drafted is None or judged is None:
                continue
            nodes = list(drafted.tokens)
            path = [0, *(nodes.index(node) for node in judged.path)]
            emitted = state.append(sample, [*(drafted.tokens[node] for node in judged.path), judged.token])
            seen[sample] = accepted(sample, path[:emitted])
            state.stats.record(sample, drafted, judged, emitted)
            self.decider.learn(state.memory[sample], drafted.outcome(judged))
            if state.budget[sample] > 0:
                remaining[sample] = judged
                kept[state.handles[sample]] = path
            else:
                state.cache.close(state.handles[sample])
        keep(kept)
        self.drafter.commit(state.drafts, tree, Verdict(tuple(remaining)))
        if self.drafter.hidden_layers and seen:
            self.drafter.take_hidden(state.drafts, seen)

    def _check_positions(self, prompts: Sequence[Sequence[int]], budget: int) -> None:
        longest = max(len(prompt) for prompt in prompts)
        for part, limit in (("target", self.target.max_positions), ("drafter", self.drafter.max_positions)):
            if limit is not None and longest + budget > limit:
                raise ValueError(
                    f"a prompt of {longest} tokens and {budget} new ones exceed the {part}'s {limit} positions; "
                    "shorten the prompt or lower max_new_tokens"
                )


def _wrapped(target: Any) -> RaggedModel:
    return target if isinstance(target, RaggedModel) else RaggedModel(target)


def as_drafter(drafter: Any) -> Drafter:
    """A drafter as it is, a model as a draft model."""
    if isinstance(drafter, RaggedModel) or hasattr(drafter, "get_output_embeddings"):
        return LanguageModelDrafter(drafter)
    instance("drafter", drafter, Drafter)
    return drafter
