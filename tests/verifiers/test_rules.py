"""Rules and tree verifiers against golden values, optima, independent references and symmetries."""

import math

import pytest
import torch

import arbordraft as ad
from arbordraft.sampling.laws import AdaptiveTopTail, DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise, SharedSource
from arbordraft.testing import (
    ROW_KINDS,
    acceptance,
    draft_trees,
    expected_accepted,
    one_tree,
    packed,
    random_rows,
    random_table,
    row,
    target_rows,
)
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Exactness
from arbordraft.verifiers import (
    KSeq,
    LongestBranch,
    OptimalTransport,
    Remembered,
    Rule,
    SharedMatching,
    TopTailRule,
    TypicalAcceptance,
    matching_verdict,
    optimal_acceptance,
)

LAWS = [
    *(ad.IID(2), ad.IID(3), ad.WithoutReplacement(2), ad.WithoutReplacement(3)),
    *(ad.TopTail(1, 1), ad.TopTail(2, 1), ad.TopTail(1, 2), AdaptiveTopTail(2, 0.3), AdaptiveTopTail(3, 0.25)),
    *(ad.Fixed(2), ad.Fixed(3)),
]
RULES = [
    ad.RecursiveRejection(),
    KSeq(),
    ad.SpecHub("set"),
    ad.SpecHub("paper"),
    TopTailRule(),
    ad.Matching(),
    OptimalTransport(),
]
VALID = [
    (law, rule)
    for law in LAWS
    for rule in RULES
    if rule.supports(law) and (law.k == 2 or not isinstance(rule, OptimalTransport))  # the solver is slow
]


def short(value):
    if isinstance(value, DraftLaw):
        return f"{type(value).__name__}{value.k if value.tops * value.tails == 0 else (value.tops, value.tails)}"
    if isinstance(value, Rule):
        return str(value).removesuffix("()")
    return None


# Golden values: computed by hand, by enumeration and by linear programming.

OPPOSITE = row(1, 2, 3, 4), row(4, 3, 2, 1)
CLOSE = row(0.5, 0.3, 0.15, 0.05), row(0.6, 0.2, 0.1, 0.1)


@pytest.mark.parametrize(
    ("rows", "law", "rule", "expected"),
    [
        (OPPOSITE, ad.IID(1), ad.RecursiveRejection(), 0.6),
        (OPPOSITE, ad.IID(1), KSeq(), 0.6),
        (OPPOSITE, ad.IID(2), ad.RecursiveRejection(), 0.72),
        (OPPOSITE, ad.IID(2), KSeq(), 0.75),
        (OPPOSITE, ad.WithoutReplacement(2), ad.RecursiveRejection(), 0.764286),
        (OPPOSITE, ad.TopTail(1, 1), ad.SpecHub(), 0.766667),
        (OPPOSITE, ad.TopTail(1, 1), ad.SpecHub("paper"), 0.766667),
        (OPPOSITE, ad.TopTail(1, 1), TopTailRule(), 0.766667),
        (OPPOSITE, ad.IID(2), OptimalTransport(), 0.79),
        (OPPOSITE, ad.WithoutReplacement(2), OptimalTransport(), 0.834524),
        (OPPOSITE, ad.IID(3), ad.RecursiveRejection(), 0.768),
        (OPPOSITE, ad.IID(3), KSeq(), 0.79395),
        (OPPOSITE, ad.WithoutReplacement(3), ad.RecursiveRejection(), 0.840298),
        (OPPOSITE, ad.TopTail(2, 1), TopTailRule(), 0.933333),
        (OPPOSITE, ad.IID(3), OptimalTransport(), 0.871),
        (OPPOSITE, ad.WithoutReplacement(3), OptimalTransport(), 1.0),
        (CLOSE, ad.IID(2), ad.RecursiveRejection(), 0.895),
        (CLOSE, ad.IID(2), KSeq(), 0.929599),
        (CLOSE, ad.WithoutReplacement(2), ad.RecursiveRejection(), 0.941667),
        (CLOSE, ad.TopTail(1, 1), ad.SpecHub(), 1.0),
    ],
    ids=short,
)
def test_golden_acceptance(rows, law, rule, expected):
    assert acceptance(rule, law, *rows) == pytest.approx(expected, abs=1e-6)


