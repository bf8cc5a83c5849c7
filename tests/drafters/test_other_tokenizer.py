"""Drafters with another tokenizer than the target: they draft shared tokens, or their text is tokenised anew."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.companions import UNEVEN, Rounds
from support.models import LETTERS, PROMPTS, VOCAB, decode, next_logits, tiny, tiny_tokenizer
from support.request_law import FEW, fit
from support.request_law import few_tokens as few
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import arbordraft as ad
from arbordraft.checkpoints.translation import Translation, encoded, shared_tokens, tokens_by_bytes
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters.grow import Growth

pytestmark = pytest.mark.usefixtures("kernels")
every_backend = pytest.mark.parametrize("kernels", ["torch", "native"])

PAIRS = ["ab", "cd", "ef", "gh", "mn", "xy"]


def merging(letters, pairs=(), **options):
    """Builds a tokenizer with a token for every letter, in another order, and for some pairs of letters."""
    vocabulary = {token: number for number, token in enumerate([*reversed(letters), *pairs])}
    spelling = Tokenizer(models.BPE(vocabulary, [(first, second) for first, second in pairs]))
    spelling.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=spelling, **options)


@cache
def models_with(kernels):
    """Builds a target and a draft model with other ids; the draft model lacks four letters of the target."""
    letters = LETTERS[: VOCAB - 4]
    model = tiny(seed=3, vocab_size=len(letters) + len(PAIRS), num_hidden_layers=1)
    target = ad.RaggedModel(tiny(), tiny_tokenizer(), kernels=kernels)
    return target, ad.RaggedModel(model, merging(letters, PAIRS), kernels=kernels)


def target(kernels="torch"):
    return models_with(kernels)[0]


def small(kernels="torch"):
    return models_with(kernels)[1]


DRAFTERS = {"intersection": ad.IntersectionDrafter, "retokenized": ad.RetokenizedDrafter}
every_drafter = pytest.mark.parametrize("name", DRAFTERS)


def drafter(name, kernels="torch"):
    return DRAFTERS[name](small(kernels), target(kernels))


def letters_of(tokens):
    return "".join(LETTERS[token] for token in tokens)


# Tokens and texts


def byte_level(*words):
    spelling = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    spelling.pre_tokenizer, spelling.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="<end>")


def sentence_piece(*words):
    spelling = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0]))
    spelling.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="</s>")


def test_tokens_are_matched_by_bytes_and_end_tokens_by_meaning():
    ours = byte_level("a", "Ġthe", "Ã¼", "Â", "<end>", "z", "Ġ", "Ċ")
    theirs = sentence_piece("▁the", "</s>", "ü", "<0xC2>", "q", "a", "Ġ", "▁")
    assert tokens_by_bytes(ours) == {b"a": 0, b" the": 1, "ü".encode(): 2, b"\xc2": 3, b"z": 5, b" ": 6, b"\n": 7}
    first, second = shared_tokens(ours, theirs, (99, 99))
    assert list(zip(first.tolist(), second.tolist(), strict=True)) == [(0, 5), (1, 0), (2, 2), (3, 3), (4, 1), (6, 7)]
    assert shared_tokens(ours, theirs, (2, 1))[0].tolist() == [1]  # ids that the models have


def test_a_translation_depends_on_the_text_alone():
    text = [token % 50 for token in range(0, 900, 7)] * 2
    whole, growing = Translation(tiny_tokenizer(), merging(LETTERS, PAIRS)), None
    growing = Translation(tiny_tokenizer(), merging(LETTERS, PAIRS))
    for end in range(1, len(text) + 1):
        found = growing(text[:end])
    assert found == whole(text)
    assert len(text) > 2 * 64
    assert merging(LETTERS, PAIRS).decode(found) == letters_of(text)


def test_a_continuation_is_encoded_after_other_text():
    """Tokenizers may treat the beginning of a text in a special way."""
    spelling = Tokenizer(models.BPE({"▁": 0, "a": 1, "b": 2, "c": 3}, []))
    spelling.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling)
    assert tokenizer("bc")["input_ids"] == [0, 2, 3]
    assert encoded(tokenizer, "bc") == [2, 3]
    assert encoded(merging("abc", ["ab"]), "bc") == merging("abc", ["ab"])("bc")["input_ids"]  # alone, or a and b merge


# Drafts


def intersection_row(prefix, drafted):
    """Computes a row by definition: the drafter's ids of the text, the path token by token, only shared tokens."""
    ids = merging(LETTERS[: VOCAB - 4], PAIRS).get_vocab()
    text = [*merging(LETTERS[: VOCAB - 4], PAIRS)(letters_of(prefix))["input_ids"], *(ids[LETTERS[t]] for t in drafted)]
    row = next_logits(small().model, text)
    wide = torch.full((VOCAB,), -torch.inf)
    for token, letter in enumerate(LETTERS[: VOCAB - 4]):
        wide[token] = row[ids[letter]]
    return wide.softmax(-1)


