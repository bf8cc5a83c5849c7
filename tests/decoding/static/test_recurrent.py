"""Steps of fixed shapes with recurrent layers, on a pretended GPU: texts, slots of states, transfers and launches."""

import itertools
from collections import Counter
from functools import cache

import pytest
import torch
from support.models import PROMPTS, decode, greedy_reference
from support.pretended_gpu import moved, pretended_gpu
from support.recurrent_models import recurrent, recurrent_target
from support.traffic import answers_amid_others, requests, text

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.static import bucket, recording, step
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.heads.eagle import EagleHead
from arbordraft.kernels import choice
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.states import MOST_STATES, RecurrentStates
from arbordraft.verifiers import TopTailRule

KINDS = ("lfm2", "granitemoehybrid", "qwen3_next", "mamba2")
HEADED = KINDS[:-1]  # Mamba-2's configuration has no sizes of an attention for a head
CHAIN, TREE = ad.TreeTopology.chain(3), ad.TreeTopology([-1, 0, 0, 1, 1, 2, 3])
SAMPLED = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seeds": [1, 2, 3]}
every_kind = pytest.mark.parametrize("architecture", KINDS)
each_topology = pytest.mark.parametrize("topology", [CHAIN, TREE], ids=["chain", "tree"])


@pytest.fixture(scope="module", autouse=True)
def _networks():
    """Builds all networks before the GPU is there: their weights are those of a CPU's random numbers."""
    for architecture in KINDS:
        network(architecture)
    for architecture in HEADED:
        head(architecture, gpu=True)


@cache
def network(architecture):
    return recurrent(architecture)


@cache
def head(architecture, *, gpu):
    torch.manual_seed(0)
    return EagleHead.for_target(recurrent(architecture), list(range(40)), hidden_layers=[0, 1, 2])


@cache
def on_gpu(architecture):
    """Returns a target on the pretended GPU."""
    return ad.RaggedModel(moved(network(architecture)), kernels="torch", self_test=False)


@cache
def drafter_of_head(architecture, *, gpu):
    """Returns a drafter whose drafts and their verification are one run."""
    target, own = on_gpu(architecture) if gpu else recurrent_target(architecture), head(architecture, gpu=gpu)
    return ad.EagleDrafter(moved(own) if gpu else own, target)


def drafter(name, architecture, *, gpu):
    if name == "lookups":
        return ad.NGramDrafter(longest=3, shortest=1)
    if name == "head":
        return drafter_of_head(architecture, gpu=gpu)
    return ad.LanguageModelDrafter(on_gpu(architecture) if gpu else recurrent_target(architecture))


def made(architecture, name, topology, coupling=None, *, gpu, buckets=(8, 32)):
    target = on_gpu(architecture) if gpu else recurrent_target(architecture)
    return ad.SpeculativeDecoder(
        target, drafter(name, architecture, gpu=gpu), topology, coupling, buckets=buckets if gpu else None
    )


# Texts


@each_topology
@every_kind
def test_greedy_texts_are_those_of_transformers(architecture, topology):
    """A ragged batch, with a prompt of one token, and its samples alone; a copy of the target drafts."""
    expected = greedy_reference(recurrent(architecture), PROMPTS, max_new_tokens=16, eos_token_id=None)
    with pretended_gpu():
        choice.ran.clear()
        decoder = made(architecture, "model", topology, gpu=True)
        found, stats = decode(decoder, max_new_tokens=16)
        assert found == expected
        assert choice.ran["static_step/triton"] > 2
        assert sum(stats.accepted.values()) > 0.8 * sum(stats.tried.values()) / topology.width
        for prompt, tokens in zip(PROMPTS, expected, strict=True):
            assert decode(decoder, [prompt], max_new_tokens=16)[0] == [tokens]


