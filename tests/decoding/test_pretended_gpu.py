"""Whole decoders on a pretended GPU: tokens and counts as on the CPU, and few transfers and launches per step."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from support import behaviour
from support.launches import launches
from support.models import left_padded, tiny
from support.pretended_gpu import DEVICE, OnDevice, moved, pretended_gpu

from arbordraft import (
    IID,
    Coupling,
    EagleDrafter,
    LanguageModelDrafter,
    Lifted,
    NGramDrafter,
    NoDrafter,
    RaggedModel,
    RecursiveRejection,
    SelfDrafter,
    SpecHub,
    SpeculativeDecoder,
    TopDown,
    TopTail,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.decoding.static import draft, step
from arbordraft.drafters.eagle import EagleNetwork
from arbordraft.drafters.model_drafter import ModelDrafter, TargetCacheDrafter
from arbordraft.heads.eagle import EagleHead
from arbordraft.kernels import choice
from arbordraft.sampling import noise
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.weight_watch import WeightWatch
from arbordraft.verifiers import TopTailRule

PROMPTS = [[5, 9, 7, 5, 9, 7, 5, 9], [8, 3, 8, 3, 8, 3, 8, 3]]
TREE, CHAIN = TreeTopology.from_k_config((2, 2, 1)), TreeTopology.chain(3)
SHARED = {"do_sample": True, "temperature": 0.9, "top_k": 0, "seeds": [1, 2]}


# Recorded configurations


def covering():
    """Chooses a few configurations that cover all drafters, couplings, deciders, steps, settings and modes."""
    axes = ("drafter", "coupling", "decider", "step", "settings", "mode")
    names = [name for name in behaviour.tenth() if isinstance(behaviour.everything()[name], behaviour.Configuration)]
    values = {name: {(axis, getattr(behaviour.everything()[name], axis)) for axis in axes} for name in names}
    missing, chosen = set().union(*values.values()), []
    while missing:
        best = max(names, key=lambda name: len(values[name] & missing))
        missing -= values[best]
        chosen.append(best)
    return chosen


@pytest.fixture
def on_gpu(monkeypatch):
    """Puts the models of recorded configurations on the pretended GPU for one test; yields its counts."""
    kept = behaviour.target, behaviour.drafter
    for made in kept:
        made.cache_clear()
    monkeypatch.setattr(behaviour, "_device", "cuda:0")
    with pretended_gpu() as counts, behaviour.as_named():
        yield counts
    for made in kept:
        made.cache_clear()


def guesses(name):
    """Tells whether native kernels guess drafts of a configuration which torch's modules draft from exact scores."""
    one = behaviour.everything()[name]
    if isinstance(one, behaviour.Built):
        shared = one.builder.startswith(("fitted", "expanding", "eagle", "default,model", "default,eagle"))
        return one.kernels == "native" and shared and one.settings not in ("greedy", "t1")
    if one.kernels != "native" or one.drafter in ("none", "lookup"):
        return False
    pathwise = "shared" in one.coupling or one.settings == "mixed" or one.settings.startswith("greedy")
    return pathwise and (one.settings not in ("greedy", "t1", "t.7") or one.grammar != "free")


def tokens_of(names):
    """Returns the tokens, on the CPU, of configurations whose drafts are guesses: their counts differ on a GPU."""
    return {name: behaviour.outcome(behaviour.everything()[name]).tokens for name in names if guesses(name)}


@pytest.fixture(scope="module")
def tokens_of_few():
    return tokens_of(covering())


@pytest.fixture(scope="module")
def tokens_of_a_tenth():
    return tokens_of(behaviour.tenth())


def differing(names, tokens):
    """Returns the configurations with other tokens, or with another hash if counts are compared, too."""
    known, found = behaviour.recorded(), {}
    for name in names:
        if name not in tokens:
            found[name] = behaviour.hash_of(name)
        elif (own := behaviour.outcome(behaviour.everything()[name]).tokens) != tokens[name]:
            found[name] = str(own)
    return [f"{name}: {other}" for name, other in found.items() if other != known[name]]


@pytest.mark.parametrize("part", range(4))
def test_a_gpu_reproduces_recorded_results(tokens_of_few, on_gpu, part):
    assert differing(covering()[part::4], tokens_of_few) == []
    assert on_gpu.launches > 1000
    assert on_gpu.total > 10


