"""Arguments of deciders, drafters, cost tables, builders and tuning: decoding works, or an error names the argument."""

import math

import pytest
import torch
from support.models import ragged
from support.refusals import check_refusal, refusals

import arbordraft as ad
from arbordraft import builders
from arbordraft.bench.tuned import Choice, Setting, Tuned
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
    Bandit,
    Decider,
    EntropyBound,
    FixedDepth,
    Heuristic,
    LearnedDecider,
    NodeBudget,
    PathSurvival,
)
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.measuring import measure_costs, measure_rows
from arborlab.tuning import tune

NAN, INF = math.nan, math.inf
TABLE = ad.CostTable((1, 8), (1.0, 2.0))
STEPS = StepCosts(TABLE, TABLE)
TWO = [FixedDepth(1), FixedDepth(2)]


def decoder(drafter=None, coupling=None, **options):
    coupling = coupling or ad.Coupling.matching()
    return ad.SpeculativeDecoder(ragged(), drafter or ad.NGramDrafter(), ad.TreeTopology.chain(2), coupling, **options)


DECIDERS = [
    (lambda: FixedDepth(depth=-1), ValueError, "depth must be a whole number of at least 0, got -1"),
    (lambda: FixedDepth(depth=1.5), TypeError, "depth must be a whole number of at least 0, got 1.5"),
    (lambda: ad.ConfidenceThreshold(threshold=NAN), ValueError, "threshold must be a number from 0 to 1, got nan"),
    (lambda: ad.ConfidenceThreshold(threshold=None), TypeError, "threshold must be a number .* got None"),
    (lambda: EntropyBound(threshold=NAN), ValueError, "threshold must be a number from 0 to 1, got nan"),
    (lambda: EntropyBound(gamma=0), ValueError, "gamma must be above 0, got 0"),
    (lambda: EntropyBound(gamma=NAN), ValueError, "gamma must be a number, got nan"),
    (lambda: EntropyBound(gamma="0.2"), TypeError, "gamma must be a number, got '0.2'"),
    (lambda: PathSurvival(threshold=NAN), ValueError, "threshold must be a number of at least 0, got nan"),
    (lambda: Heuristic(first=9, longest=8), ValueError, "first must be a whole number from 1 to 8, got 9"),
    (lambda: Heuristic(first=2.0), TypeError, "first must be a whole number .* got 2.0"),
    (lambda: Heuristic(longest=0), ValueError, "longest must be a whole number of at least 1, got 0"),
    (lambda: AcceptedAverage(first=NAN), ValueError, "first must be a number of at least 0, got nan"),
    (lambda: AcceptedAverage(margin=0), ValueError, "margin must be above 0, got 0"),
    (lambda: AcceptedAverage(margin=INF), ValueError, "margin must be a number, got inf"),
    (lambda: AcceptedAverage(decay=1.5), ValueError, "decay must be a number from 0 to 1, got 1.5"),
    (lambda: AdaEDL(threshold=NAN), ValueError, "threshold must be a number from 0 to 1, got nan"),
    (lambda: AdaEDL(wanted=2), ValueError, "wanted must be a number from 0 to 1, got 2"),
    (lambda: AdaEDL(step=0), ValueError, "step must be above 0, got 0"),
    (lambda: AdaEDL(step=NAN), ValueError, "step must be a number, got nan"),
    (lambda: AdaEDL(decay=-0.1), ValueError, "decay must be a number from 0 to 1, got -0.1"),
    (lambda: Bandit(deciders=[]), ValueError, "at least two deciders to choose from, got 0"),
    (lambda: Bandit(deciders=None), TypeError, "deciders must be of type Sequence or ModuleList, got None"),
    (lambda: Bandit(deciders=[FixedDepth(), 3]), TypeError, r"deciders\[1\] must be of type Decider, got 3"),
    (lambda: Bandit(deciders=[FixedDepth, Heuristic]), TypeError, r"deciders\[0\] must be of type Decider"),
    (lambda: Bandit(deciders=TWO, cost=NAN), ValueError, "cost must be a number of at least 0, got nan"),
    (lambda: Bandit(deciders=TWO, longest=0.5), TypeError, "longest must be a whole number"),
    (lambda: Bandit(deciders=TWO, exploration=INF), ValueError, "exploration must be a number .* got inf"),
    (lambda: ad.CostAware(costs={}), TypeError, r"costs must be of type StepCosts or CostTable, got \{\}"),
    (lambda: ad.CostAware(costs=STEPS, nodes=0), ValueError, "nodes must be a whole number of at least 1, got 0"),
    (lambda: ad.CostAware(costs=STEPS, nodes=2.5), TypeError, "nodes must be a whole number of at least 1, got 2.5"),
    (lambda: ad.CostAware(costs=STEPS, decay=-0.1), ValueError, "decay must be a number from 0 to 1, got -0.1"),
    (lambda: ad.CostAware(costs=STEPS, survival=0.5), TypeError, "survival must be of type PathSurvival, got 0.5"),
    (lambda: NodeBudget(nodes=0), ValueError, "nodes must be a whole number of at least 1, got 0"),
    (lambda: NodeBudget(nodes=2.5), TypeError, "nodes must be a whole number of at least 1, got 2.5"),
    (lambda: LearnedDecider(hidden_size=-1), ValueError, "hidden_size must be a whole number from 0 to 65536, got -1"),
    (lambda: LearnedDecider(top_k=11), ValueError, "top_k must be a whole number from 0 to 10, got 11"),
    (lambda: LearnedDecider(top_k=2.0), TypeError, "top_k must be a whole number"),
    (lambda: LearnedDecider(widths=(10**9,)), ValueError, r"widths\[0\] must be a whole number from 1 to 65536"),
    (lambda: LearnedDecider(widths=64), TypeError, "widths must be a list of numbers, got 64"),
    (lambda: LearnedDecider(temperatures=()), ValueError, "temperatures must hold at least one"),
    (lambda: LearnedDecider(temperatures=(NAN,)), ValueError, r"temperatures\[0\] must be a number, got nan"),
    (lambda: LearnedDecider(threshold=NAN), ValueError, "threshold must be a number of at least 0, got nan"),
]

