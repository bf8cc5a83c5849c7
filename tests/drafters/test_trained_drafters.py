"""Trained drafters: their rows are those of their networks after any accepted path, and decoding is lossless."""

from dataclasses import replace

import pytest
import torch
from support.companions import (
    EXIT,
    LAYERS,
    ROWS,
    UNEVEN,
    Rounds,
    check_rows,
    drafter,
    states,
    target,
    trained,
    walk,
    with_norms,
)
from support.models import PROMPTS, check_greedy, decode, fusable, greedy_reference, ragged, tiny
from support.request_law import few_tokens as few
from support.request_law import fit

import arbordraft as ad
from arbordraft.drafters import Drafter
from arbordraft.drafters.grow import Growth
from arbordraft.drafters.language_model import shrink
from arbordraft.heads.block import BlockHead
from arbordraft.heads.dflash import DFlashHead
from arbordraft.heads.eagle import EagleHead
from arbordraft.heads.exit_adapter import ExitAdapter
from arbordraft.heads.medusa import MedusaHead
from arbordraft.target.cache import RaggedKVCache

CHAIN, CROSSED = (
    ad.TreeTopology.chain(4),
    ad.TreeTopology([-1, 0, 0, 2, 1, 1]),
)  # not numbered in the order of their parents
LAWS = [ad.IID(2), ad.WithoutReplacement(2), ad.TopTail(1, 1)]
LOOKUP = ad.Coupling.matching(2)
DRAWN = ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()))
HYBRIDS = {
    "hybrid block": lambda: ad.HybridDrafter(ad.NGramDrafter(3, 1), drafter("block")),
    "hybrid eagle": lambda: ad.HybridDrafter(ad.NGramDrafter(3, 1), drafter("eagle")),
    "hybrid medusa": lambda: ad.HybridDrafter(ad.NGramDrafter(3, 1), drafter("medusa")),
}
every_drafter = pytest.mark.parametrize("name", ROWS)


def build(name, coupling=DRAWN, topology=UNEVEN):
    found = HYBRIDS[name]() if name in HYBRIDS else drafter(name)
    return ad.SpeculativeDecoder(target(), found, topology, coupling)


