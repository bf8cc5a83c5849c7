"""What forwards, verification and lookups cost and gain with a model's own modules, each paired with its reference.

Shapes: B samples, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from arbordraft.bench.measure import Measurement, paired, precision
from arbordraft.bench.workload import Tell, Workload, quiet
from arbordraft.coupling import Coupling
from arbordraft.deciders import Backoff
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import NGramDrafter
from arbordraft.laws import DraftLaw, TopTail, WithoutReplacement
from arbordraft.prompts import REPEATING, VARIED
from arbordraft.sampling import Noise
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftTree, SampleTree
from arbordraft.verifiers import (
    Lifted,
    OptimalTransport,
    RecursiveRejection,
    Rule,
    SpecHub,
    TopDown,
    TopTailRule,
)

_CALLS = 40  # calls per timing of something that takes microseconds


def forward_cost(target: RaggedModel, workload: Workload, tell: Tell = quiet) -> Iterator[Measurement]:
    """One packed forward against the model's own forward of the same tokens on its own cache.

    At batch 1 both do the same arithmetic. At batch 8 the contexts differ in length, and transformers pads them.
    """
    alone, ragged = [200], [32, 64, 96, 160, 256, 384, 640, 1024]  # the second: chats and documents
    for contexts, new in [(alone, 1), (alone, 8), (alone, 16), (alone, 32), (ragged, 1), (ragged, 8)]:
        batch = len(contexts)
        context = f"context {contexts[0]}" if batch == 1 else f"contexts {min(contexts)}-{max(contexts)}"
        case = f"{precision(target.model)}, batch {batch}, {new} tokens each, {context}"
        ours, reference, ratio = paired(*forward_pair(target, contexts, new), workload.repeats, tell, case)
        yield Measurement("forward", case, ours, reference, ratio, "<= 1.10" if batch == 1 else "<= 0.80")


def forward_pair(target: RaggedModel, contexts: list[int], new: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The packed and the padded forward of ``new`` random tokens per sample, each leaving its cache as it was."""
    from transformers import DynamicCache

    model, batch, longest = target.model, len(contexts), max(contexts)
    prompts = [torch.randint(target.vocab_size, (length,)).tolist() for length in contexts]
    tokens = torch.randint(target.vocab_size, (batch, new))

    cache = RaggedKVCache()
    handles = [cache.open(length + new) for length in contexts]
    target.prefill(dict(zip(handles, prompts, strict=True)), cache)

    def packed() -> None:
        target(tokens.flatten(), cache.plan(handles, [range(new)] * batch), cache)
        cache.drop(handles)

    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in contexts])
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=past, logits_to_keep=1)
    # generate() drops a mask that masks nothing, which spares the model work: so does this.
    grown = None if batch == 1 else torch.cat([mask, torch.ones(batch, new, dtype=torch.long)], dim=1)
    next_positions = torch.tensor(contexts)[:, None] + torch.arange(new)

    def padded() -> None:
        with torch.no_grad():
            model(tokens, attention_mask=grown, position_ids=next_positions, past_key_values=past)
        past.crop(-new)

    return packed, padded


def verify_cost(target: RaggedModel, workload: Workload, tell: Tell = quiet) -> Iterator[Measurement]:
    """Verification of a 16-node tree against the target's forward of its rows, and SpecHub against one softmax."""
    topology = TreeTopology.from_k_config((3, 2, 1))
    generator = torch.Generator().manual_seed(workload.seed)
    forward, _ = forward_pair(target, [200], topology.num_nodes)
    for name, coupling in (
        ("recursive rejection, top-down", Coupling(WithoutReplacement(3), TopDown(RecursiveRejection()))),
        ("recursive rejection, lifted", Coupling(WithoutReplacement(3), Lifted(RecursiveRejection()))),
        ("tail and tops, lifted", Coupling(TopTail(1, 2), Lifted(RecursiveRejection()))),
    ):
        verify = _verification(topology, coupling, target.vocab_size, generator)
        ours, reference, ratio = paired(verify, forward, workload.repeats, tell, name)
        size = f"{topology.num_nodes} nodes, V={target.vocab_size}"
        case = f"{precision(target.model)} forward, {size}, {name}, with softmax"
        yield Measurement("verify", case, ours, reference, ratio, "<= 0.15")


def spechub_cost(workload: Workload) -> Iterator[Measurement]:
    """SpecHub at one node against one softmax of the same row, for growing vocabularies."""
    generator = torch.Generator().manual_seed(workload.seed)
    for vocab in (4096, 16384, 49152, 131072, 262144):
        ours, reference, ratio = paired(*_nodes(SpecHub(), TopTail(1, 1), vocab, generator), workload.repeats)
        ours, reference = ours / _CALLS, reference / _CALLS
        # A row below this size fits the innermost caches: the rule's fixed cost shows.
        reach = "<= 2.0" if vocab >= 49152 else ""
        case = f"SpecHub at one node, V={vocab}, against one softmax"
        yield Measurement("verify", case, ours, reference, ratio, reach, f"{ours / vocab * 1e6:.2f} ns per token")


