"""A learned decider: its inputs, when it stops, saving and loading, and output that stays the same."""

import json
import math
from functools import partial

import pytest
import torch
from support.models import PROMPTS, VOCAB, context, generated, greedy_reference, grown, joined, ragged, tiny
from torch.testing import assert_close

import arbordraft as ad
from arbordraft.deciders import FixedDepth, LearnedDecider
from arbordraft.deciders.decisions import Draw, Origin, StepView
from arbordraft.drafters.grow import Growth
from arbordraft.heads.eagle import EagleHead
from arbordraft.target.cache import RaggedKVCache
from arbordraft.testing import distance_to_target, draft_trees, random_table

ROW = torch.tensor([0.7, 0.2, 0.1])
TREE = ad.TreeTopology.from_k_config((2, 2, 1))


def view(*samples, greedy=False):
    """Builds the view of samples, each given as the paths of its nodes."""
    return StepView(max(map(len, samples[0])), samples, [None] * len(samples), greedy)


def path(*rows, probability=0.5):
    reads = ((lambda row=row: row) if isinstance(row, torch.Tensor) else row for row in rows)
    origins = (read if isinstance(read, Origin) else Origin(read) for read in reads)
    return tuple(Draw(probability, origin) for origin in origins)


def constant(chance, **settings):
    """Builds a decider that predicts the same chance for every row."""
    decider = LearnedDecider(**settings)
    with torch.no_grad():
        for parameter in decider.parameters():
            parameter.zero_()
        decider.network[-1].bias.fill_(math.log(chance / (1 - chance)))
    return decider


def random_decider(seed=0, **settings):
    torch.manual_seed(seed)
    decider = LearnedDecider(**settings)
    with torch.no_grad():
        for parameter in decider.parameters():
            parameter.normal_(std=2 / parameter.shape[-1] ** 0.5)
    return decider


def eagle_drafter(target=None):
    torch.manual_seed(0)
    target = target or ragged()
    head = EagleHead.for_target(target.model, list(range(3, VOCAB)), hidden_layers=[0, 1, 2])
    return ad.EagleDrafter(head, target)


def test_the_whole_path_has_to_survive():
    """With 0.8 for every row, three rows survive with 0.512; the best node of a sample counts."""
    one, three = path(ROW), path(ROW, ROW, ROW)
    assert constant(0.8, threshold=0.511)(view([three], [three, one])) == [True, True]
    assert constant(0.8, threshold=0.513)(view([three], [three, one])) == [False, True]
    assert constant(0.8, threshold=0.801)(view([three], [three, one])) == [False, False]


def test_a_root_always_survives():
    assert LearnedDecider(threshold=1.0)(view([()], [()])) == [True, True]
    assert LearnedDecider(threshold=1.01)(view([()], [()])) == [False, False]


def test_depths_have_temperatures_of_their_own():
    """At half the temperature the logit doubles: 0.8 becomes 16/17. The last temperature holds for deeper rows."""
    chance = 0.8 * (16 / 17) ** 2
    for threshold, goes_on in ((chance - 1e-4, True), (chance + 1e-4, False)):
        decider = constant(0.8, threshold=threshold, temperatures=(1.0, 0.5))
        assert decider(view([path(ROW, ROW, ROW)])) == [goes_on]


def test_a_lookup_states_its_own_chance():
    lookup = path(None, None, probability=0.9)
    assert constant(0.1, threshold=0.80)(view([lookup])) == [True]
    assert constant(0.1, threshold=0.82)(view([lookup])) == [False]