# Optima.


@pytest.mark.parametrize("law", [ad.IID(1), ad.WithoutReplacement(1), *LAWS], ids=short)
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_optimum_by_prefix_scan_equals_the_linear_program(kind, law):
    for seed in range(3 if law.k < 3 else 1):
        rows = random_rows(kind, 7 - law.k, seed)  # a program per outcome: more draws get fewer tokens
        solved = acceptance(OptimalTransport("compact"), law, *rows)
        assert optimal_acceptance(law, *rows) == pytest.approx(solved, abs=1e-9)


@pytest.mark.parametrize("law", [ad.IID(2), ad.WithoutReplacement(2), ad.TopTail(1, 2)], ids=short)
def test_compact_and_full_program_agree(law):
    for seed in range(4):
        rows = random_rows("random", 4, seed)
        compact, full = (acceptance(OptimalTransport(form), law, *rows) for form in ("compact", "full"))
        assert compact == pytest.approx(full, abs=1e-9)


@pytest.mark.parametrize(("law", "rule"), VALID, ids=short)
def test_no_rule_beats_the_optimum_of_its_law(law, rule):
    single = law.tails == 1 and not isinstance(law, AdaptiveTopTail)
    optimal = isinstance(rule, (ad.SpecHub, OptimalTransport)) or (isinstance(rule, TopTailRule) and single)
    for kind in ROW_KINDS:
        for seed in range(1 if isinstance(rule, OptimalTransport) else 3):
            rows = random_rows(kind, 5, seed)
            found, best = acceptance(rule, law, *rows), optimal_acceptance(law, *rows)
            assert found <= best + 1e-12
            if optimal:
                assert found == pytest.approx(best, abs=1e-9)


def test_hub_acceptance_in_closed_form():
    for seed in range(5):
        target, draft = random_rows("random", 6, seed)
        hub = int(draft.argmax())
        besides = torch.minimum(target, draft / (1 - draft[hub]))
        expected = (besides.sum() - besides[hub] + target[hub]).item()
        assert acceptance(ad.SpecHub(), ad.TopTail(1, 1), target, draft) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("draws", [2, 3, 4])
def test_optimum_without_replacement_survives_extreme_rows(draws):
    """One token has nearly all the mass, or tokens have masses of many orders of magnitude."""
    for weights in ((1, 1e-9, 2e-9, 3e-10, 1e-9), (1, 1e-3, 1e-6, 1e-9, 1e-12), (1, 1, 1e-8, 2e-8, 1e-8)):
        draft, target = row(*weights), row(1, 2, 3, 2, 1)
        law = ad.WithoutReplacement(draws)
        inside = [0.0] * 32
        for chance, tokens in law.enumerate(draft):
            used = sum(1 << token for token in tokens)
            for members in range(32):
                inside[members] += chance * (used & ~members == 0)
        masses = [sum(target[token].item() for token in range(5) if members >> token & 1) for members in range(32)]
        expected = 1 + min(mass - covered for mass, covered in zip(masses, inside, strict=True))
        assert optimal_acceptance(law, target, draft) == pytest.approx(expected, abs=1e-9)


def test_a_program_too_large_is_refused():
    with pytest.raises(ValueError, match="max_variables = 50"):
        OptimalTransport(max_variables=50)(row(*[1] * 9), 1.0, row(*[1] * 9), [0, 1], ad.IID(2))


# The law of a rule at one node.


