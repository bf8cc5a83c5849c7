"""Drafters: the rows they show to the verifier are those they drew from, after any accepted path."""

from random import Random

import pytest
import torch
from support.companions import Rounds, walk
from support.models import (
    PROMPTS,
    VOCAB,
    check_greedy,
    context,
    greedy_reference,
    grown,
    joined,
    next_logits,
    ragged,
    tiny,
)
from torch.testing import assert_close
from transformers import TopKLogitsWarper

import arbordraft as ad
from arbordraft.drafters import Drafter
from arbordraft.drafters.ngram import Guess
from arbordraft.sampling.owned_rows import SampleError
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers import KSeq


class Forgetful(ad.LanguageModelDrafter):
    """Keeps the first rows of the tree instead of those of the accepted path."""

    def commit(self, state, tree, verdict):
        state.cache.commit(
            {
                state.handles[sample]: range(min(len(path) - 1, len(state.fed.get(sample, []))))
                for sample, path in enumerate(verdict.paths)
                if path
            }
        )


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
def test_the_draft_cache_follows_every_kind_of_verdict(architecture):
    drafter = ad.LanguageModelDrafter(ragged(architecture, seed=3))
    rounds, _ = walk(drafter, "model", drafter.model.model, ragged())
    state = rounds.state
    assert list(state.handles) == [0, 2]
    # Accepted rows are kept. Only the last token is still to be fed, and before it the leaf, if one was accepted.
    assert [len(rounds.tokens[sample]) - state.cache.length(state.handles[sample]) for sample in (0, 2)] == [2, 1]


def test_a_wrong_rollback_would_be_seen():
    drafter = Forgetful(ragged(seed=3))
    with pytest.raises(AssertionError):
        walk(drafter, "model", drafter.model.model, ragged())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gpt_neox", "gpt_oss"])
def test_early_exit_is_the_truncated_target(architecture):
    model, shallow = (tiny(architecture, num_hidden_layers=layers) for layers in (3, 2))
    shallow.load_state_dict(model.state_dict(), strict=False)
    target = ad.RaggedModel(model, kernels="torch")
    rounds, _ = walk(ad.EarlyExitDrafter(target, layers=2), "model", shallow, target)
    # The target's cache is unharmed: its own next logits are right for every sample that goes on.
    for sample in (0, 2):
        handle, prefix = rounds.handles[sample], rounds.tokens[sample]
        assert rounds.cache.length(handle) == len(prefix) - 1
        logits = target(torch.tensor(prefix[-1:]), rounds.cache.lay_out([handle], [[0]]), rounds.cache)
        assert_close(logits[0], next_logits(model, prefix), rtol=0, atol=1e-4)


def fails_behind_drafts(input_ids, scores):
    if input_ids.shape[1] > len(PROMPTS[0]):
        raise ArithmeticError
    return scores


@pytest.mark.parametrize("make", [lambda target: ad.EarlyExitDrafter(target, layers=1), ad.LanguageModelDrafter])
def test_growing_that_failed_halfway_leaves_nothing_behind(make):
    """The step is repeated without the sample whose processor failed."""
    target, topology, law = ragged(), ad.TreeTopology.from_k_config((2, 2, 1)), ad.Fixed(2)
    drafter, cache, prompt = make(target), RaggedKVCache(), PROMPTS[0]
    handle = cache.open(len(prompt))
    target.prefill({handle: prompt[:-1]}, cache)
    state = joined(drafter, [prompt], cache, [handle])

    def drafted(*processors):
        tree = grown(drafter, state, context([prompt], topology, law, greedy=True, processors=processors))
        drafter.rollback(state)
        return tree

    expected = drafted()
    with pytest.raises(SampleError):
        drafted(fails_behind_drafts)
    cache.drop([handle])
    drafter.rollback(state)
    again = drafted()
    assert again.token.tolist() == expected.token.tolist()
    assert_close(again.chance, expected.chance, rtol=0, atol=1e-6)


