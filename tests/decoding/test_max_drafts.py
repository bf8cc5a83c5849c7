"""A bound on the drafts of one request: it holds in every step, and neither its text nor its neighbours change."""

import pytest
import torch
from support.models import PAYS, PROMPTS, generated, ragged

import arbordraft as ad
from arbordraft.deciders import FixedDepth
from arbordraft.deciders.decisions import Limits
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.target_initialised import TargetInitialisedDecoder

TREE = ad.TreeTopology.from_k_config((3, 2, 1))
SEEDS = [4, 5, 6]


def model_drafter():
    return ad.LanguageModelDrafter(ragged(seed=3))


class Asking(FixedDepth):
    """Is asked before every level."""

    can_plan = False

    def forward(self, view):
        return [True] * len(view.paths)


def built(drafter=None, coupling=None, topology=TREE, **options):
    return ad.SpeculativeDecoder(ragged(), drafter or model_drafter(), topology, coupling, **options)


# Decoders whose texts do not depend on drafts, and whether requests sample.
PATHWISE = {
    "greedy": (lambda: built(), False),
    "shared noise": (lambda: built(), True),
    "a decider that plans": (lambda: built(decider=ad.CostAware(PAYS)), True),
    "a decider that is asked": (lambda: built(decider=Asking()), True),
    "lookups, then a model": (lambda: built(ad.HybridDrafter(ad.NGramDrafter(4, 1), model_drafter())), True),
    "steps of fixed shapes": (lambda: built(buckets=(4, 16, 32), decider=ad.CostAware(PAYS)), True),
    "a chain": (lambda: built(topology=ad.TreeTopology.chain(5), coupling=ad.Coupling.shared(1)), True),
    "greedy, random drafts": (
        lambda: built(coupling=ad.Coupling(ad.WithoutReplacement(3), ad.Lifted(ad.RecursiveRejection()))),
        False,
    ),
}
DRAWN = {
    "trees": lambda: built(coupling=ad.Coupling(ad.WithoutReplacement(3), ad.Lifted(ad.RecursiveRejection()))),
    "chains": lambda: built(topology=ad.TreeTopology.chain(4), coupling=ad.Coupling.of(ad.IID(1))),
}


def drafts_of(decoder, sampled, **options):
    """Returns tokens, and by sample the number of drafts in each of its steps."""
    drafts = {sample: [] for sample in range(len(PROMPTS))}

    def watch(state, tree, verdict):
        for sample in tree.living:
            drafts[sample].append(tree.lengths[sample] - 1)

    decoder.on_step = watch
    own = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": SEEDS} if sampled else {"do_sample": False}
    tokens, output = generated(decoder, max_new_tokens=14, eos_token_id=None, pad_token_id=0, **own, **options)
    return tokens, drafts, output


@pytest.mark.parametrize("name", PATHWISE)
def test_a_bound_holds_and_changes_no_text(name):
    build, sampled = PATHWISE[name]
    free, drafts, _ = drafts_of(build(), sampled)
    widest = max(drafts[0])
    assert widest > 3  # otherwise no bound would bite
    for bound in (0, 1, 3, 64):
        tokens, bounded, output = drafts_of(build(), sampled, max_drafts=[bound, None, None])
        assert tokens == free
        assert max(bounded[0]) == min(bound, widest)
        assert max(bounded[1]) > 1
        assert max(bounded[2]) > 1
        if bound == 0:
            assert output.answers[0].forwards == len(tokens[0])
            assert output.answers[0].drafted == 0


def test_the_likeliest_drafts_are_kept():
    """A tree of three drafts is the whole tree's beginning by probability."""
    whole, kept = [], []
    for found, bound in ((whole, None), (kept, 3)):
        decoder = built()
        decoder.on_step = lambda state, tree, verdict, found=found: found.append(tree)
        decoder.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=6, do_sample=False, max_drafts=bound)
    tree, pruned = whole[0], kept[0]
    reach = [1.0] * tree.rows
    for row in range(1, tree.rows):
        reach[row] = reach[tree.parent[row]] * tree.chance[row]
    best = sorted(range(1, tree.rows), key=lambda row: (-reach[row], row))[:3]
    assert pruned.node.tolist() == sorted([0, *tree.node[best].tolist()])