@pytest.mark.parametrize(("law", "rule"), VALID, ids=short)
@pytest.mark.parametrize("weight", [0.0, 1e-9, 0.3, 1.0])
def test_node_law_is_a_law_and_keeps_the_target(law, rule, weight):
    """Averaged over the drafts, every token gets its share of the weighted target, and the null token the rest."""
    for kind in ROW_KINDS:
        target, draft = random_rows(kind, 4, 7)
        before = target.clone(), draft.clone()
        emitted, null = torch.zeros_like(target), 0.0
        for chance, tokens in law.enumerate(draft):
            found = rule(target, weight, draft, tokens, law)
            assert min(found.accept) >= 0
            assert sum(found.accept) + found.stop.sum().item() + found.reject == pytest.approx(1, abs=1e-12)
            assert found.stop[tokens].sum() == 0
            emitted += chance * found.stop
            for token, share in zip(tokens, found.accept, strict=True):
                emitted[token] += chance * share
            null += chance * found.reject
        torch.testing.assert_close(emitted, weight * target, atol=1e-12, rtol=0)
        assert null == pytest.approx(1 - weight, abs=1e-12)
        assert torch.equal(target, before[0])
        assert torch.equal(draft, before[1])


@pytest.mark.parametrize(("law", "rule"), VALID, ids=short)
def test_float32_rows_give_nearly_the_same_law(law, rule):
    target, draft = random_rows("peaked", 200, 3)
    if isinstance(rule, OptimalTransport):
        target, draft = random_rows("random", 5, 3)
    tokens = law.draw(draft, [0.4, 0.8, 0.1])
    exact, single = (rule(t, 0.6, d, tokens, law) for t, d in ((target, draft), (target.float(), draft.float())))
    assert single.accept == pytest.approx(exact.accept, abs=1e-5)
    assert single.stop.dtype == (torch.float64 if isinstance(rule, OptimalTransport) else torch.float32)
    torch.testing.assert_close(single.stop.double(), exact.stop, atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("rule", [ad.SpecHub("set"), ad.SpecHub("paper"), ad.RecursiveRejection(), TopTailRule()])
def test_a_hub_that_leaves_almost_no_mass(rule):
    """In float32 the hub's probability is 1, but another token was drawn, too."""
    target, draft = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 3e-40, 1e-40])
    found = rule(target, 1.0, draft, [1, 0], ad.TopTail(1, 1))
    exact = rule(target.double(), 1.0, row(1e10, 3, 1), [1, 0], ad.TopTail(1, 1))
    assert found.accept == pytest.approx(exact.accept, abs=1e-5)
    torch.testing.assert_close(found.stop.double(), exact.stop, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", [ad.RecursiveRejection(), KSeq()])
def test_a_token_that_cannot_have_been_drafted_is_refused(rule):
    with pytest.raises(ValueError, match="token 2 was drafted with probability 0"):
        rule(row(1, 1, 1), 1.0, row(1, 1, 0), [2], ad.IID(1))


@pytest.mark.parametrize(
    ("law", "rule"), [(ad.IID(2), KSeq()), (ad.TopTail(1, 1), ad.SpecHub()), (ad.IID(2), OptimalTransport())]
)
def test_rules_that_need_the_draft_row_say_so(law, rule):
    with pytest.raises(ValueError, match="needs the draft row"):
        rule(row(1, 1, 1), 1.0, None, [0, 1], law)


@pytest.mark.parametrize("rule", [ad.RecursiveRejection(), KSeq(), OptimalTransport()])
def test_one_draw_is_speculative_sampling(rule):
    for kind in ROW_KINDS:
        target, draft = random_rows(kind, 4, 1)
        for _, (token,) in ad.IID(1).enumerate(draft):
            found = rule(target, 1.0, draft, [token], ad.IID(1))
            assert found.accept == pytest.approx([min(1.0, (target[token] / draft[token]).item())], abs=1e-12)


@pytest.mark.parametrize("law", [ad.WithoutReplacement(2), ad.TopTail(1, 1), ad.TopTail(1, 2)], ids=short)
def test_tops_by_residual_equal_recursive_rejection(law):
    for kind in ROW_KINDS:
        target, draft = random_rows(kind, 5, 2)
        for _, tokens in law.enumerate(draft):
            one, two = (rule(target, 0.7, draft, tokens, law) for rule in (TopTailRule(), ad.RecursiveRejection()))
            assert one.accept == pytest.approx(two.accept, abs=1e-12)
            torch.testing.assert_close(one.stop, two.stop, atol=1e-12, rtol=0)


# Symmetries.


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
def test_equal_rows_accept_a_whole_chain(lift):
    for rule in (ad.RecursiveRejection(), KSeq()):
        found = expected_accepted(lift(rule), ad.TreeTopology.chain(3), ad.IID(1), random_table("equal", 3))
        assert found == pytest.approx(3, abs=1e-12)


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize(("law", "rule"), [pair for pair in VALID if pair[0].k == 2], ids=short)
def test_disjoint_supports_accept_nothing(law, rule, lift):
    assert expected_accepted(lift(rule), ad.TreeTopology([-1, 0, 0, 1]), law, random_table("disjoint", 4)) == 0


@pytest.mark.parametrize(
    ("law", "rule"), [pair for pair in VALID if not isinstance(pair[1], OptimalTransport)], ids=short
)  # the solver may pick any of several optimal plans
def test_permuting_the_vocabulary_commutes(law, rule):
    target, draft = random_rows("random", 5, 4)
    order = torch.tensor([3, 0, 4, 1, 2])
    place = order.argsort().tolist()
    for _, tokens in law.enumerate(draft):
        one = rule(target, 0.8, draft, tokens, law)
        two = rule(target[order], 0.8, draft[order], [place[token] for token in tokens], law)
        assert one.accept == pytest.approx(two.accept, abs=1e-12)
        torch.testing.assert_close(one.stop[order], two.stop, atol=1e-12, rtol=0)


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
@pytest.mark.parametrize(("law", "rule"), [pair for pair in VALID if pair[0].k == 2], ids=short)
def test_a_certain_target_is_greedy_decoding(law, rule, lift):
    """Temperature 0 needs no special case. Any of several equal siblings may be accepted, so tokens are compared."""
    table, noise = random_table("certain target", 3), Noise.draw([Noise.source(0)], 4)
    verifier = lift(rule)
    for topology in (ad.TreeTopology([-1, 0, 0, 1]), ad.TreeTopology.chain(2)):
        for _, tree in draft_trees(topology, law, table):
            batch, rows = packed([tree], [target_rows(tree, table)])
            sampled = verifier(batch, rows, noise)
            best = rows.argmax(-1).tolist()
            greedy = matching_verdict(batch, lambda rows, places, best=best: [best[row] for row in rows])
            emitted = tuple(sampled.emitted(batch, 0))
            assert all(table(emitted[:depth])[0][token] == 1 for depth, token in enumerate(emitted))
            if not law.replacement:
                assert vars(sampled) == vars(greedy)


# Whole trees.


def block_verification(table, tokens):
    """Returns the law of the accepted length of one chain by block verification, after Sun et al. (ICLR 2025)."""
    logs, stay, lengths = 0.0, [1.0], []
    for index, token in enumerate(tokens):
        target, draft = table(tokens[:index])
        logs = min(0.0, logs + math.log(target[token] / draft[token]))
        stay.append(math.exp(logs))
    for index in range(len(tokens) + 1):
        target, draft = table(tokens[:index])
        if index == len(tokens):
            accept = stay[index]
        elif index == 0:
            accept = 1.0
        else:
            mass = (stay[index] * target - draft).clamp_min(0).sum().item()
            accept = mass / (mass + 1 - stay[index]) if mass > 0 else 0.0
        lengths.append(accept)
    law, left = [0.0] * len(lengths), 1.0
    for index in reversed(range(len(lengths))):
        law[index] = left * lengths[index]
        left *= 1 - lengths[index]
    return law


def test_lifted_rejection_on_a_chain_is_block_verification():
    topology, law, verifier = ad.TreeTopology.chain(3), ad.IID(1), ad.Lifted(ad.RecursiveRejection())
    for seed in range(3):
        table = random_table("random", 3, seed)
        for _, tree in draft_trees(topology, law, table):
            expected = block_verification(table, tuple(tree.path(3)))
            found = [0.0] * 4
            for share, path, _ in verifier.law(tree, target_rows(tree, table)):
                found[len(path) - 1] += share
            assert found == pytest.approx(expected, abs=1e-12)


def traversal(tree, target, node=0, weight=1.0):
    """Maps accepted rows to probabilities by traversal verification (Weng et al., NeurIPS 2025); None is rejection."""
    children = tree.children(node)
    if not children:
        return {node: weight, None: 1 - weight}
    p, q, ends, left = target[node].clone(), tree.drawn_from(node).clone(), {}, 1.0
    for child in children:
        token = tree.token(child)
        below = traversal(tree, target, child, min(1.0, weight * p[token].item() / q[token].item()))
        rejected = below.pop(None)
        ends |= {end: left * share for end, share in below.items()}
        left *= rejected
        rest = (weight * p - q).clamp_min(0)
        mass = rest.sum().item()
        if mass + 1 - weight <= 0:
            return {**ends, node: 0.0, None: left}
        weight, p = mass / (mass + 1 - weight), rest / mass if mass > 0 else rest
        q[token] = 0
        q = q / q.sum() if q.sum() > 0 else q
    return {**ends, node: left * weight, None: left * (1 - weight)}


@pytest.mark.parametrize("topology", [ad.TreeTopology.k_ary(2, 2), ad.TreeTopology([-1, 0, 0, 1, 1, 2, 4])], ids=str)
def test_lifted_rejection_without_replacement_is_traversal(topology):
    table, verifier = random_table("random", 4), ad.Lifted(Remembered(ad.RecursiveRejection()))
    for index, (_, tree) in enumerate(draft_trees(topology, ad.WithoutReplacement(2), table)):
        if index % 23:  # a sample of the trees
            continue
        target = target_rows(tree, table)
        expected = traversal(tree, target)
        assert expected.pop(None) == pytest.approx(0, abs=1e-12)
        found = dict.fromkeys(expected, 0.0)
        for share, path, _ in verifier.law(tree, target):
            found[path[-1]] += share
        assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("law", "rule"),
    [
        (ad.IID(2), ad.RecursiveRejection),
        (ad.IID(2), KSeq),
        (ad.WithoutReplacement(2), ad.RecursiveRejection),
        (ad.TopTail(1, 1), ad.SpecHub),
        (ad.TopTail(1, 1), TopTailRule),
    ],
    ids=str,
)
def test_lifting_a_set_based_rule_accepts_no_less(law, rule):
    for seed in range(3):
        table = random_table("random", 3, seed)
        top_down, lifted = (
            expected_accepted(lift(Remembered(rule())), ad.TreeTopology.k_ary(2, 2), law, table)
            for lift in (ad.TopDown, ad.Lifted)
        )
        assert lifted >= top_down - 1e-12


