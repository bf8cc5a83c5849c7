"""Improved MCSD: tokens of its wide mode, their distance from the target's law, and exactness of width 1."""

import warnings
from itertools import pairwise

import pytest
import torch
from support.models import PROMPTS, Planned, decode, greedy_reference, left_padded, new_tokens, ragged
from torch.nn import functional

import arbordraft as ad
from arbordraft import builders
from arbordraft.deciders import FixedDepth
from arbordraft.deciders.decisions import Limits
from arbordraft.decoding.target_initialised import TargetInitialisedDecoder
from arbordraft.sampling.noise import Noise, residual
from arbordraft.testing import distance_to_target, random_table, row
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.verifiers import LongestBranch

TOPOLOGIES = [ad.TreeTopology.fork(3, 3), ad.TreeTopology.from_k_config((2, 2, 1))]
NEW = 9


def wide(topology, decider=None):
    with warnings.catch_warnings(action="ignore"):
        return TargetInitialisedDecoder(
            ragged(), ad.LanguageModelDrafter(ragged(seed=3)), topology, decider or FixedDepth()
        )


def next_rows(model, text):
    """Returns ``[L, V]`` probabilities of a plain forward."""
    return model(torch.tensor([text])).logits[0].double().softmax(dim=-1)


@torch.no_grad()
def told(topology, prompt, seed=None):
    """Runs the paper's method branch by branch on plain models; a seed selects the decoder's own noise."""
    target, draft = ragged().model, ragged(seed=3).model
    generator = Noise.source(seed or 0)
    greedy, text, following = seed is None, list(prompt), None
    while len(text) < len(prompt) + NEW:
        noise = None if greedy else Noise.draw([generator], topology.num_nodes)
        following = next_rows(target, text)[-1] if following is None else following
        tokens, ratios, drafts = {}, {}, {}
        for parent, children in enumerate(topology.child_list):
            if not children or len(text) + topology.depth_list[parent] >= len(prompt) + NEW:
                continue
            above = [tokens[node] for node in topology.path(parent)[1:]]
            drafts[parent] = following if parent == 0 else next_rows(draft, [*text, *above])[-1]
            if greedy:
                drawn = drafts[parent].topk(len(children)).indices.tolist()
            else:
                law = ad.WithoutReplacement(len(children))
                drawn = law.draw(drafts[parent].float(), noise.draft[0, list(children)].tolist())
            tokens |= zip(children, drawn, strict=True)
            wanted = next_rows(target, [*text, *above])[-1]
            for child, token in zip(children, drawn, strict=True):
                ratios[child] = wanted[token] / drafts[parent][token]
                if greedy:
                    ratios[child] = float(wanted.argmax() == token)
        passes = {
            node: topology.depth_list[node] == 1 or (0.5 if greedy else float(noise.accept[0, node])) < ratios[node]
            for node in tokens
        }
        alive = [node for node in tokens if all(passes[above] for above in topology.path(node)[1:])]
        deepest = max(topology.depth_list[node] for node in alive)
        last = next(node for node in sorted(alive) if topology.depth_list[node] == deepest)
        text += [tokens[node] for node in topology.path(last)[1:]]
        following = next_rows(target, text)[-1]
        if not greedy and deepest > 1 and last in drafts:
            following = residual(following, drafts[last])
    return text[len(prompt) :]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["fork", "static"])
@pytest.mark.parametrize("sampled", [False, True])
def test_it_commits_the_tokens_of_the_papers_method(topology, sampled):
    seeds = [11, 12, 13] if sampled else None
    options = {"do_sample": True, "seeds": seeds, "top_k": 0} if sampled else {"do_sample": False}
    found, stats = decode(wide(topology), max_new_tokens=NEW, **options)
    assert found == [
        told(topology, prompt, seed) for prompt, seed in zip(PROMPTS, seeds or [None] * len(PROMPTS), strict=True)
    ]
    assert stats.exactness == "lossy"
    assert (stats.pad_rows, stats.pad_keys) == (0, 0)


def test_its_greedy_text_is_not_the_targets():
    output = wide(TOPOLOGIES[0]).generate(**left_padded(PROMPTS), max_new_tokens=NEW, do_sample=False)
    found = new_tokens(output, PROMPTS, [NEW] * len(PROMPTS))
    assert found != greedy_reference(ragged().model, PROMPTS, max_new_tokens=NEW)


def test_a_decider_shortens_branches_but_never_takes_the_candidates():
    decoder = wide(TOPOLOGIES[0], FixedDepth(0))
    _, stats = decode(decoder, max_new_tokens=NEW)
    assert stats.drafted == 3 * NEW * len(PROMPTS)
    assert stats.tau == 1
    _, stats = decode(wide(TOPOLOGIES[0], FixedDepth(2)), max_new_tokens=NEW)
    assert 1 < stats.tau <= 2


