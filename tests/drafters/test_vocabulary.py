"""Drafts of large vocabularies are chosen from frequent tokens and from those that the text has used."""

import pytest
from support.models import decode, varied

import arbordraft as ad
from arbordraft.drafters import model_drafter, vocabulary
from arbordraft.drafters.feeding import feed
from arbordraft.drafters.vocabulary import BLOCK, FREQUENT, TextVocabulary, blocks_of

CHAIN = ad.TreeTopology.chain(4)
RARE = FREQUENT + 5 * BLOCK


def test_rare_tokens_of_a_text_join_the_frequent_ones():
    text = [1] * 90 + [RARE + 3]
    one = TextVocabulary(text)
    blocks = blocks_of([one]).tolist()
    assert blocks == [*range(FREQUENT // BLOCK), RARE // BLOCK]
    text += [RARE, RARE + 1, RARE - 1]
    assert blocks_of([one]).tolist() == [*blocks[:-1], RARE // BLOCK - 1, RARE // BLOCK]
    assert one.missed == pytest.approx(2 / 64, rel=0.1), "a block counts once"


def test_samples_share_their_tokens():
    texts = [TextVocabulary([1] * 90 + [RARE + 100 * number]) for number in range(3)]
    found = blocks_of(texts).tolist()
    assert found == sorted(found)
    assert len(found) == FREQUENT // BLOCK + 3


def test_a_text_of_other_tokens_is_drafted_from_all():
    german = [1, 2, *range(RARE, RARE + 40 * BLOCK, 5 * BLOCK), 3]
    text = [*german, *[1] * 20]
    one = TextVocabulary(text)
    assert blocks_of([one]) is None
    assert blocks_of([TextVocabulary([1] * 90), one]) is None
    text += [1] * 200
    assert blocks_of([one]) is not None, "until it uses frequent ones again"


@pytest.fixture
def blocks(monkeypatch):
    """Blocks that drafts are chosen from, for a tiny vocabulary in which two blocks are frequent."""
    seen = []

    def noted(*given, **options):
        seen.append(given[6])
        return feed(*given, **options)

    monkeypatch.setattr(model_drafter, "feed", noted)
    monkeypatch.setattr(model_drafter, "LARGE", 0)
    monkeypatch.setattr(vocabulary, "FREQUENT", 2 * BLOCK)
    return seen


def drafters(target):
    copy = ad.RaggedModel(target.model, kernels="native", weights="int8", self_test=False)
    return {"model": ad.LanguageModelDrafter(copy, same_tokenizer=True), "self": ad.SelfDrafter(target, "int8")}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("missed", [0.0, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["model", "self"])
def test_texts_stay_those_of_plain_decoding(blocks, monkeypatch, name, temperature, missed):
    """Whether few tokens are drafted, or all of them; greedily, and with shared noise."""
    monkeypatch.setattr(vocabulary, "_MOST_MISSED", missed)
    target = ad.RaggedModel(varied("llama"), kernels="native", self_test=False)
    settings = {"max_new_tokens": 30, "do_sample": temperature > 0, "seeds": [1, 2, 3]}
    expected, _ = decode(ad.SpeculativeDecoder(target, ad.NoDrafter(), CHAIN, ad.Coupling.shared()), **settings)
    drafted = []
    decoder = ad.SpeculativeDecoder(target, drafters(target)[name], CHAIN, ad.Coupling.shared())
    decoder.on_step = lambda state, tree, verdict: drafted.append(
        {int(token) for row, token in enumerate(tree.token) if tree.depth[row]}
    )
    found, stats = decode(decoder, **settings)
    assert found == expected
    assert sum(stats.accepted.values()) > 0
    assert len(blocks) == len([step for step in drafted if step]) > 0
    few = [
        (set(own.tolist()), step) for own, step in zip(blocks, filter(None, drafted), strict=True) if own is not None
    ]
    assert few if missed else len(few) < len(blocks)
    assert all({token // BLOCK for token in step} <= own for own, step in few)
