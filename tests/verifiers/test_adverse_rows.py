"""Adverse rows, drafts and seeds keep the target's law, by enumeration, to 1e-12."""

import numpy as np
import pytest
import torch
from support.models import PROMPTS, generated, greedy_reference, next_logits, ragged, tiny
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

import arbordraft as ad
from arbordraft.drafters import Drafter
from arbordraft.kernels.verify import lowest_kept, row_max
from arbordraft.sampling.noise import Noise
from arbordraft.testing import distance_to_target, one_tree, random_table, target_rows, tree_arguments
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.verifiers import OptimalTransport, optimal_acceptance
from arbordraft.verifiers.packed import verify_packed

EXACT = 1e-12
NEVER = {"eos_token_id": None, "pad_token_id": 0}


# Optimal transport on float32 rows.

KINDS = ["flat", "usual", "peaked", "tiny masses", "sum off by some ulp", "zeros"]
SIZES = [  # law and vocabulary, small enough for milliseconds per case
    (ad.TopTail(1, 1), 16),
    (ad.TopTail(2, 1), 16),
    (ad.TopTail(1, 2), 5),
    (ad.IID(2), 4),
    (ad.WithoutReplacement(2), 5),
    (ad.IID(3), 3),
    (ad.WithoutReplacement(3), 4),
]


def softmax_row(kind, vocabulary, *seed):
    """Draws a float32 row like the softmax of a model."""
    generator = np.random.default_rng([KINDS.index(kind), vocabulary, *seed])
    spread = {"flat": 0.1, "peaked": 12.0, "tiny masses": 40.0}.get(kind, 2.0)
    found = torch.tensor(spread * generator.normal(size=vocabulary), dtype=torch.float32).softmax(dim=0)
    if kind.startswith("sum"):
        found *= 1 + 6e-8 * torch.tensor(generator.integers(1, 4, size=vocabulary))
    if kind == "zeros":
        found[generator.permutation(vocabulary)[: vocabulary // 3]] = 0
        found /= found.sum()
    return found


def emitted_distance(rule, law, target, draft, weight=1.0):
    """Returns the total variation between a rule's emitted tokens at a node and the target, normalised in float64."""
    emitted, null = torch.zeros(len(target), dtype=torch.float64), 0.0
    for chance, tokens in law.enumerate(draft):
        found = rule(target, weight, draft, tokens, law)
        emitted += chance * found.stop.double()
        null += chance * found.reject
        for token, accept in zip(tokens, found.accept, strict=True):
            emitted[token] += chance * accept
    wanted = weight * target.double() / target.double().sum()
    return (float((emitted - wanted).abs().sum()) + abs(null - (1 - weight))) / 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("law", "vocabulary"), SIZES, ids=[f"{law}-{size}" for law, size in SIZES])
@pytest.mark.parametrize("formulation", ["full", "compact"])
def test_transport_meets_the_law_of_float32_rows(formulation, law, vocabulary, kind):
    for seed in range(3):
        target, draft = (softmax_row(kind, vocabulary, seed, side) for side in range(2))
        distance = emitted_distance(OptimalTransport(formulation), law, target, draft, (1.0, 0.37, 1.0)[seed])
        assert distance < EXACT, seed


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formulation", ["full", "compact"])
def test_transport_is_optimal_on_float32_rows(formulation, kind):
    law, rule = ad.TopTail(1, 1), OptimalTransport(formulation)
    target, draft = (softmax_row(kind, 12, 5, side) for side in range(2))
    accepted = sum(chance * sum(rule(target, 1.0, draft, drawn, law).accept) for chance, drawn in law.enumerate(draft))
    assert accepted == pytest.approx(optimal_acceptance(law, target, draft), abs=1e-8)


def random_plan(worth, rows, tokens, masses, p):
    return np.random.default_rng(len(worth)).random(len(worth)) * masses[rows]


@pytest.mark.parametrize(
    "plan",
    [random_plan, lambda worth, *_: np.zeros(len(worth)), lambda worth, *_: np.full(len(worth), 7.0)],
    ids=["random", "empty", "far too much"],
)
@pytest.mark.parametrize("formulation", ["full", "compact"])
def test_any_plan_of_the_solver_keeps_the_law(monkeypatch, formulation, plan):
    monkeypatch.setattr("arbordraft.verifiers.transport._solve", plan)
    target, draft = (softmax_row("usual", 6, 1, side) for side in range(2))
    assert emitted_distance(OptimalTransport(formulation), ad.IID(2), target, draft) < EXACT


def test_a_plan_without_its_residual_is_caught(monkeypatch):
    def served_alone(rows, tokens, served, masses, p, row):
        plan = np.bincount(tokens[rows == row], served[rows == row], minlength=len(p))
        return plan / plan.sum() if plan.sum() > 0 else p

    monkeypatch.setattr("arbordraft.verifiers.transport._completed", served_alone)
    target, draft = (softmax_row("usual", 6, 1, side) for side in range(2))
    assert emitted_distance(OptimalTransport("full"), ad.IID(2), target, draft) > 1e-3


@pytest.mark.parametrize("formulation", ["full", "compact"])
def test_whole_texts_by_transport_in_float32(formulation):
    coupling = ad.Coupling(ad.TopTail(1, 1), ad.Lifted(OptimalTransport(formulation)))
    decoder = ad.SpeculativeDecoder(
        ragged(), ad.LanguageModelDrafter(ragged(seed=3)), ad.TreeTopology.from_k_config((2, 1)), coupling
    )
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(20)]
    _, output = generated(decoder, prompts, max_new_tokens=12, do_sample=True, seeds=range(20), **NEVER)
    assert output.stats.emitted == [12] * 20
    assert output.stats.exactness == "exact"


