"""Whole drafts in fixed shapes: the same trees as level by level, and no operator that waits for the host."""

from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support.companions import Rounds
from support.companions import drafter as trained_drafter
from support.companions import target as trained_target
from support.grown_trees import (
    BETWEEN_LEVELS,
    BINARY,
    GREEDY,
    HOT,
    LAW,
    MANY,
    PLANS,
    TEMPERATURES,
    TEXTS,
    TOPOLOGIES,
    at_most,
    check,
    check_no_drafts,
    trees,
)
from support.models import ARCHITECTURES, PROMPTS, VOCAB, left_padded, new_tokens, ragged
from support.native_drafters import built
from support.recording import as_on_a_gpu, record_on_cpu
from support.watching import Watch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM

from arbordraft import (
    Coupling,
    EagleDrafter,
    HybridDrafter,
    LanguageModelDrafter,
    NGramDrafter,
    NoDrafter,
    RaggedModel,
    SpeculativeDecoder,
    TreeTopology,
)
from arbordraft.deciders import EntropyBound, NodeBudget
from arbordraft.decoding.static.cache import Memory
from arbordraft.decoding.static.draft import DraftBucket, DraftStep
from arbordraft.decoding.static.drafting import StaticDrafts
from arbordraft.drafters.eagle import EagleNetwork
from arbordraft.drafters.network import ModelNetwork
from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.kernels import grow_level
from arbordraft.kernels.draft_tree import reference
from arbordraft.target.attention import UnsupportedModel

KINDS = ["eagle", "eagle, trimmed", "model"]
WIDE = TreeTopology.from_k_config((4, 4, 3, 1))  # 68 nodes below the root have children: two ancestor words


@cache
def parts(kind):
    return built(kind, "torch")


@pytest.fixture(autouse=True)
def drafts(monkeypatch):
    """Records the number of samples of every draft in fixed shapes."""
    done, lay_out = [], StaticDrafts.lay_out

    def counted(self, drafter, state, context, network, trees):
        done.append(len(trees.slots))
        return lay_out(self, drafter, state, context, network, trees)

    monkeypatch.setattr(StaticDrafts, "lay_out", counted)
    return done


def pair(kind, topology=BINARY, texts=TEXTS):
    """Builds rounds of one drafter twice: in fixed shapes and level by level."""
    target, drafter = parts(kind) if isinstance(kind, str) else kind
    return Rounds(drafter, target, texts, StaticDrafts(topology)), Rounds(drafter, target, texts)


# The same trees


@pytest.mark.one_in(13)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("heat", TEMPERATURES)
@pytest.mark.parametrize("topology", [*TOPOLOGIES, "wide"])
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_shapes_grow_the_same_trees(drafts, kind, topology, heat, plan):
    """Samples that rested read more tokens when they draft again."""
    topology, nothing = TOPOLOGIES.get(topology, WIDE), topology == "root" or plan == "nothing"
    count = check(*pair(kind, topology), topology, PLANS[plan], **TEMPERATURES[heat])
    assert (count > 0) != nothing
    assert len(drafts) == 3 * (not nothing)
    assert set(drafts[1:]) <= {3 if plan == "levels" else 4}


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_levels_run_as_the_deepest_sample_may_have(monkeypatch, kind):
    """Later steps find in the cache the rows that these levels leave there."""
    sizes, forward = [], DraftStep.forward

    def seen(self, *inputs):
        found = forward(self, *inputs)
        sizes.append(found.shape[2])
        return found

    monkeypatch.setattr(DraftStep, "forward", seen)
    levels = iter([1, 1, 3, 3, 2, 2])
    assert check(*pair(kind), BINARY, lambda situation: at_most([next(levels)] * 4)(situation), **GREEDY) > 0
    assert sizes == [3, 15, 7]


@pytest.mark.parametrize("options", [GREEDY, HOT], ids=["greedy", "shared noise"])
def test_fewer_tokens_than_children(options):
    target, known = parts("eagle")
    settings = {**known.head.config.to_dict(), "draft_vocab_size": 3}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        head = EagleHead(EagleConfig(**settings))
    head.set_vocabulary([4, 9, 30])
    topology = TreeTopology.from_k_config((4, 4))
    assert check(*pair((target, EagleDrafter(head, target)), topology), topology, at_most(MANY), **options) == 11 * 12


