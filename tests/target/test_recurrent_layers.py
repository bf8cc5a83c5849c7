"""Models with recurrent layers: trees, commits, copies and repeated steps have the logits of single texts."""

import pytest
import torch
from support.models import next_logits
from support.recurrent_models import FUSED, OTHERS, QUICK, ROW_WISE, recurrent, recurrent_target
from support.shrunken import shrunken
from torch.testing import assert_close

from arbordraft import RaggedModel, TreeTopology, UnsupportedModel
from arbordraft.kernels import choice
from arbordraft.kernels.recurrent_tree import Scan
from arbordraft.target import states
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.equality import equality_report
from arbordraft.target.prepacked import recognition, row_wise
from arbordraft.target.prepacked.weight_collector import Linear
from arbordraft.target.states import RecurrentStates
from arbordraft.trees.topology import ancestor_words
from arbordraft.trees.verdict import Exactness

TREE = TreeTopology([-1, 0, 0, 1, 1, 2])
KEPT = [[0, 2, 5], [0, 1], [0], []]
PROMPTS = [[5, 9, 7, 5, 9], [11], [8, 3, 8, 3, 20, 21, 22, 8, 3, 30], [4, 6]]
TREES = [[12, 13, 14, 15, 16, 17], [21, 22, 23, 24, 25, 26]]  # of two steps
WINDOWS, STATES = ("lfm2",), ("qwen3_next", "mamba2", "mamba")
FUSED_OF = {"lfm2": "lfm2", "qwen3_next": "qwen3_next", "mamba2": "granitemoehybrid", "mamba": "bamba"}
every_architecture = pytest.mark.parametrize(
    "architecture", [*QUICK, pytest.param("kimi_linear", marks=pytest.mark.soak)]
)


def close(found, expected):
    return (found - expected).abs().max() <= 2e-4 * expected.abs().max()


def run_tree(target, cache, samples, tokens):
    """Returns ``[samples, nodes, V]`` logits of the same tree after every sample."""
    words = ancestor_words(TREE.visible.cpu()).repeat(len(samples), 1)
    batch = cache.lay_out(samples, [TREE.depth_list] * len(samples), words)
    return target(torch.tensor(tokens * len(samples)), batch, cache).view(len(samples), TREE.num_nodes, -1)


def wrong_nodes(target, cache, samples, texts, tokens):
    """Returns the samples and nodes of a tree whose logits are not those of their path alone."""
    packed = run_tree(target, cache, samples, tokens)
    return [
        (number, node)
        for number, text in enumerate(texts)
        for node in range(TREE.num_nodes)
        if not close(packed[number, node], next_logits(target.model, text + [tokens[n] for n in TREE.path(node)]))
    ]


def prefilled(target, prompts=PROMPTS, chunk=2048):
    cache = RaggedKVCache()
    samples = [cache.open(len(prompt)) for prompt in prompts]
    target.prefill(dict(zip(samples, prompts, strict=True)), cache, chunk=chunk)
    return cache, samples


def differing(target, chunk=2048):
    """Runs two steps with accepted paths, then plain rows; returns steps, samples and nodes that are wrong."""
    cache, samples = prefilled(target, chunk=chunk)
    texts, wrong = PROMPTS, []
    for step, tokens in enumerate(TREES):
        wrong += [(step, *place) for place in wrong_nodes(target, cache, samples, texts, tokens)]
        cache.commit(dict(zip(samples, KEPT, strict=True)))
        texts = [text + [tokens[node] for node in kept] for text, kept in zip(texts, KEPT, strict=True)]
    for token in (31, 32):  # lone rows, whose states are computed ahead
        plain = target(torch.tensor([token] * len(samples)), cache.lay_out(samples, [[0]] * len(samples)), cache)
        texts = [[*text, token] for text in texts]
        found = [close(row, next_logits(target.model, text)) for row, text in zip(plain, texts, strict=True)]
        wrong += [(token, number, 0) for number, right in enumerate(found) if not right]
        cache.commit({sample: [0] for sample in samples})
    return wrong


