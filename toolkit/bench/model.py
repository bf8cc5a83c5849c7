"""What forwards, verification and lookups cost and gain with a model's own modules, each paired with its reference.

Shapes: B samples, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from arbordraft.bench.decoding import answers
from arbordraft.bench.measure import Measurement, paired, precision
from arbordraft.bench.verifiers import drafted_tree
from arbordraft.bench.workload import Tell, Workload, quiet
from arbordraft.deciders import CostAware
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.measuring import known_costs
from arbordraft.decoding.prompts import REPEATING, VARIED, left_padded
from arbordraft.drafters import NGramDrafter
from arbordraft.sampling.laws import DraftLaw, TopTail, WithoutReplacement
from arbordraft.sampling.noise import Noise
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.hf_cache import cache_argument
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import (
    Lifted,
    OptimalTransport,
    RecursiveRejection,
    Rule,
    SpecHub,
    TopDown,
    TopTailRule,
)
from arbordraft.verifiers.coupling import Coupling

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
        reach = "<= 1.10" if batch == 1 else "<= 0.80"
        yield paired("forward", case, *forward_pair(target, contexts, new), workload, tell, reach=reach)


def forward_pair(target: RaggedModel, contexts: list[int], new: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """The packed and the padded forward of ``new`` random tokens per sample, each leaving its cache as it was."""
    from transformers import DynamicCache

    model, batch = target.model, len(contexts)
    prompts = [torch.randint(target.vocab_size, (length,)).tolist() for length in contexts]
    tokens = torch.randint(target.vocab_size, (batch, new))

    cache = RaggedKVCache()
    handles = [cache.open(length + new) for length in contexts]
    target.prefill(dict(zip(handles, prompts, strict=True)), cache)

    def packed() -> None:
        target(tokens.flatten(), cache.lay_out(handles, [range(new)] * batch), cache)
        cache.drop(handles)

    ids, mask = left_padded(prompts).values()
    past = DynamicCache(config=model.config)
    kept = {cache_argument(model): past}
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **kept)
    # generate() drops a mask that masks nothing, which spares the model work: so does this.
    grown = None if batch == 1 else torch.cat([mask, torch.ones(batch, new, dtype=torch.long)], dim=1)
    next_positions = torch.tensor(contexts)[:, None] + torch.arange(new)

    def padded() -> None:
        with torch.no_grad():
            model(tokens, attention_mask=grown, position_ids=next_positions, **kept)
        past.crop(-new)

    return packed, padded


def verify_cost(target: RaggedModel, workload: Workload, tell: Tell = quiet) -> Iterator[Measurement]:
    """Verification of a full 16-node tree against the target's forward of its rows."""
    topology = TreeTopology.from_k_config((3, 2, 1))
    generator, source = torch.Generator().manual_seed(workload.seed), Noise.source(0)
    forward, _ = forward_pair(target, [200], topology.num_nodes)
    for name, coupling in (
        ("recursive rejection, top-down", Coupling(WithoutReplacement(3), TopDown(RecursiveRejection()))),
        ("recursive rejection, lifted", Coupling(WithoutReplacement(3), Lifted(RecursiveRejection()))),
        ("tail and tops, lifted", Coupling(TopTail(1, 2), Lifted(RecursiveRejection()))),
    ):
        logits = torch.randn(topology.num_nodes, target.vocab_size, generator=generator) * 3
        tree = DraftTree((drafted_tree(topology, coupling.law, logits, generator),))

        def verify(coupling: Coupling = coupling, logits: Tensor = logits, tree: DraftTree = tree) -> None:
            coupling(tree, logits.softmax(dim=-1), Noise.draw([source], topology.num_nodes))

        size = f"{topology.num_nodes} nodes, V={target.vocab_size}"
        case = f"{precision(target.model)} forward, {size}, {name}, with softmax"
        yield paired("verify", case, verify, forward, workload, tell, reach="<= 0.15")


