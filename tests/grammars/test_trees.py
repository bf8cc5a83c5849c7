"""Grammars and stateful processors on the paths of trees: the output is that of plain decoding."""

import json

import jsonschema
import pytest
import torch
from support.constrained import DECODERS, GRAMMARS, PERSON, TEXTS, TREE, Following, Resting, decoded, only, plainly
from support.models import EOS, PROMPTS, VOCAB
from support.native_drafters import KINDS, built
from support.request_law import few_tokens, fit, small_decoder
from support.spellers import speller, speller_tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

import arbordraft as ad
from arbordraft import builders
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.drafters import GrammarDrafter, HybridDrafter
from arbordraft.sampling.stateful import Allowed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DECODERS)
def test_drafts_change_nothing(name, temperature):
    tokens, stats = decoded(DECODERS[name](), temperature)
    assert tokens == plainly(temperature)
    assert stats.forwards[0] < stats.emitted[0]
    text = speller_tokenizer().decode(tokens[0][:-1])
    assert tokens[0][-1] == EOS
    jsonschema.validate(json.loads(text), PERSON)


def test_grammars_change_the_output():
    """Without grammars the texts differ, so the equality above is a real test."""
    free = decoded(builders.plain(speller()), 0.0, [None] * 3)[0]
    assert [ours == theirs for ours, theirs in zip(plainly(0.0), free, strict=True)] == [False, True, False]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_cost_no_steps(temperature):
    tokens, stats = decoded(DECODERS["forced alone"](), temperature)
    assert stats.emitted[0] / stats.forwards[0] > 1.5
    assert stats.forwards[1] == len(tokens[1])  # no grammar, no drafts


def test_forced_tokens_are_drafted_while_deciders_rest():
    decoder = ad.SpeculativeDecoder(speller(), GrammarDrafter(), decider=Resting(8))
    tokens, stats = decoded(decoder, 0.0)
    assert tokens == plainly(0.0)
    assert stats.emitted[0] / stats.forwards[0] > 1.5


def test_forbidden_tokens_are_never_drafted():
    """Lookups would continue as the prompt does; the grammar stops them at forbidden tokens."""
    seen = []
    decoder = ad.SpeculativeDecoder(speller(), ad.NGramDrafter(shortest=1), TREE)
    compiled = decoder.grammar_compiler(GRAMMARS[2], [EOS])

    def watch(state, tree, verdict):
        if 2 not in tree.living:
            return
        place = compiled.fork()
        for token in state[2].tokens[state[2].prompt :]:
            place.accept(token)
        seen.extend((place, tree[2].path(row)) for row in tree[2].rows[1:])

    decoder.on_step = watch
    decoded(decoder, 1.0)
    assert seen
    for place, path in seen:
        for token in path:
            assert token in place.allowed()
            place = place.fork()
            place.accept(token)


class Alternating(LogitsProcessor):
    """Allows ids with ``id % 3 == position % 3``; the path, not a state, gives the position after the prompt."""

    def __init__(self, prompt):
        self.prompt = prompt

    def __call__(self, input_ids, scores):
        return only(scores, (input_ids.shape[1] - self.prompt) % 3)


class Entangled(Following):
    """Shares one state among all forks, which is wrong."""

    def fork(self):
        return self


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "right"), [(Following, True), (Entangled, False)], ids=["forked", "not forked"])
def test_a_users_stateful_processor_is_followed_if_it_forks(kind, right, temperature):
    prompt = speller_tokenizer()(TEXTS[0]).input_ids
    settings = {"max_new_tokens": 20, "do_sample": temperature > 0, "seeds": [5], "eos_token_id": None}
    outputs = [
        decoder.generate(torch.tensor([prompt]), logits_processor=LogitsProcessorList([processor]), **settings)
        for decoder, processor in [
            (builders.plain(speller()), Alternating(len(prompt))),
            (DECODERS["model, tree"](), kind()),
        ]
    ]
    assert torch.equal(*outputs) == right


class Failing(Following):
    """Raises after its third token."""

    def accept(self, token):
        super().accept(token)
        if self.count > 2:
            raise RuntimeError("lost the thread")