@pytest.mark.parametrize("chunk", [2048, 3], ids=["whole", "chunked"])
@pytest.mark.one_in(2)
@every_architecture
def test_trees_are_run_as_their_paths(architecture, chunk):
    assert differing(recurrent_target(architecture), chunk) == []


@pytest.mark.usefixtures("kernels")
@every_architecture
def test_native_kernels_run_trees_as_their_paths(architecture):
    choice.ran.clear()
    target = recurrent_target(architecture, "native")
    assert differing(target) == []
    assert choice.ran["tree_convolution/native"]
    assert choice.ran["tree_scan/native"] or architecture.startswith("lfm2")


# Layers in one native call


def fused(architecture, dtype=torch.float32):
    """Returns a target whose layers all run in one call, and whose own modules no longer run."""
    model, exact = recurrent(architecture, **FUSED[architecture]).to(dtype), dtype == torch.float32
    target = RaggedModel(model, kernels="native", self_test=exact)  # in 16 bits, rounding chooses other experts
    assert target.prepacking.fused == target.num_layers
    assert target.prepacking.stack is not None
    return target


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("chunk", [2048, 3], ids=["whole", "chunked"])
@pytest.mark.parametrize("architecture", FUSED)
def test_fused_layers_run_trees_as_their_paths(architecture, chunk):
    target = fused(architecture)
    choice.ran.clear()
    assert differing(target, chunk) == []
    assert not choice.ran["tree_convolution/native"]  # the whole layer ran instead


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", FUSED)
def test_fused_layers_have_the_same_bits_in_every_batch(architecture, dtype):
    target = fused(architecture, dtype)
    assert target.row_invariant
    for threads in (1, 3):
        torch.set_num_threads(threads)
        report = equality_report(target, Exactness.EXACT)
        assert (report.equality, report.equal) == ("bitwise", report.rows)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("architecture", FUSED)
def test_fused_layers_have_the_same_bits_with_fewer_bits(architecture, weights):
    model = recurrent(architecture, **FUSED[architecture])
    target = RaggedModel(model, kernels="native", weights=weights, row_invariant=True)
    assert target.prepacking.fused == target.num_layers
    report = equality_report(target, Exactness.EXACT)
    assert (report.equality, report.equal) == ("bitwise", report.rows)


def hooked(mixer, part):
    """Adds a hook that changes the output of a part of a mixer."""
    module = mixer if part == "mixer" else getattr(mixer, part)
    module.register_forward_hook(lambda _, __, output: 1.1 * output)


def other_norm(mixer, _):
    base = type(mixer.norm)

    def forward(self, x, gate):
        return 1.1 * base.forward(self, x, gate)

    mixer.norm.__class__ = type(base.__name__, (base,), {"forward": forward})


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("spoil", "part"), [(hooked, "mixer"), (hooked, "out_proj"), (other_norm, "norm")])
@pytest.mark.parametrize("architecture", ["granitemoehybrid", "qwen3_5_text"])
def test_mixers_that_only_look_right_are_not_fused(architecture, spoil, part):
    model = recurrent(architecture, **FUSED[architecture])
    layer = model.model.layers[0]
    spoil(layer.mamba if architecture == "granitemoehybrid" else layer.linear_attn, part)
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == target.num_layers - 1
    assert target.prepacking.stack is None
    assert differing(target) == []


# Falcon-H1: attention and Mamba-2 side by side


def fused_layers(model):
    return RaggedModel(model, kernels="native").prepacking.fused


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "options",
    [
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
        dict.fromkeys(("attention_bias", "projectors_bias", "mamba_proj_bias", "mlp_bias"), True),
    ],
    ids=["norms after gates", "biases"],
)
def test_other_forms_of_layers_with_two_mixers_are_fused(options):
    model = recurrent("falcon_h1", **FUSED["falcon_h1"], **options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == target.num_layers
    assert differing(target) == []


@pytest.mark.usefixtures("kernels")
def test_norms_before_the_gates_of_mamba_are_not_fused():
    assert fused_layers(recurrent("falcon_h1", **ROW_WISE["falcon_h1"])) == 0


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "path", ["mamba", "mamba.conv1d", "mamba.out_proj", "self_attn.o_proj", "feed_forward.down_proj", "input_layernorm"]
)
def test_parts_of_layers_with_two_mixers_keep_their_hooks(path):
    model = recurrent("falcon_h1", **FUSED["falcon_h1"])
    model.model.layers[0].get_submodule(path).register_forward_hook(lambda _, __, output: 1.1 * output)
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == target.num_layers - 1
    assert differing(target) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("number", range(8))