@pytest.mark.parametrize("samples", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_any_size(drafts, kind, samples):
    """This includes batches that are padded to a power of two."""
    texts = [[4, 2, 8]] if samples == 1 else [*TEXTS[2:], [6, 6]][:samples]
    fast, slow = pair(kind, texts=texts)
    for number in range(3):
        tree, found = trees(fast, BINARY, at_most(MANY), seed=31 * number, **HOT)
        _, expected = trees(slow, BINARY, at_most(MANY), seed=31 * number, **HOT)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours[0] == theirs[0]
            assert ours[1] == pytest.approx(theirs[1], rel=1e-4)
        for rounds in (fast, slow):
            rounds.commit(tree, [number + 1] * samples)
    assert drafts == [samples] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_and_finished_samples(kind):
    texts = [list(range(3, 40)), [9], list(range(50, 20, -1)), [5, 6] * 7]
    fast, slow = pair(kind, texts=texts)
    for rounds in (fast, slow):
        rounds.commit(trees(rounds, BINARY, at_most(MANY), **GREEDY)[0], [1, None, 0, None])
    (_, found), (_, expected) = (trees(rounds, BINARY, at_most(MANY), **GREEDY) for rounds in (fast, slow))
    assert [tree is None for tree in found] == [False, True, False, True]
    assert [tree and tree[0] for tree in found] == [tree and tree[0] for tree in expected]


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3"])
def test_models_with_windows_caps_sinks_learned_positions_and_latent_keys(architecture):
    kind = ragged(), LanguageModelDrafter(ragged(architecture, seed=3), same_tokenizer=True)
    assert check(*pair(kind), BINARY, at_most(MANY), **HOT) > 0


@pytest.mark.parametrize("kind", ["model", "eagle"])
def test_positions_end_where_the_text_may_end(kind):
    """There are 128 positions; rows below a sample's last level have none of their own."""
    model = LanguageModelDrafter(ragged("gpt2", seed=3), same_tokenizer=True)
    case = (ragged(), model) if kind == "model" else parts(kind)
    text = [token % VOCAB for token in range(126)]
    fast, slow = pair(case, texts=[text])
    (_, found), (_, expected) = (
        trees(rounds, BINARY, at_most(MANY), **GREEDY, max_depth=[1]) for rounds in (fast, slow)
    )
    assert found[0][0] == expected[0][0]
    assert len(found[0][0]) == 3


@pytest.mark.parametrize("heat", TEMPERATURES)
@pytest.mark.parametrize("kind", ["eagle", "eagle, trimmed", "model"])
def test_nan_weights_draft_nothing(kind, heat):
    target, drafter = built(kind, "torch")
    head = drafter.model.model if kind == "model" else drafter.head
    with torch.no_grad():
        head.lm_head.weight[3] = float("nan")
    check_no_drafts(Rounds(drafter, target, TEXTS, StaticDrafts(BINARY)), **TEMPERATURES[heat])


@pytest.mark.parametrize("options", BETWEEN_LEVELS.values(), ids=BETWEEN_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_need_the_host_between_levels_are_grown_level_by_level(drafts, kind, options):
    target, drafter = parts(kind)
    rounds = Rounds(drafter, target, TEXTS, StaticDrafts(BINARY))
    tree = rounds.propose(BINARY, **{"law": LAW, **options})
    assert drafts == []
    assert tree.lengths[0] == 15


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_writes_only_its_own_rows(kind):
    """Committed rows and rows of other samples stay as they are, in any batch."""
    rounds, _ = pair(kind, texts=TEXTS[:3])
    trees(rounds, BINARY, at_most(MANY), **GREEDY)
    own = rounds.state.cache
    taken = torch.zeros(own._rows, dtype=torch.bool)
    each, first = rounds.static.each, own.dummy_start + 1
    taken[first : first + each] = True
    for slab in own._slabs.values():
        if slab.start != own.dummy_start:
            taken[slab.start + slab.length - 1 : slab.start + slab.length + each] = True  # the last one is read again
    before = [pool.clone() for pool in own.buffers()]
    trees(rounds, BINARY, at_most(MANY), **HOT)
    for pool, old in zip(own.buffers(), before, strict=True):
        assert torch.equal(pool[~taken], old[~taken])
        assert not torch.equal(pool[taken], old[taken])


# Negative controls: differences are seen


def swapped(forward):
    """Gives two siblings each other's output."""

    def feed(self, places, fed, out, depth, level, pools):
        return forward(self, places, fed, None if out is None else out.flip(1), depth, level, pools)

    return feed


def another(name, change):
    """Builds a patch that changes one entry of the tables."""

    def spoil(fill):
        def filled(self, table, *given):
            fill(self, table, *given)
            change(self.read(table)[name])

        return filled

    return DraftBucket, "fill", spoil


CONTROLS = {
    "calibration": (another("calibration", lambda factors: factors.mul_(1.3)), PLANS["dear rows"], GREEDY),
    "expectation": (another("expected", lambda children: children.mul_(0.6)), PLANS["dear rows"], GREEDY),
    "budget": (another("budget", lambda budget: budget.sub_(18)), at_most(MANY, budget=20), GREEDY),
    "committed rows": (another("committed", lambda rows: rows.clamp_(min=1).sub_(1)), at_most(MANY), GREEDY),
    "seed": (another("seeds", lambda seeds: seeds.add_(1)), at_most(MANY), HOT),
    "temperature": (another("temperature", lambda heat: heat.mul_(0.5)), at_most(MANY), HOT),
    "parents' outputs": ((DraftStep, "_feed", swapped), at_most(MANY), GREEDY),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_changed_input_would_be_seen(monkeypatch, control):
    (owner, name, spoil), plan, options = CONTROLS[control]
    monkeypatch.setattr(owner, name, spoil(getattr(owner, name)))
    with pytest.raises(AssertionError):
        check(*pair("eagle"), BINARY, plan, **options)


# Nothing asks the host; test_pretended_gpu.py counts the transfers of whole steps


def decide_by(monkeypatch, going):
    """Replaces the rule by which recorded drafts choose the nodes that get children."""
    monkeypatch.setattr(grow_level.reference, "rule", SimpleNamespace(**{**vars(reference), "going": going}))


def run_without_numbers(kind, device, mode):
    """Runs a draft of a network that has shapes but no numbers; returns the operators that are noticed."""
    bucket = DraftBucket(2, BINARY.max_depth + 1, BINARY.max_depth)
    with mode, torch.device(device):
        config = AutoConfig.for_model("llama", **ARCHITECTURES["llama"])
        target = RaggedModel(AutoModelForCausalLM.from_config(config).eval(), self_test=False, kernels="torch")
        network = ModelNetwork(target).recorded()
        if kind != "model":
            own = {"target_hidden_size": 32, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB}
            trimmed = 40 if "trimmed" in kind else VOCAB
            head = EagleHead(EagleConfig(**own, **heads, draft_vocab_size=trimmed, hidden_layers=[0, 1]))
            network = EagleNetwork(head.eval(), target)
        table = torch.zeros(bucket.size, dtype=torch.int64)
        states = torch.zeros(2 * bucket.rows if network.states else 0, network.states)
        pools = [torch.zeros(50, 2, 8) for _ in range(4)]
    steps = [DraftStep(network, BINARY, bucket, shared=shared, longest=64) for shared in (False, True)]
    with torch.no_grad(), mode, Watch(device) as seen:
        for step in steps:
            assert step(table, states, Memory(pools)).shape == (2, 2, BINARY.num_nodes)
    return seen.found


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_of_a_draft_lies_on_its_device(kind):
    """The meta device computes nothing, so tensors made elsewhere stand out."""
    assert run_without_numbers(kind, "meta", nullcontext()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_have_shapes_without_numbers(kind):
    """Fake tensors raise wherever a number is asked for."""
    assert run_without_numbers(kind, "cpu", FakeTensorMode(allow_non_fake_inputs=True)) == []


@pytest.mark.parametrize("kind", ["eagle", "model"])
def test_a_tensor_on_another_device_is_noticed(monkeypatch, kind):
    """Negative control: a tensor of the CPU."""

    def elsewhere(*given):
        return reference.going(*given) & torch.ones(2, 1, dtype=torch.bool, device="cpu")

    decide_by(monkeypatch, elsewhere)
    with pytest.raises(RuntimeError, match="Tensor on device cpu is not on the expected device meta"):
        run_without_numbers(kind, "meta", nullcontext())


# Decoders

NEVER = {"eos_token_id": None, "pad_token_id": 0}
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0, **NEVER}


def decoder(name="eagle", topology=BINARY, buckets=(16, 64), **options):
    if name == "hybrid":
        drafter = HybridDrafter(NGramDrafter(longest=3, shortest=2), trained_drafter("eagle"))
    else:
        drafter = trained_drafter(name)
    return SpeculativeDecoder(
        trained_target(), drafter, topology, **{"coupling": Coupling.shared(2), **options}, buckets=buckets
    )


def decode(static, prompts=PROMPTS, **options):
    options = {"max_new_tokens": 16, "do_sample": False, "seeds": list(range(len(prompts))), **options}
    output = static.generate(**left_padded(prompts), return_dict_in_generate=True, **options)
    return new_tokens(output.sequences, prompts, output.stats.emitted), output.stats


@pytest.mark.parametrize("name", ["eagle", "model", "hybrid"])
def test_text_is_that_of_plain_decoding(drafts, name):
    """This holds for any drafts and in any batch."""
    plain = SpeculativeDecoder(trained_target(), NoDrafter(), TreeTopology.chain(0), Coupling.shared(2))
    static, expected = decoder(name), decode(plain, **SAMPLED)[0]
    assert decode(static, **NEVER)[0] == decode(plain, **NEVER)[0]
    found, stats = decode(static, **SAMPLED)
    assert found == expected
    assert stats.tau > 1.3
    for seed, (prompt, tokens) in enumerate(zip(PROMPTS, expected, strict=True)):
        assert decode(static, [prompt], **SAMPLED, seeds=[seed])[0] == [tokens]
    assert drafts
    assert decode(static, **SAMPLED, seeds=[7, 8, 9])[0] != expected


@pytest.mark.parametrize("spoiled", [1, 5])
def test_wrong_drafts_change_no_text(monkeypatch, spoiled):
    """In lossless decoding, drafts never change the text."""
    expected, right = decode(decoder(), **SAMPLED)
    likeliest = DraftStep._likeliest

    def wrong(self, *given):
        tokens, chances = likeliest(self, *given)
        return (tokens + spoiled) % given[2].shape[1], chances  # of the outputs, which are given as logits

    monkeypatch.setattr(DraftStep, "_likeliest", wrong)
    found, stats = decode(decoder(), **SAMPLED)
    assert found == expected
    assert stats.tau < right.tau


@pytest.mark.parametrize("name", ["eagle", "model"])
def test_drafts_of_dynamic_size_equal_those_of_ordinary_steps(drafts, name):
    for decider in (NodeBudget(3), EntropyBound()):
        found, stats = decode(decoder(name, decider=decider), **SAMPLED)
        expected, other = decode(decoder(name, decider=decider, buckets=None), **SAMPLED)
        assert found == expected
        assert (stats.forwards, stats.accepted_rank) == (other.forwards, other.accepted_rank)


def test_ordinary_steps_draft_level_by_level(drafts):
    decode(decoder(buckets=None), **NEVER)
    assert drafts == []


@pytest.mark.parametrize("name", ["eagle", pytest.param("model", marks=pytest.mark.soak)])
def test_a_draft_is_one_graph(drafts, name):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    chain, settings = TreeTopology.chain(2), {**SAMPLED, "max_new_tokens": 5}
    expected, _ = decode(decoder(name, chain, buckets=None), PROMPTS[:1], **settings)
    found, _ = decode(decoder(name, chain, buckets=(8,), compile_backend="eager"), PROMPTS[:1], **settings)
    assert found == expected
    assert drafts
    assert not torch._dynamo.utils.counters["graph_break"]


# Recording, with a stand-in for the GPU


@pytest.fixture
def recorded(monkeypatch):
    return record_on_cpu(monkeypatch, "a draft")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["eagle", "model"])
@pytest.mark.parametrize("settings", [NEVER, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_recorded_once_and_replayed(drafts, recorded, name, settings):
    expected, _ = decode(decoder(name, buckets=None), **settings)
    static = as_on_a_gpu(decoder(name))
    assert decode(static, **settings)[0] == expected
    made, first = recorded.made, len(drafts)
    assert made <= 2 * 3 + 1  # for 3 or 2 samples, and 1; for all levels, 2 and 1; a cache that has grown
    assert recorded.replays == first
    assert decode(static, **settings)[0] == expected
    assert recorded.made == made, "pools stay where they are"
    assert recorded.replays == 2 * first


def test_a_draft_that_asks_the_host_cannot_be_recorded(monkeypatch, recorded):
    def refused(*_):
        raise RuntimeError("operation not permitted when stream is capturing")

    decide_by(monkeypatch, refused)
    with pytest.raises(UnsupportedModel, match=r"behind a draft of EagleHead cannot be recorded .*buckets=None"):
        decode(as_on_a_gpu(decoder()), **NEVER)
