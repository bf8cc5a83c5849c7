"""Exported drafters and deciders in decoders: the same rows and tokens as the torch parts, and refusals."""

import pytest
from onnx_steps import draft_steps
from support.companions import ROWS, Rounds, check_rows, drafter, target, texts, trained, walk
from support.models import PROMPTS, ragged, tiny_tokenizer
from support.models import decode as decoded
from support.onnx_graphs import decider

import arbordraft as ad
from arbordraft.bench.workload import Workload
from arbordraft.drafter_names import drafter_named, load_drafter
from arbordraft.drafters.onnx_networks import OnnxBlock, OnnxEagle, OnnxMedusa, OnnxModel, OnnxNetwork
from arbordraft.onnx.decider import OnnxDecider
from arbordraft.onnx.graph import Graph

TREE = ad.TreeTopology.from_k_config((2, 2, 1))
GREEDY = ad.Coupling.matching(2)
KINDS = [
    ("block", ad.BlockDrafter, OnnxBlock),
    ("peagle", ad.BlockDrafter, OnnxBlock),
    ("eagle", ad.EagleDrafter, OnnxEagle),
    ("medusa", ad.MedusaDrafter, OnnxMedusa),
    ("model", ad.LanguageModelDrafter, OnnxModel),
    ("exit", ad.LanguageModelDrafter, OnnxModel),
]
DRAWN = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))


EXPORTED = [name for name in ROWS if name not in ("dflash", "dspark")]  # these have no graphs


def decode(proposer, *, coupling=GREEDY, decider=None, prompts=PROMPTS, **options):
    decoder = ad.SpeculativeDecoder(target(), proposer, TREE, coupling, decider)
    return decoded(decoder, prompts, **{"max_new_tokens": 20, **options})


@pytest.mark.parametrize("name", EXPORTED)
def test_every_row_is_the_networks_own(graphs, name):
    """Rounds accept different paths of uneven trees, and samples of the batch end at different times."""
    assert walk(load_drafter(graphs(name).folder, target()), name)[1] > 35


@pytest.mark.parametrize("name", EXPORTED)
def test_the_same_tokens_from_the_same_steps(graphs, name):
    """Answers and drafts are equal at temperature 0 in float32, alone and in a ragged batch."""
    exported, original = load_drafter(graphs(name).folder, target()), drafter(name)
    found, stats = decode(exported)
    expected, known = decode(original)
    assert found == expected == [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts(), strict=True)]
    assert (stats.forwards, stats.drafted, stats.accepted) == (known.forwards, known.drafted, known.accepted)
    assert stats.tau > 1.1
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        assert decode(exported, prompts=[prompt])[0] == [answer]


def test_draws_follow_the_same_noise(graphs):
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [3, 4, 5], "coupling": DRAWN}
    found, stats = decode(load_drafter(graphs("eagle").folder, target()), **options)
    expected, known = decode(drafter("eagle"), **options)
    assert found == expected
    assert stats.tau == known.tau


def test_long_texts_are_fed_in_parts(graphs, monkeypatch):
    monkeypatch.setattr(OnnxNetwork, "chunk", 3)
    for name in ("block", "eagle", "model"):
        rounds = Rounds(load_drafter(graphs(name).folder, target()), target(), PROMPTS)
        tree = rounds.propose(TREE, ad.WithoutReplacement(2))
        assert check_rows(name, trained(name).network, target().model, tree, rounds.tokens) > 5


def test_a_text_of_one_token_lets_the_target_go_first(graphs):
    expected = decode(drafter("eagle"), prompts=[[11]])[0]
    for name in ("block", "eagle", "medusa"):
        assert decode(load_drafter(graphs(name).folder, target()), prompts=[[11]])[0] == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_drafts_leave_the_answers_alone(graphs, quantization):
    exported = load_drafter(graphs("eagle", quantization=quantization).folder, target())
    assert decode(exported)[0] == [text[len(prompt) :] for prompt, text in zip(PROMPTS, texts(), strict=True)]
    assert quantization in repr(exported)


def test_loaders_take_the_folder(graphs):
    for name, kind, network in KINDS:
        loaded = load_drafter(graphs(name).folder, target())
        assert type(loaded) is kind
        assert network in {type(module) for module in loaded.modules()}
    assert drafter_named(str(graphs("eagle").folder), target()).hidden_layers == (1, 2, 3)


