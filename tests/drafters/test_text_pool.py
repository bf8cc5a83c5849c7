"""A pool of finished texts: it finds suffixes, drops texts, survives a file, and changes no text."""

import threading

import pytest
import torch
from support.models import PAYS as COSTS
from support.models import PROMPTS, decode, ragged

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request

SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1, 2, 3]}


def test_the_longest_suffix_is_found():
    pool = ad.TextPool()
    pool.extend([[1, 2, 3, 4, 5], [9, 2, 3, 4, 6], [7, 7]])
    assert len(pool) == 2  # a text of two tokens has nothing to look up
    assert pool.matches((9, 2, 3, 4)) == [(4, 6, 2), (3, 5, 1)]
    assert pool.matches((8, 2, 3, 4)) == [(3, 6, 2), (3, 5, 1)]
    assert pool.matches((2, 3)) == []
    assert pool.matches((5, 9, 2)) == []  # no suffix runs over the end of a text
    assert pool.matches((3, 4, 5)) == []  # nothing follows this suffix


def test_the_least_useful_texts_make_room():
    pool = ad.TextPool(max_bytes=1 << 16)
    texts = [[number, number + 1, number + 2, *range(1000, 1097)] for number in range(100, 400, 10)]
    for text in texts[:3]:
        pool.add(text)
    first = pool.matches((100, 101, 102))[0][2]
    for text in texts[3:]:
        pool.praise(first)
        pool.add(text)
        assert pool.nbytes <= 1 << 16
    assert 1 < len(pool) < len(texts)
    assert pool.matches((100, 101, 102))  # kept, because it was praised
    assert not pool.matches((110, 111, 112))
    assert pool.matches((390, 391, 392))
    pool.add(list(range(5000)))
    assert pool.nbytes <= 1 << 16
    assert pool.matches((4990, 4991, 4992))


def test_a_pool_survives_a_file(tmp_path):
    pool = ad.TextPool(shortest=2)
    pool.extend([[1, 2, 3, 4, 5], [9, 2, 3, 4, 6]])
    pool.save(tmp_path / "pool.safetensors")
    read = ad.TextPool.load(tmp_path / "pool.safetensors")
    assert read.shortest == 2
    assert read.matches((9, 2, 3, 4)) == pool.matches((9, 2, 3, 4))
    (tmp_path / "other").write_text("no pool")
    with pytest.raises(ValueError, match="holds no pool of texts"):
        ad.TextPool.load(tmp_path / "other")
    with pytest.raises(ValueError, match="holds no pool of texts"):
        ad.TextPool.load(tmp_path / "missing")


def test_threads_may_read_and_add():
    pool, failures = ad.TextPool(max_bytes=1 << 17), []

    def work(seed):
        source = torch.Generator().manual_seed(seed)
        try:
            for _ in range(100):
                text = torch.randint(6, (40,), generator=source).tolist()
                pool.add(text)
                for size, token, number in pool.matches(text[:8]):
                    assert 3 <= size <= 8
                    assert 0 <= token < 6
                    pool.praise(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("request_", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_repeated_text_is_decoded_faster(request_):
    of = ragged()
    expected, _ = decode(ad.builders.plain(of), max_new_tokens=24, **request_)
    decoder = ad.SpeculativeDecoder(of, ad.NGramDrafter(pool=ad.TextPool()), ad.TreeTopology.chain(6))
    taus = []
    for _ in range(2):
        found, stats = decode(decoder, max_new_tokens=24, **request_)
        assert found == expected
        taus.append(stats.tau)
    assert taus[1] > 2 * taus[0]
    assert len(decoder.drafter.pool) == len(PROMPTS)


def test_the_pool_is_not_used_if_texts_depend_on_drafts():
    of, taus = ragged(), []
    coupling = ad.Coupling(ad.Fixed(1), ad.TopDown(ad.RecursiveRejection()))
    decoder = ad.SpeculativeDecoder(of, ad.NGramDrafter(pool=ad.TextPool()), ad.TreeTopology.chain(6), coupling)
    texts = []
    for _ in range(2):
        found, stats = decode(decoder, max_new_tokens=24, **SAMPLED)
        texts.append(found)
        taus.append(stats.tau)
    assert texts[0] == texts[1]
    assert taus[0] == taus[1]
    assert len(decoder.drafter.pool) == len(PROMPTS)


@pytest.mark.parametrize("reuse", [True, False])
def test_answers_do_not_depend_on_earlier_texts(reuse):
    of = ragged()
    asked = [
        Request(prompt=PROMPTS[n % 3], max_new_tokens=12 + n, seed=n // 3, temperature=float(n % 2)) for n in range(9)
    ]
    plain = Engine(ad.builders.plain(of), max_cache_tokens=900)
    expected = [[answer.tokens for answer in plain.submit(request).result()] for request in asked]
    for order in (range(9), [4, 8, 0, 3, 7, 1, 5, 2, 6]):
        drafter = ad.NGramDrafter(longest=8, shortest=1, pool=ad.TextPool(shortest=1))
        decoder = ad.SpeculativeDecoder(of, drafter, ad.TreeTopology.chain(6), decider=ad.CostAware(COSTS))
        engine = Engine(decoder, max_cache_tokens=900, max_samples=3, reuse=reuse)
        streams = {}
        for number in order:
            streams[number] = engine.submit(asked[number])
            engine.step()
        engine.run()
        assert [[answer.tokens for answer in streams[n].answers] for n in range(9)] == expected
        assert len(drafter.pool) >= 6


def test_load_puts_the_pool_before_other_drafters():
    of, pool = ragged(), ad.TextPool()
    for name, kind in (("ngram", ad.NGramDrafter), ("none", ad.NGramDrafter), ("early-exit:1", ad.HybridDrafter)):
        drafter = ad.load(of, name, costs=None, pool=pool).drafter
        assert isinstance(drafter, kind)
        assert (drafter if kind is ad.NGramDrafter else drafter.first).pool is pool
    assert ad.load(of, "ngram", pool=pool).drafter.pool is pool


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ad.TextPool(max_bytes=9), ValueError, "max_bytes"),
        (lambda: ad.TextPool(shortest=0), ValueError, "shortest"),
        (lambda: ad.NGramDrafter(pool=[1]), TypeError, "pool must be of type TextPool"),
    ],
)
def test_invalid_arguments_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()
