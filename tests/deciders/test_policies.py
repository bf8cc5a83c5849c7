"""Whatever a decider, a drafter, a cost table, a builder or tuning is given: the right thing, or a named error."""

import json
import math

import pytest
import torch
from support.models import ragged

from arbordraft import (
    ConfidenceThreshold,
    CostAware,
    CostTable,
    Coupling,
    Fixed,
    HybridDrafter,
    Matching,
    NGramDrafter,
    NoDrafter,
    SpeculativeDecoder,
    TopDown,
    TreeTopology,
    builders,
)
from arbordraft.bench.tuning import Choice, Setting, Tuned, tune
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

NAN, INF = math.nan, math.inf
TABLE = CostTable((1, 8), (1.0, 2.0))
STEPS = StepCosts(TABLE, TABLE)
TWO = [FixedDepth(1), FixedDepth(2)]


def decoder(drafter=None, coupling=None, **options):
    coupling = coupling or Coupling(Fixed(1), TopDown(Matching()))
    return SpeculativeDecoder(ragged(), drafter or NGramDrafter(), TreeTopology.chain(2), coupling, **options)


def cases(*rows):
    """Of each: what is made, with which arguments, the error, and what it says."""
    return [
        pytest.param(
            make, given, error, says, id=f"{make.__name__} {', '.join(f'{k}={v!r}'[:40] for k, v in given.items())}"
        )
        for make, given, error, says in rows
    ]