def test_typical_acceptance_takes_the_deepest_unsurprising_path():
    rows = {0: row(0.9, 0.1), 1: row(0.6, 0.4), 2: row(0.5, 0.5), 3: row(0.2, 0.8)}
    tree = one_tree(ad.TreeTopology([-1, 0, 0, 1]), ad.Fixed(2), {0: 0, 1: 0, 2: 1, 3: 1})
    batch, packed_rows = packed([tree], [rows])
    noise = Noise.draw([Noise.source(0)], 4)
    verdict = TypicalAcceptance()(batch, packed_rows, noise)
    assert verdict.paths == [[0, 1, 3]]
    assert verdict.recovered == [False]
    strict = TypicalAcceptance(epsilon=0.5, delta=10.0)(batch, packed_rows, noise)
    assert strict.paths == [[0, 1]]
    with pytest.raises(ValueError, match="epsilon"):
        TypicalAcceptance(epsilon=0.0)


@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
def test_a_batch_gives_the_verdicts_of_its_samples(lift):
    """Finished samples, single roots and trees of different sizes do not disturb each other."""
    table, law, topology = random_table("random", 4), ad.TopTail(1, 1), ad.TreeTopology.k_ary(2, 2)
    trees = [tree for _, tree in draft_trees(topology, law, table)][:3]
    trees.insert(1, one_tree(topology, law, {0: 3}))
    samples = [trees[0], None, *trees[1:]]
    targets = [target_rows(tree, table) if tree else {} for tree in samples]
    generators = [Noise.source(seed) for seed in range(len(samples))]
    noise = Noise.draw(generators, topology.num_nodes)
    batch, rows = packed(samples, targets)
    verdict = lift(ad.SpecHub())(batch, rows, noise)
    assert (verdict.paths[1], verdict.tokens[1], verdict.recovered[1]) == ([], -1, False)
    for index, tree in enumerate(samples):
        if tree:
            own = Noise(noise.draft[[index]], noise.accept[[index]], noise.final[[index]])
            alone = lift(ad.SpecHub())(*packed([tree], [targets[index]]), own)
            first = batch.offsets[index]
            assert [[first + row for row in path] for path in alone.paths] == [verdict.paths[index]]
            assert (alone.tokens, alone.recovered) == ([verdict.tokens[index]], [verdict.recovered[index]])
    with pytest.raises(ValueError, match="rows were given"):
        lift(ad.SpecHub())(batch, rows[:-1], noise)
    with pytest.raises(ValueError, match="sum nan"):
        lift(ad.SpecHub())(trees[1].batch, torch.full((1, 4), torch.nan), noise)