@pytest.mark.parametrize("name", DRAWN)
def test_random_trees_end_at_the_last_level_that_fits(name):
    free, drafts, _ = drafts_of(DRAWN[name](), True)
    levels = DRAWN[name]().topology.levels
    for bound in (0, 2, 4, 64):
        tokens, bounded, _ = drafts_of(DRAWN[name](), True, max_drafts=[bound, None, None])
        fitting = max(level.stop - 1 for level in levels if level.stop - 1 <= bound)
        assert max(bounded[0]) == min(fitting, max(drafts[0]))
        assert tokens[1:] == free[1:]
        assert (bounded[1], bounded[2]) == (drafts[1], drafts[2])
    assert drafts_of(DRAWN[name](), True, max_drafts=64)[0] == free


def test_requests_of_an_engine_have_bounds():
    made = built(ad.HybridDrafter(ad.NGramDrafter(4, 1), model_drafter()))
    asked = [
        Request(prompt=PROMPTS[number % 3], max_new_tokens=12, temperature=1.0, seed=number, ends=(), max_drafts=bound)
        for number, bound in enumerate((0, None, 2, None, 0, 1))
    ]
    engine = Engine(made, max_cache_tokens=600, max_samples=4)
    streams = [engine.submit(request) for request in asked]
    events = [list(stream) for stream in streams]
    free = Engine(made, max_cache_tokens=600)
    for request, stream, own in zip(asked, streams, events, strict=True):
        alone = free.submit(Request(**{**vars(request), "max_drafts": None})).result()
        assert [answer.tokens for answer in stream.answers] == [answer.tokens for answer in alone]
        most = max(len(event.tree.rows) - 1 for event in own if event.tree is not None)
        assert most <= (request.max_drafts if request.max_drafts is not None else TREE.num_nodes)
        assert (most > 0) == (request.max_drafts != 0)


def test_a_bounded_request_tells_the_decider_nothing_if_it_never_drafts():
    learned = []

    class Learning(FixedDepth):
        def learn(self, memory, outcome):
            learned.append(outcome.drafted)

    drafts_of(built(decider=Learning()), False, max_drafts=0)
    assert learned == []
    drafts_of(built(decider=Learning()), False, max_drafts=1)
    assert max(learned) == 1


def test_plans_know_the_bound_but_not_as_the_end_of_the_text():
    seen = []

    class Planning(FixedDepth):
        can_plan = True

        def plan(self, situation):
            seen.append(situation)
            return Limits.everything(situation.max_depth)

    drafts_of(built(decider=Planning()), False, max_drafts=[2, None, 0])
    assert list(seen[0].max_depth) == [2, 3, 0]
    assert list(seen[0].left) == [14, 14, 14]


def test_bounds_are_refused_that_are_none():
    ids = torch.tensor(PROMPTS[:1])
    for bound, error, reason in (
        (-1, ValueError, "max_drafts must be a whole number of at least 0, got -1"),
        (True, TypeError, "max_drafts must be a whole number of at least 0"),
        (1.5, TypeError, "max_drafts must be a whole number of at least 0"),
        ([1, 2], ValueError, "max_drafts has 2 bounds for 1 samples; pass one for all, or a list with one per sample"),
        ([-2], ValueError, r"max_drafts\[0\] must be a whole number of at least 0"),
        ("many", TypeError, "max_drafts must be a list of numbers"),
    ):
        with pytest.raises(error, match=reason):
            built().generate(ids, max_new_tokens=2, max_drafts=bound)
    for bound, error in ((-1, ValueError), ("1", TypeError), (False, TypeError)):
        with pytest.raises(error, match="max_drafts must be a whole number of at least 0"):
            Request(prompt=[1], max_drafts=bound)


@pytest.mark.filterwarnings("ignore:2 target-initialised")
def test_target_initialised_candidates_cannot_be_left_out():
    decoder = TargetInitialisedDecoder(ragged(), model_drafter(), ad.TreeTopology.from_k_config((2, 1)))
    with pytest.raises(ValueError, match=r"max_drafts: each step of this decoder begins with candidates.*leave it out"):
        decoder.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=3, do_sample=False, max_drafts=2)