DECIDERS = cases(
    (FixedDepth, {"depth": -1}, ValueError, "depth must be a whole number of at least 0, got -1"),
    (FixedDepth, {"depth": 1.5}, TypeError, "depth must be a whole number of at least 0, got 1.5"),
    (FixedDepth, {"depth": True}, TypeError, "depth must be a whole number .* got True"),
    (FixedDepth, {"depth": "2"}, TypeError, "depth must be a whole number .* got '2'"),
    (FixedDepth, {"depth": NAN}, TypeError, "depth must be a whole number .* got nan"),
    (ConfidenceThreshold, {"threshold": NAN}, ValueError, "threshold must be a number from 0 to 1, got nan"),
    (ConfidenceThreshold, {"threshold": INF}, ValueError, "threshold must be a number from 0 to 1, got inf"),
    (ConfidenceThreshold, {"threshold": 1.5}, ValueError, "threshold must be a number from 0 to 1, got 1.5"),
    (ConfidenceThreshold, {"threshold": None}, TypeError, "threshold must be a number .* got None"),
    (ConfidenceThreshold, {"threshold": [0.4]}, TypeError, "threshold must be a number"),
    (EntropyBound, {"threshold": NAN}, ValueError, "threshold must be a number from 0 to 1, got nan"),
    (EntropyBound, {"gamma": 0}, ValueError, "gamma must be above 0, got 0"),
    (EntropyBound, {"gamma": NAN}, ValueError, "gamma must be a number, got nan"),
    (EntropyBound, {"gamma": "0.2"}, TypeError, "gamma must be a number, got '0.2'"),
    (PathSurvival, {"threshold": NAN}, ValueError, "threshold must be a number of at least 0, got nan"),
    (PathSurvival, {"threshold": -0.5}, ValueError, "threshold must be a number of at least 0, got -0.5"),
    (PathSurvival, {"threshold": INF}, ValueError, "threshold must be a number of at least 0, got inf"),
    (Heuristic, {"first": 9, "longest": 8}, ValueError, "first must be a whole number from 1 to 8, got 9"),
    (Heuristic, {"first": 2.0}, TypeError, "first must be a whole number .* got 2.0"),
    (Heuristic, {"longest": 0}, ValueError, "longest must be a whole number of at least 1, got 0"),
    (AcceptedAverage, {"first": NAN}, ValueError, "first must be a number of at least 0, got nan"),
    (AcceptedAverage, {"margin": 0}, ValueError, "margin must be above 0, got 0"),
    (AcceptedAverage, {"margin": INF}, ValueError, "margin must be a number, got inf"),
    (AcceptedAverage, {"decay": 1.5}, ValueError, "decay must be a number from 0 to 1, got 1.5"),
    (AcceptedAverage, {"decay": NAN}, ValueError, "decay must be a number from 0 to 1, got nan"),
    (AdaEDL, {"threshold": NAN}, ValueError, "threshold must be a number from 0 to 1, got nan"),
    (AdaEDL, {"wanted": 2}, ValueError, "wanted must be a number from 0 to 1, got 2"),
    (AdaEDL, {"step": 0}, ValueError, "step must be above 0, got 0"),
    (AdaEDL, {"step": NAN}, ValueError, "step must be a number, got nan"),
    (AdaEDL, {"decay": -0.1}, ValueError, "decay must be a number from 0 to 1, got -0.1"),
    (Bandit, {"deciders": []}, ValueError, "at least two deciders to choose from, got 0"),
    (Bandit, {"deciders": TWO[:1]}, ValueError, "at least two deciders to choose from, got 1"),
    (Bandit, {"deciders": None}, TypeError, "deciders must be of type Sequence or ModuleList, got None"),
    (Bandit, {"deciders": [FixedDepth(), 3]}, TypeError, r"deciders\[1\] must be of type Decider, got 3"),
    (Bandit, {"deciders": [FixedDepth, Heuristic]}, TypeError, r"deciders\[0\] must be of type Decider"),
    (Bandit, {"deciders": TWO, "cost": NAN}, ValueError, "cost must be a number of at least 0, got nan"),
    (Bandit, {"deciders": TWO, "cost": -1}, ValueError, "cost must be a number of at least 0, got -1"),
    (Bandit, {"deciders": TWO, "longest": 0.5}, TypeError, "longest must be a whole number"),
    (Bandit, {"deciders": TWO, "exploration": INF}, ValueError, "exploration must be a number .* got inf"),
    (CostAware, {"costs": {}}, TypeError, r"costs must be of type StepCosts or CostTable, got \{\}"),
    (CostAware, {"costs": None}, TypeError, "costs must be of type StepCosts or CostTable, got None"),
    (CostAware, {"costs": 3}, TypeError, "costs must be of type StepCosts or CostTable, got 3"),
    (CostAware, {"costs": STEPS, "nodes": 0}, ValueError, "nodes must be a whole number of at least 1, got 0"),
    (CostAware, {"costs": STEPS, "nodes": 2.5}, TypeError, "nodes must be a whole number of at least 1, got 2.5"),
    (CostAware, {"costs": STEPS, "nodes": NAN}, TypeError, "nodes must be a whole number of at least 1, got nan"),
    (CostAware, {"costs": STEPS, "decay": -0.1}, ValueError, "decay must be a number from 0 to 1, got -0.1"),
    (CostAware, {"costs": STEPS, "decay": NAN}, ValueError, "decay must be a number from 0 to 1, got nan"),
    (CostAware, {"costs": STEPS, "survival": 0.5}, TypeError, "survival must be of type PathSurvival, got 0.5"),
    (NodeBudget, {"nodes": 0}, ValueError, "nodes must be a whole number of at least 1, got 0"),
    (NodeBudget, {"nodes": -3}, ValueError, "nodes must be a whole number of at least 1, got -3"),
    (NodeBudget, {"nodes": 2.5}, TypeError, "nodes must be a whole number of at least 1, got 2.5"),
    (NodeBudget, {"nodes": NAN}, TypeError, "nodes must be a whole number of at least 1, got nan"),
    (NodeBudget, {"nodes": None}, TypeError, "nodes must be a whole number of at least 1, got None"),
    (LearnedDecider, {"hidden_size": -1}, ValueError, "hidden_size must be a whole number from 0 to 65536, got -1"),
    (LearnedDecider, {"hidden_size": 10**12}, ValueError, "hidden_size must be a whole number from 0 to 65536"),
    (LearnedDecider, {"top_k": 11}, ValueError, "top_k must be a whole number from 0 to 10, got 11"),
    (LearnedDecider, {"top_k": 2.0}, TypeError, "top_k must be a whole number"),
    (LearnedDecider, {"widths": (10**9,)}, ValueError, r"widths\[0\] must be a whole number from 1 to 65536"),
    (LearnedDecider, {"widths": 64}, TypeError, "widths must be a list of numbers, got 64"),
    (LearnedDecider, {"temperatures": ()}, ValueError, "temperatures must hold at least one"),
    (LearnedDecider, {"temperatures": (NAN,)}, ValueError, r"temperatures\[0\] must be a number, got nan"),
    (LearnedDecider, {"threshold": NAN}, ValueError, "threshold must be a number of at least 0, got nan"),
)