@pytest.mark.soak
def test_a_gpu_reproduces_a_tenth_of_the_recorded_results(tokens_of_a_tenth, on_gpu):
    assert differing(behaviour.tenth(), tokens_of_a_tenth) == []


# Transfers


@pytest.fixture(scope="module")
def parts():
    """Builds a target on the pretended GPU, and drafters for it."""
    with pretended_gpu():
        model, small = tiny(num_hidden_layers=4), tiny(seed=3)
        head = EagleHead.for_target(model, list(range(40)), hidden_layers=[1, 2, 3])
        for network in (model, head, small):
            moved(network)
        target, draft = RaggedModel(model, kernels="torch"), RaggedModel(small, kernels="torch")
        return target, {
            "none": NoDrafter(),
            "lookup": NGramDrafter(longest=4, shortest=2),
            "eagle": EagleDrafter(head, target),
            "model": LanguageModelDrafter(draft),
        }


def crossings(parts, drafter, topology, coupling, buckets, request):
    """Counts the transfers of a step in the middle of an answer."""
    seen = []
    with pretended_gpu() as counts:
        target, drafters = parts
        decoder = SpeculativeDecoder(target, drafters[drafter], topology, coupling, buckets=buckets)
        decoder.on_step = lambda *_: seen.append(Counter(counts.crossings))
        ends = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
        decoder.generate(**left_padded(PROMPTS), **ends, **{"do_sample": False, **request})
    return seen[2] - seen[1]


def _lifted(law):
    return Coupling(law, Lifted(RecursiveRejection()))