def test_early_exit_is_refused_where_it_cannot_work():
    with pytest.raises(ValueError, match=r"layers must lie in 1\.\.1 for this target, got 2"):
        ad.EarlyExitDrafter(ragged(), layers=2)
    unlisted = tiny()
    unlisted.model.layers = torch.nn.Sequential(*unlisted.model.layers)
    with pytest.raises(ad.UnsupportedModel, match="neither early exit"):
        ad.EarlyExitDrafter(ad.RaggedModel(unlisted, kernels="torch"), layers=1)
    with pytest.raises(ValueError, match="built from the target"):
        ad.EarlyExitDrafter(ragged(seed=1), layers=1).check(ragged(), ad.IID(1))


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 0}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("law", [ad.IID(1), ad.WithoutReplacement(1)], ids=str)
@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
def test_a_drafter_equal_to_the_target_is_always_right(lift, law, sampling):
    target = ragged()
    coupling = ad.Coupling(law, lift(ad.RecursiveRejection()))
    decoder = ad.SpeculativeDecoder(target, ad.LanguageModelDrafter(target), ad.TreeTopology.chain(3), coupling)
    prompt = torch.tensor([PROMPTS[2]])
    options = {"max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True, **sampling}
    stats = decoder.generate(prompt, **options).stats
    assert (stats.forwards, stats.tau) == ([3], 4.0)
    assert stats.acceptance_by_depth == [1.0, 1.0, 1.0]


def ngram_tree(text, topology, k=2, **options):
    drafter = ad.NGramDrafter(**options)
    tree = grown(drafter, joined(drafter, [text]), context([text], topology, ad.Fixed(k), greedy=True))
    return dict(zip(tree.node.tolist(), tree.token.tolist(), strict=True))


@pytest.mark.parametrize(
    ("text", "topology", "options", "tokens"),
    [
        # The suffix 1 2 was followed by 3 4.
        ([1, 2, 3, 4, 9, 1, 2], ad.TreeTopology.chain(3), {}, {0: 2, 1: 3, 2: 4, 3: 9}),
        # Nothing to look up: a root alone.
        ([1, 2, 3, 4], ad.TreeTopology.chain(3), {}, {0: 4}),
        ([1], ad.TreeTopology.chain(3), {}, {0: 1}),
        # A longer suffix has priority over a later or more frequent shorter one.
        ([5, 1, 2, 3, 7, 1, 2, 4, 7, 1, 2, 4, 5, 1, 2], ad.TreeTopology([-1, 0, 0]), {}, {0: 2, 1: 3, 2: 4}),
        # Of several continuations the most frequent comes first, then the latest.
        ([1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2, 5, 1, 2], ad.TreeTopology([-1, 0, 0, 0]), {}, {0: 2, 1: 4, 2: 5, 3: 3}),
        # The text may continue into itself: drafted tokens are part of the next suffix.
        ([1, 2, 1, 2], ad.TreeTopology.chain(4), {}, {0: 2, 1: 1, 2: 2, 3: 1, 4: 2}),
        # Suffixes shorter than `shortest` are not followed, suffixes longer than `longest` are not distinguished.
        ([1, 3, 9, 1], ad.TreeTopology.chain(1), {}, {0: 1}),
        ([1, 3, 9, 1], ad.TreeTopology.chain(1), {"shortest": 1}, {0: 1, 1: 3}),
        ([5, 1, 3, 6, 1, 4, 5, 1], ad.TreeTopology.chain(1), {"longest": 1, "shortest": 1}, {0: 1, 1: 4}),
        ([5, 1, 3, 6, 1, 4, 5, 1], ad.TreeTopology.chain(1), {"longest": 2, "shortest": 1}, {0: 1, 1: 3}),
        # A branch without a continuation ends; its sibling goes on.
        ([1, 2, 3, 1, 2, 4, 7, 8, 1, 2], ad.TreeTopology([-1, 0, 0, 1, 2, 3, 4]), {},
         {0: 2, 1: 4, 2: 3, 3: 7, 4: 1, 5: 8, 6: 2}),
        ([3, 1, 2, 4, 1, 2], ad.TreeTopology([-1, 0, 0, 1, 2]), {"longest": 2}, {0: 2, 1: 4, 3: 1}),
    ],
)  # fmt: skip
def test_ngram_trees(text, topology, options, tokens):
    assert ngram_tree(text, topology, k=3, **options) == tokens


def looked_up(tokens, suffix, wanted, longest, shortest):
    """Looks up by the definition; returns tokens with sizes, votes and ranks."""
    found, suffix = {}, suffix[-longest:]
    for size in range(len(suffix), shortest - 1, -1):
        ends = [end for end in range(size - 1, len(tokens) - 1) if tokens[end - size + 1 : end + 1] == suffix[-size:]]
        after = [tokens[end + 1] for end in ends[-32:]]
        order = sorted(set(after), key=lambda token: (-after.count(token), after[::-1].index(token)))
        for token in order:
            if len(found) < wanted and token not in found:
                found[token] = Guess(token, size, min(2, len(ends)) if len(order) == 1 else 0, len(found))
    return list(found.values())


@pytest.mark.parametrize(("longest", "shortest"), [(4, 2), (2, 1), (1, 1), (6, 3), (64, 5)])
def test_lookups_are_those_of_the_definition(longest, shortest):
    """Texts repeat themselves often and grow; lookups continue their ends, or drafts after these."""
    random, count = Random(longest), 0
    for _ in range(120):
        letters, length = random.choice([(1, 50), (2, 90), (3, 120), (9, 40)])
        drafter, text = ad.NGramDrafter(longest, shortest), [random.randrange(letters) for _ in range(length)]
        index = joined(drafter, [text[: random.randrange(length)]]).texts[0].index
        index.extend(text)
        for drafts in range(5):
            path = [*text, *(random.randrange(letters) for _ in range(drafts))]
            wanted = random.randrange(1, 5)
            expected = looked_up(text, path, wanted, longest, shortest)
            assert drafter._lookup(index, text, tuple(path[-longest:]), wanted, None) == expected
            count += len(expected)
    assert count > 300


def test_the_confidence_of_a_lookup_grows_with_the_match():
    """1 2 was followed by 4 twice and by 3 once: a first and a second choice after a suffix of two tokens."""
    drafter, views, text = ad.NGramDrafter(longest=2), [], [1, 2, 3, 1, 2, 4, 1, 2, 4, 1, 2]

    def decide(view):
        views.append(view.confidence)
        return [True]

    state = joined(drafter, [text])
    grown(drafter, state, context([text], ad.TreeTopology.k_ary(2, 2), ad.Fixed(2), greedy=True), decide=decide)
    odds = state.texts[0].odds
    first, second = odds(Guess(4, size=2, votes=0, rank=0)), odds(Guess(3, size=2, votes=0, rank=1))
    assert views == [[[1.0]], [[first, second]]]
    assert first > odds(Guess(4, size=1, votes=0, rank=0)) > second > 0
    sure = [odds(Guess(4, size, votes, rank=0)) for size, votes in ((2, 0), (2, 1), (2, 2), (3, 2), (9, 2))]
    assert sure == sorted(set(sure)), "longer suffixes and more votes are surer"
    assert sure[-1] < 1


def test_ngrams_learn_committed_tokens():
    drafter, topology = ad.NGramDrafter(), ad.TreeTopology.chain(2)
    state = joined(drafter, [[1, 2, 3], [1, 2, 3]])
    tokens = [[1, 2, 3], [1, 2, 3]]
    for addition in (5, 1, 2):
        tree = grown(drafter, state, context(tokens, topology, ad.Fixed(1), greedy=True, max_depth=[2, None]))
        assert tree.lengths == [1, 0]
        drafter.commit(state, tree, Verdict.of(tree, {0: (0, addition)}))
        tokens[0].append(addition)
    tree = grown(drafter, state, context(tokens, topology, ad.Fixed(1), greedy=True, max_depth=[2, None]))
    assert tree[0].tokens == [2, 3, 5]


def test_ngrams_need_a_certain_law():
    with pytest.raises(ValueError, match=r"couple them as Fixed\(2\)"):
        ad.NGramDrafter().check(ragged(), ad.IID(2))
    with pytest.raises(ValueError, match="shortest must be a whole number from 1 to 1, got 2"):
        ad.NGramDrafter(longest=1, shortest=2)


def test_rows_with_a_small_support_give_smaller_trees():
    """top_k=1 leaves one token, which is drawn once without replacement and twice with it."""
    drafter = ad.LanguageModelDrafter(ragged(seed=3))
    topology = ad.TreeTopology.k_ary(2, 2)
    for law, lengths in ((ad.WithoutReplacement(2), 3), (ad.TopTail(1, 1), 3), (ad.IID(2), 7)):
        tree = Rounds(drafter, ragged(), PROMPTS).propose(topology, law, processors=[TopKLogitsWarper(1)])
        assert tree.lengths == [lengths] * 3


def test_a_drafter_may_do_nothing_but_propose():
    """A custom drafter needs no other method."""

    class Table(Drafter):
        def scores(self, state, frontier):
            return torch.eye(VOCAB)[[token + 1 for token in frontier.tokens]]

    decoder = ad.SpeculativeDecoder(ragged(), Table(), ad.TreeTopology.chain(2), ad.Coupling.matching())
    stats = check_greedy(decoder, PROMPTS[:1], 6)
    assert stats.drafted > 0


def test_a_drafter_may_choose_its_tokens():
    class Constant(Drafter):
        certain = True

        def scores(self, state, frontier):
            return [([7], [1.0]) for _ in frontier.nodes]

    decoder = ad.SpeculativeDecoder(ragged(), Constant(), ad.TreeTopology.chain(1), ad.Coupling.matching())
    assert check_greedy(decoder, PROMPTS[:1], 6).drafted > 0
    with pytest.raises(ValueError, match=r"couple them as Fixed\(1\)"):
        ad.SpeculativeDecoder(ragged(), Constant(), ad.TreeTopology.chain(1), ad.Coupling(ad.IID(1), ad.Lifted(KSeq())))


def test_a_drafter_that_ignores_the_room_left_does_not_lengthen_the_output():
    """The drafter knows the target's tokens and always proposes three of them."""
    (future,) = greedy_reference(ragged().model, PROMPTS[:1], max_new_tokens=12, eos_token_id=None)
    topology = ad.TreeTopology.chain(3)

    class Prophet(Drafter):
        certain = True

        def depths(self, state, context):
            return [topology.max_depth]

        def scores(self, state, frontier):
            return [([future[len(frontier.text(0)) - len(PROMPTS[0])]], [1.0])]

    decoder = ad.SpeculativeDecoder(ragged(), Prophet(), topology, ad.Coupling.matching())
    for count in range(1, 6):
        output = decoder.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=count, do_sample=False, eos_token_id=None)
        assert output[0, len(PROMPTS[0]) :].tolist() == future[:count]


class Short(Drafter):
    """Gives no prediction for the last node."""

    def __init__(self, guesses):
        super().__init__()
        self.certain = guesses

    def scores(self, state, frontier):
        rows = torch.zeros(len(frontier) - 1, VOCAB)
        return [([1], [0.5])] * len(rows) if self.certain else rows


@pytest.mark.parametrize("guesses", [False, True])
def test_missing_predictions_are_refused(guesses):
    step = context(PROMPTS, ad.TreeTopology.chain(2), ad.Fixed(1), greedy=True)
    with pytest.raises(ValueError, match=r"Short.* must give predictions for each of 3 nodes, gave 2"):
        grown(Short(guesses), None, step)