def rule_cost(workload: Workload) -> Iterator[Measurement]:
    """SpecHub, and tail and tops, at one node against one softmax of the same row; SpecHub against its linear program.

    The program's variables are pairs of a drawn outcome and a token: beyond small vocabularies there is no solving it.
    """
    generator = torch.Generator().manual_seed(workload.seed)
    hub = TopTail(1, 1)
    nodes: list[tuple[str, Rule, TopTail, int]] = [
        *(("SpecHub", SpecHub(), hub, vocab) for vocab in (4096, 16384, 49152, 131072, 262144)),
        *(
            (f"TopTail({k - 1}, 1)", TopTailRule(), TopTail(k - 1, 1), vocab)
            for k in (2, 3, 4)
            for vocab in (4096, 32768, 131072, 262144)
        ),
    ]
    for name, rule, law, vocab in nodes:
        logits = torch.randn(2, vocab, generator=generator) * 3
        case = f"{name} at one node, V={vocab}, against one softmax"
        # A row below this size fits the innermost caches: the rule's fixed cost shows.
        reach = "<= 2.0" if name == "SpecHub" and vocab >= 49152 else ""
        node, softmax = _node(rule, law, logits, generator), partial(logits[0].softmax, dim=-1)
        row = paired("verify", case, node, softmax, workload, reach=reach, calls=(_CALLS, _CALLS))
        yield replace(row, detail=f"{row.ours / vocab * 1e6:.2f} ns per token")
    for vocab in (64, 256, 1024):
        logits = torch.randn(2, vocab, generator=generator) * 3
        closed, solved = (_node(rule, hub, logits, generator) for rule in (SpecHub(), OptimalTransport()))
        case = f"SpecHub at one node, V={vocab}, against its compact linear program"
        yield paired("verify", case, closed, solved, workload, calls=(_CALLS, 1))


def _node(rule: Rule, law: DraftLaw, logits: Tensor, generator: torch.Generator) -> Callable[[], object]:
    """A rule's law at one node, for other drawn children in every call; ``logits`` are the target's and the draft's."""
    p, q = logits.softmax(dim=-1)
    uniforms = torch.rand(_CALLS, law.k, generator=generator).tolist()
    drawn = cycle([law.draw(q, each) for each in uniforms])
    return lambda: rule(p, 1.0, q, next(drawn), law)


# Prompts whose answers repeat them and prompts whose answers do not, each with the speed-up to reach.
KINDS = {"repeating": (REPEATING, ">= 1.5"), "varied": (VARIED, ">= 0.9")}


def lookup_speed(
    target: RaggedModel, workload: Workload, kind: str = "given", reach: str = "", tell: Tell = quiet
) -> Measurement:
    """Greedy decoding with the n-gram tree against plain ``generate``, all prompts of one ``kind`` in one batch."""
    tree, count = TreeTopology.from_k_config((2, 1, 1, 1)), len(workload.prompts)
    drafter = NGramDrafter(longest=5, shortest=3)
    pays = CostAware(known_costs(target, drafter))
    decoder = SpeculativeDecoder(target, drafter, tree, Coupling.matching(2), pays)
    (inputs,) = replace(workload, batch=count).batches(target)
    request: dict[str, Any] = {**inputs, **workload.request()}
    model: Any = target.model
    generate = partial(model.generate, **request)
    case = f"{precision(model)}, batch {count}, {kind} prompts, {workload.new_tokens} new tokens"
    speculate = partial(decoder.generate, **request)
    row = paired("decode", case, speculate, generate, workload, tell, reach=reach, speed_up=True)
    output: Any = decoder.generate(**request, return_dict_in_generate=True)
    wanted = generate()[:, inputs["input_ids"].shape[1] :].tolist()
    found = answers(output, inputs)
    same = sum(answer == whole[: len(answer)] for answer, whole in zip(found, wanted, strict=True))
    tokens = sum(map(len, found))
    speeds = f"{tokens / row.ours * 1e3:.0f} against {tokens / row.reference * 1e3:.0f} tokens/s"
    return replace(row, detail=f"tau {output.stats.tau:.2f}, {speeds}, {same} of {count} answers equal")
