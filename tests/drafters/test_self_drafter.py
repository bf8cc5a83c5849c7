"""A target that drafts for itself with weights of fewer bits: its own tokens, on its own cache."""

import warnings
from dataclasses import replace

import pytest
import torch
from support.constrained import decoded
from support.models import PROMPTS, decode, fusable, tiny, varied
from support.recurrent_models import FUSED, ROW_WISE, recurrent
from support.spellers import SPEAKER_VOCAB, speller_tokenizer
from transformers import LogitsProcessorList

import arbordraft as ad
from arbordraft import drafter_names
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.drafter_names import choose_drafter, drafter_named
from arbordraft.drafters import model_drafter, self_drafter
from arbordraft.heads.eagle import EagleHead
from arbordraft.kernels import choice
from arbordraft.kernels.decoder_layers import Matrix
from arbordraft.kernels.draft_tree import DraftRun
from arbordraft.kernels.grouped_linear import restore_panels, round_to_panels
from arbordraft.kernels.prepacked_linear import pack
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.states import RecurrentStates

pytestmark = pytest.mark.usefixtures("kernels")

TREE, CHAIN = ad.TreeTopology.from_k_config((2, 2, 1)), ad.TreeTopology.chain(4)
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1, 2, 3]}
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def target(dtype=torch.float32, architecture="llama", **options):
    return ad.RaggedModel(varied(architecture, **options).to(dtype), kernels="native", self_test=False)


def decoder(of, weights="int8", topology=CHAIN, coupling=None, **options):
    return ad.SpeculativeDecoder(of, ad.SelfDrafter(of, weights), topology, coupling, **options)


@each_type
@pytest.mark.parametrize("weights", self_drafter.BITS)
@pytest.mark.parametrize("request_", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_tokens_are_the_targets_own(request_, weights, dtype):
    of = target(dtype)
    expected, _ = decode(ad.builders.plain(of), **request_)
    for topology in (CHAIN, TREE):
        made = decoder(of, weights, topology)
        found, stats = decode(made, **request_)
        assert found == expected
        assert made.drafter._network._native[1] is not None  # in one call
        assert sum(stats.accepted.values()) > 0.4 * sum(stats.tried.values()) > 0


def test_weights_of_more_bits_are_right_more_often():
    of, rates = target(), []
    for weights in ("int4", "int8"):
        _, stats = decode(decoder(of, weights), max_new_tokens=40)
        rates.append(sum(stats.accepted.values()) / sum(stats.tried.values()))
    assert rates[0] < rates[1] > 0.9


@pytest.mark.parametrize("request_", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_one_call_drafts_the_same_trees_as_level_by_level(monkeypatch, request_):
    """This holds in float32; in bfloat16, one call rounds less in between."""
    of, drafted = target(), []
    for whole in (True, False):
        if not whole:
            monkeypatch.setattr(self_drafter, "native_model", lambda *_, **__: None)
        made, seen = decoder(of, topology=TREE), []
        made.on_step = lambda state, tree, verdict, seen=seen: seen.append((tree.node.tolist(), tree.token.tolist()))
        decode(made, **request_)
        assert (made.drafter._network._native[1] is not None) == whole
        drafted.append(seen)
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3", "gpt2", "mixtral"])
def test_other_architectures(architecture):
    """They have windows, norms of heads, learned positions and experts, which one call may not support."""
    of = target(architecture=architecture)
    expected, _ = decode(ad.builders.plain(of))
    assert decode(decoder(of))[0] == expected


@pytest.mark.parametrize(
    "coupling",
    [
        ad.Coupling(ad.IID(1), ad.TopDown(ad.RecursiveRejection())),
        ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection())),
        ad.Coupling(ad.TopTail(1, 1), ad.TopDown(ad.SpecHub())),
    ],
    ids=["chain", "block", "SpecHub"],
)
def test_drafts_may_be_drawn_at_random(coupling):
    of = target()
    topology = CHAIN if coupling.law.k == 1 else TREE
    _, stats = decode(decoder(of, "int4", topology, coupling), **SAMPLED, max_new_tokens=20)
    assert sum(stats.accepted.values()) > 0.4 * sum(stats.tried.values()) > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_costs_let_drafts_of_any_probability_go_on(monkeypatch, temperature):
    """Models of random weights give low probabilities, and yet target and drafter agree."""
    of, costs = target(), StepCosts(CostTable((1, 16), (1.0, 1.2)), CostTable((1, 16), (0.3, 0.3)))
    request = SAMPLED | {"temperature": temperature} if temperature else {}
    taus = []
    for informative in (False, True):  # True, as for other drafters, is the negative control
        monkeypatch.setattr(ad.SelfDrafter, "informative", informative)
        made = decoder(of, topology=ad.TreeTopology.chain(6), decider=ad.CostAware(costs))
        _, stats = decode(made, **request, max_new_tokens=40)
        taus.append(stats.tau)
    assert taus[0] > 3 > taus[1]


