"""Text in, text out, and decoders that derive their coupling from drafter and topology."""

import threading
import time

import pytest
import torch
from support.models import PROMPTS, generated, greedy_reference, left_padded, tiny, tiny_tokenizer

import arbordraft as ad
from arbordraft.sampling.laws import SharedNoise
from arbordraft.verifiers import SharedMatching

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
STRICT = "{{ raise_exception('roles must alternate') }}"


def target(template: str | None = None, tokenizer: bool = True, **overrides: object) -> ad.RaggedModel:
    """Builds a target with one letter per token; no token ends a text."""
    words = tiny_tokenizer(chat_template=template) if tokenizer else None
    model = tiny(**overrides)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return ad.RaggedModel(model, words, kernels="torch")


def decoder(template: str | None = None, **options: object) -> ad.SpeculativeDecoder:
    return ad.SpeculativeDecoder(target(template, **options), ad.NGramDrafter())


# Couplings that a decoder derives from its drafter

DRAFTERS = {
    "lookups": (lambda t: ad.NGramDrafter(), ad.Fixed),
    "nothing": (lambda t: ad.NoDrafter(), ad.Fixed),
    "early exit": (lambda t: ad.EarlyExitDrafter(t, 1), SharedNoise),
    "draft model": (
        lambda t: ad.LanguageModelDrafter(ad.RaggedModel(tiny(seed=1), t.tokenizer, kernels="torch")),
        SharedNoise,
    ),
    "lookups, else early exit": (lambda t: ad.HybridDrafter(ad.NGramDrafter(), ad.EarlyExitDrafter(t, 1)), SharedNoise),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_decoder_of_target_and_drafter_alone(name):
    make, law = DRAFTERS[name]
    model = target()
    made = ad.SpeculativeDecoder(model, make(model))
    assert isinstance(made.coupling.law, law)
    assert isinstance(made.coupling.verifier, SharedMatching)
    assert made.equality_report().equality != "lossy"
    tokens, _ = generated(made, max_new_tokens=12, do_sample=False)
    assert tokens == greedy_reference(model.model, PROMPTS, max_new_tokens=12)
    sampled = made.generate(**left_padded(PROMPTS), max_new_tokens=6, do_sample=True, seeds=[1, 2, 3])
    again = made.generate(**left_padded(PROMPTS), max_new_tokens=6, do_sample=True, seeds=[1, 2, 3])
    assert torch.equal(sampled, again)


@pytest.mark.parametrize(
    ("topology", "law"),
    [(ad.TreeTopology.chain(3), ad.IID), (ad.TreeTopology.k_ary(3, 2), SharedNoise)],
    ids=["chain", "tree"],
)
def test_the_law_follows_the_topology(topology, law):
    model = target()
    made = ad.SpeculativeDecoder(model, ad.EarlyExitDrafter(model, 1), topology)
    assert (type(made.coupling.law), made.coupling.law.k) == (law, topology.width)


@pytest.mark.parametrize(
    ("law", "verifier"),
    [
        (SharedNoise(2), SharedMatching),
        (ad.Fixed(2), SharedMatching),
        (ad.IID(2), ad.Lifted),
        (ad.TopTail(1, 1), ad.Lifted),
    ],
    ids=str,
)
def test_every_law_has_a_verifier(law, verifier):
    coupling = ad.Coupling.of(law)
    assert type(coupling.verifier) is verifier
    assert coupling.exactness == ("pathwise" if verifier is SharedMatching else "exact")


def test_a_law_must_be_a_draft_law():
    with pytest.raises(TypeError, match="law must be of type DraftLaw"):
        ad.Coupling.of(2)


# complete()


def test_complete_is_generate_in_words():
    made = decoder()
    words = made.target.tokenizer
    ids = torch.tensor([words("hello")["input_ids"]])
    sequence = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)[0]
    assert made.complete("hello", max_new_tokens=20) == words.decode(sequence[5:])


@pytest.mark.parametrize(
    ("system", "raw", "read"),
    [(None, False, "uhia"), ("be", False, "sbeuhia"), (None, True, "hi")],
    ids=["template", "system prompt", "raw"],
)
def test_the_model_reads_the_template_or_the_raw_text(system, raw, read):
    expected = decoder().complete(read, max_new_tokens=8)
    assert decoder(TEMPLATE).complete("hi", max_new_tokens=8, system=system, raw=raw) == expected