MODEL = torch.nn.Linear(1, 1)
DRAFTERS = cases(
    (NGramDrafter, {"longest": 10**9}, ValueError, "longest must be a whole number from 1 to 64, got 1000000000"),
    (NGramDrafter, {"longest": 0}, ValueError, "longest must be a whole number from 1 to 64, got 0"),
    (NGramDrafter, {"longest": 2.5}, TypeError, "longest must be a whole number .* got 2.5"),
    (NGramDrafter, {"longest": NAN}, TypeError, "longest must be a whole number .* got nan"),
    (NGramDrafter, {"shortest": 5}, ValueError, "shortest must be a whole number from 1 to 4, got 5"),
    (NGramDrafter, {"shortest": 0}, ValueError, "shortest must be a whole number from 1 to 4, got 0"),
    (NGramDrafter, {"shortest": "1"}, TypeError, "shortest must be a whole number"),
    (HybridDrafter, {"first": None, "otherwise": NoDrafter()}, TypeError, "first must be of type Drafter, got None"),
    (HybridDrafter, {"first": NGramDrafter(), "otherwise": MODEL}, TypeError, "otherwise must be of type Drafter"),
    (HybridDrafter, {"first": NGramDrafter, "otherwise": NoDrafter}, TypeError, "first must be of type Drafter"),
)


def measured(**given):
    return measure_rows(**{"target": ragged(), "rows": (1, 2), "context": 4, "repeats": 1} | given)


COSTS = cases(
    (CostTable, {"rows": [], "seconds": []}, ValueError, r"ascending rows from 1 and a time for each, got rows \[\]"),
    (CostTable, {"rows": (2, 4), "seconds": (1, 1)}, ValueError, r"ascending rows from 1 .* got rows \[2, 4\]"),
    (CostTable, {"rows": (1, 1), "seconds": (1, 1)}, ValueError, "ascending rows from 1"),
    (
        CostTable,
        {"rows": (1, 2), "seconds": (1,)},
        ValueError,
        "ascending rows from 1 and a time for each, got .* 1 times",
    ),
    (CostTable, {"rows": (1.5,), "seconds": (1,)}, TypeError, r"rows\[0\] must be a whole number, got 1.5"),
    (CostTable, {"rows": (1, NAN), "seconds": (1, 1)}, TypeError, r"rows\[1\] must be a whole number, got nan"),
    (CostTable, {"rows": 1, "seconds": 1.0}, TypeError, "rows must be a list of numbers, got 1"),
    (CostTable, {"rows": {1: 2}, "seconds": (1,)}, TypeError, "rows must be a list of numbers"),
    (CostTable, {"rows": "12", "seconds": (1, 1)}, TypeError, "rows must be a list of numbers, got '12'"),
    (CostTable, {"rows": (1,), "seconds": (NAN,)}, ValueError, r"seconds\[0\] must be a number, got nan"),
    (CostTable, {"rows": (1,), "seconds": (INF,)}, ValueError, r"seconds\[0\] must be a number, got inf"),
    (CostTable, {"rows": (1, 2), "seconds": (1, -1)}, ValueError, r"seconds\[1\] must be above 0, got -1"),
    (CostTable, {"rows": (1,), "seconds": (0,)}, ValueError, r"seconds\[0\] must be above 0, got 0"),
    (CostTable, {"rows": (1,), "seconds": ("1",)}, TypeError, r"seconds\[0\] must be a number, got '1'"),
    (measured, {"target": None}, TypeError, "target must be of type RaggedModel, got None"),
    (measured, {"rows": (1, 10**9)}, ValueError, r"rows\[1\] must be a whole number from 1 to 16384, got 1000000000"),
    (measured, {"rows": (2, 1)}, ValueError, "ascending rows from 1"),
    (measured, {"rows": (1, 500)}, ValueError, "500 rows exceed the target's 128 positions"),
    (measured, {"context": 10**12}, ValueError, "context must be a whole number from 0 to 1048576"),
    (measured, {"context": -1}, ValueError, "context must be a whole number from 0 to 1048576, got -1"),
    (measured, {"repeats": 0}, ValueError, "repeats must be a whole number of at least 1, got 0"),
    (StepCosts, {"target": {}, "draft": TABLE}, TypeError, r"target must be of type CostTable, got \{\}"),
    (StepCosts, {"target": TABLE, "draft": None}, TypeError, "draft must be of type CostTable, got None"),
    (StepCosts, {"target": TABLE, "draft": TABLE, "decide": NAN}, ValueError, "decide must be .* at least 0, got nan"),
    (StepCosts, {"target": TABLE, "draft": TABLE, "rest": -1}, ValueError, "rest must be .* at least 0, got -1"),
    (StepCosts, {"target": TABLE, "draft": TABLE, "rest": "1"}, TypeError, "rest must be a number .* got '1'"),
    (decoder, {"costs": TABLE}, TypeError, "unexpected keyword argument 'costs'"),
    (decoder, {"decider": TABLE}, TypeError, "decider must be of type Decider, got CostTable"),
    (decoder, {"decider": NodeBudget(3)}, ValueError, r"NodeBudget\(nodes=3\) looks at tokens that are still to be"),
    (decoder, {"expected_batch": 0}, ValueError, "expected_batch must be a whole number of at least 1, got 0"),
    (decoder, {"expected_batch": 2.0}, TypeError, "expected_batch must be a whole number of at least 1, got 2.0"),
)