MODEL = torch.nn.Linear(1, 1)
DRAFTERS = [
    (lambda: ad.NGramDrafter(longest=10**9), ValueError, "longest must be a whole number from 1 to 64, got 1000000000"),
    (lambda: ad.NGramDrafter(longest=2.5), TypeError, "longest must be a whole number .* got 2.5"),
    (lambda: ad.NGramDrafter(shortest=5), ValueError, "shortest must be a whole number from 1 to 4, got 5"),
    (lambda: ad.NGramDrafter(shortest="1"), TypeError, "shortest must be a whole number"),
    (
        lambda: ad.HybridDrafter(first=None, otherwise=ad.NoDrafter()),
        TypeError,
        "first must be of type Drafter, got None",
    ),
    (
        lambda: ad.HybridDrafter(first=ad.NGramDrafter(), otherwise=MODEL),
        TypeError,
        "otherwise must be of type Drafter",
    ),
]


def measured(**given):
    return measure_rows(**{"target": ragged(), "rows": (1, 2), "context": 4, "repeats": 1} | given)


COSTS = [
    (
        lambda: ad.CostTable(rows=[], seconds=[]),
        ValueError,
        r"ascending rows from 1 and a time for each, got rows \[\]",
    ),
    (lambda: ad.CostTable(rows=(1.5,), seconds=(1,)), TypeError, r"rows\[0\] must be a whole number, got 1.5"),
    (lambda: ad.CostTable(rows=(1, NAN), seconds=(1, 1)), TypeError, r"rows\[1\] must be a whole number, got nan"),
    (lambda: ad.CostTable(rows=1, seconds=1.0), TypeError, "rows must be a list of numbers, got 1"),
    (lambda: ad.CostTable(rows=(1,), seconds=(NAN,)), ValueError, r"seconds\[0\] must be a number, got nan"),
    (lambda: ad.CostTable(rows=(1, 2), seconds=(1, -1)), ValueError, r"seconds\[1\] must be above 0, got -1"),
    (lambda: ad.CostTable(rows=(1,), seconds=(0,)), ValueError, r"seconds\[0\] must be above 0, got 0"),
    (lambda: ad.CostTable(rows=(1,), seconds=("1",)), TypeError, r"seconds\[0\] must be a number, got '1'"),
    (lambda: measured(target=None), TypeError, "target must be of type RaggedModel, got None"),
    (
        lambda: measured(rows=(1, 10**9)),
        ValueError,
        r"rows\[1\] must be a whole number from 1 to 16384, got 1000000000",
    ),
    (lambda: measured(rows=(2, 1)), ValueError, "ascending rows from 1"),
    (lambda: measured(rows=(1, 500)), ValueError, "500 rows exceed the target's 128 positions"),
    (lambda: measured(context=10**12), ValueError, "context must be a whole number from 0 to 1048576"),
    (lambda: measured(repeats=0), ValueError, "repeats must be a whole number of at least 1, got 0"),
    (lambda: StepCosts(target={}, draft=TABLE), TypeError, r"target must be of type CostTable, got \{\}"),
    (lambda: StepCosts(target=TABLE, draft=None), TypeError, "draft must be of type CostTable, got None"),
    (lambda: StepCosts(target=TABLE, draft=TABLE, decide=NAN), ValueError, "decide must be .* at least 0, got nan"),
    (lambda: StepCosts(target=TABLE, draft=TABLE, rest=-1), ValueError, "rest must be .* at least 0, got -1"),
    (lambda: StepCosts(target=TABLE, draft=TABLE, rest="1"), TypeError, "rest must be a number .* got '1'"),
    (lambda: decoder(costs=TABLE), TypeError, "unexpected keyword argument 'costs'"),
    (lambda: decoder(decider=TABLE), TypeError, "decider must be of type Decider, got CostTable"),
    (lambda: decoder(decider=NodeBudget(3)), ValueError, r"NodeBudget\(nodes=3\) looks at tokens that are still to be"),
    (lambda: decoder(expected_batch=0), ValueError, "expected_batch must be a whole number of at least 1, got 0"),
    (lambda: decoder(expected_batch=2.0), TypeError, "expected_batch must be a whole number of at least 1, got 2.0"),
    (lambda: ad.CostTable((2, 4), (1, 1)), ValueError, r"ascending rows from 1 .* got rows \[2, 4\]"),
    (lambda: ad.CostTable((1, 2), (1,)), ValueError, "ascending rows from 1 and a time for each, got .* 1 times"),
]