# Siblings that repeat a token.

EIGHTHS = torch.tensor([4, 2, 1, 1], dtype=torch.float64) / 8  # each token has half of the mass that earlier ones leave
MIDPOINTS = (torch.arange(4, dtype=torch.float64) + 0.5) / 4
REPEATS = {"0 0": [0, 0], "0 0 0": [0, 0, 0], "0 1 0": [0, 1, 0], "0 0 1": [0, 0, 1], "0 1 1": [0, 1, 1]}


def repeated(tokens, law=None, draft=None, samples=1):
    """Builds trees of a root and these children."""
    topology, told = ad.TreeTopology.k_ary(len(tokens), 1), {0: 3, **dict(enumerate(tokens, start=1))}
    rows = {} if draft is None else {0: draft}
    return DraftTree.of(topology, law or ad.Fixed(len(tokens)), [told] * samples, [rows] * samples)


def packed_law(tokens, lifted, dtype):
    """Returns the law of the packed verifier's first token; its noise is on a grid that divides all its chances."""
    width = len(tokens)
    points = torch.cartesian_prod(*[MIDPOINTS] * (width + 1))  # one decision per child, and the draw after the root
    scores = EIGHTHS.log().to(dtype).expand(len(points) * (width + 1), -1)
    accept, final = points.roll(1, dims=1), points[:, -1:].expand(-1, width + 1)
    tree = repeated(tokens, samples=len(points))
    found = verify_packed(tree, scores, Noise(accept, accept, final), lifted=lifted)
    assert list(found) == tree.living
    first = torch.tensor([int(tree.token[end]) if tree.depth[end] else token for end, token in found.values()])
    return torch.bincount(first, minlength=4).double() / len(first)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("tokens", REPEATS.values(), ids=REPEATS)
def test_packed_verification_of_repeated_siblings(tokens, lifted, dtype):
    assert float((packed_law(tokens, lifted, dtype) - EIGHTHS).abs().max()) < EXACT


def test_mass_that_counts_twice_is_caught(monkeypatch):
    monkeypatch.setattr("arbordraft.kernels.verify.reference._first_of", lambda tokens, among: among)
    assert float((packed_law([0, 0], False, torch.float64) - EIGHTHS).abs().max()) > 0.1