@every_backend
@pytest.mark.parametrize("law", [ad.WithoutReplacement(2), ad.IID(2)], ids=str)
def test_rows_are_the_models_own_over_the_shared_tokens(kernels, law):
    """Compares over several rounds that accept different paths."""
    prompts = [[token % (VOCAB - 4) for token in prompt] for prompt in PROMPTS]
    rounds = Rounds(drafter("intersection", kernels), target(kernels), prompts)
    compared = 0
    for ends in ((3, 7, 0), (0, 2, 6), (7, 7, 7), (0, 0, 0)):
        tree = rounds.propose(UNEVEN, law)
        for row in range(tree.rows):
            if (drawn := tree.drawn_from(row)) is not None:
                sample = int(tree.owner[row])
                expected = intersection_row(rounds.tokens[sample], tree[sample].path(row))
                torch.testing.assert_close(drawn, expected, rtol=0, atol=2e-5)
                compared += 1
        rounds.commit(tree, ends)
        rounds.tokens = [[token % (VOCAB - 4) for token in text] for text in rounds.tokens]
    assert compared > 40


def test_tokens_that_the_drafter_lacks_are_read_but_never_drafted():
    lacking = [*PROMPTS[2], VOCAB - 1, VOCAB - 2]
    tree = Rounds(drafter("intersection"), target(), [lacking]).propose(ad.TreeTopology.chain(3), ad.IID(1))
    for row in range(tree.rows):
        if (drawn := tree.drawn_from(row)) is not None:
            assert not drawn[VOCAB - 4 :].any()
            assert drawn.sum() == pytest.approx(1, abs=1e-5)


@every_backend
def test_chains_are_the_models_text_tokenised_anew(kernels):
    made, prompts = drafter("retokenized", kernels), [[t % (VOCAB - 4) for t in prompt] for prompt in PROMPTS]
    rounds = Rounds(made, target(kernels), prompts)
    tree = rounds.propose(ad.TreeTopology.chain(4), ad.Fixed(1))
    tokenizer = merging(LETTERS[: VOCAB - 4], PAIRS)
    for sample, prompt in enumerate(prompts):
        text = tokenizer(letters_of(prompt))["input_ids"]
        written = []
        while len(letters := tokenizer.decode(written)) < 4:
            written.append(int(next_logits(small().model, [*text, *written]).argmax()))
        chain = [LETTERS.index(letter) for letter in letters][:4]
        found = tree.token[tree[sample].rows.start + 1 : tree[sample].rows.stop].tolist()
        assert found == chain[: len(found)]
        assert len(found) >= 3


def test_no_token_is_out_of_reach_where_text_is_tokenised_anew():
    """A pair is one token for the drafter and two for the target."""
    made = drafter("retokenized")
    pairs = {number: pair for pair, number in merging(LETTERS[: VOCAB - 4], PAIRS).get_vocab().items() if pair in PAIRS}
    with torch.no_grad():
        wrapped = small()
        logits = made.catch_up
        made.catch_up = lambda state, missing: logits(state, missing)._replace(
            logits=torch.eye(wrapped.vocab_size)[[next(iter(pairs))]]
        )
    tree = Rounds(made, target(), [PROMPTS[2]]).propose(ad.TreeTopology.chain(2), ad.Fixed(1))
    assert letters_of(tree.token[1:3].tolist()) == next(iter(pairs.values()))


# Decoders


@every_backend
@every_drafter
def test_texts_are_those_of_the_target(name, kernels):
    of = target(kernels)
    topologies = [ad.TreeTopology.chain(3)]
    topologies += [ad.TreeTopology.from_k_config((2, 2))] if name == "intersection" else []
    for request in ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1, 2, 3]}):
        expected, _ = decode(ad.builders.plain(of), **request)
        for topology in topologies:
            found, stats = decode(
                ad.SpeculativeDecoder(of, drafter(name, kernels), topology, ad.Coupling.shared(2)), **request
            )
            assert found == expected
            assert sum(stats.tried.values()) > 0


@cache
def few_drafter(name):
    letters = "abcdef"
    of = ad.RaggedModel(few(0).model, tiny_tokenizer(letters), kernels="torch")
    model = ad.RaggedModel(few(3).model, merging(letters[:5], ["ab"]), kernels="torch")
    return of, DRAFTERS[name](model, of)