def ems_sd(**given):
    return builders.ems_sd(ragged(), **given)


def specinfer(**given):
    return builders.specinfer(ragged(), ragged(seed=3), **given)


def mcsd(**given):
    return builders.mcsd(ragged(), ragged(seed=3), **given)


def dynasd(**given):
    return builders.dynasd(ragged(), ragged(seed=3), **given)


def spechub(**given):
    return builders.spechub(ragged(), ragged(seed=3), **given)


def sequoia(**given):
    return builders.sequoia(ragged(), ragged(seed=3), **{"acceptance": [0.5, 0.2], "nodes": 4} | given)


def fitted(**given):
    return builders.fitted(ragged(), ragged(seed=3), **given)


def expanding(**given):
    return builders.expanding(ragged(), ragged(seed=3), **given)


def lookup(**given):
    return builders.lookup(ragged(), **given)


def eagle(**given):
    return builders.eagle(ragged(), **given)


BUILDERS = cases(
    (ems_sd, {"length": 10**9}, ValueError, "length must be a whole number from 0 to 512, got 1000000000"),
    (ems_sd, {"length": -1}, ValueError, "length must be a whole number from 0 to 512, got -1"),
    (ems_sd, {"length": 2.5}, TypeError, "length must be a whole number"),
    (specinfer, {"k_config": (10**6,)}, ValueError, "at most 2048 nodes"),
    (specinfer, {"k_config": (0,)}, ValueError, r"k_config\[0\] must be a whole number of at least 1, got 0"),
    (specinfer, {"k_config": 3}, TypeError, "k_config must be a list of numbers, got 3"),
    (mcsd, {"k_config": (2.5,)}, TypeError, r"k_config\[0\] must be a whole number"),
    (mcsd, {"k_config": (2,) * 30}, ValueError, "at most 2048 nodes"),
    (dynasd, {"width": 0}, ValueError, "width must be a whole number of at least 1, got 0"),
    (dynasd, {"width": 1.5}, TypeError, "width must be a whole number"),
    (dynasd, {"width": 10**9}, ValueError, "at most 2048 nodes"),
    (dynasd, {"depth": 10**9}, ValueError, "depth must be a whole number from 0 to 512, got 1000000000"),
    (dynasd, {"depth": NAN}, TypeError, "depth must be a whole number from 0 to 512, got nan"),
    (dynasd, {"width": 2, "k_config": 3}, TypeError, "k_config must be a list of numbers, got 3"),
    (spechub, {"depth": 40}, ValueError, "at most 2048 nodes"),
    (spechub, {"depth": "4"}, TypeError, "depth must be a whole number"),
    (sequoia, {"acceptance": [NAN]}, ValueError, r"acceptance\[0\] must be a number from 0 to 1, got nan"),
    (sequoia, {"acceptance": {}}, TypeError, "acceptance must be a list of numbers"),
    (sequoia, {"nodes": 10**5}, ValueError, "nodes must be a whole number from 1 to 2048, got 100000"),
    (fitted, {"nodes": 0}, ValueError, "nodes must be a whole number from 1 to 2048, got 0"),
    (fitted, {"nodes": 2.5}, TypeError, "nodes must be a whole number from 1 to 2048, got 2.5"),
    (fitted, {"nodes": 10**9, "lookup": True}, ValueError, "nodes must be a whole number from 1 to 2048"),
    (fitted, {"max_depth": NAN}, TypeError, "max_depth must be a whole number"),
    (fitted, {"topology": [-1, 0]}, TypeError, "topology must be of type TreeTopology"),
    (fitted, {"costs": {}}, TypeError, r"costs must be of type StepCosts or CostTable, got \{\}"),
    (expanding, {"nodes": 0}, ValueError, "nodes must be a whole number from 1 to 2048, got 0"),
    (expanding, {"nodes": 2.5}, TypeError, "nodes must be a whole number from 1 to 2048, got 2.5"),
    (lookup, {"costs": {}}, TypeError, "costs must be of type StepCosts or CostTable"),
    (lookup, {"costs": TABLE, "expected_batch": 0}, ValueError, "expected_batch must be a whole number"),
    (eagle, {"head": None}, TypeError, "head must be of type str or PathLike or EagleDrafter, got None"),
)