LIFTED = ad.Lifted(ad.RecursiveRejection())
VERIFIERS = {
    "greedy": (CHAIN, None, {}),
    "shared noise": (TREE, None, SAMPLED),
    "shared noise, truncated": (TREE, None, SAMPLED | {"top_k": 20, "min_p": 0.01}),
    "lifted chain": (CHAIN, ad.Coupling(ad.IID(1), LIFTED), SAMPLED),
    "lifted tree": (TREE, ad.Coupling(ad.TopTail(1, 1), LIFTED), SAMPLED),
    "without replacement": (TREE, ad.Coupling(ad.WithoutReplacement(2), LIFTED), SAMPLED),
    "top-down": (TREE, ad.Coupling(ad.IID(2), ad.TopDown(ad.RecursiveRejection())), SAMPLED),
    "TopTail": (TREE, ad.Coupling(ad.TopTail(1, 1), ad.TopDown(TopTailRule())), SAMPLED),
}


CASES = [
    (kind, name, verifier)
    for kind, name, (verifier, (_, coupling, _)) in itertools.product(
        KINDS, ("lookups", "model", "head"), VERIFIERS.items()
    )
    if (coupling is None if name == "lookups" else name == "model" or kind in HEADED)  # lookups draw nothing
]


@pytest.mark.one_in(3)  # each verifier runs with drafts of a model and of a head
@pytest.mark.parametrize(("architecture", "name", "verifier"), CASES)
def test_texts_are_those_of_ordinary_steps(architecture, name, verifier):
    topology, coupling, request = VERIFIERS[verifier]
    expected, counts = decode(made(architecture, name, topology, coupling, gpu=False), max_new_tokens=14, **request)
    with pretended_gpu():
        choice.ran.clear()
        found, stats = decode(made(architecture, name, topology, coupling, gpu=True), max_new_tokens=14, **request)
        assert choice.ran["static_step/triton"] > 2
    assert found == expected
    assert (stats.accepted, stats.tried) == (counts.accepted, counts.tried)


@every_kind
def test_a_step_makes_one_upload_and_one_download(architecture):
    drafters = ("lookups", "head") if architecture in HEADED else ("lookups",)
    for name, request in itertools.product(drafters, ({}, SAMPLED)):
        seen = []
        with pretended_gpu() as counts:
            decoder = made(architecture, name, TREE, gpu=True, buckets=(32,))
            decoder.on_step = lambda *_, counts=counts, seen=seen: seen.append(Counter(counts.crossings))
            decode(decoder, **request)
        found = seen[2] - seen[1]
        assert sorted(kind for kind, _ in found.elements()) == ["download", "upload"], found


# Negative controls


def differs(architecture, name="model", topology=TREE):
    expected = greedy_reference(recurrent(architecture), PROMPTS, max_new_tokens=16, eos_token_id=None)
    with pretended_gpu():
        return decode(made(architecture, name, topology, gpu=True), max_new_tokens=16)[0] != expected


@every_kind
def test_states_in_wrong_slots_would_be_seen(monkeypatch, architecture):
    """Each sample gets the state of another one."""
    places = StaticCache.state_places

    def wrong(self, batch):
        found = places(self, batch)
        return found._replace(ahead=[*found.ahead[1:], found.ahead[0]])

    monkeypatch.setattr(StaticCache, "state_places", wrong)
    assert differs(architecture)


@every_kind
def test_a_wrong_parent_would_be_seen(monkeypatch, architecture):
    """Rows below the first level follow their grandparents."""

    class Wrong(bucket.Paths):
        def __init__(self, parent, rows, states):
            super().__init__(
                [parent[above] if above >= 0 and parent[above] >= 0 else above for above in parent], rows, states
            )

    monkeypatch.setattr(bucket, "Paths", Wrong)
    assert differs(architecture)


@every_kind
def test_a_path_that_lacks_its_end_would_be_seen(monkeypatch, architecture):
    advance = step.StepStates.advance

    def wrong(self, path):
        last = torch.arange(path.shape[1], device=path.device) >= (path >= 0).sum(dim=1, keepdim=True) - 1
        last[:, 0] = False
        advance(self, path.masked_fill(last, -1))

    monkeypatch.setattr(step.StepStates, "advance", wrong)
    assert differs(architecture)


# Samples that come and go