def untrained(name, of, tokens=range(30), hidden_layers=(0, 1, 2)):
    """Builds an untrained drafter for any target; its masks, terms and adapters have an effect."""
    model, options = of.model, {"hidden_layers": list(hidden_layers)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "block":
            head = BlockHead.for_target(model, tokens, **options)
            torch.nn.init.normal_(head.lm_head_markov.weight, std=0.3)
            torch.nn.init.normal_(head.masks.weight[1:], std=0.3)
            return ad.BlockDrafter(head, of)
        if name == "peagle":
            return ad.BlockDrafter(BlockHead.for_target(model, tokens, markov_rank=0, mask_token_id=2, **options), of)
        if name in ("dflash", "dspark"):
            kind = {"markov_rank": 0, "from_anchor": False} if name == "dflash" else {}
            head = DFlashHead.for_target(model, tokens, mask_token_id=2, num_hidden_layers=1, **kind, **options)
            if head.markov_head is not None:
                torch.nn.init.normal_(head.markov_head.markov_w2.weight, std=3.0)
            return ad.DFlashDrafter(head, of)
        if name == "eagle":
            return ad.EagleDrafter(EagleHead.for_target(model, tokens, **options), of)
        if name == "medusa":
            return ad.MedusaDrafter(MedusaHead.for_target(model, tokens), of)
        if name == "exit":
            return ad.EarlyExitDrafter(of, 1, adapted(model, 1))
        return ad.LanguageModelDrafter(ad.RaggedModel(shrink(model, [0]), kernels=of.backend))


def few_drafter(name):
    """Builds a drafter for the target of six tokens, whose law of texts is known."""
    return untrained(name, few(0), [0, 1, 3, 4, 5], [1])


# Losslessness


@pytest.mark.one_in(2)
@pytest.mark.parametrize("topology", [CHAIN, UNEVEN], ids=["chain", "tree"])
@pytest.mark.parametrize("name", [*ROWS, *HYBRIDS])
def test_greedy_equals_transformers(name, topology):
    """Compares a ragged batch, with a prompt of one token, and its samples alone."""
    coupling = LOOKUP if name in HYBRIDS else DRAWN
    decoder = build(name, coupling, topology)
    expected = greedy_reference(target().model, PROMPTS, max_new_tokens=18, eos_token_id=None)
    found, stats = decode(decoder, max_new_tokens=18)
    assert found == expected
    assert stats.accepted.total() > sum(stats.forwards) / 3  # drafting took part in it
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert decode(decoder, [prompt], max_new_tokens=18)[0] == [tokens]


@every_drafter
def test_sampling_has_the_law_of_the_target(name):
    coupling = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    assert fit(ad.SpeculativeDecoder(few(0), few_drafter(name), ad.TreeTopology([-1, 0, 0, 1]), coupling)) > 1e-3


def test_rows_that_were_not_drawn_from_would_be_seen(monkeypatch):
    """Negative control: rows flatter than those that the drafts came from."""
    grown = Growth.grown

    def lie(*given):
        tree = grown(*given)
        return replace(tree, draft_rows=tree.draft_rows * 0.3 + 0.7 / 6)

    monkeypatch.setattr(Growth, "grown", lie)
    coupling = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    decoder = ad.SpeculativeDecoder(few(0), few_drafter("medusa"), ad.TreeTopology([-1, 0, 0, 1]), coupling)
    assert fit(decoder) < 1e-6


# Rows


@pytest.mark.one_in(3)
@pytest.mark.parametrize("topology", [UNEVEN, CROSSED, CHAIN], ids=["uneven", "crossed", "chain"])
@pytest.mark.parametrize("law", LAWS, ids=str)
@every_drafter
def test_rows_are_those_of_the_network(name, law, topology):
    """The batch is ragged, and tokens are drawn from these rows by the law."""
    rounds = Rounds(drafter(name), target(), PROMPTS)
    tree = rounds.propose(topology, law)
    assert check_rows(name, trained(name).network, target().model, tree, PROMPTS) > 5
    if name in ("exit", "model"):
        assert tree.node.tolist() == [*range(topology.num_nodes)] * len(PROMPTS)
    for row in range(tree.rows):
        if (drawn_from := tree.drawn_from(row)) is not None:
            uniforms = rounds.step.noise.draft[tree.owner[row], list(topology.child_list[tree.node[row]])].tolist()
            assert tree.token[tree.children[row]].tolist() == tree.law_of(row).draw(drawn_from, uniforms)


@every_drafter
def test_rows_stay_right_after_any_accepted_path(name):
    assert walk(drafter(name), name)[1] > 35


class Late(ad.EagleDrafter):
    """Uses each token's states for the next token."""

    def take_hidden(self, state, hidden):
        super().take_hidden(state, {sample: states.roll(1, 0) for sample, states in hidden.items()})


class Hoarder(ad.EagleDrafter):
    """Keeps the slots of its trees."""

    def commit(self, state, tree, verdict):
        state.cache.commit = lambda kept: None
        super().commit(state, tree, verdict)
        del state.cache.commit


class Forward(ad.MedusaDrafter):
    """Predicts from the first token that it was shown."""

    def take_hidden(self, state, hidden):
        state.seen |= {sample: states[0] for sample, states in hidden.items()}


@pytest.mark.parametrize(("name", "wrong"), [("eagle", Late), ("eagle", Hoarder), ("medusa", Forward)])
def test_a_wrong_state_would_be_seen(name, wrong):
    with pytest.raises(AssertionError):
        walk(wrong(drafter(name).head, target()), name)


@pytest.mark.parametrize("name", ["block", "eagle", "medusa"])
def test_a_text_of_one_token_is_not_drafted_for(name):
    rounds = Rounds(drafter(name), target(), [[11], [5, 9]])
    tree = rounds.propose(CHAIN, ad.IID(1))
    assert tree.lengths == [1, {"block": 5, "eagle": 5, "medusa": 4}[name]]
    rounds.commit(tree, [0, 1])
    tree = rounds.propose(CHAIN, ad.IID(1))
    assert tree[0].drawn_from(0) is not None
    check_rows(name, trained(name).network, target().model, tree, rounds.tokens)


def test_medusa_trees_end_where_the_heads_do():
    rounds = Rounds(drafter("medusa"), target(), PROMPTS[2:])
    assert rounds.propose(ad.TreeTopology.chain(7), ad.IID(1)).lengths == [4]
    assert rounds.propose(ad.TreeTopology.chain(2), ad.IID(1)).lengths == [3]
    assert rounds.propose(ad.TreeTopology.chain(7), ad.IID(1), max_depth=[1]).lengths == [2]


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["block", "eagle", "medusa"])
def test_nothing_outside_of_the_vocabulary_is_drafted(name, greedy):
    """This holds even if the tree has more nodes than the vocabulary has tokens."""
    kind = {"block": BlockHead, "eagle": EagleHead, "medusa": MedusaHead}[name]
    with torch.random.fork_rng():
        head = kind.for_target(target().model, [3, 60])
    made = {"block": ad.BlockDrafter, "eagle": ad.EagleDrafter, "medusa": ad.MedusaDrafter}[name](head, target())
    for law in (ad.IID(3), ad.WithoutReplacement(3), ad.TopTail(1, 2), ad.Fixed(3)):
        tree = Rounds(made, target(), PROMPTS).propose(ad.TreeTopology.k_ary(3, 2), law, greedy=greedy)
        assert set(tree.token[tree.node > 0].tolist()) == {3, 60}
        assert tree.lengths[1] == 1
    check_greedy(ad.SpeculativeDecoder(target(), made, UNEVEN, DRAWN))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["block", "eagle", "medusa", "exit", "model"])