def test_inputs_of_the_network():
    """These are depth, log-probability of the path above, greediness; entropy and top of the row; hidden state."""
    decider, seen = LearnedDecider(hidden_size=2, top_k=4), []
    decider.logits = lambda *features: seen.append(features) or torch.zeros(len(features[0]))
    first = Origin(lambda: ROW, torch.tensor([1.0, 2.0]))
    second = Origin(lambda: torch.tensor([0.0, 1.0, 0.0]), torch.tensor([3.0, 4]))
    sibling, other = Draw(0.25, first), Draw(0.5, first)
    decider(view([(other, Draw(1.0, second)), (sibling,)], greedy=True))
    ((places, statistics, hidden),) = seen
    assert_close(places, torch.tensor([[0, 0, 1], [1, math.log(0.5), 1]]))
    entropy = -sum(p * math.log(p) for p in ROW.tolist())
    assert_close(statistics, torch.tensor([[entropy, 0.7, 0.2, 0.1, 0.0], [0.0, 1.0, 0.0, 0.0, 0.0]]))
    assert_close(hidden, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    decider(view([path(first, first, probability=0.0)]))
    assert seen[1][0].tolist() == [[0, 0, 0]]  # each row is read once


def test_every_feature_counts():
    decider = random_decider(hidden_size=3, top_k=2)
    places, statistics, hidden = torch.randn(1, 3), torch.rand(1, 3), torch.randn(1, 3)
    known = decider.logits(places, statistics, hidden).item()
    assert decider.logits(places + 1, statistics, hidden).item() != known
    assert decider.logits(places, statistics + 1, hidden).item() != known
    assert decider.logits(places, statistics, hidden.flip(1)).item() != known
    without = random_decider(hidden_size=0, top_k=0, widths=())
    assert without.logits(places, statistics, hidden) == without.logits(places, statistics + 1, None)


@pytest.mark.parametrize("settings", [{}, {"hidden_size": 4, "top_k": 0, "widths": (8, 5)}, {"widths": ()}])
def test_a_file_keeps_everything(tmp_path, settings):
    decider = random_decider(**settings, threshold=0.25, temperatures=(1.5, 0.5))
    decider.save_pretrained(tmp_path / "there")
    found = LearnedDecider.from_pretrained(tmp_path / "there")
    assert repr(found) == repr(decider)
    assert json.loads((tmp_path / "there" / "config.json").read_text())["threshold"] == 0.25
    for name, tensor in decider.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    origins = [Origin(partial(torch.softmax, torch.rand(5), 0), torch.randn(4)) for _ in range(60)]
    steps = [view([path(*origins[i : i + 3])]) for i in range(0, 60, 3)]
    answers = [decider(step) for step in steps]
    assert [found(step) for step in steps] == answers
    assert LearnedDecider.from_pretrained(tmp_path / "there", threshold=0.75).threshold == 0.75


def test_missing_or_wrong_hidden_states_are_refused():
    decider = LearnedDecider(hidden_size=4)
    with pytest.raises(ValueError, match="reads hidden states of size 4, the drafter shows none"):
        decider(view([path(ROW)]))
    with pytest.raises(ValueError, match="reads hidden states of size 4, the drafter shows 3"):
        decider(view([path(Origin(lambda: ROW, torch.zeros(3)))]))


def test_an_eagle_drafter_shows_the_inputs_of_its_output_matrix():
    target, views = ragged(), []
    drafter = eagle_drafter()

    def decide(step):
        views.append(step)
        return [True] * len(step.paths)

    cache = RaggedKVCache()
    prompts = [PROMPTS[0], PROMPTS[2]]
    handles = [cache.open(len(prompt)) for prompt in prompts]
    known = {handle: prompt[:-1] for handle, prompt in zip(handles, prompts, strict=True)}
    hidden = target.prefill(known, cache, hidden=drafter.hidden_layers)
    state = joined(drafter, prompts, cache, handles)
    drafter.take_hidden(state, {sample: hidden[handle] for sample, handle in enumerate(handles)})
    tree = grown(drafter, state, context(prompts, TREE, ad.WithoutReplacement(2)), decide=decide)
    assert tree.lengths == [TREE.num_nodes] * 2
    assert [step.depth for step in views] == [0, 0, 1, 1, 2, 2]  # sampled: every sample is shown alone
    for number, step in enumerate(views):
        (paths,), sample = step.paths, tree[number % 2]  # all nodes exist, so rows are in the order of nodes
        for node, draws in zip(TREE.levels[step.depth], paths, strict=True):
            assert len(draws) == step.depth
            for passed, draw in zip(TREE.path(node)[1:], draws, strict=True):
                row = sample.drawn_from(sample.rows[TREE.parent_list[passed]])
                assert torch.equal(draw.origin.row, row)
                assert draw.probability == pytest.approx(row[sample.tokens[passed]].item())
                logits = drafter.head.widen(drafter.head.lm_head(draw.origin.hidden)[None])[0]
                assert_close(logits.softmax(-1), row)


def decode(decider, drafter, topology=TREE, **options):
    coupling = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    decoder = ad.SpeculativeDecoder(ragged(), drafter, topology, coupling, decider)
    tokens, output = generated(decoder, **{"max_new_tokens": 12, "do_sample": False, **options})
    return output.stats, tokens


@pytest.mark.one_in(3)
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.3, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["rows", "hidden", "both"])
def test_the_output_does_not_depend_on_the_decider(kind, threshold):
    """The samples of the batch stop at their own depths."""
    drafter = ad.LanguageModelDrafter(ragged(seed=3)) if kind == "rows" else eagle_drafter()
    size = 0 if kind == "rows" else 32
    decider = random_decider(hidden_size=size, top_k=0 if kind == "hidden" else 10, threshold=threshold)
    stats, found = decode(decider, drafter)
    assert found == greedy_reference(ragged().model, PROMPTS, max_new_tokens=12)
    assert (stats.pad_rows, stats.pad_keys) == (0, 0)


