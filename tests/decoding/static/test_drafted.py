"""Drafts and the target's step in one run: the same tokens, trees and counts as in two runs."""

import numpy as np
import pytest
import torch
from support.companions import drafter as trained_drafter
from support.companions import target as trained_target
from support.models import PAYS, PROMPTS, left_padded, new_tokens

from arbordraft import CostAware, CostTable, Coupling, Engine, Request, SpeculativeDecoder, TreeTopology
from arbordraft.deciders import EntropyBound, NodeBudget
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.decisions import Limits, Verification
from arbordraft.decoding.executors import RecordedExecutor
from arbordraft.decoding.static import drafted, drafted_step
from arbordraft.decoding.static.drafted import DraftedSteps, _prices
from arbordraft.decoding.static.drafted_step import kept
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.kernels.draft_tree.reference import number_kept
from arbordraft.trees.forest import Forest

TREE = TreeTopology.from_k_config((3, 2, 1))
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}
DEAR = StepCosts(CostTable((1, 64), (1.0, 5.0)), CostTable((1, 64), (0.05, 0.06)))  # half of the drafts are given up
PADDING = {"rows", "pad_rows", "pad_keys", "seconds", "busy"}


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
    found, run = [], DraftedSteps.__call__

    def watched(self, *given):
        if (out := run(self, *given)) is not None:
            found.append(out[0].rows)
        return out

    monkeypatch.setattr(DraftedSteps, "__call__", watched)
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
    monkeypatch.setattr(RecordedExecutor, "_in_one_run", lambda *_: None)


@pytest.mark.one_in(2)
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


def test_two_runs_are_needed_if_the_decider_is_asked_before_every_level(done):
    decode(EntropyBound(), **GREEDY)
    assert done == []


def test_two_runs_are_needed_if_whole_trees_are_too_large(done):
    *_, stats = decode(NodeBudget(3), buckets=(8,), **GREEDY)
    assert len(done) < max(stats.forwards) - 1  # only the last trees, of few levels, fit
    assert max(done, default=0) <= 8


def everything(reach, prices):
    return reach >= 0


def test_drafts_that_are_not_given_up_would_be_seen(monkeypatch):
    """Negative control: no text changes, but counts do."""
    tokens, counts, _ = decode(CostAware(DEAR), **GREEDY)
    monkeypatch.setattr(drafted_step, "kept", everything)
    found, others, _ = decode(CostAware(DEAR), **GREEDY)
    assert found == tokens
    assert others != counts


def test_rows_with_tokens_of_other_nodes_would_be_seen(monkeypatch):
    """Negative control: the target verifies tokens of other nodes."""
    tokens, counts, _ = decode(CostAware(DEAR), **GREEDY)
    sources = drafted._sources

    def elsewhere(*given):
        found = sources(*given)
        found[2:] = found[1:-1].copy()
        return found

    monkeypatch.setattr(drafted, "_sources", elsewhere)
    assert decode(CostAware(DEAR), **GREEDY)[:2] != (tokens, counts)


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
    seconds, budget = 0.05 * (seed % 6) * np.arange(samples * sum(nodes) + 1), seed % 9 if seed % 2 else -1
    verification = Verification(seconds, rate=1.0) if seed % 3 else None
    forest = Forest.of_roots(TREE, [0] * samples, [None] * samples)
    limits = Limits.everything([3] * samples, budget=budget, verification=verification)
    prices = _prices(TreesToGrow(forest, range(samples), (), (), limits), samples * sum(nodes))
    whole = torch.cat(reach, dim=1)
    found = (kept(whole, torch.from_numpy(prices)) if len(prices) else whole >= 0).nonzero().tolist()
    expected = by_the_host(whole.tolist(), lambda ranked: number_kept(np.array(ranked), budget, verification))
    assert {tuple(place) for place in found} == expected