def test_a_broken_network_costs_speed_only(name, value, sampling):
    broken = drafter(name)
    with torch.no_grad():
        for weight in (
            broken.adapter if name == "exit" else broken.model if name == "model" else broken.head
        ).parameters():
            weight.fill_(value)
    expected = greedy_reference(target().model, PROMPTS, max_new_tokens=6, eos_token_id=None)
    with pytest.warns(UserWarning, match="drafter produced NaN or infinite logits"):
        found, stats = decode(ad.SpeculativeDecoder(target(), broken, UNEVEN, DRAWN), max_new_tokens=6, **sampling)
    assert found == expected
    assert stats.drafted == 0


# Packed weights


def adapted(model, layers):
    """Builds an adapter that changes its input."""
    with torch.random.fork_rng():
        adapter = ExitAdapter.for_target(model, layers)
        torch.nn.init.normal_(adapter.mlp.down_proj.weight, std=0.3)
    return adapter


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("backend", ["torch", "native"])
@every_drafter
def test_packed_weights_give_the_same_rows(name, backend):
    model, twin = (with_norms(fusable(num_hidden_layers=3)) for _ in range(2))  # reading states leaves hooks
    packed, reference = ad.RaggedModel(model, kernels=backend), ad.RaggedModel(twin, kernels="torch")
    made, plain = untrained(name, packed), untrained(name, reference)
    network = {"exit": "adapter", "model": "model"}.get(name, "head")
    network = getattr(plain, network) if name != "model" else plain.model.model
    rounds = Rounds(made, packed, PROMPTS)
    for _ in range(2):
        tree = rounds.propose(UNEVEN, ad.WithoutReplacement(2))
        check_rows(name, network, twin, tree, rounds.tokens, atol=1e-4)
        rounds.commit(tree, [0, 0, 1])
    check_greedy(ad.SpeculativeDecoder(packed, made, UNEVEN, DRAWN), count=8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_drafter
def test_half_precision(name, dtype):
    """A drafter takes the target's dtype; NaN or an error would show here."""
    half = ad.RaggedModel(with_norms(fusable(num_hidden_layers=3)).to(dtype), kernels="torch")
    made = untrained(name, half)
    found, stats = decode(ad.SpeculativeDecoder(half, made, UNEVEN, DRAWN), max_new_tokens=8)
    assert stats.drafted > 0
    assert [len(tokens) for tokens in found] == [8, 8, 8]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("architecture", ["gpt2", "gpt_neox", "gemma2", "gpt_oss"])
@every_drafter
def test_any_architecture(name, architecture):
    of = ad.RaggedModel(
        with_norms(tiny(architecture, **{"n_layer" if architecture == "gpt2" else "num_hidden_layers": 3})),
        kernels="torch",
    )
    assert check_greedy(ad.SpeculativeDecoder(of, untrained(name, of), UNEVEN, DRAWN), count=8).drafted > 0


# Early exit


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "gpt_neox"])
def test_a_new_adapter_changes_no_bit(architecture):
    model = fusable(architecture, num_hidden_layers=3)
    of = ad.RaggedModel(model, kernels="torch")
    rows = []
    for adapter in (None, ExitAdapter.for_target(model, 2), adapted(model, 2)):
        tree = Rounds(ad.EarlyExitDrafter(of, 2, adapter), of, PROMPTS).propose(CHAIN, ad.IID(1))
        rows.append(torch.stack([tree[sample].drawn_from(tree[sample].root) for sample in tree.living]))
    assert torch.equal(rows[0], rows[1])
    assert not torch.allclose(rows[0], rows[2])


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2", "opt", "gpt_oss", "deepseek_v3"])
def test_the_final_norm_follows_the_layers(architecture):
    """The normed state before the second layer is the input of the head in a model of one layer."""
    of, found = ad.RaggedModel(fusable(architecture), kernels="torch"), []
    for layers, hidden in ((None, 1), (1, 2)):
        cache = RaggedKVCache()
        tokens, batch = torch.tensor(PROMPTS[0]), cache.lay_out([cache.open(5)], [range(5)])
        found.append(of.run(tokens, batch, cache, layers=layers, hidden=(hidden,))[1])
    torch.testing.assert_close(of.final_norm(found[0]), found[1], rtol=0, atol=1e-5)
    assert not torch.allclose(found[0], found[1], atol=1e-2)