def test_the_threshold_controls_how_much_is_drafted():
    drafter = ad.LanguageModelDrafter(ragged(seed=3))
    options = {"eos_token_id": None}
    drafted = {
        threshold: decode(random_decider(threshold=threshold), drafter, **options)[0].drafted
        for threshold in (0.0, 0.3, 1.0, 1.1)
    }
    assert drafted[0.0] == decode(FixedDepth(), drafter, **options)[0].drafted
    assert drafted[1.0] == decode(FixedDepth(1), drafter, **options)[0].drafted
    assert drafted[1.1] == 0
    assert drafted[0.0] > drafted[0.3] > drafted[1.0]


def test_samples_of_a_batch_stop_at_their_own_depths(monkeypatch):
    drafter, lengths, grown = ad.LanguageModelDrafter(ragged(seed=3)), [], Growth.grown

    def watched(*given):
        lengths.append((tree := grown(*given)).lengths)
        return tree

    monkeypatch.setattr(Growth, "grown", watched)
    decode(random_decider(1, threshold=0.2), drafter, ad.TreeTopology.chain(4), do_sample=True, seeds=[1, 2, 3])
    assert any(len(set(step)) > 1 for step in lengths[:3])  # well before the end, which itself shortens drafts


def step_view(tree, depth):
    """Builds the view that a decoder would show of a tree before its next level, ``depth``, is drawn."""
    origins = {row: Origin(partial(tree.drawn_from, row)) for row in tree.rows}
    parent = tree.batch.parent.tolist()

    def draws(row):
        path = tree.batch.path(row)[1:]
        return tuple(Draw(origins[parent[r]].row[tree.token(r)].item(), origins[parent[r]]) for r in path)

    frontier = [row for row in tree.rows if tree.batch.depth[row] == depth - 1]
    return StepView(depth - 1, [[draws(row) for row in frontier]], [None])


@pytest.mark.parametrize("parents", [[-1, 0, 1, 2], [-1, 0, 0, 1, 3]], ids=["chain", "tree"])
def test_exactly_the_target_is_emitted(parents):
    """All trees are enumerated; the decider stops in some and goes on in others."""
    decider, answers = random_decider(threshold=0.2), set()

    def goes_on(depth, tree):
        (found,) = decider(step_view(tree, depth))
        answers.add((depth, found))
        return found

    def draft(*arguments):
        return draft_trees(*arguments, goes_on=goes_on)

    law, verifier = ad.WithoutReplacement(2 if len(parents) > 4 else 1), ad.TopDown(ad.RecursiveRejection())
    for seed in range(2):
        table = random_table("peaked", 3, seed)
        assert distance_to_target(verifier, ad.TreeTopology(parents), law, table, draft=draft) < 1e-12
    assert {(3, True), (3, False)} <= answers


def test_a_decider_that_looks_at_the_drawn_level_would_be_seen():
    """Negative control: the decider is asked after the draw, and levels with tokens that it refuses are dropped."""
    decider = constant(0.5, threshold=0.4)

    def drops(depth, tree):
        paths = [[Draw(d.probability, Origin()) for d in path] for path in step_view(tree, depth + 1).paths[0]]
        return not decider(view(paths))[0]

    def draft(*arguments):
        return draft_trees(*arguments, drops=drops)

    arguments = (
        ad.TopDown(ad.RecursiveRejection()),
        ad.TreeTopology.chain(1),
        ad.WithoutReplacement(1),
        random_table("random", 3),
    )
    assert distance_to_target(*arguments, draft=draft) > 1e-3


def test_targets_of_another_dtype_decode():
    """Hidden states have the target's dtype; the decider computes in its own."""
    target = ad.RaggedModel(tiny().to(torch.bfloat16), kernels="torch")
    coupling = ad.Coupling.matching()
    decider = random_decider(hidden_size=32, threshold=0.3)
    decoder = ad.SpeculativeDecoder(target, eagle_drafter(target), ad.TreeTopology.chain(3), coupling, decider)
    assert decoder.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=6, do_sample=False).shape[1] > len(PROMPTS[0])
