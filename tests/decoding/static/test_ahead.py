"""Drafts and the target's step in one run: the same tokens, trees and counts as in two runs."""

from dataclasses import replace

import pytest
import torch
from support.companions import drafter as trained_drafter
from support.companions import target as trained_target
from support.models import PAYS, PROMPTS, VOCAB, left_padded, new_tokens
from support.watching import watch

from arbordraft import CostAware, CostTable, Coupling, EagleDrafter, Engine, Request, SpeculativeDecoder, TreeTopology
from arbordraft.deciders import EntropyBound, NodeBudget
from arbordraft.deciders.base import Decider
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.decisions import Plan, RowPrices
from arbordraft.decoding.executors import RecordedExecutor
from arbordraft.decoding.static import drafted_step
from arbordraft.decoding.static.ahead import StepAhead, WholeTrees
from arbordraft.decoding.static.draft import GrownTrees
from arbordraft.decoding.static.drafted_step import DraftedStep, kept

TREE = TreeTopology.from_k_config((3, 2, 1))
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}
DEAR = StepCosts(CostTable((1, 64), (1.0, 5.0)), CostTable((1, 64), (0.05, 0.06)))  # half of the drafts are given up
PADDING = {"rows", "pad_rows", "pad_keys", "seconds"}


class Halving(Decider):
    """Keeps half of the drafts, by a function instead of numbers."""

    can_plan = True

    def plan(self, situation):
        return Plan.everything(situation.max_depth, keep=lambda chances: (len(chances) + 1) // 2)


DECIDERS = {
    "all": lambda: None,
    "drafts that pay": lambda: CostAware(PAYS),
    "expensive rows": lambda: CostAware(DEAR),
    "four nodes": lambda: CostAware(PAYS, nodes=4),
    "budget": lambda: NodeBudget(3),
}


@pytest.fixture
def done(monkeypatch):
    """Records the nodes of trees that were drafted and verified in one run, step by step."""
    found, result = [], StepAhead.result

    def watched(self, tree):
        if (out := result(self, tree)) is not None:
            found.append(tree.rows)
        return out

    monkeypatch.setattr(StepAhead, "result", watched)
    return found


def decode(decider, name="eagle", prompts=PROMPTS, buckets=(64,), **settings):
    decoder = SpeculativeDecoder(
        trained_target(),
        trained_drafter(name) if isinstance(name, str) else name,
        TREE,
        Coupling.shared(3),
        buckets=buckets,
        decider=decider,
    )
    options = {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0, "seeds": list(range(len(prompts)))}
    output = decoder.generate(**left_padded(prompts), return_dict_in_generate=True, **{**options, **settings})
    counts = {name: value for name, value in vars(output.stats).items() if name not in PADDING}
    return new_tokens(output.sequences, prompts, output.stats.emitted), counts, output.stats


def apart(monkeypatch):
    monkeypatch.setattr(RecordedExecutor, "ahead", lambda *_: None)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("decider", DECIDERS)
@pytest.mark.parametrize("name", ["eagle", "model"])
def test_one_run_gives_the_same_tokens_and_counts_as_two(monkeypatch, done, name, decider, settings):
    tokens, counts, stats = decode(DECIDERS[decider](), name, **settings)
    steps = len(done)
    assert steps > 3
    assert min(stats.seconds.values()) >= 0
    apart(monkeypatch)
    assert decode(DECIDERS[decider](), name, **settings)[:2] == (tokens, counts)
    assert len(done) == steps
    assert counts["drafted"] > 0


def test_drafts_are_given_up_on_the_device(done):
    decode(CostAware(DEAR), **GREEDY)
    assert min(done) < max(done) < len(PROMPTS) * TREE.num_nodes


def test_samples_of_many_temperatures_share_a_run(monkeypatch, done):
    def answers():
        decoder = SpeculativeDecoder(
            trained_target(), trained_drafter("eagle"), TREE, Coupling.shared(3), buckets=(64,)
        )
        engine = Engine(decoder, max_samples=3)
        streams = [
            engine.submit(Request(prompt=text, max_new_tokens=12, temperature=heat, seed=3))
            for text, heat in zip(PROMPTS, (0.0, 0.5, 1.0), strict=True)
        ]
        engine.run()
        return [stream.result()[0].tokens for stream in streams]

    together = answers()
    assert done
    apart(monkeypatch)
    assert answers() == together


@pytest.mark.parametrize("decider", [Halving, EntropyBound], ids=["a function", "a decider that is asked"])
def test_two_runs_are_needed_if_numbers_cannot_state_the_kept_nodes(done, decider):
    decode(decider(), **GREEDY)
    assert done == []


def test_two_runs_are_needed_if_whole_trees_are_too_large(done):
    *_, stats = decode(NodeBudget(3), buckets=(8,), **GREEDY)
    assert len(done) < max(stats.forwards) - 1  # only the last trees, of few levels, fit
    assert max(done, default=0) <= 8


def test_no_operator_of_a_run_waits_for_the_host(monkeypatch):
    found = watch(monkeypatch, DraftedStep)
    decode(CostAware(DEAR), **SAMPLED)
    assert found == []


def everything(trees, prices):
    return torch.cat(trees.reach[1:], dim=1) >= 0


def test_drafts_that_are_not_given_up_would_be_seen(monkeypatch):
    """Negative control: no text changes, but counts do."""
    tokens, counts, _ = decode(CostAware(DEAR), **GREEDY)
    monkeypatch.setattr(drafted_step, "kept", everything)
    found, others, _ = decode(CostAware(DEAR), **GREEDY)
    assert found == tokens
    assert others != counts


def test_rows_with_tokens_of_other_nodes_would_be_seen(monkeypatch):
    """Negative control: the target verifies tokens of other nodes."""
    sources = WholeTrees.sources

    def elsewhere(*given):
        found = sources(*given)
        found[2:] = found[1:-1].copy()
        return found

    monkeypatch.setattr(WholeTrees, "sources", elsewhere)
    with pytest.raises(ValueError, match="not in list"):
        decode(CostAware(DEAR), **GREEDY)


class Changing(EagleDrafter):
    """Replaces every drafted token by the next token id."""

    alone = False

    def propose_trees(self, state, context, samples, growth, draws):
        static = context.static.alone if self.alone and context.static is not None else context.static
        found = super().propose_trees(state, replace(context, static=static), samples, growth, draws)
        return None if found is None else found._replace(tokens=[(token + 1) % VOCAB for token in found.tokens])


@pytest.mark.parametrize("alone", [False, True], ids=["with the target's step", "drafts alone"])
def test_drafts_that_a_drafter_changes_are_verified_as_changed(monkeypatch, done, alone):
    """The target verifies the same tokens that are committed."""
    monkeypatch.setattr(Changing, "alone", alone)
    drafter = Changing(trained_drafter("eagle").head, trained_target())
    expected, _, right = decode(None, **GREEDY)
    done.clear()
    found, counts, stats = decode(None, drafter, **GREEDY)
    assert found == expected
    assert done == []
    assert counts["drafted"] > 0
    assert stats.tau < right.tau


# Which nodes are kept


def by_the_host(reach, keep):
    """Returns the places that the host keeps, ranked like the grower ranks them."""
    places = [(sample, node) for sample, row in enumerate(reach) for node, one in enumerate(row) if one >= 0]
    ranked = sorted(places, key=lambda place: (-reach[place[0]][place[1]], place[1], place[0]))
    return set(ranked[: keep([reach[sample][node] for sample, node in ranked])])


@pytest.mark.parametrize("seed", range(40))
def test_the_device_keeps_the_nodes_that_the_host_would_keep(seed):
    generator = torch.Generator().manual_seed(seed)
    samples, nodes = 1 + seed % 4, (2, 3, 4)
    # Few different values, so that many nodes are equally likely; negative values mark missing nodes.
    reach = [torch.randint(-1, 5, (samples, count), generator=generator).double() / 8 for count in nodes]
    reach = [torch.where(level < 0, -1.0, level) for level in reach]
    price = 0.05 * (seed % 6)
    keep = RowPrices(lambda drafts: price * drafts, seed % 9 if seed % 2 else None) if seed % 3 else RowPrices()
    prices = torch.tensor(keep.table(samples * sum(nodes)), dtype=torch.float64)
    found = kept(GrownTrees([], [], [torch.ones(samples, 1), *reach]), prices).nonzero().tolist()
    assert {tuple(place) for place in found} == by_the_host(torch.cat(reach, dim=1).tolist(), keep)