def tuning(**given):
    settings = {"tokenizer": None, "name": "none", "drafter": NoDrafter(), "prompts": ["a"]} | given
    return tune(ragged(), **settings)


def tuned(**given):
    choices = [Choice(2, Setting("plain"), 1.0, 1.0)]
    fields = {"drafter": "none", "temperature": 0.0, "costs": STEPS, "choices": choices}
    return Tuned(**fields | given)


def tuned_decoder(**given):
    return tuned().decoder(ragged(), **{"drafter": NoDrafter()} | given)


def timed(**given):
    return measure_costs(ragged(), NoDrafter(), None, **given)


TUNING = cases(
    (tuning, {"batches": ()}, ValueError, "batches must hold at least one batch size"),
    (tuning, {"batches": (0,)}, ValueError, r"batches\[0\] must be a whole number from 1 to 4096, got 0"),
    (tuning, {"batches": (10**9,)}, ValueError, r"batches\[0\] must be a whole number from 1 to 4096"),
    (tuning, {"batches": 8}, TypeError, "batches must be a list of numbers, got 8"),
    (tuning, {"batches": (1.5,)}, TypeError, r"batches\[0\] must be a whole number"),
    (tuning, {"temperature": NAN}, ValueError, "temperature must be a number of at least 0, got nan"),
    (tuning, {"temperature": -1}, ValueError, "temperature must be a number of at least 0, got -1"),
    (tuning, {"new_tokens": 0}, ValueError, "new_tokens must be a whole number of at least 1, got 0"),
    (tuning, {"prompts": []}, ValueError, "prompts must hold at least one text"),
    (tuning, {"prompts": "abc"}, TypeError, "prompts must be a list of texts"),
    (timed, {"prompts": []}, ValueError, "prompts must hold at least one text"),
    (tuned, {"choices": []}, ValueError, "holds no choice for any batch size"),
    (tuned, {"temperature": NAN}, ValueError, "temperature must be a number of at least 0, got nan"),
    (tuned_decoder, {"batch": 0}, ValueError, "batch must be a whole number of at least 1, got 0"),
    (tuned_decoder, {"batch": 2.0}, TypeError, "batch must be a whole number of at least 1, got 2.0"),
)