@pytest.mark.parametrize("temperature", [0, 0.7])
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "template"])
def test_streams_give_the_same_text(temperature, template):
    made = decoder(template)
    settings = {"max_new_tokens": 30, "temperature": temperature, "seed": 5}
    stream = made.complete("hello", stream=True, **settings)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == made.complete("hello", **settings)
    assert stream.stats.emitted == [30]


def test_a_list_gives_the_texts_of_single_calls():
    made = decoder()
    alone = [made.complete(text, max_new_tokens=10, temperature=1, seed=seed) for seed, text in enumerate("abc", 3)]
    assert made.complete(list("abc"), max_new_tokens=10, temperature=1, seed=3) == alone
    assert made.complete([]) == []
    assert made.complete(["hello"], max_new_tokens=0) == [""]


@pytest.mark.parametrize("streamed", [False, True])
def test_answers_end_before_a_stop(streamed):
    made = decoder()
    whole = made.complete("hello", max_new_tokens=30)
    stop = [whole[12:15], "no such text"]
    expected = whole[: whole.index(stop[0])]
    found = made.complete("hello", max_new_tokens=30, stop=stop, stream=streamed)
    assert ("".join(found) if streamed else found) == expected


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_is_searched_for_in_the_answer_alone_during_decoding(streamed, monkeypatch):
    """The prompt is not searched, and transformers' table of all tokens, which grows with the stop, is not built."""
    monkeypatch.setattr("transformers.StopStringCriteria.__init__", lambda *_: pytest.fail("the table is made"))
    made = ad.SpeculativeDecoder(target(), ad.NoDrafter())
    steps = steps_of(made)
    whole = made.complete("hello", max_new_tokens=30)
    assert len(steps) == 30

    def ended(*stop: str) -> tuple[str, int]:
        steps.clear()
        found = made.complete("hello", max_new_tokens=30, stop=stop, stream=streamed)
        return "".join(found), len(steps)

    place = whole.index(whole[12:15])
    assert ended(whole[12:15], "x" * 100_000) == (whole[:place], place + 3)
    assert ended("o" + whole[:1]) == (whole, 30)