VERIFIERS = {
    "top-down": ad.TopDown(ad.RecursiveRejection()),
    "lifted": ad.Lifted(ad.RecursiveRejection()),
    "typical": TypicalAcceptance(),
    "longest": LongestBranch(),
    "shared": SharedMatching(),
}


@pytest.mark.parametrize("name", VERIFIERS)
def test_samples_that_are_not_requested_are_ignored(name):
    """Verdicts about some samples equal those about all, and rows of the others need not be probabilities."""
    table, topology, verifier = random_table("random", 4), ad.TreeTopology.k_ary(2, 2), VERIFIERS[name]
    law = ad.Fixed(2) if verifier.shared else ad.WithoutReplacement(2)
    drafted = {sample: next(draft_trees(topology, law, table, (sample,)))[1] for sample in (0, 2, 4, 5)}
    drafted[3] = one_tree(topology, law, {0: 3})
    trees = [drafted.get(sample) for sample in range(6)]
    targets = [tree and target_rows(tree, table, (sample,)) for sample, tree in enumerate(trees)]
    batch, rows = packed(trees, targets)
    noise = Noise.draw([Noise.source(seed) for seed in range(len(trees))], topology.num_nodes)
    if verifier.shared:
        noise = GumbelNoise([SharedSource(seed) for seed in range(len(trees))], [5] * len(trees))
    coupling = ad.Coupling(law, verifier)
    whole = coupling(batch, rows, noise)
    for asked in ([0], [2, 5], [3, 0, 4], batch.living):
        spoilt = rows.clone()
        spoilt[[row for row in range(batch.rows) if batch.owner[row] not in asked]] = torch.nan
        found = coupling(batch, spoilt, noise, asked)
        for sample in range(len(trees)):
            path, token, recovered = ([], -1, False)
            if sample in asked:
                path, token, recovered = whole.paths[sample], whole.tokens[sample], whole.recovered[sample]
            assert (found.paths[sample], found.tokens[sample], found.recovered[sample]) == (path, token, recovered)
    with pytest.raises(ValueError, match="sample 1 takes no part"):
        coupling(batch, rows, noise, [1])