@pytest.mark.parametrize(("make", "given", "error", "says"), [*DECIDERS, *DRAFTERS, *COSTS, *BUILDERS, *TUNING])
def test_nonsense_is_named(make, given, error, says):
    with pytest.raises(error, match=says) as caught:
        make(**given)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (FixedDepth, {"depth": 0}),
        (ConfidenceThreshold, {"threshold": 0}),
        (ConfidenceThreshold, {"threshold": torch.tensor(1.0)}),
        (EntropyBound, {"threshold": 1, "gamma": 1e-9}),
        (PathSurvival, {"threshold": 2}),  # nothing is drafted: what training finds where drafts do not pay
        (Heuristic, {"first": 1, "longest": 1}),
        (AcceptedAverage, {"first": 0, "decay": 1}),
        (AdaEDL, {"wanted": 0, "decay": 1}),
        (Bandit, {"deciders": TWO, "cost": 0, "exploration": 0}),
        (CostAware, {"costs": STEPS, "decay": 1}),
        (CostAware, {"costs": STEPS, "decay": 0}),
        (CostAware, {"costs": TABLE, "nodes": 1}),
        (CostAware, {"costs": CostTable((1,), (1e-12,)), "nodes": 10**9}),
        (CostAware, {"costs": CostTable((1, 2), (1e-12, 1e12))}),
    ],
    ids=lambda value: (
        getattr(value, "__name__", None) or ", ".join(f"{name}={one!r}"[:30] for name, one in value.items())
    ),
)
def test_what_lies_at_the_bounds_decodes(make, given):
    prompt = torch.tensor([[5, 9, 7, 5, 9]])
    for settings in ({"do_sample": False}, {"do_sample": True, "seeds": [3]}):
        found = decoder(decider=make(**given)).generate(prompt, max_new_tokens=4, eos_token_id=None, **settings)
        assert found.shape == (1, 9)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (NGramDrafter, {"longest": 64, "shortest": 64}),
        (CostTable, {"rows": [1], "seconds": [1]}),
        (CostTable, {"rows": torch.tensor([1, 2]), "seconds": torch.tensor([1.0, 2.0])}),
        (NodeBudget, {"nodes": 1}),
        (NodeBudget, {"nodes": 10**9}),
    ],
    ids=["longest n-gram", "one row", "tensors", "the root alone", "all nodes"],
)
def test_drafters_and_costs_at_the_bounds_decode(make, given):
    part = make(**given)
    options = {"drafter": part} if make is NGramDrafter else {"decider": part, "coupling": Coupling.shared(1)}
    if make is CostTable:
        options["decider"] = CostAware(part)
    for settings in ({"do_sample": False}, {"do_sample": True, "seeds": [3]}):
        found = decoder(**options).generate(
            torch.tensor([[5, 9, 5, 9, 5]]), max_new_tokens=4, eos_token_id=None, **settings
        )
        assert found.shape == (1, 9)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (specinfer, {"k_config": ()}),
        (dynasd, {"depth": 0}),
        (spechub, {"depth": 0}),
        (sequoia, {"nodes": 1}),
        (fitted, {"nodes": 1}),
        (expanding, {"nodes": 1}),
    ],
    ids=["specinfer", "dynasd", "spechub", "sequoia", "fitted", "expanding"],
)
def test_the_smallest_trees_decode(make, given):
    assert make(**given).generate(torch.tensor([[5, 9]]), max_new_tokens=3, eos_token_id=None).shape == (1, 5)


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
        CostTable.load(path)


@pytest.mark.parametrize(
    "change",
    [{"choices": []}, {"temperature": -1}, {"costs": {}}, {"choices": 3}],
    ids=lambda change: f"{change}",
)
def test_damaged_tunings_are_named(tmp_path, change):
    path = tmp_path / "tuned.json"
    tuned().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"tuned.json is not what tuning writes: .*; run 'arbordraft tune' again"):
        Tuned.load(path)


class Mute(Decider):
    """Answers for one sample, however many are shown."""

    def forward(self, view):
        return [True]


def test_a_decider_that_does_not_answer_for_all_is_named():
    prompts = {"input_ids": torch.tensor([[5, 9], [7, 8]]), "max_new_tokens": 4, "do_sample": False}
    with pytest.raises(ValueError, match=r"Mute.* must say of each of 2 samples, said 1"):
        decoder(decider=Mute()).generate(**prompts)
