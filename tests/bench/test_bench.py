"""Tests of the benchmarks: padding changes no token and costs its rows, and expectations follow from the laws."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from padded import PaddedDecoder
from support.models import PROMPTS, VOCAB, decode, greedy_reference, ragged, tiny_tokenizer

import arbordraft as ad
from arbordraft.bench.decoding import emitted
from arbordraft.bench.workload import Workload
from arbordraft.drafters import Drafter
from arbordraft.testing import acceptance, random_rows
from arbordraft.verifiers import GlobalResolution, optimal_acceptance
from arborlab.verifiers import node_acceptance, tree_tau
from arborlab.verifiers.laws import laws_of
from arborlab.verifiers.nodes import RememberedRace, shared_acceptance, spread_uniforms
from arborlab.verifiers.positions import clustered, watch

CHAIN = ad.TreeTopology.chain(5)


class Told(Drafter):
    """Drafts chains of given lengths whose first tokens are right: all but the last ``wrong`` of them."""

    certain = True

    def __init__(self, texts, plan):
        super().__init__()
        self.texts, self.plan, self.step = texts, plan, 0

    def scores(self, state, frontier):
        step, guesses = self.plan[min(self.step, len(self.plan) - 1)], []
        for row, sample in enumerate(frontier.samples):
            length, right = step[sample]
            token = self.texts[sample][len(frontier.text(row))]
            guess = token if frontier.depth < right else (token + 1) % VOCAB
            guesses.append(([guess], [1.0]) if frontier.depth < length else ([], []))
        return guesses

    def commit(self, state, tree, verdict):
        self.step += 1


def test_the_worked_example_of_the_paper():
    """Predicted 5 then 2 and 2 then 5 tokens, accepted 4 then 2 and 1 then 6, the last one being no draft.

    A padded batch fills up 3 rows in either step, and 3 and then 4 columns; an unpadded one none.
    """
    prompts = [PROMPTS[0], PROMPTS[0][::-1]]
    answers = greedy_reference(ragged().model, prompts, max_new_tokens=12, eos_token_id=None)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    plan = [[(5, 3), (2, 0)], [(2, 1), (5, 5)], [(0, 0), (0, 0)]]
    parts = ad.Coupling.matching()
    pads = {}
    for name, cls, options in (
        ("unpadded", ad.SpeculativeDecoder, {}),
        ("rows only", PaddedDecoder, {"pad_cache": False}),
        ("columns only", PaddedDecoder, {"pad_input": False}),
        ("vanilla", PaddedDecoder, {}),
    ):
        decoder = cls(ragged(), Told(texts, plan), CHAIN, parts, **options)
        found, counts, commit = [], [], decoder.stepper._commit

        def watched(state, tree, verdict, *rest, commit=commit, counts=counts):
            before = [sample and len(sample.tokens) for sample in state.samples]
            commit(state, tree, verdict, *rest)
            counts.append(
                [sample and len(sample.tokens) - old for sample, old in zip(state.samples, before, strict=True)]
            )

        decoder.stepper._commit = watched
        found, stats = decode(decoder, prompts)
        assert found == answers
        assert counts[:2] == [[4, 1], [2, 6]]
        pads[name] = stats.pad_rows, stats.pad_keys
    assert pads["unpadded"] == (0, 0)
    assert pads["rows only"][0] == pads["vanilla"][0] >= 3 + 3
    assert pads["columns only"][0] == 0
    assert 0 < pads["columns only"][1] < pads["vanilla"][1]


@pytest.mark.parametrize("options", [{}, {"pad_cache": False}, {"pad_input": False}], ids=str)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_padding_changes_no_token(options, kernels):
    target = ad.RaggedModel(ragged().model, kernels=kernels)
    lookup, same = (
        ad.NGramDrafter(longest=2, shortest=1),
        ad.LanguageModelDrafter(ad.RaggedModel(ragged(seed=3).model, kernels="torch")),
    )
    for drafter in (lookup, same):
        coupling = ad.Coupling.matching()
        found, stats = decode(PaddedDecoder(target, drafter, CHAIN, coupling, **options), PROMPTS, eos_token_id=2)
        assert found == greedy_reference(ragged().model, PROMPTS, max_new_tokens=12)
        assert drafter is same or stats.pad_rows + stats.pad_keys > 0


def test_only_chains_are_padded():
    with pytest.raises(ValueError, match="made for chains"):
        PaddedDecoder(ragged(), ad.NGramDrafter(), ad.TreeTopology.k_ary(2, 2), ad.Coupling.matching(2))
    with pytest.raises(ValueError, match="leave buckets out"):
        PaddedDecoder(ragged(), ad.NGramDrafter(), CHAIN, ad.Coupling.matching(), buckets=(8,))


@pytest.mark.parametrize("k", [2, 3])
def test_rules_are_paired_with_their_laws(k):
    """Exact acceptance over all draws on a few rows: every rule is paired with its law, and none beats the optimum."""
    rows = [random_rows("random", 5, seed) for seed in range(4)]
    for law, rules in laws_of(k).values():
        for rule in rules.values():
            for target, draft in rows:
                assert acceptance(rule, law, target, draft) <= optimal_acceptance(law, target, draft) + 1e-9


SAMPLED = Workload(("a b c", "c", "b a", "d d"), batch=4, new_tokens=6, temperature=1.0)


def told():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "c"
    return ad.RaggedModel(ragged().model, tokenizer, kernels="torch")


def test_node_rows_are_expectations_on_the_same_positions():
    target = told()
    drafters = {"half": ad.EarlyExitDrafter(target, 1)}
    rows = list(node_acceptance(target, drafters, replace(SAMPLED, batch=2), children=(2, 3)))
    assert len({row.positions for row in rows}) == 1
    for row in rows:
        assert row.acceptance == pytest.approx(sum(row.by_rank))
        assert 0 < row.acceptance <= row.optimum + 6 * row.error + 1e-9
        assert len(row.by_rank) == row.k
    hub = [row.acceptance for row in rows if row.law == "TopTail(1,1)"]
    assert hub[0] == pytest.approx(hub[1], abs=0.05)  # equal on average over draws, not given a draw


def test_tree_rows_agree_with_decoding():
    """The mean over positions of the exact expectation, against counting verdicts there."""
    target = told()
    drafter, law, topology = ad.EarlyExitDrafter(target, 1), ad.WithoutReplacement(2), ad.TreeTopology.k_ary(2, 2)
    rows = list(tree_tau(target, {"half": drafter}, SAMPLED, nodes=(7,)))
    (found,) = (
        row
        for row in rows
        if (row.topology, row.law, row.verifier) == ("complete", "WithoutReplacement(2)", "TopDown(RRS)")
    )
    expected, counted = [], []
    verifier = ad.TopDown(ad.RecursiveRejection())

    def look(prompt, tree, target_rows, _):
        law_of = verifier.law(tree, target_rows)
        expected.append(sum(chance * (len(path) - 1) for chance, path, _ in law_of))
        assert sum(chance for chance, _, _ in law_of) == pytest.approx(1, abs=1e-5)
        counted.append(max(law_of, key=lambda end: end[0])[1])

    watch(target, drafter, topology, law, SAMPLED, look)
    assert len(expected) == found.positions
    assert found.tau == pytest.approx(1 + sum(expected) / len(expected), abs=1e-6)
    assert any(counted)


def test_every_shape_is_judged_at_about_the_same_size():
    target = told()
    drafters = {"half": ad.EarlyExitDrafter(target, 1)}
    ranks = {("half", name): [0.5, 0.3] for name in laws_of(2)}
    rows = list(tree_tau(target, drafters, SAMPLED, nodes=(8,), children=(2, 8), ranks=ranks))  # 8 have no room for 8
    assert {row.topology for row in rows} == {"chain", "complete", "paths", "sequoia", "delayed"}
    assert all(7 <= row.nodes <= 8 for row in rows)
    multi = {(row.law, row.topology) for row in rows if row.verifier == "multi-path"}
    assert multi >= {("IID(2)", "paths"), ("IID(2)", "delayed")}
    assert {law for law, _ in multi} == {"IID(2)"}


def test_draws_of_a_position_are_spread():
    uniforms = spread_uniforms(50, 8, 3)
    assert uniforms.min() >= 0
    assert uniforms.max() < 1
    cells = (uniforms * 8).long().sort(dim=1).values
    assert torch.equal(cells, torch.arange(8)[None, :, None].expand(50, 8, 3))
    first, second = (uniforms[..., column].flatten() for column in (0, 1))
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.2


def test_a_remembered_race_is_that_of_its_rows():
    law, remembered, fresh = ad.IID(2), RememberedRace(), GlobalResolution()
    for seed in (0, 1, 0):
        target, draft = random_rows("random", 6, seed)
        for tokens in ([0, 1], [3, 3], [5, 2]):
            outcomes = [rule(target, 1.0, draft, tokens, law) for rule in (remembered, fresh)]
            assert outcomes[0].accept == outcomes[1].accept


def test_lists_of_gumbel_noise():
    """The highest of several lists keeps the law of the target's token, but changes the token of the first list."""
    target, draft = random_rows("random", 4, 3)
    ranks, changed = zip(*(shared_acceptance(target, draft, 3, seed, lists=True) for seed in range(60)), strict=True)
    ours, same = zip(*(shared_acceptance(target, draft, 3, seed, lists=False) for seed in range(60)), strict=True)
    assert sum(same) == 0
    assert 0.2 < sum(changed) / 60 < 0.8
    assert sum(map(sum, ranks)) / 60 < optimal_acceptance(ad.IID(3), target, draft)
    assert sum(map(sum, ours)) > sum(map(sum, ranks))


def test_clusters_are_the_units_of_the_error():
    values = [(0, 1.0), (0, 1.0), (1, 0.0), (1, 0.0)]
    mean, error = clustered(values)
    assert mean == 0.5
    assert error == pytest.approx(math.sqrt(2 / 1 * (1.0**2 + 1.0**2)) / 4)
    assert math.isnan(clustered([(0, 1.0)])[1])


def test_tokens_after_the_end_of_an_answer_do_not_count():
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 7]))
    assert emitted(torch.tensor([[5, 2, 0, 0], [5, 5, 5, 5], [7, 2, 2, 2]]), model) == 2 + 4 + 1