# Deciders


def test_an_exported_decider_decides_like_the_original(graphs):
    exported, original = OnnxDecider.from_pretrained(graphs("decider").folder), decider()
    assert exported.threshold == original.threshold
    for changes in ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1, 2, 3], "coupling": DRAWN}):
        found, stats = decode(drafter("eagle"), decider=exported, **changes)
        expected, known = decode(drafter("eagle"), decider=original, **changes)
        assert found == expected
        assert (stats.rows, stats.forwards) == (known.rows, known.forwards)
    full = decode(drafter("eagle"))[1]
    assert decode(drafter("eagle"), decider=exported)[1].tau < full.tau, "the decider never stopped drafting"


def test_the_threshold_can_be_overridden(graphs):
    folder = graphs("decider").folder
    never, always = (OnnxDecider.from_pretrained(folder, threshold=value) for value in (1.1, 0.0))
    assert decode(drafter("eagle"), decider=never)[1].tau == 1
    assert decode(drafter("eagle"), decider=always)[1].tau == decode(drafter("eagle"))[1].tau


# Parts that do not fit


def test_a_drafter_belongs_to_its_target(graphs):
    other = ragged(num_hidden_layers=4, seed=2)
    for name in ("block", "eagle", "medusa", "exit"):
        with pytest.raises(ValueError, match=r"made for another target \(tiny, fingerprint"):
            load_drafter(graphs(name).folder, other)
    load_drafter(graphs("model").folder, other)  # shares no weights: any target will do
    with pytest.raises(ValueError, match="must be built for the target"):
        ad.SpeculativeDecoder(other, load_drafter(graphs("eagle").folder, target()), TREE, GREEDY)
    with pytest.raises(ValueError, match="vocabulary of 61 tokens, the target has 53"):
        load_drafter(graphs("model").folder, ragged(vocab_size=53))


def test_another_tokenizer_is_noticed(graphs):
    from support.onnx_graphs import PLANS

    from arbordraft.exports.onnx.writing import write

    spoken = ad.RaggedModel(target().model, tiny_tokenizer(), kernels="torch")
    (spec,) = PLANS["medusa"]()
    spec.about["tokenizer_sha256"] = "0" * 64
    folder = write(lambda: [spec], graphs.root / "other-tokenizer", force=True).folder
    with pytest.raises(ValueError, match="tokenizer that gives other ids"):
        load_drafter(folder, spoken)
    load_drafter(folder, target())  # this target has no tokenizer to compare


def test_files_that_are_no_graphs_are_refused(graphs, tmp_path):
    with pytest.raises(ValueError, match=r"model\.onnx is missing: write the folder again"):
        Graph(tmp_path / "model.onnx")
    whole = (graphs("medusa").folder / "model.onnx").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"nothing of the kind"):
        (tmp_path / "model.onnx").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.onnx (cannot be read as a graph|is of format unknown)"):
            load_drafter(tmp_path, target())
    with pytest.raises(ValueError, match="kind 'decider', which is no drafter"):
        load_drafter(graphs("decider").folder, target())
    with pytest.raises(ValueError, match="kind 'medusa', which is no decider"):
        OnnxDecider.from_pretrained(graphs("medusa").folder)


def test_onnxruntime_is_asked_for_by_name(graphs, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'arbordraft\[onnx\]'"):
        load_drafter(graphs("medusa").folder, target())


# The benchmark


def test_draft_steps_are_timed_in_turns(graphs):
    model = ad.RaggedModel(target().model, tiny_tokenizer(eos_token="c"), kernels="torch")
    drafters = {
        "torch": (model, trained("eagle").drafter(model)),
        "graphs": (model, load_drafter(graphs("eagle").folder, model)),
    }
    workload = Workload(("a b", "d"), batch=1, new_tokens=6, repeats=2)
    ours, theirs = draft_steps(drafters, workload, depth=3)
    assert (ours.drafter, theirs.drafter) == ("torch", "graphs")
    assert ours.ratio == 1
    assert theirs.per_level == pytest.approx(theirs.milliseconds / 3)
    assert (ours.tau, ours.acceptance) == (theirs.tau, theirs.acceptance)