def repeating_trees(topology, law, table, prefix=()):
    """Yields the only tree of a drafter that gives siblings equal tokens in pairs."""
    tokens = {0: prefix[-1] if prefix else 0}
    for node, children in enumerate(topology.child_list):
        tokens |= {child: (node + rank // 2) % 3 for rank, child in enumerate(children)}
    yield 1.0, one_tree(topology, law, tokens)


@pytest.mark.parametrize(
    "rule", [ad.Matching(), ad.RecursiveRejection(), OptimalTransport("full"), OptimalTransport()], ids=str
)
@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize("kind", ["random", "peaked", "holes", "certain target"])
def test_the_walk_over_repeated_siblings(rule, lift, kind):
    table, topology = random_table(kind, 3), ad.TreeTopology.from_k_config((3, 2))
    assert distance_to_target(lift(rule), topology, ad.Fixed(3), table, draft=repeating_trees) < EXACT


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
def test_packed_and_walked_verdicts_on_repeated_siblings(lift):
    table, topology, verifier = (
        random_table("random", 4),
        ad.TreeTopology.from_k_config((4, 3)),
        lift(ad.RecursiveRejection()),
    )
    ((_, tree),) = repeating_trees(topology, ad.Fixed(4), table)
    rows = torch.stack(list(target_rows(tree, table).values())).repeat(50, 1)
    batch = DraftTree.of(topology, ad.Fixed(4), [tree_arguments(tree)[0]] * 50)
    noise = Noise.draw([Noise.source(7)] * 50, topology.num_nodes)
    found = verify_packed(batch, rows.log(), noise, lifted=verifier.lifted)
    verdict = verifier(batch, rows, noise)
    assert list(found) == batch.living
    assert list(found.values()) == [(path[-1], own) for path, own in zip(verdict.paths, verdict.tokens, strict=True)]
    assert len({batch.node[end] for end, _ in found.values()}) > 3


@pytest.mark.parametrize("law", [ad.WithoutReplacement(2), ad.TopTail(1, 1)], ids=str)
def test_draws_that_the_law_cannot_give_are_refused(law):
    with pytest.raises(ValueError, match=r"two children of node 0 have the token 2, which .* cannot draw"):
        repeated([2, 2], law, EIGHTHS)


class Stuttering(ad.WithoutReplacement):
    """Draws one token repeatedly, against its own law."""

    def draw(self, draft, uniforms):
        return [7] * self.k


def test_decoders_refuse_draws_that_their_law_cannot_give():
    coupling = ad.Coupling(Stuttering(2), ad.TopDown(ad.RecursiveRejection()))
    topology = ad.TreeTopology.from_k_config((2,))
    decoder = ad.SpeculativeDecoder(ragged(), ad.LanguageModelDrafter(ragged(seed=3)), topology, coupling)
    with pytest.raises(ValueError, match=r"two children of node 0 have the token 7, which .* cannot draw"):
        generated(decoder, PROMPTS[:1], max_new_tokens=4, seeds=[1], do_sample=True, **NEVER)


@pytest.mark.parametrize("law", [ad.IID(2), ad.Fixed(2)], ids=str)
def test_draws_that_the_law_can_give_are_taken(law):
    assert repeated([2, 2], law, EIGHTHS).children[0] == [1, 2]


class Repeating(Drafter):
    """Proposes the target's best token twice."""

    certain = True

    def check(self, target, law):
        self.model = target.model

    def scores(self, state, frontier):
        best = [int(next_logits(self.model, frontier.text(row)).argmax()) for row in range(len(frontier))]
        return [([token] * 2, [0.5] * 2) for token in best]


def texts(buckets, lift=ad.TopDown, **settings):
    coupling = ad.Coupling(ad.Fixed(2), lift(ad.RecursiveRejection()))
    topology = ad.TreeTopology.from_k_config((2, 2))
    decoder = ad.SpeculativeDecoder(ragged(sharpness=2.0), Repeating(), topology, coupling, buckets=buckets)
    prompts = PROMPTS * 4
    settings = {"do_sample": True, **NEVER, **settings}
    return generated(decoder, prompts, max_new_tokens=6, seeds=range(len(prompts)), **settings)[0]


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
def test_repeated_drafts_give_the_same_texts_in_buckets(lift):
    """Fixed shapes must give the texts of the walk, whose law is enumerated above."""
    assert texts((32, 64, 128), lift) == texts(None, lift)


def test_a_drafter_whose_repeats_count_twice_is_caught(monkeypatch):
    expected = texts(None)
    monkeypatch.setattr("arbordraft.kernels.verify.reference._first_of", lambda tokens, among: among)
    assert texts((32, 64, 128)) != expected


@pytest.mark.parametrize("buckets", [None, (32, 64, 128)], ids=["ragged", "buckets"])
def test_repeated_drafts_keep_the_greedy_texts(buckets):
    model = tiny(sharpness=2.0)
    expected = greedy_reference(model, PROMPTS, max_new_tokens=6, **NEVER)
    assert texts(buckets, do_sample=False) == expected * 4


# Float64 scores.


def close_scores():
    """Draws rows whose best tokens differ by less than float32 resolves."""
    scores = torch.randn(200, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[:, 7] = scores.amax(dim=1) + 1.0
    scores[:, 30] = scores[:, 7] + 1e-12
    return scores


@pytest.mark.parametrize(
    ("count", "mass", "processor"),
    [(1, 0.0, TopKLogitsWarper(1)), (5, 0.0, TopKLogitsWarper(5)), (1, 0.6, TopPLogitsWarper(0.6))],
    ids=["top-k 1", "top-k 5", "top-p"],
)
def test_truncation_in_float64(count, mass, processor):
    scores = close_scores()
    lowest = lowest_kept(scores, count, mass)
    assert lowest.dtype == torch.float64
    assert torch.equal(scores >= lowest[:, None], processor(None, scores) > -torch.inf)
    lost = ~(scores >= lowest.float()[:, None]).any(dim=1)  # rows that a float32 threshold empties
    assert lost.any() or count > 1 or mass > 0


def test_the_best_token_in_float64():
    assert row_max(close_scores())[1].tolist() == [30] * 200


# Seeds.


@pytest.fixture(scope="module")
def by_seed():
    decoder = ad.SpeculativeDecoder(
        ragged(),
        ad.LanguageModelDrafter(ragged(seed=3)),
        ad.TreeTopology.chain(2),
        ad.Coupling(ad.IID(1), ad.TopDown(ad.RecursiveRejection())),
    )

    def text(seed):
        settings = {"max_new_tokens": 16, "do_sample": True, **NEVER}
        return decoder.generate(torch.tensor([PROMPTS[0]]), seeds=[seed], **settings)[0].tolist()

    return text


@pytest.mark.parametrize("more", [1, 2**31, 2**32, 2**33, 2**63, 2**64 - 12], ids=hex)
def test_every_bit_of_a_seed_counts(by_seed, more):
    assert by_seed(11) != by_seed(11 + more)


@pytest.mark.parametrize("seed", [0, 2**32 + 5, 2**64 - 1, np.uint64(2**64 - 1), torch.tensor(9)], ids=repr)
def test_equal_seeds_give_equal_texts(by_seed, seed):
    assert by_seed(seed) == by_seed(int(seed))


@pytest.mark.parametrize(
    ("seed", "error"),
    [(-1, ValueError), (2**64, ValueError), (1.0, TypeError), (True, TypeError), ("7", TypeError), (None, TypeError)],
    ids=repr,
)
def test_invalid_seeds_are_refused(by_seed, seed, error):
    with pytest.raises(error, match=r"seed.* must be a whole number from 0 to 18446744073709551615, got"):
        by_seed(seed)
