"""Drafters with fewer positions than their target: beyond these they rest, and the target decodes alone."""

import pytest
import torch
from support.models import PROMPTS, VOCAB, generated, ragged
from support.native_drafters import built

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.target.cache import RaggedKVCache

POSITIONS = 24
TREE = ad.TreeTopology.from_k_config((2, 2, 1))
LONG = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
TEXTS = [*PROMPTS, LONG[:23], LONG[:24], LONG]  # far from the limit, and one token before it, at it and beyond
NEVER = {"eos_token_id": None, "pad_token_id": 0, "top_k": 0}


def limited(drafter):
    drafter.max_positions = POSITIONS
    return drafter


def draft_model(architecture="gpt2"):
    """Builds a draft model with a table of positions, so that reading beyond its end raises an error."""
    size = {"n_positions": POSITIONS} if architecture == "gpt2" else {"max_position_embeddings": POSITIONS}
    return ad.LanguageModelDrafter(ragged(architecture, seed=3, **size))


def pair(kind):
    """Builds a target, and a drafter for it with fewer positions."""
    if kind == "model, table":
        return ragged(), draft_model()
    kind, _, kernels = kind.partition(", ")
    target, drafter = built(kind, kernels)
    return target, limited(drafter)


KINDS = ["model, table", "model, native", "eagle, native", "block, native", "eagle, torch", "block, torch"]
KINDS += ["dflash, native", "dspark, torch"]


def decode(decoder, *, sampled, texts=TEXTS):
    """Returns the tokens, and for every tree the length of the text with it and the drafter's name."""
    seen = []

    def watch(state, tree, verdict):
        for number in tree.living:
            if tree.lengths[number] > 1:
                deepest = int(tree.depth[tree[number].rows[-1]])  # nodes are ordered by level
                seen.append((len(state[number].tokens) + deepest, tree[number].proposal.source))

    decoder.on_step = watch
    options = NEVER | {"do_sample": sampled} | ({"temperature": 0.8} if sampled else {})
    tokens, _ = generated(decoder, texts, max_new_tokens=12, seeds=range(len(texts)), **options)
    return tokens, seen


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("kernels")
def test_drafts_end_with_the_positions_and_texts_go_on(kind, sampled):
    target, drafter = pair(kind)
    expected, _ = decode(ad.SpeculativeDecoder(target, ad.NoDrafter(), coupling=ad.Coupling.shared(2)), sampled=sampled)
    found, drafted = decode(ad.SpeculativeDecoder(target, drafter, TREE, ad.Coupling.shared(2)), sampled=sampled)
    assert found == expected
    assert max(length for length, _ in drafted) == POSITIONS


@pytest.mark.parametrize("kind", ["eagle", "model"])
def test_fixed_shapes_draft_no_further(kind, monkeypatch):
    """All rows stay within the positions, including padding."""
    target, drafter = built(kind, "torch")
    network, highest = type(drafter._network), []
    run = network.run

    def watched(self, tokens, hidden, positions, ragged, rows=None):
        highest.append(positions.max().item())
        return run(self, tokens, hidden, positions, ragged, rows)

    monkeypatch.setattr(network, "run", watched)
    expected, _ = decode(ad.SpeculativeDecoder(target, ad.NoDrafter(), coupling=ad.Coupling.shared(2)), sampled=False)
    fixed = ad.SpeculativeDecoder(target, limited(drafter), TREE, ad.Coupling.shared(2), buckets=(16, 64))
    found, drafted = decode(fixed, sampled=False)
    assert found == expected
    assert max(length for length, _ in drafted) == POSITIONS
    assert max(highest) < POSITIONS


def test_lookups_go_on_where_a_draft_model_ends():
    text = LONG[:10] * 4
    decoder = ad.SpeculativeDecoder(ragged(), ad.HybridDrafter(ad.NGramDrafter(), draft_model()), TREE)
    found, drafted = decode(decoder, sampled=False, texts=[text, PROMPTS[0]])
    assert found == decode(ad.SpeculativeDecoder(ragged(), ad.NoDrafter()), sampled=False, texts=[text, PROMPTS[0]])[0]
    assert {source for length, source in drafted if length > POSITIONS} == {"NGramDrafter"}
    assert "LanguageModelDrafter" in {source for _, source in drafted}


def test_a_prompt_that_is_too_long_is_not_read(monkeypatch):
    drafter, read = draft_model(), []
    prefill = drafter.model.prefill

    def watched(tokens, cache, **options):
        read.append(sum(map(len, tokens.values())))
        return prefill(tokens, cache, **options)

    decoder = ad.SpeculativeDecoder(ragged(), drafter, TREE)
    monkeypatch.setattr(drafter.model, "prefill", watched)
    decode(decoder, sampled=False, texts=[LONG, PROMPTS[0]])
    assert read == [len(PROMPTS[0]) - 1]


def test_the_room_of_an_engine_is_the_targets():
    decoder = ad.SpeculativeDecoder(ragged(), draft_model(), TREE)
    plain = ad.SpeculativeDecoder(ragged(), ad.NoDrafter())
    assert [Engine(each).room(len(LONG)) for each in (decoder, plain)] == [89, 89]


@pytest.mark.parametrize("kind", ["model, table", "eagle, torch"])
def test_a_prefix_shared_with_longer_texts_changes_no_draft(kind):
    """Random drafts affect the text, so requests must get the drafts that they would get alone."""
    target, drafter = pair(kind)
    drafter.max_positions = limit = 60 if kind == "eagle, torch" else POSITIONS
    text = torch.randint(3, VOCAB, (80,), generator=torch.Generator().manual_seed(2)).tolist()
    decoder = ad.SpeculativeDecoder(target, drafter, TREE, ad.Coupling(ad.IID(2), ad.Lifted(ad.RecursiveRejection())))
    prompts = [text, text[: limit - 10], text[: limit - 4], text[:50]]
    asked = [
        Request(prompt=prompt, max_new_tokens=12, temperature=1.0, seed=number, ends=())
        for number, prompt in enumerate(prompts)
    ]

    def answers(requests):
        engine = Engine(decoder, max_cache_tokens=1000, reuse=True)
        streams = [engine.submit(request) for request in requests]
        engine.run()
        return [(answer.tokens, answer.stats.drafted) for stream in streams for answer in stream.answers]

    together = answers(asked)
    assert together == [found for request in asked for found in answers([request])]
    assert together[0][1] == 0
    assert min(drafted for _, drafted in together[1:3]) > 0


def test_states_beyond_the_positions_are_not_kept():
    _, drafter = pair("eagle, torch")
    cache = RaggedKVCache()
    state = drafter.open(cache)
    drafter.add(state, 0, LONG, cache.open(len(LONG)))
    for _ in range(5):
        drafter.take_hidden(state, {0: torch.zeros(7, 3 * 32)})
    assert sum(map(len, state.pending[0])) == POSITIONS