def test_sampling_settings_take_effect():
    made = decoder()
    greedy = made.complete("hello", max_new_tokens=20)
    assert made.complete("hello", max_new_tokens=20, temperature=3, top_k=1, seed=0) == greedy
    free, most = (made.complete("hello", max_new_tokens=20, temperature=3, top_k=k, seed=0) for k in (0, 10**30))
    assert most == free
    assert made.complete("hello", max_new_tokens=20, temperature=3, top_p=1e-9, seed=0) == greedy
    assert made.complete("hello", max_new_tokens=20, temperature=3, seed=0) != greedy


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"text": 5}, TypeError, "text must be a str or a list of them, got int"),
        ({"text": b"hello"}, TypeError, "text must be a str or a list of them, got bytes"),
        ({"text": ["a", None]}, TypeError, "text must be a str or a list of them, got NoneType"),
        ({"text": ""}, ValueError, "the text is empty"),
        ({"text": ["a", ""]}, ValueError, "the text is empty"),
        ({"text": ["a"], "stream": True}, ValueError, "one text at a time"),
        ({"raw": True, "system": "be"}, ValueError, "system is for the chat template"),
        ({"system": "be"}, ValueError, "no chat template"),
        ({"system": 3}, TypeError, "system must be a str"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens must be a whole number of at least 0"),
        ({"max_new_tokens": 2.5}, TypeError, "max_new_tokens must be a whole number"),
        ({"max_new_tokens": 1000}, ValueError, "exceed the target's 128 positions"),
        ({"temperature": -1}, ValueError, "temperature must be a number of at least 0"),
        ({"temperature": float("nan")}, ValueError, "temperature must be a number"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number"),
        ({"top_p": 1.5}, ValueError, "top_p must be a number from 0 to 1"),
        ({"top_k": -3}, ValueError, "top_k must be a whole number of at least 0"),
        ({"seed": -1}, ValueError, "seed must be a whole number from 0"),
        ({"seed": 2**64}, ValueError, "seed must be a whole number from 0"),
        ({"stop": 3}, TypeError, "stop must be a str or a list of them"),
        ({"stop": ["a", ""]}, ValueError, "stop must not hold an empty text"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("streamed", [False, True])
def test_bad_requests_are_refused(options, error, match, streamed):
    """A stream also raises the error at the call, not when it is read."""
    if streamed and isinstance(options.get("text"), list):
        error, match = ValueError, "one text at a time"
    with pytest.raises(error, match=match):
        decoder().complete(**{"text": "hello", "max_new_tokens": 5, "stream": streamed, **options})


@pytest.mark.parametrize("streamed", [False, True])
def test_text_needs_a_tokenizer(streamed):
    with pytest.raises(ValueError, match=r"text needs a tokenizer: load the model with arbordraft\.load"):
        decoder(tokenizer=False).complete("hello", stream=streamed)


# chat()


def test_chat_reads_the_whole_conversation():
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho"},
        {"role": "user", "content": "no"},
    ]
    plain = decoder()
    expected = plain.complete("sbeuhiahounoa", max_new_tokens=8)
    made = decoder(TEMPLATE)
    assert made.chat(messages, max_new_tokens=8) == expected
    assert "".join(made.chat(messages, max_new_tokens=8, stream=True)) == expected
    contents = made.target.tokenizer("\n\n".join(message["content"] for message in messages))["input_ids"]
    assert contents
    assert made.chat(messages[1:2], max_new_tokens=8, raw=True) == plain.complete("hi", max_new_tokens=8)


@pytest.mark.parametrize(
    ("messages", "template", "error", "match"),
    [
        ("hello", TEMPLATE, TypeError, "messages must be a list of dicts"),
        ({"role": "user", "content": "a"}, TEMPLATE, TypeError, "messages must be a list of dicts"),
        (["hello"], TEMPLATE, TypeError, r"messages\[0\] must be"),
        ([{"role": "user"}], TEMPLATE, TypeError, r"messages\[0\] must be"),
        ([{"role": "user", "content": [1]}], TEMPLATE, TypeError, r"messages\[0\] must be"),
        ([], TEMPLATE, ValueError, "at least one message"),
        ([{"role": "system", "content": "be"}], None, ValueError, "no chat template.*raw=True"),
        ([{"role": "user", "content": "a"}], STRICT, ValueError, "refuses these messages: roles must alternate"),
    ],
    ids=["text", "dict", "texts", "no content", "content of parts", "none", "no template", "template refuses"],
)
def test_bad_messages_are_refused(messages, template, error, match):
    with pytest.raises(error, match=match):
        decoder(template).chat(messages)


# Streams


def steps_of(made: ad.SpeculativeDecoder) -> list[int]:
    steps: list[int] = []
    made.on_step = lambda *_: steps.append(1)
    return steps


def test_a_closed_stream_stops_decoding():
    made = ad.SpeculativeDecoder(target(max_position_embeddings=4096), ad.NoDrafter())
    steps = steps_of(made)
    stream = made.complete("hello", max_new_tokens=4000, stream=True)
    next(stream)
    stream.close()
    done = len(steps)
    assert done < 4000
    time.sleep(0.05)
    assert len(steps) == done
    assert stream.stats.emitted == [done]
    assert list(stream) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "arbordraft-text"]


def test_a_dropped_stream_stops_decoding():
    made = ad.SpeculativeDecoder(target(max_position_embeddings=4096), ad.NoDrafter())
    for _ in made.complete("hello", max_new_tokens=4000, stream=True):
        break
    assert not [thread for thread in threading.enumerate() if thread.name == "arbordraft-text"]


def test_an_unread_stream_decodes_nothing():
    made = decoder()
    steps = steps_of(made)
    made.complete("hello", max_new_tokens=20, stream=True).close()
    assert steps == []


def test_an_error_reaches_the_reader():
    made = decoder()
    with torch.no_grad():
        made.target.model.get_output_embeddings().weight[:] = float("nan")
    with pytest.raises(ad.DecodingError, match="NaN"):
        list(made.complete("hello", max_new_tokens=20, stream=True))


def test_two_streams_at_once():
    made = decoder()
    one, other = (made.complete(text, max_new_tokens=20, stream=True) for text in ("hello", "world"))
    pairs = list(zip(one, other, strict=False))
    assert len(pairs) > 1
    assert "".join(piece for piece, _ in pairs) == made.complete("hello", max_new_tokens=20)