def alone(architecture, request):
    """Returns the texts of a request by ordinary steps on a CPU."""
    engine = Engine(made(architecture, "model", TREE, gpu=False), max_cache_tokens=4000)
    return [answer.tokens for answer in engine.submit(request).result()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("buckets", [(8, 32), "auto"], ids=["recorded", "automatic"])
@every_kind
def test_answers_are_those_of_a_request_alone(architecture, buckets, reuse):
    """Late joins, chunked prompts and cancelled requests; with automatic steps, some ordinary ones in between."""
    kinds = [{}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}]
    kinds += [{"repetition_penalty": 1.3}] * (buckets == "auto")
    asked = requests(6, kinds)
    expected = [alone(architecture, one) for one in asked]
    with pretended_gpu():
        choice.ran.clear()
        decoder = made(architecture, "model", TREE, gpu=True, buckets=buckets)
        engine = Engine(decoder, max_cache_tokens=4000, max_samples=4, max_rows=16, reuse=reuse)
        assert answers_amid_others(engine, asked) == expected
        assert choice.ran["static_step/triton"] > 4


def turns(architecture):
    """Yields chats of two turns: how many tokens of the first were not copied, the second's text, and its request.

    The first answers end at various tokens of the same text.
    """
    prompt = text(40, 1)
    (whole,) = greedy_reference(network_of_cpu(architecture), [prompt], max_new_tokens=12, eos_token_id=None)
    with pretended_gpu():
        engine = Engine(made(architecture, "model", CHAIN, gpu=True), max_cache_tokens=4000, reuse=True)
        for place in range(5, 12):
            end = whole[place]
            (answer,) = engine.submit(Request(prompt=prompt, max_new_tokens=12, ends=(end,))).result()
            first = [*prompt, *answer.tokens, *([end] if answer.tokens[-1] != end else [])]
            turn = Request(prompt=[*first, *text(8, place)], max_new_tokens=8, ends=())
            (found,) = engine.submit(turn).result()
            yield len(first) - 1 - found.stats.copied, found.tokens, turn


@cache
def network_of_cpu(architecture):
    return recurrent(architecture)


def right(architecture, turn):
    options = {"max_new_tokens": turn.max_new_tokens, "eos_token_id": None}
    return greedy_reference(network_of_cpu(architecture), [turn.prompt], **options)[0]


@every_kind
def test_the_next_turn_of_a_chat_begins_at_a_state_that_is_there(architecture):
    """An answer may end among accepted tokens; then no state is there after its last token."""
    found = list(turns(architecture))
    assert {missing for missing, _, _ in found} > {0}  # some end where a state is
    assert max(missing for missing, _, _ in found) <= CHAIN.num_nodes
    assert [tokens for _, tokens, _ in found] == [right(architecture, turn) for _, _, turn in found]


@every_kind
def test_a_state_behind_the_end_of_an_answer_would_be_seen(monkeypatch, architecture):
    """Negative control: the state after all accepted tokens stands for that after the answer."""

    def wrong(self, handle, rows):
        sample = self._samples[handle]
        sample.slot, sample.ahead, sample.sure = sample.ahead, sample.slot, 0

    monkeypatch.setattr(RecurrentStates, "step_ahead", wrong)
    found = list(turns(architecture))
    assert {missing for missing, _, _ in found} == {0}
    assert [tokens for _, tokens, _ in found] != [right(architecture, turn) for _, _, turn in found]


@every_kind
def test_a_step_whose_recording_fails_is_repeated_without_it(monkeypatch, architecture):
    """Samples of a first kind have run on the device; their states are those before until the step is committed."""
    prompts = [text(9, 1), text(5, 2)]
    asked = [
        Request(prompt=prompts[0], max_new_tokens=12),
        Request(prompt=prompts[1], max_new_tokens=12, temperature=1.0, top_k=7, seed=1),
    ]
    expected, call, ran = [alone(architecture, one) for one in asked], recording.Recording.__call__, []

    def failing(self, *given):
        if self.step.kind.processors:
            raise UnsupportedModel("a step cannot be recorded")
        ran.append(self)
        return call(self, *given)

    monkeypatch.setattr(recording.Recording, "__call__", failing)
    with pretended_gpu():
        engine = Engine(made(architecture, "lookups", TREE, gpu=True, buckets="auto"), max_cache_tokens=4000)
        streams = [engine.submit(one) for one in asked]
        engine.run()
        assert [[answer.tokens for answer in stream.answers] for stream in streams] == expected
    assert len(ran) == 1


# Memory