def test_a_factor_that_is_forgotten_would_be_seen(monkeypatch, number):
    """Negative control: one of a layer's eight matrices keeps its products."""
    times, layers_of, called = Linear.times, recognition.layers_of, []

    def without(linear, *factors, **others):
        called.append(linear)
        return linear if len(called) == number + 1 else times(linear, *factors, **others)

    def compared(*layer):
        called.clear()
        return layers_of(*layer)

    assert fused_layers(recurrent("falcon_h1", **FUSED["falcon_h1"])) == 2
    monkeypatch.setattr(Linear, "times", without)
    monkeypatch.setattr(recognition, "layers_of", compared)
    assert fused_layers(recurrent("falcon_h1", **FUSED["falcon_h1"])) == 0


# Equal bits


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ROW_WISE)
def test_rows_have_the_same_bits_in_every_batch(architecture, dtype):
    """Trees of a ragged batch after chunked prompts, and each of their paths row by row."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        model = recurrent(architecture, **ROW_WISE[architecture]).to(dtype)
        target = RaggedModel(model, kernels="native", row_invariant=True)
        assert target.row_invariant
        report = equality_report(target, Exactness.EXACT)
        assert (report.equality, report.equal) == ("bitwise", report.rows)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", OTHERS)
def test_functions_that_may_mix_rows_are_named(architecture):
    target = RaggedModel(recurrent(architecture), kernels="native", self_test=False)
    assert not target.row_invariant
    with pytest.raises(UnsupportedModel, match=r"needs row-wise functions for all of \w+, which calls .*torch"):
        RaggedModel(target.model, kernels="native", self_test=False, row_invariant=True)


@pytest.mark.usefixtures("kernels")
def test_functions_that_round_by_the_place_would_be_seen(monkeypatch):
    """Negative control: torch's own gates and norms."""
    model = recurrent("olmo_hybrid", hidden_size=64)  # heads of other sizes than kernels for layers take
    monkeypatch.setattr(row_wise, "_INSTEAD", {})
    target = RaggedModel(model, kernels="native")
    assert not target.row_invariant
    report = equality_report(target, Exactness.EXACT)
    assert report.equal < report.rows


# Negative controls


def commits_another_node(patch):
    commit = RecurrentStates.commit

    def wrong(self, kept, lengths):
        commit(self, {handle: [0, 1] if rows == [0, 2, 5] else rows for handle, rows in kept.items()}, lengths)

    patch.setattr(RecurrentStates, "commit", wrong)


def reads_another_parent(patch):
    parent = states._parent
    patch.setattr(states, "_parent", lambda words, place: 2 if place == 4 else parent(words, place))


def keeps_no_windows(patch):
    patch.setattr(states, "commit_windows", lambda *_: None)
    replay = states.replay_layers

    def without(layers, pools, *rest):
        replay(layers, [(windows.clone(), after) for windows, after in pools], *rest)

    patch.setattr(states, "replay_layers", without)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("architecture", [*WINDOWS, *STATES])
@pytest.mark.parametrize(
    ("spoil", "first"),
    [
        (commits_another_node, (1, 0)),
        (reads_another_parent, (0, 0)),
        (keeps_no_windows, (0, 0)),
    ],
    ids=["another node", "another parent", "no windows"],
)
def test_a_wrong_state_would_be_seen(request, monkeypatch, architecture, kernels, spoil, first):
    if kernels == "fused":
        request.getfixturevalue("kernels")
        architecture, first = FUSED_OF[architecture], (1, 0) if spoil is keeps_no_windows else first
    target = fused(architecture) if kernels == "fused" else recurrent_target(architecture)
    spoil(monkeypatch)
    wrong = differing(target)
    assert wrong
    assert min(wrong)[:2] >= first
    if spoil is reads_another_parent:
        assert {node for _, _, node in wrong if node} == {4}