@every_drafter
def test_sampling_has_the_law_of_the_target(name):
    of, made = few_drafter(name)
    coupling = ad.Coupling.matching(1)
    if name == "intersection":
        coupling = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    topology = ad.TreeTopology([-1, 0, 0, 1]) if name == "intersection" else ad.TreeTopology.chain(2)
    assert fit(ad.SpeculativeDecoder(of, made, topology, coupling)) > 1e-3


def test_rows_that_were_not_drawn_from_would_be_seen(monkeypatch):
    """Negative control: rows flatter than those that the drafts came from."""
    of, made = few_drafter("intersection")
    grown = Growth.grown

    def lie(*given):
        tree = grown(*given)
        return replace(tree, draft_rows=tree.draft_rows * 0.3 + 0.7 / FEW)

    monkeypatch.setattr(Growth, "grown", lie)
    coupling = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    assert fit(ad.SpeculativeDecoder(of, made, ad.TreeTopology([-1, 0, 0, 1]), coupling)) < 1e-6


def test_it_goes_on_from_tokens_that_it_lacks():
    """The target or another drafter chose them; the drafter reads the first id of their text."""
    of, made = target(), drafter("intersection")
    assert made._id_of(VOCAB - 1) == 0
    hybrid = ad.HybridDrafter(ad.NGramDrafter(3, 1), made)
    for found in (hybrid, made):
        decoder = ad.builders.dynasd(of, found, width=1, depth=2)
        assert decode(decoder)[0] == decode(ad.builders.plain(of))[0]
    lacking = [VOCAB - 1, VOCAB - 2, 3, VOCAB - 1, VOCAB - 2]
    ids = torch.tensor([lacking * 3])
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    found = ad.SpeculativeDecoder(of, hybrid, ad.TreeTopology.chain(4)).generate(ids, **given)
    assert torch.equal(found, ad.builders.plain(of).generate(ids, **given))


@every_drafter
def test_it_rests_where_its_positions_end(name):
    """The text goes on without drafts."""
    model = tiny(seed=3, vocab_size=VOCAB + 2, num_hidden_layers=1, max_position_embeddings=20)
    made = DRAFTERS[name](ad.RaggedModel(model, merging(LETTERS[: VOCAB - 4], PAIRS), kernels="torch"), target())
    expected, _ = decode(ad.builders.plain(target()), max_new_tokens=40)
    found, _ = decode(ad.SpeculativeDecoder(target(), made, ad.TreeTopology.chain(3)), max_new_tokens=40)
    assert found == expected


@every_drafter
def test_it_rests_where_its_memory_ends(name):
    """A text of pairs needs twice the rows in letters. A bounded cache lacks them, but no request is refused."""
    wide = merging(LETTERS[: VOCAB - 4], PAIRS)
    of = ad.RaggedModel(tiny(vocab_size=len(wide)), wide, kernels="torch")
    letters = ad.RaggedModel(tiny(seed=3, num_hidden_layers=1), tiny_tokenizer(), kernels="torch")
    pair = wide.get_vocab()["ab"]
    prompts = [[pair] * 20, [pair] * 9]
    expected, _ = decode(ad.builders.plain(of), prompts, max_new_tokens=8)
    topology, drafted = ad.TreeTopology.chain(3), []
    for bound in (80, None):
        made = DRAFTERS[name](letters, of)
        decoder = ad.SpeculativeDecoder(of, made, topology, max_cache_tokens=bound)
        found, stats = decode(decoder, prompts, max_new_tokens=8)
        assert found == expected
        drafted.append(stats.drafted)
    assert drafted[0] < drafted[1]


def test_names_select_these_drafters(tmp_path):
    model = small()
    model.model.save_pretrained(tmp_path / "small")
    model.tokenizer.save_pretrained(tmp_path / "small")
    of = target()
    assert isinstance(drafter_named(str(tmp_path / "small"), of), ad.IntersectionDrafter)
    assert isinstance(drafter_named(f"retokenized:{tmp_path / 'small'}", of), ad.RetokenizedDrafter)


def test_pairs_of_models_that_do_not_fit_are_refused():
    bare = ad.RaggedModel(tiny(), kernels="torch")
    for kind in DRAFTERS.values():
        with pytest.raises(ValueError, match="need both: wrap the models with theirs"):
            kind(bare, target())
        with pytest.raises(ValueError, match="must be built for the target"):
            ad.SpeculativeDecoder(target("native"), kind(small(), target()), ad.TreeTopology.chain(1))
    stranger = ad.RaggedModel(tiny(vocab_size=3), merging("äöü"), kernels="torch")
    with pytest.raises(ValueError, match="have no tokens in common"):
        ad.IntersectionDrafter(stranger, target())