@every_kind
def test_memory_of_the_greatest_number_of_samples_keeps_its_place(architecture):
    """Samples that join and leave move between slots; steps of one shape are recorded once."""
    with pretended_gpu():
        decoder = made(architecture, "lookups", CHAIN, gpu=True, buckets=(32,))
        engine, seen, made_anew = Engine(decoder, max_cache_tokens=2000, max_samples=4, max_rows=64), set(), Counter()
        record = recording.Recording.record

        def counted(self, memory):
            made_anew[self] += 1
            record(self, memory)

        decoder.on_step = lambda state, *_: seen.add(state.cache.memory().addresses)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(recording.Recording, "record", counted)
            streams = [engine.submit(Request(prompt=text(20, seed), max_new_tokens=12)) for seed in range(9)]
            engine.run()
        assert all(stream.answers for stream in streams)
        states = engine._scheduler.state.cache._states
        assert states._slots == 5 * MOST_STATES
    assert {len(memory) for memory in seen} == {len(next(iter(seen)))}
    assert len({memory[-1] for memory in seen}) == 1
    assert set(made_anew.values()) == {1}


def test_more_samples_move_the_states_and_steps_are_recorded_again():
    with pretended_gpu():
        decoder = made("mamba2", "lookups", CHAIN, gpu=True, buckets=(32,))
        expected = [decode(decoder, [prompt])[0][0] for prompt in PROMPTS]
        before = decoder.static._idle.memory().addresses
        assert decode(decoder)[0] == expected
        assert decoder.static._idle.memory().addresses != before


def test_convolutions_of_several_widths_are_refused():
    cache = StaticCache(None, 4)
    cache._states = RecurrentStates()
    for width in (3, 4):
        cache._states.windows((0, width), torch.zeros(1, 5), width)
    with pytest.raises(UnsupportedModel, match=r"need convolutions of one width, not of \[3, 4\]"):
        cache.layout()


# Launches


def operators(architecture, layers, kernels="torch", dtype=torch.float32):
    """Counts the operators of a step of a model with this many recurrent layers alone."""
    sizes = {"num_hidden_layers": layers}
    if architecture != "mamba2":
        sizes["layer_types"] = ["conv" if architecture == "lfm2" else "linear_attention"] * layers
    made_here, seen = recurrent(architecture, **sizes, **DENSE.get(architecture, {})).to(dtype), []
    with pytest.MonkeyPatch.context() as patch:  # recognition needs torch's own tensors
        patch.setattr(choice, "interpreted", lambda: kernels == "triton")
        target = ad.RaggedModel(made_here, kernels=kernels, self_test=False)
    with pretended_gpu() as counts:
        moved(made_here)
        decoder = ad.SpeculativeDecoder(target, ad.NGramDrafter(), TREE, buckets=(32,))
        decoder.on_step = lambda *_: seen.append(Counter(counts.operators))
        decode(decoder)
    return seen[2] - seen[1]


DENSE = {"granitemoehybrid": {"num_local_experts": 0}}


@pytest.mark.parametrize(("architecture", "allowed"), [("mamba2", 8), ("lfm2", 2)])
def test_states_of_all_layers_advance_in_few_launches(architecture, allowed):
    """Windows: one launch behind one that joins the layers' inputs. States: one behind five, one for each input."""
    for layers in (2, 4):
        found = operators(architecture, layers)
        assert found["advance_windows"] == 1
        assert found["advance_states"] == (architecture == "mamba2")
        joined = found["stack"] - 1  # one joins the step's results
        assert 0 < joined + found["advance_windows"] + found["advance_states"] <= allowed


@pytest.mark.parametrize(("architecture", "allowed"), [("mamba2", 20), ("lfm2", 14), ("granitemoehybrid", 27)])
def test_a_recurrent_layer_takes_few_launches(architecture, allowed):
    """In bfloat16, MLPs included: linears, one convolution, one scan, norms, and the functions of the model itself."""
    few, many = (operators(architecture, layers, "triton", torch.bfloat16) for layers in (2, 4))
    layer = many - few
    assert layer["tree_convolution"] == 2
    assert layer["tree_scan"] + layer["tree_selective"] == (0 if architecture == "lfm2" else 2)
    assert layer.total() <= 2 * allowed, layer