def test_the_drafter_holds_nothing_but_its_weights():
    of = target()
    made, rows = decoder(of), []

    def watch(state, tree, verdict):
        assert state.drafts.cache is state.cache
        assert state.cache.weights is of._prepared
        rows.append([slab.tree_positions for slab in state.cache._slabs.values()])

    made.on_step = watch
    decode(made)
    assert rows
    own = {parameter.data_ptr() for parameter in of.model.parameters()}
    assert {parameter.data_ptr() for parameter in made.drafter.parameters()} == own
    assert made.drafter.model.prepacking.nbytes < 0.7 * of.prepacking.nbytes


def test_rows_that_the_drafter_leaves_in_the_cache_would_be_seen(monkeypatch):
    """Negative control: rows that the drafter commits differ from the target's rows, and change the text."""
    of = target(torch.bfloat16)
    expected, _ = decode(ad.builders.plain(of), max_new_tokens=30)
    feed = model_drafter.feed
    monkeypatch.setattr(model_drafter, "feed", lambda *given, commit: feed(*given, commit=True))
    found, _ = decode(decoder(of, "int4"), max_new_tokens=30)
    assert found != expected


@pytest.mark.parametrize("reuse", [True, False])
def test_requests_come_and_go(reuse):
    of = target()
    made = decoder(of, topology=TREE)
    system = [3 + place % 30 for place in range(40)]
    asked = [
        Request(prompt=[*system, *PROMPTS[n % 3]], max_new_tokens=4 + n, seed=n, temperature=n % 2) for n in range(7)
    ]
    expected = [[answer.tokens for answer in Engine(made, max_cache_tokens=900).submit(one).result()] for one in asked]
    engine = Engine(made, max_cache_tokens=900, max_samples=3, max_rows=16, reuse=reuse)
    streams = []
    for request in asked:
        streams.append(engine.submit(request))
        engine.step()
    engine.run()
    assert [[answer.tokens for answer in stream.answers] for stream in streams] == expected


def test_processors_that_look_at_the_text():
    class Odd:
        """Allows only odd tokens after even ones, and only even tokens after odd ones."""

        def __call__(self, input_ids, scores):
            forbidden = torch.arange(scores.shape[1])[None] % 2 == input_ids[:, -1:] % 2
            return scores.masked_fill(forbidden, float("-inf"))

    of, processors = target(), LogitsProcessorList([Odd()])
    expected, _ = decode(ad.builders.plain(of), logits_processor=processors)
    found, stats = decode(decoder(of), logits_processor=processors)
    assert found == expected
    assert sum(stats.accepted.values()) > 0


def test_it_drafts_after_lookups():
    of = target()
    hybrid = ad.HybridDrafter(ad.NGramDrafter(), ad.SelfDrafter(of, "int8"))
    expected, _ = decode(ad.builders.plain(of), max_new_tokens=30)
    found, stats = decode(ad.SpeculativeDecoder(of, hybrid, CHAIN), max_new_tokens=30)
    assert found == expected
    assert sum(stats.accepted.values()) > 0