def test_it_warns_that_it_is_lossy_and_refuses_invalid_parts():
    with pytest.warns(UserWarning, match="change the output law"):
        builders.dynasd(ragged(), ragged(seed=3), width=2)
    drafter = ad.LanguageModelDrafter(ragged(seed=3))
    with pytest.raises(ValueError, match="a single candidate needs no TargetInitialisedDecoder"):
        TargetInitialisedDecoder(ragged(), drafter, ad.TreeTopology.chain(3))
    with pytest.raises(ValueError, match="cannot go on from tokens that it did not choose"):
        TargetInitialisedDecoder(ragged(), ad.NGramDrafter(), TOPOLOGIES[0])
    with pytest.raises(ValueError, match="width must be a whole number of at least 1, got 0"):
        builders.dynasd(ragged(), drafter, width=0)


def test_width_one_is_lossless():
    with warnings.catch_warnings(action="error"):
        decoder = builders.dynasd(ragged(), ragged(seed=3))
    assert type(decoder) is ad.SpeculativeDecoder
    assert decoder.coupling.exactness == "exact"
    assert isinstance(decoder.decider, ad.ConfidenceThreshold)
    assert decoder.topology.parent_list == ad.TreeTopology.chain(5).parent_list
    static = builders.dynasd(ragged(), ragged(seed=3), k_config=(2, 2))
    assert static.topology.parent_list == ad.TreeTopology.from_k_config((2, 2)).parent_list
    law, table = ad.WithoutReplacement(2), random_table("random", 3)
    assert distance_to_target(ad.TopDown(ad.RecursiveRejection()), static.topology, law, table) < 1e-12


def first_token_law(width, depth, target, ratio):
    """Returns the ``[V]`` law of the first committed token of a fork whose drafts pass with probability ``ratio``."""
    topology, verifier, vocabulary = ad.TreeTopology.fork(width, depth), LongestBranch(), len(target)
    wanted, draft = functional.one_hot(torch.tensor(0), vocabulary).double() * ratio, row(1, *[0] * (vocabulary - 1))
    wanted[1] = 1 - ratio
    law = torch.zeros(vocabulary, dtype=torch.float64)
    # All tokens below the candidates are the same, so branches differ in their first one only.
    for chance, candidates in ad.WithoutReplacement(width).enumerate(target):
        tokens = {0: 0} | {n: candidates[n - 1] if d == 1 else 0 for n, d in enumerate(topology.depth_list) if n}
        rows = dict.fromkeys(range(1, len(tokens)), draft)
        tree = DraftTree.of(topology, ad.WithoutReplacement(width), [tokens], [rows])[0]
        for share, path, following in verifier.law(tree, {0: target} | dict.fromkeys(range(1, len(tokens)), wanted)):
            first = tree.tokens[path[1]] if len(path) > 1 else int(following.argmax())
            law[first] += chance * share
    return law


def test_wide_modes_are_as_far_from_the_target_as_documented():
    """Equally good branches already bias the output: the likeliest token is drawn early, and then loses by chance.

    With two branches of one test each, the first branch wins unless only the second passes.
    """
    target = row(0.6, 0.2, 0.1, 0.06, 0.04)
    laws = [first_token_law(width, depth, target, 0.6) for width, depth in ((2, 1), (2, 2), (2, 3), (4, 2))]
    distances = [float((law - target).abs().sum() / 2) for law in laws]
    assert all(float(law.sum()) == pytest.approx(1) for law in laws)
    mode_first = 0.6 + sum(p * 0.6 / (1 - p) for p in (0.2, 0.1, 0.06, 0.04))  # the likeliest token is among the two
    second = mode_first - 0.6
    lucky = 0.4 * 0.6
    assert laws[1][0] == pytest.approx(0.6 * (1 - lucky) + second * lucky)
    assert laws[0].tolist() == pytest.approx(target.tolist())  # without tests the first candidate wins, without bias
    assert all(shorter < longer for shorter, longer in pairwise(distances))
    assert distances[-1] > 0.14


def test_a_fifth_of_the_likeliest_token_is_lost():
    """With five tests per branch, as in the reference, the likeliest token has probability 0.481 instead of 0.6."""
    law = first_token_law(2, 6, row(0.6, 0.2, 0.1, 0.06, 0.04), 0.6)
    assert float(law[0]) == pytest.approx(0.481, abs=5e-4)


@pytest.mark.parametrize("sampled", [False, True])
def test_plans_are_never_those_of_the_clock(sampled):
    """Its texts depend on the drafts, greedy ones too, so the plan must not depend on seconds."""
    asked = []

    def plan(situation):
        asked.append(situation.pathwise)
        return Limits.everything(situation.max_depth)

    decode(wide(TOPOLOGIES[1], Planned(plan)), do_sample=sampled)
    assert asked
    assert not any(asked)
