"""Steps without drafts leave no drafter stale: its later drafts are those without these steps."""

import pytest
import torch
from support.every_drafter import EVERY, pair
from support.models import PROMPTS, Planned, left_padded

import arbordraft as ad
from arbordraft.deciders.decisions import Limits

pytestmark = pytest.mark.usefixtures("kernels")

CHAIN = ad.TreeTopology.chain(3)
NEW = 60


def drafts_by_place(name, resting):
    """Decodes two texts greedily; returns the drafts after every number of committed tokens, by sample.

    Args:
        name: names target and drafter.
        resting: numbers of the steps in which nothing is drafted.
    """
    target, drafter = ("lookups", ad.NGramDrafter()) if name == "lookups" else pair(name)
    if name == "lookups":
        target, _ = pair("model/native")
    steps, found = [0], {}

    def plan(situation):
        steps[0] += 1
        levels = [0] * len(situation.max_depth) if steps[0] in resting else situation.max_depth
        return Limits.everything(levels)

    decoder = ad.SpeculativeDecoder(target, drafter, CHAIN, decider=Planned(plan))

    def note(state, tree, verdict):
        for number in tree.living:
            rows = tree.rows_of([number])[1:]
            if len(rows):
                found[number, len(state[number].tokens)] = tree.token[rows].tolist()

    decoder.on_step = note
    text = decoder.generate(**left_padded(PROMPTS[::2]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    return found, text


@pytest.mark.parametrize("name", [*EVERY, "lookups"])
def test_drafts_after_a_rest_are_those_without_one(name):
    always, text = drafts_by_place(name, ())
    rested, same = drafts_by_place(name, {1, 2, *range(6, 15), 17})
    assert torch.equal(text, same)
    common = always.keys() & rested.keys()
    assert {place: rested[place] for place in common} == {place: always[place] for place in common}
    assert len(common) >= 2


def test_a_stale_drafter_would_be_seen(monkeypatch):
    """Negative control: a draft model that takes tokens which it never read for read."""
    always, _ = drafts_by_place("model/torch", ())
    real = ad.LanguageModelDrafter.missing

    def stale(self, state, context, sample):
        tokens, states = real(self, state, context, sample)
        return ([*tokens[:-1][::-1], tokens[-1]] if len(tokens) > 4 else tokens), states

    monkeypatch.setattr(ad.LanguageModelDrafter, "missing", stale)
    rested, _ = drafts_by_place("model/torch", set(range(6, 15)))
    common = always.keys() & rested.keys()
    assert any(rested[place] != always[place] for place in common)