def test_more_than_a_norm_after_the_layers_is_refused():
    projecting = ragged("opt", word_embed_proj_dim=16)
    with pytest.raises(ad.UnsupportedModel, match="more than a norm between"):
        _ = projecting.final_norm


def test_an_adapter_fits_one_number_of_layers():
    adapter = ExitAdapter.for_target(target().model, EXIT)
    with pytest.raises(ValueError, match=r"made for \[2\] layers, not for 3"):
        ad.EarlyExitDrafter(target(), 3, adapter)
    with pytest.raises(ValueError, match=r"layers must lie in 1\.\.3"):
        ad.EarlyExitDrafter(target(), LAYERS, ExitAdapter.for_target(target().model, LAYERS))


def test_the_model_is_left_as_it_was():
    of = ad.RaggedModel(fusable(num_hidden_layers=3), kernels="torch")
    before = [len(module._forward_hooks) for module in of.model.modules()]
    Rounds(ad.EarlyExitDrafter(of, 2, adapted(of.model, 2)), of, PROMPTS).propose(UNEVEN, ad.IID(2))
    assert [len(module._forward_hooks) for module in of.model.modules()] == before == [0] * len(before)


# Hybrid


class Sometimes(Drafter):
    """Proposes one token to some samples in some rounds, and checks the states that it is shown.

    Args:
        rounds: for every round, the samples that get a token.
        layers: layers whose states it reads.
    """

    certain = True
    max_levels = 1

    def __init__(self, rounds, layers):
        super().__init__()
        self.rounds, self.hidden_layers = iter(rounds), layers

    def open(self, target_cache):
        return {}

    def add(self, state, sample, tokens, handle):
        state[sample] = []

    def take_hidden(self, state, hidden):
        for sample, shown in hidden.items():
            state[sample].append(shown)

    def scores(self, state, frontier):
        chosen = next(self.rounds)
        return [([9], [1.0]) if sample in chosen else ([], []) for sample in frontier.samples]


@pytest.mark.parametrize("name", ROWS)
def test_a_skipped_sample_catches_up(name):
    """The first part reads states of other layers than the second part."""
    first = Sometimes([(0, 1), (), (0, 2), (0,), ()], (2, 0))
    hybrid = ad.HybridDrafter(first, drafter(name))
    others = drafter(name).hidden_layers
    assert hybrid.hidden_layers == tuple(dict.fromkeys((2, 0, *others)))
    rounds = Rounds(hybrid, target(), PROMPTS)
    ends = [[1, 0, 3], [3, 1, 0], [0, 3, 1], [1, None, 0], [0, None, 0]]
    compared = 0
    for number, ends_now in enumerate(ends):
        tree = rounds.propose(UNEVEN, ad.WithoutReplacement(2), seed=7 * number)
        compared += check_rows(name, trained(name).network, target().model, tree, rounds.tokens)
        rounds.commit(tree, ends_now)
    assert compared > 20
    for sample, text in enumerate(rounds.tokens):
        shown = torch.cat(rounds.state.first[sample])
        if rounds.handles[sample] in rounds.cache:
            torch.testing.assert_close(shown, states(target().model, text[:-1], 2, 0), rtol=0, atol=1e-4)


def test_parts_that_read_no_states_get_none():
    hybrid = ad.HybridDrafter(ad.NGramDrafter(), drafter("exit"))
    assert hybrid.hidden_layers == ()
    assert ad.HybridDrafter(ad.NGramDrafter(), drafter("medusa")).hidden_layers == (LAYERS,)


# Parts that do not fit


@pytest.mark.parametrize("name", ["block", "eagle", "medusa", "exit"])
def test_a_drafter_belongs_to_its_target(name):
    with pytest.raises(ValueError, match="must be built f"):
        drafter(name).check(few(0), ad.IID(1))
    with pytest.raises(ValueError, match="must be built f"):
        ad.SpeculativeDecoder(few(0), drafter(name), CHAIN, DRAWN)
