"""Grammars that become too complex fail only their own answer, which never continues without a grammar."""

import pytest
from support.constrained import DECODERS, TEXTS, Following, plainly
from support.models import EOS, left_padded, new_tokens
from support.spellers import SPEAKER_VOCAB, speller, speller_tokenizer
from transformers import LogitsProcessorList

from arbordraft import DecodingError, NoDrafter, Request, SpeculativeDecoder, builders
from arbordraft.decoding.engine import Engine
from arbordraft.grammars import Grammar, GrammarCompiler, GrammarError, engine

MANY = {"type": "object", "properties": {f"k{i}": {"const": i} for i in range(40)}, "additionalProperties": False}
# Fails after the choice of the word and before the keys of "wide": the engine looks ahead through forced text.
LATE = {
    "type": "object",
    "properties": {"word": {"enum": ["cat", "dog"]}, "wide": MANY},
    "required": ["word", "wide"],
    "additionalProperties": False,
}
SAID = '{"word": "'


@pytest.fixture
def narrow(monkeypatch):
    """Lowers the limit of the engine, which then gives up early."""
    monkeypatch.setattr(engine, "_PARTS", 100)


def failed(decoder, temperature):
    prompts = [speller_tokenizer()(text).input_ids for text in TEXTS]
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    grammars = [None, Grammar.json_schema(LATE), Grammar.regex("[a-c]{2}(, [a-c]{2}){3}")]
    with pytest.raises(DecodingError) as caught:
        decoder.generate(**left_padded(prompts), max_new_tokens=24, seeds=[10, 12, 13], grammar=grammars, **sampling)
    output = caught.value.output
    return caught.value.failures, new_tokens(output.sequences, prompts, output.stats.emitted)


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DECODERS)
def test_only_its_own_answer_fails_with_every_decoder(name, temperature):
    failures, tokens = failed(DECODERS[name](), temperature)
    assert list(failures) == [1]
    assert "too many parts: 159 items, at most 100" in failures[1]
    text = speller_tokenizer().decode(tokens[1])
    assert any(f'{SAID}{word}", "wide": {{"'.startswith(text) for word in ("cat", "dog"))
    assert text.startswith(SAID)
    assert tokens == failed(builders.plain(speller()), temperature)[1]
    assert tokens[2] == plainly(temperature)[2]
    assert len(tokens[0]) == 24


@pytest.mark.usefixtures("narrow")
def test_an_engine_fails_only_that_request():
    decoder = SpeculativeDecoder(speller(), NoDrafter())
    running = Engine(decoder, max_cache_tokens=4000)
    prompt = speller_tokenizer()("yes").input_ids
    late, good = (
        running.submit(Request(prompt=prompt, grammar=grammar, temperature=1.0, seed=1))
        for grammar in (Grammar.json_schema(LATE), Grammar.choice(["yes", "no"]))
    )
    running.run()
    assert good.result()[0].finish_reason == "stop"
    with pytest.raises(GrammarError, match="too many parts"):
        late.result()
    # refused at once, as the first token already fails
    with pytest.raises(GrammarError, match="too many parts"):
        running.submit(Request(prompt=prompt, grammar=Grammar.json_schema(MANY)))


@pytest.mark.usefixtures("narrow")
def test_complete_and_chat_raise_the_error():
    decoder = builders.lookup(speller())
    with pytest.raises(DecodingError, match="too many parts"):
        decoder.complete("yes", raw=True, grammar=Grammar.json_schema(LATE))
    pieces = decoder.complete("yes", raw=True, stream=True, grammar=Grammar.json_schema(LATE))
    with pytest.raises(DecodingError, match="too many parts"):
        "".join(pieces)
    with pytest.raises(DecodingError, match="too many parts"):
        decoder.chat([{"role": "user", "content": "yes"}], raw=True, grammar=Grammar.json_schema(LATE))


def test_wide_and_long_schemas_are_followed():
    compiler = GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)
    wide = {**MANY, "properties": {f"k{i}": {"const": i} for i in range(1000)}}
    long = {"type": "array", "items": {"const": 1}, "minItems": 20_000}
    for schema, text in ((wide, '{"k7": 7, "k998": 998}'), (long, "[1, 1, 1")):
        state = compiler(Grammar.json_schema(schema), [EOS]).fork()
        for token in speller_tokenizer()(text).input_ids:
            assert token in state.allowed()
            state.accept(token)
        assert (EOS in state.allowed()) == (schema is wide)


def test_a_state_never_allows_everything():
    """A state restricts tokens even after a forbidden token and after the end."""
    compiler = GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)
    state = compiler(Grammar.choice(["yes"]), [EOS]).fork()
    with pytest.raises(GrammarError, match="forbids the token"):
        state.fork().accept(EOS)
    for token in speller_tokenizer()("yes").input_ids:
        state.accept(token)
    state.accept(EOS)
    assert state.allowed().tokens() == [EOS]
    with pytest.raises(GrammarError, match="forbids"):
        state.accept(EOS)


class Jealous(Following):
    """Raises after every token that is not the next token of one text."""

    def __init__(self, text, count=0):
        super().__init__(count)
        self.text = text

    def fork(self):
        return type(self)(self.text, self.count)

    def accept(self, token):
        if token != self.text[self.count]:
            raise RuntimeError("not this one")
        super().accept(token)

    def __call__(self, scores):
        return scores


@pytest.mark.parametrize("name", ["lookup, tree", "model, tree", "head, tree"])
def test_a_failure_after_a_rejected_draft_is_ignored(name):
    """Whether a text fails must not depend on rejected drafts."""
    prompt = speller_tokenizer()(TEXTS[1]).input_ids
    settings = {**left_padded([prompt]), "max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    plain = builders.plain(speller()).generate(**settings)
    rejected = []
    decoder = DECODERS[name]()
    decoder.on_step = lambda state, tree, verdict: rejected.append(tree.lengths[0] - len(verdict.paths[0]))
    followed = decoder.generate(
        **settings, logits_processor=LogitsProcessorList([Jealous(plain[0, len(prompt) :].tolist())])
    )
    assert followed.tolist() == plain.tolist()
    assert sum(rejected) > 0