# Prefixes, cuts, repeated and broken steps


@pytest.mark.parametrize("architecture", [*WINDOWS, *STATES, "granitemoehybrid"])
def test_a_state_is_copied_at_its_own_length_only(architecture):
    target, prompt = recurrent_target(architecture), PROMPTS[2]
    cache, (source,) = prefilled(target, [prompt])
    kept = len(prompt) - 1  # one token before the end, so that an equal prompt still has one to read
    assert [cache.reusable(source, tokens) for tokens in (len(prompt), kept, kept - 1)] == [len(prompt), kept, 0]
    assert cache.reusable(source, 1000) == len(prompt)
    copy = cache.open(len(prompt))
    with pytest.raises(ValueError, match=f"no state is there after {kept - 1} tokens, but after 0"):
        cache.share(source, copy, kept - 1)
    cache.share(source, copy, kept)
    other = [*prompt[:kept], 40, 41]
    target.prefill({copy: other[kept:]}, cache)
    assert wrong_nodes(target, cache, [source, copy], [prompt, other], TREES[0]) == []


@pytest.mark.parametrize("architecture", [*WINDOWS, *STATES])
def test_a_state_that_is_copied_one_token_late_would_be_seen(monkeypatch, architecture):
    """Negative control: the state of the whole prompt stands for that of its beginning."""
    target, prompt = recurrent_target(architecture), PROMPTS[2]
    cache, (source,) = prefilled(target, [prompt])
    restore = RecurrentStates._restore
    monkeypatch.setattr(RecurrentStates, "_restore", lambda self, sample, slot, n, _: restore(self, sample, slot, n, n))
    copy = cache.open(len(prompt))
    cache.share(source, copy, len(prompt) - 1)
    target.prefill({copy: [40]}, cache)
    wrong = wrong_nodes(target, cache, [source, copy], [prompt, [*prompt[:-1], 40]], TREES[0])
    assert {number for number, _ in wrong} == {1}


@pytest.mark.parametrize("architecture", [*WINDOWS, *STATES])
def test_texts_are_cut_to_the_last_state_before(architecture):
    target, prompt = recurrent_target(architecture), PROMPTS[2]
    cache, (sample,) = prefilled(target, [prompt], chunk=4)  # states after 3 and 9 tokens, and after all 10
    for cut, length in ((12, 10), (9, 9), (8, 3), (2, 0)):
        cache.shorten(sample, cut)
        assert cache.length(sample) == length
        assert wrong_nodes(target, cache, [sample], [prompt[:length]], TREES[0]) == []
        cache.drop([sample])


@pytest.mark.parametrize("architecture", [*WINDOWS, *STATES])
def test_steps_that_fail_are_repeated(architecture):
    target = recurrent_target(architecture)
    cache, samples = prefilled(target)
    run_tree(target, cache, samples, TREES[1])
    cache.drop(samples)
    target(torch.tensor([3] * len(samples)), cache.lay_out(samples, [[0]] * len(samples)), cache)
    cache.drop(samples)  # a lone root, whose state was computed ahead
    assert wrong_nodes(target, cache, samples, PROMPTS, TREES[0]) == []
    with pytest.raises(IndexError):
        run_tree(target, cache, samples[:2], [1000] * TREE.num_nodes)