def test_new_weights_are_packed_anew():
    of = target()
    made = decoder(of)
    decode(made)
    packed = made.drafter.model.prepacking
    of.model.model.layers[0].mlp.up_proj.weight.data.mul_(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found, stats = decode(made)
        expected, _ = decode(ad.builders.plain(of))
    assert found == expected
    assert made.drafter.model.prepacking is not packed
    assert sum(stats.accepted.values()) > 0.8 * sum(stats.tried.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_drafts_under_grammars(temperature):
    model = fusable(sharpness=3.0, vocab_size=SPEAKER_VOCAB, max_position_embeddings=512)
    of = ad.RaggedModel(model, speller_tokenizer(), kernels="native", self_test=False)
    expected, _ = decoded(ad.builders.plain(of), temperature)
    found, stats = decoded(decoder(of), temperature)
    assert found == expected
    assert sum(stats.accepted.values()) > 0.5 * sum(stats.tried.values()) > 0


@each_type
def test_the_exact_head_ranks_the_screened_tokens(dtype):
    """Even if a bad copy of the head screens the tokens, the exact head ranks those that pass."""
    of = target(dtype)
    drafter = ad.SelfDrafter(of, "int8")
    exact = drafter._network.native
    assert exact.weights.exact.weight.data_ptr() == of.network().get_output_embeddings().prepacked[0].data_ptr()
    noise = torch.randn(of.vocab_size, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    screen = Matrix(*pack(of.model.lm_head.weight.detach().float() + noise, "int4"))
    rates = []
    for weights in (replace(exact.weights, head=screen), replace(exact.weights, head=screen, exact=None)):
        made = ad.SpeculativeDecoder(of, drafter, CHAIN)
        drafter._network._native = drafter._network._native[0], DraftRun(weights)
        _, stats = decode(made, max_new_tokens=40)
        rates.append(sum(stats.accepted.values()) / sum(stats.tried.values()))
    assert rates[0] > rates[1] + 0.02


def test_the_weights_that_gain_most_are_taken():
    """Weights of 8 bits agree more often; the gain of each decides which are taken."""
    of, found = target(), {}
    for weights in self_drafter.BITS:
        drafter = ad.SelfDrafter(of, weights)._compared()
        found[weights] = drafter.acceptance[0], drafter.gain(of)
        assert sum(drafter.acceptance) <= 1
        assert drafter.default_topology().num_nodes > 1  # fitted to this acceptance
    assert found["int4"][0] < found["int8"][0] <= 1
    best = max(found, key=lambda weights: found[weights][1])
    taken = ad.SelfDrafter.fitted(of)
    assert (taken.weights, taken.acceptance[0]) == (best, found[best][0])


def test_the_gain_follows_from_agreement_and_effort(monkeypatch):
    drafter = ad.SelfDrafter(target())
    gains = []
    for agreed, effort in ((1.0, 0.25), (0.9, 0.25), (0.9, 0.5), (0.3, 0.9)):
        drafter.acceptance = (agreed, 0.0)
        monkeypatch.setattr(drafter, "effort", lambda target, effort=effort: effort)
        gains.append(drafter.gain(drafter.target))
    assert gains[0] == pytest.approx(13 / (1.1 + 12 * 0.25))
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1


def test_auto_takes_it_where_it_pays(monkeypatch, caplog):
    caplog.set_level("INFO", logger="arbordraft")
    of = target()
    assert isinstance(ad.load(of, costs=None).drafter, ad.NGramDrafter)
    assert "too small" in caplog.text
    monkeypatch.setattr(drafter_names, "_LARGE", 0)
    pays = ad.load(of, costs=None).drafter
    assert isinstance(pays, ad.HybridDrafter)
    assert (repr(pays.first), type(pays.otherwise)) == ("NGramDrafter(longest=4, shortest=2)", ad.SelfDrafter)
    assert "the model itself: with" in caplog.text
    assert ad.load(of).drafter.first.shortest == 1  # the decider drops lookups that do not pay
    monkeypatch.setattr(drafter_names, "_MIN_SPEEDUP", 99)
    assert isinstance(ad.load(of, costs=None).drafter, ad.NGramDrafter)
    assert "would bring less" in caplog.text
    monkeypatch.setattr(drafter_names, "available_memory", lambda: 0)
    assert "needs memory, of which 0.0 GiB are free" in choose_drafter(of)[1]
    assert "know no weights of fewer bits" in choose_drafter(ad.RaggedModel(tiny(), kernels="torch"))[1]


def test_auto_copies_no_weights_of_few_bits(monkeypatch):
    monkeypatch.setattr(drafter_names, "_LARGE", 0)
    model, chosen = target().model, {}
    for weights in ("int4", "int8"):
        chosen[weights] = choose_drafter(ad.RaggedModel(model, kernels="native", weights=weights))
    assert isinstance(chosen["int4"][0], ad.NGramDrafter)
    assert "as its weights have 4." in chosen["int4"][1] or "as its weights have 5." in chosen["int4"][1]
    assert "bits each" not in chosen["int8"][1]


@pytest.mark.parametrize(("acceptance", "taken"), [(0.99, ad.EagleDrafter), (0.2, ad.HybridDrafter)])
def test_auto_takes_a_trained_head_unless_it_gains_less(monkeypatch, tmp_path, acceptance, taken):
    of = target()
    head = EagleHead.for_target(of.model, range(of.vocab_size), hidden_layers=[0, 1, 2])
    head.config.acceptance = [acceptance, 0.01]
    head.save_pretrained(tmp_path / "head")
    monkeypatch.setattr(drafter_names, "trained_for", lambda target: tmp_path / "head")
    monkeypatch.setattr(ad.EagleDrafter, "effort", lambda *_: 0.05)  # as with a target of common size
    assert isinstance(choose_drafter(of)[0], ad.EagleDrafter)  # too small a target to try anything else
    monkeypatch.setattr(drafter_names, "_LARGE", 0)
    assert isinstance(choose_drafter(of)[0], taken)


def test_names_select_the_weights():
    of = target()
    assert repr(drafter_named("self:int8", of)) == "SelfDrafter(weights='int8')"
    assert drafter_named("self", of).weights in self_drafter.BITS
    fitted = ad.builders.cost_aware(of, ad.SelfDrafter(of), costs=CostTable((1, 8), (1.0, 1.1)))
    assert fitted.topology.max_depth == 12
    loaded = ad.load(of, "self:int4", costs=None)
    assert loaded.topology.max_depth == loaded.topology.num_nodes - 1 == 12


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: ad.SelfDrafter(target(), "int2"), ValueError, "int4 or int8 weights, got 'int2'"),
        (lambda: drafter_named("self:int3", target()), ValueError, "got 'int3'"),
        (lambda: drafter_named("self:", target()), ValueError, "int4 or int8 weights, got ''"),
        (lambda: ad.SelfDrafter(fusable()), TypeError, "wrap the model"),
        (
            lambda: ad.SelfDrafter(ad.RaggedModel(tiny(), kernels="torch")),
            ValueError,
            "native kernels on a CPU, and by Triton's on a GPU; this one has kernels='torch'",
        ),
        (lambda: ad.SpeculativeDecoder(target(), ad.SelfDrafter(target()), CHAIN), ValueError, "the target that it"),
    ],
)
def test_invalid_arguments_are_refused(make, error, match):
    with pytest.raises(error, match=match):
        make()