@pytest.mark.parametrize("name", ["lookup, tree", "model, tree"])
def test_errors_of_a_processor_are_raised(name):
    with pytest.raises(RuntimeError, match="lost the thread"):
        decoded(DECODERS[name](), 0.0, [None] * 3, logits_processor=LogitsProcessorList([Failing()]))


class Wheel(Following):
    """Leaves every third position free, and forces a single token at the others."""

    def allowed(self):
        tokens = range(3, VOCAB) if self.count % 3 == 0 else [5 + self.count % 40]
        return Allowed(sum(1 << token for token in tokens).to_bytes((VOCAB + 7) // 8, "little"))

    def __call__(self, scores):
        return self.allowed().mask(scores)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_with_native_drafts_follow_processors(kind, temperature):
    """A constrained sample is drafted level by level, the others as usual."""
    target, drafter = built(kind, "native", torch.float32)
    warped = [
        {"prompt": prompt, "max_new_tokens": 24, "temperature": temperature, "seed": 3, "ends": (), "processors": some}
        for prompt in PROMPTS
        for some in ([Wheel()], [])
    ]
    texts = []
    for made in (builders.plain(target), ad.SpeculativeDecoder(target, drafter, TREE, ad.Coupling.shared(2))):
        engine = Engine(made, max_cache_tokens=4000)
        streams = [engine.submit(Request(**settings)) for settings in warped]
        engine.run()
        texts.append([stream.result()[0].tokens for stream in streams])
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


# Transitions of each state: they branch, force a token, and return.
AUTOMATON = {0: {1: 1, 2: 2, 5: 0}, 1: {3: 2}, 2: {0: 0, 1: 1, 4: 3, 5: 2}, 3: {2: 0}}


class Automaton:
    """Follows the transitions of ``AUTOMATON``."""

    def __init__(self, state=0):
        self.state = state

    def fork(self):
        return type(self)(self.state)

    def accept(self, token):
        self.state = AUTOMATON.get(self.state, {}).get(token)

    def allowed(self):
        if self.state is None:
            return None
        return Allowed(sum(1 << token for token in AUTOMATON[self.state]).to_bytes(1, "little"))

    def __call__(self, scores):
        return scores if self.state is None else self.allowed().mask(scores)


class Careless(Automaton):
    """Ignores one of the tokens; the test must notice its wrong law."""

    def accept(self, token):
        if token != 1:
            super().accept(token)


def followers(text):
    """Returns the transitions of ``AUTOMATON`` after a text."""
    state = 0
    for token in text:
        state = AUTOMATON[state][token]
    return AUTOMATON[state]


def p_value(name, processor):
    torch.manual_seed(7)
    return fit(LAWS[name](), 500, followers, logits_processor=LogitsProcessorList([processor]))


def model():
    return ad.LanguageModelDrafter(few_tokens(1))


LAWS = {
    "block, chain": lambda: small_decoder(
        ad.IID(1), ad.Lifted(ad.RecursiveRejection()), ad.TreeTopology.chain(3), model()
    ),
    "with replacement": lambda: small_decoder(ad.IID(2), ad.TopDown(ad.RecursiveRejection()), TREE, model()),
    "without replacement": lambda: small_decoder(
        ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()), TREE, model()
    ),
    "hub pairs": lambda: small_decoder(
        ad.TopTail(1, 1), ad.TopDown(ad.SpecHub()), ad.TreeTopology.k_ary(2, 3), model()
    ),
    "fixed": lambda: small_decoder(ad.Fixed(2), ad.TopDown(ad.Matching()), TREE, model()),
    "lookup": lambda: ad.SpeculativeDecoder(few_tokens(0), ad.NGramDrafter(shortest=1), TREE),
    "forced, else random": lambda: small_decoder(
        ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()), TREE, HybridDrafter(GrammarDrafter(), model())
    ),
    "shared noise": lambda: ad.SpeculativeDecoder(few_tokens(0), model(), TREE),
}


@pytest.mark.parametrize("name", LAWS)
def test_the_output_law_is_that_of_the_masked_target(name):
    assert p_value(name, Automaton()) > 1e-3


def test_a_wrong_law_is_detected():
    assert p_value("shared noise", Careless()) < 1e-6