def test_target_tokens_are_requested_at_once_or_level_by_level():
    generator, topology = torch.Generator().manual_seed(0), ad.TreeTopology.k_ary(2, 3)
    lengths = set()
    for _ in range(20):
        told = [
            None if sample == 2 else dict(enumerate(torch.randint(3, (15,), generator=generator).tolist()))
            for sample in range(4)
        ]
        tree = DraftTree.of(topology, ad.Fixed(2), told)
        own = torch.randint(3, (tree.rows,), generator=generator).tolist()
        asked = []

        def tokens_of(rows, places, tree=tree, own=own, asked=asked):
            asked.append(list(rows))
            assert places == [(tree.owner[row], tree.depth[row]) for row in rows]
            return [own[row] for row in rows]

        for samples in (None, [3, 0]):
            asked.clear()
            walked = matching_verdict(tree, tokens_of, samples)
            on_paths = sorted(row for path in walked.paths for row in path)
            assert sorted(row for rows in asked for row in rows) == on_paths
            asked.clear()
            assert vars(matching_verdict(tree, tokens_of, samples, at_once=True)) == vars(walked)
            assert asked == [tree.rows_of(samples or [0, 1, 3])]
            lengths |= set(map(len, walked.paths))
    assert lengths == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("at_once", [False, True])