# Transfers of a step, and how many of them are downloads, for which the host waits. Recorded steps need one upload and
# one download; the cache of a draft model uploads the moves of its rows. Other steps upload their batch and the seeds
# of the noise. They download the most probable tokens and the drawn tokens. Each of the three draft levels does so too,
# and downloads its children. One more upload moves accepted rows, unless they stand directly after the root. Random
# draws upload their uniforms, and verification uploads its trees.
ALLOWED = {
    "plain, recorded": (("none", None, None, (2,), {}), 2, 1),
    "lookups, recorded": (("lookup", CHAIN, None, (8,), {}), 2, 1),
    "lookups, recorded, sampled": (("lookup", CHAIN, None, (8,), SHARED), 2, 1),
    "lookups, recorded, truncated": (("lookup", CHAIN, None, (8,), {**SHARED, "top_k": 20, "min_p": 0.01}), 2, 1),
    "head, recorded": (("eagle", TREE, None, (32,), {}), 2, 1),
    "head, recorded, sampled": (("eagle", TREE, None, (32,), SHARED), 2, 1),
    "model, recorded, sampled": (("model", TREE, None, (32,), SHARED), 3, 1),
    "model, recorded, random": (("model", TREE, _lifted(TopTail(1, 1)), (32,), SHARED), 11, 4),
    "model, recorded, random chain": (("model", CHAIN, _lifted(IID(1)), (32,), SHARED), 11, 4),
    "lookups": (("lookup", CHAIN, None, None, {}), 2, 1),
    "lookups, sampled": (("lookup", CHAIN, None, None, SHARED), 4, 2),
    "head": (("eagle", TREE, None, None, {}), 9, 4),
    "head, sampled": (("eagle", TREE, None, None, SHARED), 13, 5),
    "model, random chain": (("model", CHAIN, _lifted(IID(1)), None, SHARED), 13, 5),
    "model, SpecHub": (("model", TREE, Coupling(TopTail(1, 1), TopDown(SpecHub())), None, SHARED), 15, 5),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_a_step_makes_no_more_transfers_than_it_needs(parts, case):
    decoder, allowed, waits = ALLOWED[case]
    found = crossings(parts, *decoder)
    assert found.total() <= allowed, found.most_common()
    assert sum(count for (kind, _), count in found.items() if kind != "upload") <= waits, found.most_common()
    if "recorded" in case:
        assert {kind for kind, _ in found} == {"upload", "download"}


# A target that drafts for itself


@pytest.fixture(scope="module")
def self_drafting():
    """Builds a target on the pretended GPU that drafts for itself; returns both, and the target's texts on the CPU."""
    network, texts = tiny(num_hidden_layers=4, max_position_embeddings=128), {}
    with pytest.MonkeyPatch.context() as patch:  # recognition needs torch's own tensors
        patch.setattr(choice, "interpreted", lambda: True)
        target = RaggedModel(network, kernels="triton", self_test=False)
        drafter = SelfDrafter(target)
    for name, request in (("greedy", {}), ("sampled", SHARED)):
        plain = SpeculativeDecoder(target, NoDrafter(), TreeTopology.chain(0), buckets=None)
        texts[name] = plain.generate(**left_padded(PROMPTS), **ENDS, **{"do_sample": False, **request}).tolist()
    with pretended_gpu():
        moved(network)
        for copy in drafter.model.copies:
            copy.panels = OnDevice(copy.panels)
        # The copies are those of the weights that moved.
        drafter.model._prepared = replace(drafter.model._prepared, weights=WeightWatch(network.modules()))
    return target, drafter, texts


ENDS = {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}


def drafted(self_drafting, topology, request, on_step=None):
    """Returns the texts and counts of a target that drafts for itself."""
    target, drafter, _ = self_drafting
    decoder = SpeculativeDecoder(target, drafter, topology, buckets=(8, 32))
    decoder.on_step = on_step
    found = decoder.generate(
        **left_padded(PROMPTS), **ENDS, **{"do_sample": False, **request}, return_dict_in_generate=True
    )
    return found.sequences.tolist(), found.stats


@pytest.mark.parametrize("topology", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_a_target_drafts_for_itself_in_the_run_that_verifies(self_drafting, monkeypatch, name, topology):
    seen, compared, latest = [], [], RaggedModel._latest
    monkeypatch.setattr(RaggedModel, "_latest", lambda model: compared.append((model, len(seen))) or latest(model))
    with pretended_gpu() as counts:
        choice.ran.clear()
        request = SHARED if name == "sampled" else {}
        found, stats = drafted(self_drafting, topology, request, lambda *_: seen.append(Counter(counts.crossings)))
    assert found == self_drafting[2][name]
    assert sum(stats.accepted.values()) > 0.3 * sum(stats.tried.values()) > 0
    assert choice.ran["static_step/triton"] == len(seen) > 2
    assert choice.ran["static_draft/triton"] == 0  # no draft ran by itself
    assert sorted(kind for kind, _ in (seen[2] - seen[1]).elements()) == ["download", "upload"]
    # The copy's weights are compared before the first step alone.
    assert {step for model, step in compared if model is self_drafting[1].model} == {0}


def test_wrong_copies_change_no_text(self_drafting, monkeypatch):
    """Negative control of the drafts: those of other weights are hardly ever right."""
    with pretended_gpu():
        for copy in self_drafting[1].model.copies:
            monkeypatch.setattr(copy, "panels", OnDevice(copy.panels.host.roll(1, 0)))
        found, stats = drafted(self_drafting, CHAIN, {})
    assert found == self_drafting[2]["greedy"]
    assert sum(stats.accepted.values()) < 0.2 * sum(stats.tried.values())


def test_rows_of_a_copy_that_stay_would_be_seen(self_drafting, monkeypatch):
    """Negative control: a draft that commits its rows to the target's cache changes the texts."""
    monkeypatch.setattr(TargetCacheDrafter, "caught_up", ModelDrafter.caught_up)
    with pretended_gpu():
        found, _ = drafted(self_drafting, CHAIN, {})
    assert found != self_drafting[2]["greedy"]


@pytest.mark.parametrize("rows", [[[0]], [[0, 1]] * 2], ids=["one", "several"])
def test_a_layer_of_the_copy_takes_eight_launches(self_drafting, rows):
    drafter, counted = self_drafting[1], []
    with pretended_gpu() as counts:
        cache = RaggedKVCache()
        samples = [cache.open(8) for _ in rows]
        tokens = torch.tensor([3 + row for each in rows for row in each])
        words = torch.tensor([[1], [3]] * 2) if len(rows[0]) > 1 else None
        for layers in (3, 3, 4, 4):  # the first run of each makes the pools
            batch = cache.lay_out(samples, rows, words)
            counts.clear()
            drafter.model(tokens, batch, cache, layers=layers)
            counted.append(Counter(counts.operators))
            cache.commit({sample: [] for sample in samples})
    found = counted[3] - counted[1]
    assert found["grouped_linear"] == 4
    assert found["ragged_tree_attention"] == found["rotate_append"] == 1
    assert found.total() <= 8, found


# Launches


def launches_of_a_layer(architecture, row_invariant):
    """Counts the operators of an inner layer: the difference between four layers and three."""
    counted, network = [], tiny(architecture, num_hidden_layers=4, **LAYER_TYPES.get(architecture, {}))
    with pytest.MonkeyPatch.context() as patch:  # recognition needs torch's own tensors
        patch.setattr(choice, "interpreted", lambda: True)
        target = RaggedModel(network, kernels="triton", row_invariant=row_invariant, self_test=False)
    with pretended_gpu() as counts:
        moved(network)
        cache = RaggedKVCache()
        samples = [cache.open(8), cache.open(8)]
        tokens = torch.tensor([3, 4, 5, 6])
        for layers in (3, 3, 4, 4):  # the first run of each makes the pools
            batch = cache.lay_out(samples, [[0, 1]] * 2, torch.tensor([[1], [3]] * 2))
            counts.clear()
            target(tokens, batch, cache, layers=layers)
            counted.append(Counter(counts.operators))
            cache.commit({sample: [] for sample in samples})
    return counted[3] - counted[1]


LAYER_TYPES = {"gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2}}


@pytest.mark.parametrize(("architecture", "allowed"), [("llama", 7), ("qwen2", 7), ("qwen3", 7), ("gemma2", 9)])
def test_a_layer_takes_few_launches(architecture, allowed):
    """A layer launches norms, products with the operations after them, and attention; Gemma has two more norms."""
    found = launches_of_a_layer(architecture, True)
    assert found.total() <= allowed, found
    assert found["ragged_tree_attention"] == found["project_rotate_append"] == found["gated_linear"] == 1
    several = launches_of_a_layer(architecture, False)
    assert several.total() > allowed  # seven separate products, which cuBLAS may split


def launches_of_a_draft(parts, monkeypatch, request):
    """Counts the operators of each level of a head's draft below the roots, without those of its network."""
    spent, so_far = Counter(), []
    run, grow = EagleNetwork.run, draft.grow_level
    with pretended_gpu() as counts:

        def ran(*given):
            before = Counter(counts.operators)
            out = run(*given)
            spent.update(counts.operators - before)
            return out

        def grown(*given):
            out = grow(*given)
            so_far.append(counts.operators - spent)
            return out

        monkeypatch.setattr(EagleNetwork, "run", ran)
        monkeypatch.setattr(draft, "grow_level", grown)
        target, drafters = parts
        decoder = SpeculativeDecoder(target, drafters["eagle"], TREE, buckets=(32,))
        ends = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
        decoder.generate(**left_padded(PROMPTS[:1]), **ends, **{"do_sample": False, **request})
    return [after - before for before, after in pairwise(so_far[: TREE.max_depth])]


@pytest.mark.parametrize(("request_", "allowed"), [({}, 4), (SHARED, 10)], ids=["greedy", "sampled"])
def test_a_level_of_a_draft_takes_few_launches(parts, monkeypatch, request_, allowed):
    """Beside its network: the parents' outputs, the best scores, the level's growth, and the noise of sampling."""
    found = launches_of_a_draft(parts, monkeypatch, {**request_, "seeds": [1]} if request_ else {})
    assert len(found) == TREE.max_depth - 1
    for level in found:
        assert 2 <= level.total() <= allowed, level
        assert level["grow_level"] == level["tree_expand"] == 1


# Verifiers of recorded steps: the drafter, the topology, the coupling and the request.
VERIFIERS = {
    "greedy": ("lookup", CHAIN, None, {}),
    "shared noise": ("lookup", CHAIN, None, SHARED),
    "shared noise, truncated": ("lookup", CHAIN, None, SHARED | {"top_k": 20, "min_p": 0.01}),
    "lifted chain": ("model", CHAIN, _lifted(IID(1)), SHARED),
    "lifted long chain": ("model", TreeTopology.chain(7), _lifted(IID(1)), SHARED),
    "lifted tree": ("model", TREE, _lifted(TopTail(1, 1)), SHARED),
    "lifted, truncated": ("model", TREE, _lifted(TopTail(1, 1)), SHARED | {"top_k": 20, "min_p": 0.01}),
    "lifted, without replacement": ("model", TREE, _lifted(WithoutReplacement(2)), SHARED),
    "top-down": ("model", TREE, Coupling(IID(2), TopDown(RecursiveRejection())), SHARED),
    "TopTail": ("model", TREE, Coupling(TopTail(1, 1), TopDown(TopTailRule())), SHARED),
    "SpecHub": ("model", TREE, Coupling(TopTail(1, 1), Lifted(SpecHub())), SHARED),
}


def operators_of_verification(parts, monkeypatch, verifier):
    """Counts the operators of each recorded step from the logits to the next tokens, without the request's processors.

    Args:
        parts: see :func:`parts`.
        monkeypatch: replaces the functions at which counting starts and ends.
        verifier: key of ``VERIFIERS``.
    """
    begun, found, counts_of_processors = [], [], Counter()
    read, paths, cut = step.score_rows, step.accepted_paths, step.truncated
    drafter, topology, coupling, request = VERIFIERS[verifier]
    with pretended_gpu() as counts:

        def unbilled(function):
            def run(*given):
                before = Counter(counts.operators)
                out = function(*given)
                counts_of_processors.update(counts.operators - before)
                return out

            return run

        def reading(*given, divide):
            begun.append((Counter(counts.operators), divide))
            counts_of_processors.clear()
            return read(*given, divide=divide)

        def tracing(*given):
            before, divides = begun[-1]
            found.append(counts.operators - before - counts_of_processors)
            if not divides:
                found[-1]["score_rows, undivided"] = found[-1].pop("score_rows")
            return paths(*given)

        monkeypatch.setattr(step, "score_rows", reading)
        monkeypatch.setattr(step, "accepted_paths", tracing)
        monkeypatch.setattr(step, "truncated", unbilled(cut))
        for name in ("__call__", "trimmed"):
            monkeypatch.setattr(LogitsPipeline, name, unbilled(getattr(LogitsPipeline, name)))
        target, drafters = parts
        decoder = SpeculativeDecoder(target, drafters[drafter], topology, coupling, buckets=(32,))
        ends = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
        decoder.generate(**left_padded(PROMPTS), **ends, **{"do_sample": False, **request})
    return found


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_verification_takes_at_most_eight_launches(parts, monkeypatch, verifier):
    found = operators_of_verification(parts, monkeypatch, verifier)
    assert len(found) > 2
    for operators in found:
        assert operators["score_rows"] + operators["score_rows, undivided"] == 1
        assert launches(operators) <= 8, operators


def test_a_verifier_of_many_launches_would_be_seen(parts, monkeypatch):
    """Negative control: torch's operators take a launch each."""
    run = step.score_rows
    monkeypatch.setattr(
        step, "score_rows", lambda *given, **how: (run(*given, **how), [given[0] + 1 for _ in range(9)])[0]
    )
    assert all(launches(operators) > 8 for operators in operators_of_verification(parts, monkeypatch, "greedy"))


# The pretended GPU itself


def test_it_computes_like_the_cpu_and_counts_transfers():
    with pretended_gpu() as counts:
        here = torch.tensor([3.0, 1.0, 2.0])
        there = here.to("cuda")
        assert isinstance(there, OnDevice)
        assert there.device == DEVICE
        assert there.is_cuda
        assert counts.total == 1
        row = there.sort().values + torch.ones(3, device="cuda")
        assert isinstance(row, OnDevice)
        assert counts.total == 1
        assert row.tolist() == [2.0, 3.0, 4.0]
        assert counts.total == 2
        assert row[0].item() == 2.0
        assert counts.total == 3
        assert row.cpu()[row.argmax().cpu()] == 4.0
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("waits", "kind"),
    [
        (lambda x: x[x > 1], "mask"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[[0, 1]], "index"),
        (lambda x: bool((x > 1).all()), "asked"),
        (lambda x: x.cpu(), "download"),
    ],
)
def test_operations_that_a_gpu_would_wait_for_are_counted(waits, kind):
    with pretended_gpu() as counts:
        x = torch.arange(4, device="cuda")
        counts.clear()
        waits(x)
        assert {found for found, _ in counts.crossings} == {kind}


def test_devices_do_not_mix():
    """Negative control: a real GPU raises, too."""
    with pretended_gpu(), pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="cuda") + torch.ones(3)


def test_a_decoder_that_forgets_a_device_would_be_seen(on_gpu, monkeypatch):
    """Negative control: seeds of shared noise that stay on the CPU."""
    name = "builders default,eagle t1 batch3 torch"
    assert differing([name], {}) == []
    keys = noise.GumbelNoise.keys
    monkeypatch.setattr(noise.GumbelNoise, "keys", lambda *given: tuple(key.cpu() for key in keys(*given)))
    assert "same device" in differing([name], {})[0]