# On a GPU, here with the references of its kernels


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes targets that Triton would run on a GPU; decoding runs the references."""

    def made(architecture="llama", weights=None, **options):
        with monkeypatch.context() as patch:
            patch.setattr(choice, "interpreted", lambda: True)
            model = recurrent(architecture) if architecture in ROW_WISE else varied(architecture, **options)
            return ad.RaggedModel(model, kernels="triton", weights=weights, self_test=weights is not None)

    return made


@pytest.fixture
def copied(monkeypatch):
    """Makes drafters of such targets."""

    def made(of, weights="int4"):
        with monkeypatch.context() as patch:
            patch.setattr(choice, "interpreted", lambda: True)
            return ad.SelfDrafter(of, weights)

    return made


@pytest.mark.parametrize("buckets", [None, (8, 32)], ids=["eager", "recorded"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "mistral"])
def test_on_a_gpu_the_tokens_are_the_targets_own(on_gpu, copied, architecture, buckets):
    of = on_gpu(architecture)
    drafter = copied(of)
    assert 0.15 < drafter.effort(of) < 0.3  # bytes of float32
    for request in ({}, SAMPLED):
        expected, _ = decode(ad.builders.plain(of), **request)
        for topology in (CHAIN, TREE):
            found, stats = decode(ad.SpeculativeDecoder(of, drafter, topology, buckets=buckets), **request)
            assert found == expected
            assert sum(stats.accepted.values()) > 0.3 * sum(stats.tried.values()) > 0


def test_on_a_gpu_drafts_may_be_drawn_at_random(on_gpu, copied):
    of = on_gpu()
    coupling = ad.Coupling(ad.IID(1), ad.Lifted(ad.RecursiveRejection()))
    made = ad.SpeculativeDecoder(of, copied(of), CHAIN, coupling, buckets=(8, 32))
    _, stats = decode(made, **SAMPLED, max_new_tokens=20)
    assert sum(stats.accepted.values()) > 0.4 * sum(stats.tried.values()) > 0


def test_on_a_gpu_new_weights_are_copied_anew(on_gpu, copied, monkeypatch):
    of = on_gpu()
    made = ad.SpeculativeDecoder(of, copied(of), CHAIN, buckets=(8, 32))
    decode(made)
    before = made.drafter.model.copies
    of.model.model.layers[0].mlp.up_proj.weight.data.mul_(3)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "interpreted", lambda: True)
        with pytest.warns(UserWarning, match="prepacking them again"):
            made.drafter.open(RaggedKVCache())
    found, stats = decode(made)
    assert found == decode(ad.builders.plain(of))[0]
    assert made.drafter.model.copies is not before
    assert sum(stats.accepted.values()) > 0.4 * sum(stats.tried.values())


def test_on_a_gpu_a_target_may_have_four_bits_itself(on_gpu):
    """Its logits are those of the restored weights, up to rounding."""
    of = on_gpu(weights="int4")
    assert of.chosen.endswith("linears in 4 bits")
    exact = varied("llama")
    for module in exact.modules():
        if isinstance(module, torch.nn.Linear):
            panels = round_to_panels(module.weight)
            module.weight.data = restore_panels(panels, "INT4", module.out_features, module.in_features)
    logits = []
    for each in (of, ad.RaggedModel(exact, kernels="torch"), on_gpu()):
        cache = RaggedKVCache()
        batch = cache.lay_out([cache.open(8)], [range(8)])
        logits.append(each(torch.arange(3, 11), batch, cache))
    torch.testing.assert_close(logits[0], logits[1])
    assert (logits[0] - logits[2]).abs().max() > 1e-2  # negative control


@pytest.mark.parametrize(
    ("architecture", "match"),
    [("mixtral", "experts"), ("gpt2", "LayerNorm"), ("lfm2", "conv")],
)
def test_on_a_gpu_other_models_are_refused_by_name(on_gpu, copied, architecture, match):
    with pytest.raises(ad.UnsupportedModel, match=f"weights='int4' on a GPU needs kernels .*{match}"):
        copied(on_gpu(architecture))


def test_on_a_gpu_other_weights_are_refused(on_gpu, copied, monkeypatch):
    of = on_gpu()
    with pytest.raises(ValueError, match="on a GPU a target drafts for itself with int4 weights, got 'int8'"):
        copied(of, "int8")
    monkeypatch.setattr(choice, "interpreted", lambda: True)
    with pytest.raises(ValueError, match="no row-invariant products on a GPU"):
        ad.RaggedModel(of.model, kernels="triton", weights="int4", row_invariant=True)
    with pytest.raises(ValueError, match="int8 weights need the native kernels"):
        ad.RaggedModel(of.model, kernels="triton", weights="int8")
    assert "never timed on a GPU" in choose_drafter(of)[1]


# Recurrent targets


def states_by_length(made, **request):
    """Returns the tokens of a decode, and the bytes of every sample's states by sample and length."""
    found = {}

    def watch(state, tree, verdict):
        memory = state.cache._states
        for sample in filter(None, state.samples):
            slot = memory._samples[sample.handle].slot
            bits = b"".join(
                pools[:, slot].contiguous().view(torch.uint8).numpy().tobytes() for pools in memory._stacks()
            )
            found[sample.number, state.cache.length(sample.handle)] = bits

    made.on_step = watch
    return decode(made, max_new_tokens=20, **request)[0], found