def rule_cost(workload: Workload) -> Iterator[Measurement]:
    """Tail and tops at one node for growing vocabularies and numbers of children, and against the linear program.

    The program's variables are pairs of a drawn outcome and a token: beyond small vocabularies there is no solving it.
    """
    generator = torch.Generator().manual_seed(workload.seed)
    for k in (2, 3, 4):
        for vocab in (4096, 32768, 131072, 262144):
            law = TopTail(k - 1, 1)
            ours, reference, ratio = paired(*_nodes(TopTailRule(), law, vocab, generator), workload.repeats)
            detail = f"{ours / _CALLS / vocab * 1e6:.2f} ns per token"
            case = f"TopTail({k - 1}, 1) at one node, V={vocab}, against one softmax"
            yield Measurement("verify", case, ours / _CALLS, reference / _CALLS, ratio, "", detail)
    for vocab in (64, 256, 1024):
        logits = torch.randn(2, vocab, generator=generator) * 3
        p, q = logits.softmax(dim=-1)
        closed, solved = _hub(SpecHub(), p, q, _CALLS), _hub(OptimalTransport(), p, q, 1)
        ours, reference, ratio = paired(closed, solved, workload.repeats)
        case = f"SpecHub at one node, V={vocab}, against its compact linear program"
        yield Measurement("verify", case, ours / _CALLS, reference, ratio / _CALLS)


def _hub(rule: Rule, p: Tensor, q: Tensor, calls: int) -> Callable[[], None]:
    law = TopTail(1, 1)
    pair = law.draw(q, [0.5])

    def node() -> None:
        for _ in range(calls):
            rule(p, 1.0, q, pair, law)

    return node


def _nodes(
    rule: Rule, law: DraftLaw, vocab: int, generator: torch.Generator
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A rule's law for many drawn children, and as many softmaxes."""
    logits = torch.randn(2, vocab, generator=generator) * 3
    p, q = logits.softmax(dim=-1)
    drawn = [law.draw(q, uniforms) for uniforms in torch.rand(_CALLS, law.k, generator=generator).tolist()]

    def nodes() -> None:
        for tokens in drawn:
            rule(p, 1.0, q, tokens, law)

    def softmaxes() -> None:
        for _ in drawn:
            logits[0].softmax(dim=-1)

    return nodes, softmaxes


def _verification(
    topology: TreeTopology, coupling: Coupling, vocab: int, generator: torch.Generator
) -> Callable[[], None]:
    """Verifies one full tree drawn from random draft rows that resemble the target's."""
    logits = torch.randn(topology.num_nodes, vocab, generator=generator) * 3
    draft = (logits + torch.randn(logits.shape, generator=generator)).softmax(dim=-1)
    tokens, rows = {0: 0}, {}
    for node, children in enumerate(topology.child_list):
        if children:
            uniforms = torch.rand(len(children), generator=generator).tolist()
            drawn = coupling.law.narrow(len(children)).draw(draft[node], uniforms)
            tokens |= dict(zip(children, drawn, strict=True))
            rows[node] = draft[node]
    tree = DraftTree((SampleTree(topology, coupling.law, dict(sorted(tokens.items())), rows),))

    source = Noise.source(0)

    def verify() -> None:
        coupling(tree, logits.softmax(dim=-1), Noise.draw([source], topology.num_nodes))

    return verify


# Prompts whose answers repeat them and prompts whose answers do not, each with the speed-up to reach.
KINDS = {"repeating": (REPEATING, ">= 1.5"), "varied": (VARIED, ">= 0.9")}


def lookup_speed(
    target: RaggedModel, workload: Workload, kind: str = "given", reach: str = "", tell: Tell = quiet
) -> Measurement:
    """Greedy decoding with the n-gram tree against plain ``generate``, all prompts in one batch.

    Args:
        target: the target.
        workload: what to decode.
        kind: what the prompts have in common.
        reach: the speed-up to reach, if any.
        tell: is told what is going on.
    """
    model: Any = target.model
    decoder = ngram_tree(target)
    count = len(workload.prompts)
    (inputs,) = replace(workload, batch=count).batches(target)
    request: dict[str, Any] = {**inputs, **workload.request()}

    def plain() -> None:
        model.generate(**request)

    def speculative() -> None:
        decoder.generate(**request)

    ours, reference, ratio = paired(speculative, plain, workload.repeats, tell, f"{kind} prompts")
    expected = model.generate(**request)
    output: Any = decoder.generate(**request, return_dict_in_generate=True)
    stats, columns = output.stats, inputs["input_ids"].shape[1]
    same = sum(
        torch.equal(answer[:end], wanted[:end])
        for answer, wanted, end in zip(
            output.sequences, expected, [columns + emitted for emitted in stats.emitted], strict=True
        )
    )
    detail = (
        f"tau {stats.tau:.2f}, {sum(stats.emitted) / ours * 1e3:.0f} against "
        f"{sum(stats.emitted) / reference * 1e3:.0f} tokens/s, {same} of {count} answers equal"
    )
    case = f"{precision(model)}, batch {count}, {kind} prompts, {workload.new_tokens} new tokens"
    return Measurement("decode", case, ours, reference, 1 / ratio, reach, detail)


def ngram_tree(target: RaggedModel) -> SpeculativeDecoder:
    """The decoder of the demo: a lookup tree that rests while lookups fail."""
    return SpeculativeDecoder(
        target,
        NGramDrafter(longest=5, shortest=3),
        TreeTopology.from_k_config((2, 1, 1, 1)),
        Coupling.matching(2),
        Backoff(patience=1),
    )
