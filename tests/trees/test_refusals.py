"""Trees, masks, laws and rules refuse bad arguments by name before any allocation."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from support.models import PROMPTS, ragged
from support.refusals import check_refusal, refusals

import arbordraft as ad
from arbordraft.sampling.laws import AdaptiveTopTail, DraftLaw
from arbordraft.sampling.noise import Noise
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.topology import MOST_DEPTH, MOST_NODES
from arbordraft.verifiers import OptimalTransport, TypicalAcceptance
from arbordraft.verifiers.packed import verify_packed

pytestmark = pytest.mark.timeout(60)

NO_WHOLE_NUMBERS = [1.5, 2.0, math.nan, math.inf, True, "2", None, [2], torch.tensor([2]), torch.tensor(2.0), 1j]
NO_NUMBERS = [True, "0.5", None, [0.5], torch.ones(2), 1j]


def shown(value):
    return repr(value).replace("\n", "")[:40]


# Arguments that must be whole numbers: constructor, name of the argument, range.
COUNTS = {
    "IID": (ad.IID, "k", 1, None),
    "WithoutReplacement": (ad.WithoutReplacement, "k", 1, None),
    "Fixed": (ad.Fixed, "k", 1, None),
    "AdaptiveTopTail": (AdaptiveTopTail, "k", 1, None),
    "TopTail, tops": (lambda tops: ad.TopTail(tops, 1), "tops", 0, None),
    "TopTail, tails": (lambda tails: ad.TopTail(1, tails), "tails", 0, None),
    "DraftLaw": (lambda tails: DraftLaw(1, tails, False), "tails", 0, None),
    "OptimalTransport": (lambda most: OptimalTransport(max_variables=most), "max_variables", 1, None),
    "chain": (ad.TreeTopology.chain, "length", 0, MOST_DEPTH),
    "k_ary, k": (lambda k: ad.TreeTopology.k_ary(k, 1), "k", 1, None),
    "k_ary, depth": (lambda depth: ad.TreeTopology.k_ary(1, depth), "depth", 0, MOST_DEPTH),
    "fork, width": (lambda width: ad.TreeTopology.fork(width, 1), "width", 1, None),
    "fork, depth": (lambda depth: ad.TreeTopology.fork(1, depth), "depth", 1, MOST_DEPTH),
    "from_k_config": (lambda k: ad.TreeTopology.from_k_config((1, k)), r"k_config\[1\]", 1, None),
    "from_parents": (lambda parent: ad.TreeTopology.from_parents([-1, 0, parent]), r"parents\[2\]", None, None),
    "sequoia, nodes": (lambda nodes: ad.TreeTopology.sequoia([0.5, 0.2], nodes), "nodes", 1, MOST_NODES),
    "warp": (lambda batch: LogitsPipeline([], batch), "batch_size", 0, None),
    "buckets": (
        lambda rows: ad.SpeculativeDecoder(
            ragged(), ad.NoDrafter(), ad.TreeTopology.chain(0), ad.Coupling.matching(), buckets=(8, rows)
        ),
        r"buckets\[1\]",
        1,
        2**16,
    ),
}


@pytest.mark.parametrize("value", NO_WHOLE_NUMBERS, ids=shown)
@pytest.mark.parametrize(("build", "name"), [case[:2] for case in COUNTS.values()], ids=COUNTS)
def test_values_that_are_no_whole_numbers_are_refused(build, name, value):
    with pytest.raises(TypeError, match=f"^{name} must be a whole number.*, got |^{name} must be a whole number, got "):
        build(value)


OUTSIDE = [(name, *case, value) for name, case in COUNTS.items() for value in (case[2], case[3]) if value is not None]


@pytest.mark.parametrize(
    ("build", "name", "value"),
    [(build, name, bound - 1 if bound == least else bound + 1) for _, build, name, least, _, bound in OUTSIDE],
    ids=[f"{case[0]}-{case[-1]}" for case in OUTSIDE],
)
def test_whole_numbers_out_of_range_are_refused(build, name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number (of at least|from) .*, got {value}$"):
        build(value)


MADE = [
    name for name in COUNTS if name not in ("from_parents", "warp")
]  # constructors that take 2 and show it in their repr


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), torch.tensor(2), np.array(2)], ids=shown)
@pytest.mark.parametrize("build", [COUNTS[name][0] for name in MADE], ids=MADE)
def test_whole_numbers_of_other_libraries_are_accepted(build, two):
    assert repr(build(two)) == repr(build(2))


# Arguments that must be real numbers.
REALS = {
    "threshold": (lambda threshold: AdaptiveTopTail(2, threshold), "threshold"),
    "epsilon": (lambda epsilon: TypicalAcceptance(epsilon), "epsilon"),
    "delta": (lambda delta: TypicalAcceptance(0.3, delta), "delta"),
    "acceptance": (lambda rate: ad.TreeTopology.sequoia([rate], 2), r"acceptance\[0\]"),
}


@pytest.mark.parametrize("value", NO_NUMBERS, ids=shown)
@pytest.mark.parametrize(("build", "name"), REALS.values(), ids=REALS)
def test_values_that_are_no_numbers_are_refused(build, name, value):
    with pytest.raises(TypeError, match=f"^{name} must be a number.*, got "):
        build(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.1, 10**400], ids=shown)
@pytest.mark.parametrize(("build", "name"), REALS.values(), ids=REALS)
def test_numbers_out_of_range_are_refused(build, name, value):
    with pytest.raises(ValueError, match=f"^{name} must be (a number|above 0).*, got "):
        build(value)


BAD = [
    (lambda: ad.TreeTopology([]), ValueError, "starts with its root"),
    (lambda: ad.TreeTopology([0, 0]), ValueError, "starts with its root"),
    (lambda: ad.TreeTopology([-1, -1]), ValueError, r"parents\[1\] = -1"),
    (lambda: ad.TreeTopology([-1, 0, 2]), ValueError, r"parents\[2\] = 2"),
    (lambda: ad.TreeTopology([-1, 0, 1, 0]), ValueError, "node 3 has depth 1 but follows a node of depth 2"),
    (lambda: ad.TreeTopology.sequoia([0.5], 4, max_depth=2), ValueError, "no tree of depth 2"),
    (lambda: ad.TreeTopology.sequoia([], 2), ValueError, "no tree of depth"),
    (lambda: AdaptiveTopTail(2, 5), ValueError, "threshold must be a number from 0 to 1, got 5"),
    (lambda: TypicalAcceptance(0), ValueError, "epsilon must be above 0, got 0"),
    (lambda: TypicalAcceptance(2), ValueError, "epsilon must be a number from 0 to 1, got 2"),
    (lambda: TypicalAcceptance(0.3, 0), ValueError, "delta must be above 0, got 0"),
    (lambda: ad.TopTail(0, 0), ValueError, "at least one child"),
    (lambda: ad.SpecHub("sets"), ValueError, 'order must be "set" or "paper", got'),
    (lambda: OptimalTransport("half"), ValueError, 'must be "compact" or "full", got'),
    (lambda: ad.TopDown(None), TypeError, "rule must be of type Rule, got None"),
    (lambda: ad.Lifted(ad.TopDown(ad.Matching())), TypeError, "rule must be of type Rule, got"),
    (lambda: ad.Coupling(2, ad.TopDown(ad.Matching())), TypeError, "law must be a DraftLaw"),
    (lambda: ad.Coupling(ad.IID(2), ad.Matching()), TypeError, "wrap a rule as TopDown"),
    (lambda: ad.TreeTopology(None), TypeError, "parents must be a list of numbers, got None"),
    (lambda: ad.TreeTopology({-1, 0}), TypeError, "parents must be a list of numbers"),
    (lambda: ad.TreeTopology.from_k_config(3), TypeError, "k_config must be a list of numbers"),
    (lambda: ad.TreeTopology.sequoia(0.5, 4), TypeError, "acceptance must be a list of numbers"),
    (lambda: ad.TreeTopology.sequoia([0.9, 0.9], 4), ValueError, "sum to at most 1, got 1.8"),
    (lambda: ad.TreeTopology.sequoia([0.5], 4, 2.5), TypeError, "max_depth must be a whole number"),
    (lambda: ad.TreeTopology.sequoia([0.5], 4, -1), ValueError, "max_depth must be .* from 0 to 512"),
    (lambda: SlicedCausalMask([-1, 0]), TypeError, "topology must be of type TreeTopology, got"),
    (lambda: LogitsPipeline([0.7]), TypeError, "a logits processor is a function of input_ids and scores, got 0.7"),
]
# Calls that would hang, or fill the memory.
HUGE = [
    (lambda: ad.TreeTopology.from_k_config((2,) * 30), ValueError, "at most 2048 nodes; down to depth 11"),
    (lambda: ad.TreeTopology.from_k_config((10**6,)), ValueError, "at most 2048 nodes; down to depth 1"),
    (lambda: ad.TreeTopology.from_k_config((10**100,)), ValueError, "at most 2048 nodes"),
    (lambda: ad.TreeTopology.from_k_config((1,) * 10**6), ValueError, "k_config must have at most 512 entries"),
    (lambda: ad.TreeTopology.k_ary(10**9, 1), ValueError, "at most 2048 nodes"),
    (lambda: ad.TreeTopology.k_ary(2, 10**9), ValueError, "depth must be a whole number from 0 to 512"),
    (lambda: ad.TreeTopology.fork(10, 500), ValueError, "at most 2048 nodes; down to depth 205"),
    (lambda: ad.TreeTopology.chain(10**9), ValueError, "length must be a whole number from 0 to 512"),
    (lambda: ad.TreeTopology([-1, *[0] * 10**6]), ValueError, "parents must have at most 2048 entries"),
    (lambda: ad.TreeTopology(iter(int, 1)), ValueError, "parents must have at most 2048 entries"),
    (lambda: ad.TreeTopology(range(-1, 1000)), ValueError, "at most 512 levels below its root, this one has 1000"),
    (lambda: ad.TreeTopology.sequoia([0.5, 0.2], 100_000), ValueError, "nodes must be a whole number from 1 to 2048"),
    (lambda: ad.TreeTopology.sequoia([1e-6] * 10**5, 64), ValueError, "acceptance must have at most 256 entries"),
    (
        lambda: OptimalTransport()(torch.ones(2000), 1.0, torch.ones(2000), [1, 2], ad.IID(2)),
        ValueError,
        "more than max_variables = 200000; truncate",
    ),
]


@refusals(*BAD, *HUGE)
def test_bad_arguments_are_refused(call, error, words):
    check_refusal(call, error, words)


# Calls at the limits work.


@pytest.mark.parametrize(
    ("build", "nodes"),
    [
        (partial(ad.TreeTopology.chain, MOST_DEPTH), MOST_DEPTH + 1),
        (partial(ad.TreeTopology.k_ary, 2, 10), 2047),
        (partial(ad.TreeTopology.fork, 3, MOST_DEPTH), 3 * MOST_DEPTH + 1),
        (partial(ad.TreeTopology, [-1, *[0] * (MOST_NODES - 1)]), MOST_NODES),
        (partial(ad.TreeTopology.sequoia, [0.6, 0.2, 0.1], MOST_NODES), MOST_NODES),
        (partial(ad.TreeTopology.from_k_config, ()), 1),
        (partial(ad.TreeTopology.from_parents, torch.tensor([-1, 0, 0])), 3),
        (partial(ad.TreeTopology.from_k_config, np.array([2, 1])), 5),
    ],
    ids=["chain", "binary", "fork", "star", "sequoia", "root", "tensor", "array"],
)
def test_the_largest_trees(build, nodes):
    topology = build()
    assert topology.num_nodes == nodes
    assert SlicedCausalMask(topology).select(range(nodes), range(nodes)).shape == (nodes, -(-nodes // 64))


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
def test_the_deepest_tree_is_verified(lift):
    """Recursive walks stay below Python's recursion limit."""
    topology, verifier = ad.TreeTopology.chain(MOST_DEPTH), lift(ad.RecursiveRejection())
    tokens = {node: PROMPTS[0][0] if node == 0 else 1 for node in range(topology.num_nodes)}
    tree = DraftTree.of(topology, ad.Fixed(1), [tokens])
    scores = torch.tensor([0.0, 9.0]).expand(topology.num_nodes, 2)
    noise = Noise.draw([Noise.source(0)], topology.num_nodes)
    walked = verifier(tree, SoftmaxRows(scores), noise)
    assert verify_packed(tree, scores, noise, lifted=verifier.lifted) == {0: (walked.accepted(0), walked.tokens[0])}