SEQUOIA = {"acceptance": [0.5, 0.2], "nodes": 4}


def made(builder, **given):
    """Builds a decoder for a tiny target; most builders take a draft model, too."""
    models = [ragged()] if builder in ("ems_sd", "lookup", "eagle") else [ragged(), ragged(seed=3)]
    return getattr(builders, builder)(*models, **(SEQUOIA if builder == "sequoia" else {}) | given)


BUILDERS = [
    (lambda: made("ems_sd", length=10**9), ValueError, "length must be a whole number from 0 to 512, got 1000000000"),
    (lambda: made("ems_sd", length=2.5), TypeError, "length must be a whole number"),
    (lambda: made("specinfer", k_config=(10**6,)), ValueError, "at most 2048 nodes"),
    (
        lambda: made("specinfer", k_config=(0,)),
        ValueError,
        r"k_config\[0\] must be a whole number of at least 1, got 0",
    ),
    (lambda: made("specinfer", k_config=3), TypeError, "k_config must be a list of numbers, got 3"),
    (lambda: made("mcsd", k_config=(2.5,)), TypeError, r"k_config\[0\] must be a whole number"),
    (lambda: made("mcsd", k_config=(2,) * 30), ValueError, "at most 2048 nodes"),
    (lambda: made("dynasd", width=0), ValueError, "width must be a whole number of at least 1, got 0"),
    (lambda: made("dynasd", width=1.5), TypeError, "width must be a whole number"),
    (lambda: made("dynasd", width=10**9), ValueError, "at most 2048 nodes"),
    (lambda: made("dynasd", depth=10**9), ValueError, "depth must be a whole number from 0 to 512, got 1000000000"),
    (lambda: made("dynasd", depth=NAN), TypeError, "depth must be a whole number from 0 to 512, got nan"),
    (lambda: made("dynasd", width=2, k_config=3), TypeError, "k_config must be a list of numbers, got 3"),
    (lambda: made("spechub", depth=40), ValueError, "at most 2048 nodes"),
    (lambda: made("spechub", depth="4"), TypeError, "depth must be a whole number"),
    (lambda: made("sequoia", acceptance=[NAN]), ValueError, r"acceptance\[0\] must be a number from 0 to 1, got nan"),
    (lambda: made("sequoia", acceptance={}), TypeError, "acceptance must be a list of numbers"),
    (lambda: made("sequoia", nodes=10**5), ValueError, "nodes must be a whole number from 1 to 2048, got 100000"),
    (lambda: made("cost_aware", nodes=0), ValueError, "nodes must be a whole number from 1 to 2048, got 0"),
    (lambda: made("cost_aware", nodes=2.5), TypeError, "nodes must be a whole number from 1 to 2048, got 2.5"),
    (lambda: made("cost_aware", nodes=10**9, lookup=True), ValueError, "nodes must be a whole number from 1 to 2048"),
    (lambda: made("cost_aware", max_depth=NAN), TypeError, "max_depth must be a whole number"),
    (lambda: made("cost_aware", topology=[-1, 0]), TypeError, "topology must be of type TreeTopology"),
    (lambda: made("cost_aware", costs={}), TypeError, r"costs must be of type StepCosts or CostTable, got \{\}"),
    (lambda: made("eagle2", nodes=0), ValueError, "nodes must be a whole number from 1 to 2048, got 0"),
    (lambda: made("eagle2", nodes=2.5), TypeError, "nodes must be a whole number from 1 to 2048, got 2.5"),
    (lambda: made("lookup", costs={}), TypeError, "costs must be of type StepCosts or CostTable"),
    (lambda: made("lookup", costs=TABLE, expected_batch=0), ValueError, "expected_batch must be a whole number"),
    (lambda: made("eagle", head=None), TypeError, "head must be of type str or PathLike or EagleDrafter, got None"),
]