@pytest.fixture(scope="module", params=["lfm2", "mamba2", "granitemoehybrid", "qwen3_5_text", "falcon_h1"])
def recurrent_target(request):
    model = recurrent(request.param, **FUSED[request.param]).to(torch.bfloat16)
    return ad.RaggedModel(model, kernels="native", row_invariant=True)


@pytest.mark.parametrize("topology", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("request_", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_states_of_the_target_keep_their_bits(recurrent_target, request_, topology):
    expected, plain = states_by_length(ad.builders.plain(recurrent_target), **request_)
    made = decoder(recurrent_target, "int4", topology, ad.Coupling.shared(2))
    found, states = states_by_length(made, **request_)
    assert found == expected
    assert made.drafter._network._native[1] is not None  # in one call
    assert len(states) > 9
    assert len(set(plain.values())) > 50
    assert all(plain[place] == bits for place, bits in states.items())


def test_states_that_the_drafter_computed_would_be_seen(recurrent_target, monkeypatch):
    """Negative control: dropped drafts leave the state after the root, which the drafter computed ahead."""
    _, plain = states_by_length(ad.builders.plain(recurrent_target))
    commit = RecurrentStates.commit

    def wrong(self, kept, lengths):
        for sample in (self._samples[handle] for handle, rows in kept.items() if not rows):
            if sample.ahead is not None:
                sample.slot, sample.ahead = sample.ahead, sample.slot
        commit(self, kept, lengths)

    monkeypatch.setattr(RecurrentStates, "commit", wrong)
    _, states = states_by_length(decoder(recurrent_target, "int4"))
    assert any(plain.get(place) != bits for place, bits in states.items())