@pytest.mark.parametrize("kernels", ["torch", "fused"])
@pytest.mark.parametrize("architecture", [*WINDOWS, *STATES])
def test_trees_may_be_run_level_by_level(request, architecture, kernels):
    """As draft models run them: the rows of a level follow those of levels before it, which nothing has committed."""
    if kernels == "fused":
        request.getfixturevalue("kernels")
    target, tokens = fused(FUSED_OF[architecture]) if kernels == "fused" else recurrent_target(architecture), TREES[0]
    cache, samples = prefilled(target)
    whole = run_tree(target, cache, samples, tokens)
    cache.drop(samples)
    found = []
    for depth, nodes in enumerate(TREE.levels):
        words = ancestor_words(TREE.visible.cpu())[list(nodes)].repeat(len(samples), 1)
        batch = cache.lay_out(samples, [[depth] * len(nodes)] * len(samples), words)
        packed = torch.tensor([tokens[node] for node in nodes] * len(samples))
        found.append(target(packed, batch, cache).view(len(samples), len(nodes), -1))
    assert_close(torch.cat(found, dim=1), whole, rtol=1e-4, atol=1e-4)
    cache.commit(dict(zip(samples, KEPT, strict=True)))
    texts = [prompt + [tokens[node] for node in kept] for prompt, kept in zip(PROMPTS, KEPT, strict=True)]
    assert wrong_nodes(target, cache, samples, texts, TREES[1]) == []


def test_samples_come_and_go():
    target = recurrent_target("qwen3_next")
    cache, samples = prefilled(target)
    for number in (0, 2):
        cache.close(samples[number])
    fresh = cache.open()  # in the place of another
    target.prefill({fresh: [50, 51, 52]}, cache)
    texts = {samples[1]: PROMPTS[1], samples[3]: PROMPTS[3], fresh: [50, 51, 52]}
    assert wrong_nodes(target, cache, list(texts), list(texts.values()), TREES[0]) == []


def test_a_path_with_a_gap_is_refused():
    target = recurrent_target("mamba2")
    cache, samples = prefilled(target)
    run_tree(target, cache, samples, TREES[0])
    with pytest.raises(ValueError, match=r"rows \[0, 3\] are no path, so no state follows from them"):
        cache.commit({samples[0]: [0, 3]})


def test_memory_does_not_grow_with_the_text():
    target = recurrent_target("mamba2")
    cache, samples = prefilled(target)
    sizes = []
    for _ in range(8):
        run_tree(target, cache, samples, TREES[0])
        cache.commit(dict(zip(samples, KEPT, strict=True)))
        target.prefill({sample: [7, 8, 9] for sample in samples}, cache)
        sizes.append(cache._states.nbytes)
    assert len(set(sizes[2:])) == 1
    one = sizes[-1] / cache._states._slots
    assert sizes[-1] <= 5 * 1.5 * len(samples) * one  # five states each, and growth ahead


# Refusals


def test_an_early_exit_is_refused():
    target, cache = recurrent_target("lfm2"), RaggedKVCache()
    batch = cache.lay_out([cache.open(1)], [[0]])
    with pytest.raises(UnsupportedModel, match="recurrent layers, whose states an early exit would leave undefined"):
        target(torch.tensor([3]), batch, cache, layers=1)


def test_unknown_states_are_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"recurrent layer that it knows \(falcon, bloom and rwkv have neither"):
        RaggedModel(shrunken("rwkv"))
    with pytest.raises(
        UnsupportedModel, match=r"layers of linear_attention \(config\.layer_types\), which keep a state"
    ):
        RaggedModel(shrunken("minimax"))


def test_a_mixer_with_another_forward_is_refused():
    model = recurrent("mamba2")
    mixer = model.backbone.layers[0].mixer
    mixer.forward = type(mixer).forward.__get__(mixer)
    with pytest.raises(UnsupportedModel, match="Mamba2Mixer has a forward of its own instead of its class's"):
        RaggedModel(model)


def test_the_self_test_notices_another_recurrence(monkeypatch):
    """A scan that forgets the parent's state is right for the first token alone."""
    run = Scan.run
    monkeypatch.setattr(Scan, "run", lambda rows, states, schedule: run(rows, torch.zeros_like(states), schedule))
    with pytest.raises(UnsupportedModel, match="packed logits differ from single ones"):
        RaggedModel(recurrent("mamba2"), kernels="torch")


@pytest.mark.parametrize("architecture", [*WINDOWS, *STATES])
def test_half_precision_passes_the_self_test(architecture):
    assert RaggedModel(recurrent(architecture).to(torch.bfloat16), kernels="torch").recurrent