def tuning(**given):
    settings = {"tokenizer": None, "name": "none", "drafter": ad.NoDrafter(), "prompts": ["a"]} | given
    return tune(ragged(), **settings)


def tuned(**given):
    choices = [Choice(2, Setting("plain"), 1.0, 1.0)]
    fields = {"drafter": "none", "temperature": 0.0, "costs": STEPS, "choices": choices}
    return Tuned(**fields | given)


def tuned_decoder(**given):
    return tuned().decoder(ragged(), **{"drafter": ad.NoDrafter()} | given)


def timed(**given):
    return measure_costs(ragged(), ad.NoDrafter(), None, **given)


TUNING = [
    (lambda: tuning(batches=()), ValueError, "batches must hold at least one batch size"),
    (lambda: tuning(batches=(0,)), ValueError, r"batches\[0\] must be a whole number from 1 to 4096, got 0"),
    (lambda: tuning(batches=8), TypeError, "batches must be a list of numbers, got 8"),
    (lambda: tuning(batches=(1.5,)), TypeError, r"batches\[0\] must be a whole number"),
    (lambda: tuning(temperature=NAN), ValueError, "temperature must be a number of at least 0, got nan"),
    (lambda: tuning(new_tokens=0), ValueError, "new_tokens must be a whole number of at least 1, got 0"),
    (lambda: tuning(prompts=[]), ValueError, "prompts must hold at least one text"),
    (lambda: tuning(prompts="abc"), TypeError, "prompts must be a list of texts"),
    (lambda: timed(prompts=[]), ValueError, "prompts must hold at least one text"),
    (lambda: tuned(choices=[]), ValueError, "holds no choice for any batch size"),
    (lambda: tuned(temperature=NAN), ValueError, "temperature must be a number of at least 0, got nan"),
    (lambda: tuned_decoder(batch=0), ValueError, "batch must be a whole number of at least 1, got 0"),
    (lambda: tuned_decoder(batch=2.0), TypeError, "batch must be a whole number of at least 1, got 2.0"),
]