def test_rows_without_tokens_matter_only_on_paths(at_once):
    tree, own = DraftTree.of(ad.TreeTopology.fork(2, 1), ad.Fixed(2), [{0: 7, 1: 3, 2: 5}]), [5, -1, 9]
    assert matching_verdict(tree, lambda rows, _: [own[row] for row in rows], at_once=at_once).tokens == [9]
    own = [3, -1, 9]
    with pytest.raises(ValueError, match="no token has any probability; check the processors"):
        matching_verdict(tree, lambda rows, _: [own[row] for row in rows], at_once=at_once)


# Couplings.


@pytest.mark.parametrize(
    ("law", "rule"),
    [
        (ad.WithoutReplacement(2), KSeq()),
        (ad.TopTail(1, 1), KSeq()),
        (ad.Fixed(2), KSeq()),
        (ad.IID(2), TopTailRule()),
        (ad.Fixed(2), TopTailRule()),
        (ad.IID(2), ad.SpecHub()),
        (ad.WithoutReplacement(2), ad.SpecHub()),
        (ad.TopTail(2, 1), ad.SpecHub()),
        (ad.TopTail(1, 2), ad.SpecHub("paper")),
        (ad.Fixed(2), ad.SpecHub()),
    ],
    ids=short,
)
@pytest.mark.parametrize("lift", [ad.TopDown, ad.Lifted])
def test_invalid_couplings_are_refused(law, rule, lift):
    with pytest.raises(ValueError, match="not valid for children drawn by"):
        ad.Coupling(law, lift(rule))


@pytest.mark.parametrize(("law", "rule"), VALID, ids=short)
def test_valid_couplings_are_accepted(law, rule):
    for lift in (ad.TopDown, ad.Lifted):
        assert ad.Coupling(law, lift(rule)).exactness == Exactness.EXACT
    assert ad.Coupling(law, TypicalAcceptance()).exactness == Exactness.LOSSY


def test_a_coupling_checks_the_topology():
    coupling = ad.Coupling(ad.TopTail(1, 1), ad.Lifted(ad.SpecHub()))
    coupling.check(ad.TreeTopology.k_ary(2, 3))
    coupling.check(ad.TreeTopology.chain(4))
    with pytest.raises(ValueError, match="nodes with 3 children"):
        coupling.check(ad.TreeTopology.k_ary(3, 1))


@pytest.mark.parametrize("inference", [False, True])
def test_remembered_rules_read_a_changed_row_again(inference):
    law, rule = ad.IID(1), Remembered(ad.RecursiveRejection())
    with torch.inference_mode(inference):
        target, draft = row(0.1, 0.9), row(0.5, 0.5)
        assert rule(target, 1.0, draft, [0], law).accept == pytest.approx([0.2])
        assert rule(target, 1.0, draft, [0], law) is rule(target, 1.0, draft, [0], law)
        target.copy_(row(0.9, 0.1))
        assert rule(target, 1.0, draft, [0], law).accept == pytest.approx([1.0])