@refusals(*DECIDERS, *DRAFTERS, *COSTS, *BUILDERS, *TUNING)
def test_invalid_arguments_are_named(call, error, words):
    check_refusal(call, error, words)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (FixedDepth, {"depth": 0}),
        (ad.ConfidenceThreshold, {"threshold": 0}),
        (ad.ConfidenceThreshold, {"threshold": torch.tensor(1.0)}),
        (EntropyBound, {"threshold": 1, "gamma": 1e-9}),
        (PathSurvival, {"threshold": 2}),  # nothing is drafted; training finds this if drafts do not pay
        (Heuristic, {"first": 1, "longest": 1}),
        (AcceptedAverage, {"first": 0, "decay": 1}),
        (AdaEDL, {"wanted": 0, "decay": 1}),
        (Bandit, {"deciders": TWO, "cost": 0, "exploration": 0}),
        (ad.CostAware, {"costs": STEPS, "decay": 1}),
        (ad.CostAware, {"costs": STEPS, "decay": 0}),
        (ad.CostAware, {"costs": TABLE, "nodes": 1}),
        (ad.CostAware, {"costs": ad.CostTable((1,), (1e-12,)), "nodes": 10**9}),
        (ad.CostAware, {"costs": ad.CostTable((1, 2), (1e-12, 1e12))}),
    ],
    ids=lambda value: (
        getattr(value, "__name__", None) or ", ".join(f"{name}={one!r}"[:30] for name, one in value.items())
    ),
)
def test_deciders_at_the_bounds_decode(make, given):
    prompt = torch.tensor([[5, 9, 7, 5, 9]])
    for settings in ({"do_sample": False}, {"do_sample": True, "seeds": [3]}):
        found = decoder(decider=make(**given)).generate(prompt, max_new_tokens=4, eos_token_id=None, **settings)
        assert found.shape == (1, 9)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (ad.NGramDrafter, {"longest": 64, "shortest": 64}),
        (ad.CostTable, {"rows": [1], "seconds": [1]}),
        (ad.CostTable, {"rows": torch.tensor([1, 2]), "seconds": torch.tensor([1.0, 2.0])}),
        (NodeBudget, {"nodes": 1}),
        (NodeBudget, {"nodes": 10**9}),
    ],
    ids=["longest n-gram", "one row", "tensors", "the root alone", "all nodes"],
)
def test_drafters_and_costs_at_the_bounds_decode(make, given):
    part = make(**given)
    options = {"drafter": part} if make is ad.NGramDrafter else {"decider": part, "coupling": ad.Coupling.shared(1)}
    if make is ad.CostTable:
        options["decider"] = ad.CostAware(part)
    for settings in ({"do_sample": False}, {"do_sample": True, "seeds": [3]}):
        found = decoder(**options).generate(
            torch.tensor([[5, 9, 5, 9, 5]]), max_new_tokens=4, eos_token_id=None, **settings
        )
        assert found.shape == (1, 9)


@pytest.mark.parametrize(
    ("builder", "given"),
    [
        ("specinfer", {"k_config": ()}),
        ("dynasd", {"depth": 0}),
        ("spechub", {"depth": 0}),
        ("sequoia", {"nodes": 1}),
        ("cost_aware", {"nodes": 1}),
        ("eagle2", {"nodes": 1}),
    ],
)
def test_the_smallest_trees_decode(builder, given):
    found = made(builder, **given).generate(torch.tensor([[5, 9]]), max_new_tokens=3, eos_token_id=None)
    assert found.shape == (1, 5)


FILES = {
    "empty": "",
    "no JSON": "rows",
    "a list": "[]",
    "no rows": '{"seconds": [1]}',
    "negative": '{"rows": [1], "seconds": [-1]}',
    "NaN": '{"rows": [1], "seconds": [NaN]}',
    "texts": '{"rows": ["1"], "seconds": ["1"]}',
    "more": '{"rows": [1], "seconds": [1], "unit": "s"}',
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_damaged_cost_tables_are_named(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"costs.json holds no cost table: .*; measure them again"):
        ad.CostTable.load(path)


class Mute(Decider):
    """Answers for one sample, for any number of samples shown."""

    def forward(self, view):
        return [True]


def test_a_decider_that_does_not_answer_for_all_is_named():
    prompts = {"input_ids": torch.tensor([[5, 9], [7, 8]]), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=r"Mute.* must answer for 2 samples, answered for 1"):
        decoder(decider=Mute()).generate(**prompts)
