"""Loading of models, drafters, kernels and costs by name; errors name their cause at once."""

import contextlib
import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from support.gguf_files import write_gguf
from support.models import (
    PROMPTS,
    VOCAB,
    fusable,
    generated,
    greedy_reference,
    left_padded,
    tiny,
    tiny_checkpoint,
    tiny_tokenizer,
)

import arbordraft as ad
from arbordraft import CostTable, loading
from arbordraft.deciders import FixedDepth, Heuristic, cost_aware
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding import measuring
from arbordraft.decoding.measuring import cost_file, known_costs, known_rows
from arbordraft.drafter_names import drafter_named, trained_for
from arbordraft.drafters.language_model import shrink
from arbordraft.heads.base import fingerprint
from arbordraft.heads.medusa import MedusaConfig, MedusaHead
from arbordraft.kernels import machine, native, precision, progress
from arbordraft.target import model as models
from arbordraft.target.prepacked import backend as backends
from arbordraft.trees.verdict import Outcome

FREE = {"costs": None, "kernels": "torch"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Sets a new cache folder; the kernels are loaded from the old one."""
    native.load()
    for name in ("known_costs", "cost_aware"):  # undoes `_quoted`: measurements go into the new folder
        monkeypatch.setattr(loading, name, getattr(measuring, name))
    monkeypatch.setenv("ARBORDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path):
    return tiny_checkpoint(tmp_path / "models" / "target")


def publish(folder: Path, model: torch.nn.Module, acceptance: float = 0.5, **changes: object) -> Path:
    """Saves a drafter that names the model it was trained for."""
    config = MedusaConfig(
        vocab_size=VOCAB,
        target_hidden_size=32,
        hidden_layers=[2],
        target_fingerprint=fingerprint(model),
        draft_vocab_size=40,
        acceptance=[acceptance, 0.1],
        **changes,
    )
    MedusaHead(config).save_pretrained(folder)
    return folder


def text(decoder: ad.SpeculativeDecoder) -> str:
    return decoder.complete("hello", max_new_tokens=12)


# Models


def test_every_way_to_name_a_model(folder):
    model = tiny(max_position_embeddings=2048)
    settings = {"dtype": "float32", **FREE}
    named = ad.load(folder, **settings)
    assert isinstance(named, ad.SpeculativeDecoder)
    assert not named.training
    assert named.target.chosen == "torch: the model's own modules (asked for)"
    expected = text(named)
    again = type(model).from_pretrained(folder).eval()
    assert text(ad.load(str(folder), **settings)) == expected
    assert text(ad.load(model, tokenizer=tiny_tokenizer(), **FREE)) == expected
    assert text(ad.load(again, **FREE)) == expected  # the tokenizer is in the model's folder
    assert text(ad.load(named.target, costs=None)) == expected


def test_the_small_model_has_a_name(monkeypatch):
    monkeypatch.setattr(loading, "load_smollm2", lambda dtype: (tiny().to(dtype), tiny_tokenizer()))
    decoder = ad.load(dtype="bfloat16", **FREE)
    assert decoder.target.model.dtype == torch.bfloat16
    assert len(text(decoder)) <= 12


@pytest.mark.parametrize(
    ("dtype", "fast", "expected"),
    [
        (None, True, torch.bfloat16),
        (None, False, torch.float32),
        ("float32", True, torch.float32),
        (torch.float16, True, torch.float16),
        ("torch.bfloat16", False, torch.bfloat16),
    ],
    ids=str,
)
def test_dtypes(folder, monkeypatch, dtype, fast, expected):
    monkeypatch.setattr(native, "fast_bfloat16", lambda: fast)
    assert ad.load(folder, "none", dtype=dtype, device="cpu", kernels="torch").target.model.dtype == expected


def test_a_slow_dtype_is_used_and_said_in_one_line(folder, monkeypatch, caplog):
    monkeypatch.setattr(native, "fast_bfloat16", lambda: False)
    precision._warn.cache_clear()
    options = {"device": "cpu", "kernels": "torch"}
    with caplog.at_level(logging.WARNING, "arbordraft"):
        assert ad.load(folder, "none", **options).target.model.dtype == torch.float32
        assert not caplog.messages
        assert ad.load(folder, "none", dtype="bfloat16", **options).target.model.dtype == torch.bfloat16
    assert [message.partition(",")[0] for message in caplog.messages] == ["dtype: bfloat16 is slow here"]


def test_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from support.gguf_files import LETTERS, write_gguf

    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny(vocab_size=len(LETTERS), num_key_value_heads=4, head_dim=8))
    decoder = ad.load(file, dtype="float32", device="cpu", **FREE)
    assert decoder.target.vocab_size == len(LETTERS)
    assert set(decoder.complete("hello", max_new_tokens=8)) <= set("".join(LETTERS))


@pytest.mark.parametrize(
    ("model", "options", "error", "match"),
    [
        ("no/such/folder", {}, ValueError, "no/such/folder cannot be loaded"),
        ("no-such-file.gguf", {}, ValueError, r"no-such-file\.gguf is no file: name a GGUF file"),
        ("", {}, ValueError, "cannot be loaded|holds no"),
        (5, {}, TypeError, "model must be a causal LM of transformers"),
        (None, {}, TypeError, "model must be a causal LM of transformers"),
        (torch.nn.Linear(1, 1), {}, TypeError, "model must be a causal LM of transformers"),
        ("smollm2", {"revision": "main"}, ValueError, "revision is for models on the hub"),
        ("folder", {"dtype": "int8"}, ValueError, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ("folder", {"dtype": torch.int64}, ValueError, "dtype must be one of"),
        ("folder", {"kernels": "fast"}, ValueError, "kernels must be one of auto, native, torch, triton, got 'fast'"),
        (
            "folder",
            {"costs": "cheap"},
            ValueError,
            "costs must be auto, renew, a CostTable, StepCosts or None, got 'cheap'",
        ),
        ("folder", {"costs": 3}, TypeError, "costs must be of type StepCosts or CostTable, got 3"),
        ("folder", {"max_cache_tokens": 0}, ValueError, "max_cache_tokens must be a whole number of at least 1"),
        ("folder", {"device": "nowhere"}, ValueError, "'nowhere' is no device of torch; write cpu, cuda"),
        ("folder", {"device": "cuda:77"}, ValueError, "cuda:77 is not there: torch sees"),
        ("model", {"dtype": "float32"}, ValueError, "dtype: the model is in memory already"),
        ("model", {"revision": "a", "device": "cpu"}, ValueError, "device, revision: the model is in memory already"),
        ("target", {"kernels": "native"}, ValueError, "kernels: the model is in memory already"),
        ("target", {"keep_weights": False}, ValueError, "keep_weights: the model is in memory already"),
        ("target", {"weights": "int8"}, ValueError, "weights: the model is in memory already"),
        ("target", {"tokenizer": 1}, ValueError, "tokenizer: the model is in memory already"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_hub")
def test_bad_models_and_options_are_refused(folder, model, options, error, match):
    made = {"folder": lambda: folder, "model": tiny, "target": lambda: ad.RaggedModel(tiny(), kernels="torch")}
    named = made[model]() if isinstance(model, str) and model in made else model
    with pytest.raises(error, match=match):
        ad.load(named, **{"costs": None, **options})


# Drafters


@pytest.mark.parametrize(
    ("drafter", "kind"),
    [
        ("auto", ad.NGramDrafter),
        ("ngram", ad.NGramDrafter),
        ("none", ad.NoDrafter),
        ("early-exit:1", ad.EarlyExitDrafter),
        ("folder", ad.LanguageModelDrafter),
        ("trained", ad.MedusaDrafter),
        (ad.NGramDrafter(3, 1), ad.NGramDrafter),
        ("model", ad.LanguageModelDrafter),
    ],
    ids=str,
)
@pytest.mark.parametrize("costs", [None, CostTable((1, 8), (1.0, 1.1))], ids=["free", "costly"])
def test_every_way_to_name_a_drafter(folder, tmp_path, drafter, kind, costs):
    target = ad.RaggedModel(tiny(max_position_embeddings=2048), tiny_tokenizer(), kernels="torch")
    target.model.generation_config.eos_token_id = None
    if drafter == "folder":
        drafter = folder
    elif drafter == "trained":
        drafter = publish(tmp_path / "head", target.model)
    elif drafter == "model":
        drafter = ad.RaggedModel(tiny(seed=1), target.tokenizer, kernels="torch")
    decoder = ad.load(target, drafter, costs=costs)
    assert isinstance(decoder.drafter, kind)
    assert isinstance(decoder.decider, FixedDepth if costs is None or kind is ad.NoDrafter else ad.CostAware)
    assert generated(decoder, max_new_tokens=10)[0] == greedy_reference(target.model, PROMPTS, max_new_tokens=10)
    sampled = [decoder.complete("hello", max_new_tokens=6, temperature=1, seed=4) for _ in range(2)]
    assert sampled[0] == sampled[1]


@pytest.mark.parametrize(
    ("drafter", "error", "match"),
    [
        (
            "ngrm",
            ValueError,
            "'ngrm' is none of auto, ngram, none, self, mtp, .*, a GGUF file, a hub name; did you mean",
        ),
        ("early-exit:", ValueError, "write early-exit:LAYERS"),
        ("early-exit:all", ValueError, "write early-exit:LAYERS"),
        ("early-exit:9", ValueError, "9"),
        ("", ValueError, "drafter '' is none of"),
        ("no/such/drafter", ValueError, "is none of auto.* and as a model: no/such/drafter cannot be loaded"),
        (7, TypeError, "drafter must be of type Drafter"),
        (None, TypeError, "drafter must be of type Drafter"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_hub")
def test_bad_drafters_are_refused(drafter, error, match):
    with pytest.raises(error, match=match):
        ad.load(tiny(), drafter, **FREE)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_gguf_file_drafts_for_another(tmp_path, kernels):
    pytest.importorskip("gguf")
    if kernels == "native" and native.problem():
        pytest.skip("no native kernels")
    from support.gguf_files import LETTERS

    for name, layers in (("large", 2), ("small", 1)):
        model = fusable(vocab_size=len(LETTERS), num_hidden_layers=layers)
        write_gguf(tmp_path / f"{name}.gguf", model, [("", "Q8_0")])
    options = {"kernels": kernels, "costs": None, "device": "cpu", "dtype": "float32"}
    decoder = ad.load(tmp_path / "large.gguf", str(tmp_path / "small.gguf"), **options)
    assert isinstance(decoder.drafter, ad.LanguageModelDrafter)
    assert decoder.target.weights == ("file" if kernels == "native" else None)
    assert decoder.drafter.model.weights in (("file", "int4") if kernels == "native" else (None,))
    assert text(decoder) == text(ad.load(decoder.target, "none"))
    write_gguf(tmp_path / "other.gguf", fusable(vocab_size=27), tokens=LETTERS[::-1])
    assert isinstance(drafter_named(str(tmp_path / "other.gguf"), decoder.target), ad.IntersectionDrafter)
    with pytest.raises(ValueError, match=r"as a model: .*none\.gguf is no file"):
        drafter_named(str(tmp_path / "none.gguf"), decoder.target)


def test_an_own_drafter_by_name(folder, tmp_path, monkeypatch):
    text = "import arbordraft as ad\n\n\ndef lookups(target):\n    return ad.NGramDrafter(longest=target.vocab_size)\n"
    (tmp_path / "mine_by_name.py").write_text(
        f"{text}\n\nclass Fixed:\n    pass\n\n\ndef other(target):\n    return 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    drafter = ad.load(folder, "mine_by_name:lookups", kernels="torch", costs=None).drafter
    assert isinstance(drafter, ad.NGramDrafter)
    assert drafter.longest == VOCAB
    for name, reason in {
        "mine_by_name:absent": "has no absent",
        "mine_by_name:Fixed": "only argument",
        "mine_by_name:other": "not an arbordraft.Drafter",
        "no_such_module:drafter": "PYTHONPATH",
    }.items():
        with pytest.raises(ValueError, match=reason):
            ad.load(folder, name, kernels="torch", costs=None)


def test_a_drafter_for_another_target_is_refused(tmp_path):
    head = publish(tmp_path / "head", tiny(num_hidden_layers=3))
    with pytest.raises(ValueError, match="trained for another target"):
        ad.load(tiny(), head, **FREE)


@pytest.mark.parametrize("place", ["inside the model's folder", "beside it", "in the cache", "elsewhere"])
def test_auto_finds_the_drafter_of_this_target(folder, cache, tmp_path, place):
    model = type(tiny()).from_pretrained(folder).eval()
    home = {
        "inside the model's folder": folder,
        "beside it": folder.parent,
        "in the cache": cache / "drafters",
        "elsewhere": tmp_path / "elsewhere",
    }[place]
    for name, acceptance in {"a": 0.4, "b": 0.6, "c": 0.5}.items():
        publish(home / name, model, acceptance)
    publish(home / "of another", tiny(num_hidden_layers=3), 0.9)
    (home / "damaged").mkdir()
    (home / "damaged" / "config.json").write_text("{")
    decoder = ad.load(model, **FREE)
    assert trained_for(decoder.target) == (None if place == "elsewhere" else home / "b")
    assert isinstance(decoder.drafter, ad.NGramDrafter if place == "elsewhere" else ad.MedusaDrafter)


def test_auto_does_not_look_into_the_current_folder(tmp_path, monkeypatch):
    publish(tmp_path / "here" / "head", tiny())
    monkeypatch.chdir(tmp_path / "here")
    assert isinstance(drafter_named("auto", ad.RaggedModel(tiny(), kernels="torch")), ad.NGramDrafter)


# Costs


@pytest.fixture
def timed(monkeypatch):
    """Records simulated measurements of the target; each gives another price."""
    done: list[CostTable] = []

    def measure(target, rows, enough, **_):
        enough()
        done.append(CostTable((1, 8), (1.0, 2.0 + len(done))))
        return done[-1]

    monkeypatch.setattr(measuring, "measure_rows", measure)
    return done


def target(**changes: object) -> ad.RaggedModel:
    return ad.RaggedModel(tiny(**changes), kernels="torch")


def test_costs_are_measured_once(timed):
    def table(*arguments, **options):
        return ad.load(*arguments, kernels="torch", **options).decider.costs.target

    known_costs(target(), ad.NGramDrafter(longest=8, shortest=1))
    assert table(tiny()) == table(tiny(seed=1)) == timed[0]  # weights do not matter
    assert len(timed) == 1
    assert table(tiny(), costs="renew") == timed[1]
    assert table(tiny()) == timed[1]
    given = CostTable((1,), (3.0,))
    assert table(tiny(), costs=given) is given
    steps = StepCosts(given, given)
    assert ad.load(tiny(), kernels="torch", costs=steps).decider.costs is steps
    for drafter, options in (("none", {}), ("auto", {"costs": None})):
        assert isinstance(ad.load(tiny(), drafter, kernels="torch", **options).decider, FixedDepth)
    own = Heuristic()
    assert ad.load(tiny(seed=5), kernels="torch", decider=own).decider is own
    assert len(timed) == 2


# Times of measurements


@pytest.fixture
def soon(monkeypatch):
    """Makes measurements worthwhile after 20 tokens in an idle engine, else before 100 at once."""
    monkeypatch.setattr(cost_aware, "_TOKENS_DECODED", 20)
    monkeypatch.setattr(cost_aware, "_SECONDS_DECODED", 100 * cost_aware._SECONDS_PER_TOKEN)


def answers(decoder, count=12, prompts=1):
    """Continues a text that repeats itself, the same for all samples."""
    ids = torch.tensor([[5, 6, 7] * 5] * prompts)
    return decoder.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()


def test_costs_are_rough_until_measuring_pays(timed):
    decoder = ad.load(tiny(), "ngram", kernels="torch")
    rough = measuring.rough_costs(decoder.target, decoder.drafter)
    plain = answers(ad.load(decoder.target, "none"))
    for _ in range(2):
        assert answers(decoder) == plain
        assert (decoder.decider.costs, timed) == (rough, []), "no caller waits for a measurement"
    assert decoder.decider._progress.seconds > 0
    decoder.decider.stepped(0, cost_aware._SECONDS_DECODED)
    for _ in range(2):
        assert answers(decoder) == plain
        assert decoder.decider.costs.target == timed[0]
    assert ad.load(decoder.target, "ngram").decider.costs == decoder.decider.costs
    assert len(timed) == 1


def test_costs_are_measured_before_a_large_batch(timed, soon):
    decoder = ad.load(tiny(), "ngram", kernels="torch")
    answers(decoder, prompts=12)
    assert decoder.decider.costs.target == timed[0]


def test_a_batch_is_large_by_the_seconds_that_tokens_take(timed):
    """Here a token takes 0.1 s, so that 1,500 tokens are less than 200 s, and 2,500 are more."""
    decider = ad.load(tiny(), "ngram", kernels="torch").decider
    memory = decider.start()
    for _ in range(10):
        decider.learn(memory, Outcome(0, 0))
        decider.stepped(0, 0.1)
    decider.expect(1500)
    assert timed == []
    decider.expect(2500)
    assert len(timed) == 1


def test_costs_are_measured_at_once_if_texts_depend_on_them(timed):
    drafter, coupling = drafters(target())["model"], ad.Coupling(ad.IID(1), ad.TopDown(ad.RecursiveRejection()))
    decoder = ad.load(tiny(), drafter, kernels="torch", topology=ad.TreeTopology.chain(3), coupling=coupling)
    assert decoder.decider.costs.target == timed[0]


def test_an_engine_measures_while_it_is_idle(timed, soon):
    decoder, idle = ad.load(tiny(), "ngram", kernels="torch"), threading.Event()
    settle = decoder.decider.settle

    def settled(hurry):
        settle(hurry)
        idle.set()

    decoder.decider.settle = settled
    with ad.Engine(decoder, max_cache_tokens=500) as engine:
        engine.submit(ad.Request(prompt=[5, 6, 7] * 5, max_new_tokens=40, ends=[])).result()
        assert idle.wait(30)
    assert decoder.decider.costs.target == timed[0]


def test_an_engine_that_is_stepped_measures_before_it_runs(timed, soon):
    decoder = ad.load(tiny(), "ngram", kernels="torch")
    engine = ad.Engine(decoder, max_cache_tokens=500)
    engine.submit(ad.Request(prompt=[5, 6, 7], max_new_tokens=30, n=4, ends=[]))
    engine.run()
    assert decoder.decider.costs.target == timed[0]


def test_a_measurement_yields_to_waiting_requests(timed):
    decoder = ad.load(tiny(), "ngram", kernels="torch")
    rough = decoder.decider.costs
    decoder.decider.expect(10**6, hurry=lambda: True)
    assert (decoder.decider.costs, timed) == (rough, [])
    assert not cost_file(decoder.target).exists()
    decoder.decider.expect(10**6)
    assert decoder.decider.costs.target == timed[0]


def test_a_failed_measurement_stops_no_answer(monkeypatch, soon):
    def fail(*_, **__):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(measuring, "measure_rows", fail)
    decoder = ad.load(tiny(), "ngram", kernels="torch")
    rough = decoder.decider.costs
    with pytest.warns(UserWarning, match="could not be measured, rough costs stay: out of memory"):
        found = answers(decoder, prompts=12)
    assert answers(decoder, prompts=12) == found, "a failed measurement is not repeated"
    assert decoder.decider.costs == rough


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["no time", "time"])
def test_costs_without_time_to_measure_are_estimated(monkeypatch, seconds):
    """Measured or not, all parts of a step have a cost, and torch's generator is not changed."""
    monkeypatch.setattr(measuring, "_SECONDS", dict.fromkeys(measuring._SECONDS, seconds))
    of = target()
    drafter, state = drafters(of)["model"], torch.get_rng_state()
    costs = known_costs(of, drafter)
    assert torch.equal(torch.get_rng_state(), state)
    assert costs.target.rows == ((1,) if not seconds else measuring._KEPT_ROWS)
    assert costs.draft.rows == ((1,) if not seconds else (1, 4, 16, 64))
    if not seconds:  # the same numbers of forwards as estimated from the weights
        forward, rough = costs.target(1), measuring.rough_costs(of, drafter)
        expected = [forward * part for part in (rough.draft(1), rough.rest, rough.start, rough.lookup)]
        assert [costs.draft(1), costs.rest, costs.start, costs.lookup] == pytest.approx(expected)
    assert known_costs(of, drafter) == costs, "the costs were not kept"


def test_measurements_are_announced(timed, stepped, caplog):
    caplog.set_level(logging.INFO, "arbordraft")

    def announced():
        found = [record.getMessage() for record in caplog.records if record.getMessage().endswith(" ...")]
        caplog.clear()
        return [text for text in found if text.startswith("measuring")]

    of = target()
    known_costs(of, drafters(of)["model"])
    known_costs(of, drafters(of)["model"])
    assert announced() == [
        "measuring forwards of this model, once per machine and kind of model (at most 4 s) ...",
        "measuring drafts for it, once per machine and kind of model (at most 6 s) ...",
    ]
    ad.load(of, drafters(of)["copied layer"]).decider.expect(10**6, hurry=lambda: False)
    assert len(stepped) == 2
    assert announced() == [], "no caller waited for this measurement"
    known_costs(of, drafters(of)["model"], renew=True)
    assert len(announced()) == 2


# Work that takes long


@pytest.fixture
def reported(monkeypatch):
    """Watches functions that take long for real models; returns whether their work was reported, by name."""
    found = {}

    def watch(place, name):
        function = getattr(place, name)

        def watched(*arguments, **options):
            found[name] = found.get(name, True) and bool(progress._reporter._running)
            return function(*arguments, **options)

        monkeypatch.setattr(place, name, watched)

    watch(loading, "read_model")
    watch(loading, "read_tokenizer")
    watch(models, "Prepacking")
    watch(models, "check_logits")
    watch(loading, "choose_drafter")
    watch(loading, "drafter_named")
    watch(measuring, "measure_rows")
    watch(measuring, "measure_steps")
    return found


def test_loading_reports_all_its_work(reported, folder):
    ad.load(folder, dtype="float32", kernels="native", costs="renew")
    once = ["read_model", "read_tokenizer", "Prepacking", "check_logits", "choose_drafter"]
    assert reported == dict.fromkeys([*once, "measure_rows", "measure_steps"], True)
    ad.load(folder, "self", dtype="float32", kernels="native", costs=None)
    assert reported["drafter_named"]


def test_loading_a_gguf_file_reports_all_its_work(reported, tmp_path):
    model = tiny(hidden_size=64, intermediate_size=128, head_dim=16)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, [("", "Q8_0")])
    ad.load(file, "none", weights="file", tokenizer=tiny_tokenizer(), kernels="native", dtype="float32")
    assert {"read_model", "read_tokenizer", "Prepacking", "check_logits"} <= reported.keys()
    assert all(reported.values())


def test_work_outside_of_a_phase_would_be_noticed(reported, folder, monkeypatch):
    """Negative control."""
    monkeypatch.setattr(loading, "phase", lambda what, **_: contextlib.nullcontext())
    ad.load(folder, "none", dtype="float32", kernels="torch")
    assert not reported["read_model"]
    assert reported["check_logits"]


# Steps with a drafter


@pytest.fixture
def stepped(timed, monkeypatch):
    """Records simulated measurements of steps; each gives another price."""
    done: list[StepCosts] = []

    def measure(target, drafter, texts, rows, enough, **_):
        enough()
        done.append(StepCosts(rows, CostTable((1, 8), (0.5, 1.0 + len(done))), rest=0.25))
        return done[-1]

    monkeypatch.setattr(measuring, "measure_steps", measure)
    return done


def drafters(of):
    return {
        "exit at 1": ad.EarlyExitDrafter(of, 1),
        "model": ad.LanguageModelDrafter(ad.RaggedModel(tiny(seed=1), kernels="torch")),
        "larger model": ad.LanguageModelDrafter(ad.RaggedModel(tiny(num_hidden_layers=3), kernels="torch")),
        "copied layer": ad.LanguageModelDrafter(ad.RaggedModel(shrink(of.model, [0]), kernels=of.backend)),
    }


def test_steps_are_measured_once_per_kind_of_drafter(timed, stepped):
    of = target()
    found = {name: known_costs(of, drafter) for name, drafter in drafters(of).items()}
    assert [costs.draft for costs in found.values()] == [costs.draft for costs in stepped]
    assert len({cost_file(of, drafter) for drafter in drafters(of).values()} | {cost_file(of)}) == len(found) + 1
    again = target(seed=4)  # neither weights nor the process matter
    assert {name: known_costs(again, drafter) for name, drafter in drafters(again).items()} == found
    assert (len(timed), len(stepped)) == (1, len(found))
    assert all(costs.target == timed[0] for costs in found.values())


def test_steps_are_measured_again_on_request(timed, stepped):
    of = target()
    drafter = ad.EarlyExitDrafter(of, 1)
    first, second = known_costs(of, drafter), known_costs(of, drafter, renew=True)
    assert first != second == known_costs(of, drafter)
    assert (second.target, second.draft) == (timed[1], stepped[1].draft)
    assert known_costs(of, ad.LanguageModelDrafter(of)).target == timed[1]  # all drafters share the target's costs
    known_rows(of, renew=True)
    assert known_costs(of, drafter).target == timed[2]
    assert ad.load(of, drafter, costs="renew").decider.costs.draft == stepped[3].draft


def test_lookups_have_no_cost_per_level(timed, monkeypatch):
    now, scores = [0.0], ad.NGramDrafter.scores

    def read() -> float:
        now[0] += 1e-6
        return now[0]

    def looked(self, state, frontier):
        now[0] += 0.01 * (frontier.depth == 0)
        return scores(self, state, frontier)

    monkeypatch.setattr(time, "perf_counter", read)  # a busy machine would add more time than lookups take
    monkeypatch.setattr(ad.NGramDrafter, "scores", looked)
    costs = known_costs(target(), ad.NGramDrafter())
    assert costs.target == timed[0]
    assert costs.draft(1) < 1e-6
    assert costs.starting(16) == 0
    assert costs.rest == pytest.approx(0, abs=1e-3)
    assert costs.looking(16) == pytest.approx(0.01, abs=1e-3)


@pytest.mark.parametrize("content", ["", "[]", '{"target": 3}', '{"rows": [1], "seconds": [1]}'])
def test_damaged_steps_are_measured_again(timed, stepped, content):
    of = target()
    drafter = ad.EarlyExitDrafter(of, 1)
    known_costs(of, drafter)
    cost_file(of, drafter).write_text(content)
    with pytest.warns(UserWarning, match=r"holds no step costs: .*measure them again: measuring now"):
        assert known_costs(of, drafter).draft == stepped[1].draft
    assert known_costs(of, drafter).draft == stepped[1].draft
    assert (len(timed), len(stepped)) == (1, 2)


@pytest.mark.parametrize("drafter", ["early-exit:1", "model"])
def test_measured_costs_are_complete(drafter):
    of = target()
    made = ad.EarlyExitDrafter(of, 1) if drafter == "early-exit:1" else drafters(of)[drafter]
    costs = known_costs(of, made, renew=True)
    assert costs.draft.rows == (1, 4, 16, 64)  # chains of 1, 4 and 16 samples, and forks of the last
    assert StepCosts.load(cost_file(of, made)) == costs == known_costs(of, made)


@pytest.mark.parametrize(
    "other",
    [
        lambda: target(num_hidden_layers=3),
        lambda: ad.RaggedModel(tiny().bfloat16(), kernels="torch"),
        lambda: target(architecture="qwen2"),
        lambda: ad.RaggedModel(tiny(), kernels="auto"),
        lambda: torch.set_num_threads(2) or target(),  # `_reproducible` restores it
    ],
    ids=["shapes", "dtype", "architecture", "kernels", "threads"],
)
def test_costs_of_another_kind_of_model_have_their_own_file(kernels, other):
    before = cost_file(target())
    assert cost_file(other()) != before


def test_damaged_costs_are_measured_again(timed):
    path = cost_file(target())
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.warns(UserWarning, match=r"holds no cost table: .*measure them again: measuring now"):
        assert known_rows(target()) == timed[0]
    assert known_rows(target()) == timed[0]
    assert len(timed) == 1


def test_costs_that_cannot_be_kept_are_measured_every_time(timed, cache):
    cache.write_text("a file where the folder should be")
    with pytest.warns(UserWarning, match="step costs are measured in every process: .*is a file, not a folder"):
        assert known_rows(target()) == timed[0]


def test_one_slow_spell_does_not_spoil_a_table(monkeypatch):
    """Disturbances only add time, so the time of more rows bounds that of fewer rows."""
    clock = iter([0.0, 9.0, 0.0, 1.0, 0.0, 2.0])
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: next(clock))
    assert measuring.measure_rows(target(), (1, 2, 4), context=4, repeats=1).seconds == (1.0, 1.0, 2.0)


# Kernels


@pytest.mark.parametrize(
    ("free", "backend"), [(None, "native"), (2**30, "native"), (1000, "torch")], ids=["unknown", "plenty", "too little"]
)
def test_a_copy_must_fit_into_memory(kernels, monkeypatch, free, backend):
    monkeypatch.setattr(backends, "available_memory", lambda: free)
    if backend == "native":
        target = ad.RaggedModel(tiny(), kernels="auto")
    else:
        with pytest.warns(UserWarning, match="own linears: a prepacked copy of the weights takes"):
            target = ad.RaggedModel(tiny(), kernels="auto")
        assert "GiB are free" in target.chosen
        assert ad.RaggedModel(tiny(), kernels="native").backend == "native"
    assert target.backend == backend


def test_the_chosen_kernels_are_logged_once(kernels, caplog):
    with caplog.at_level("INFO", logger="arbordraft"):
        target = ad.RaggedModel(tiny(head_dim=16, intermediate_size=64))
    (line,) = [text for record in caplog.records if (text := record.getMessage()).startswith("kernels: ")]
    assert line == f"kernels: {target.chosen}"
    assert target.chosen == f"native: 2 of 2 layers fused, {native.isa()}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": "torch"}, "torch: the model's own modules (asked for)"),
        ({"kernels": "native"}, "native: 0 of 2 layers fused, 9 linears prepacked, "),
        ({"weights": "int8"}, ", int8"),
        ({"keep_weights": False}, "originals in a file"),
        ({"kernels": "torch", "keep_weights": False}, "torch: the model's own modules (asked for)"),
    ],
    ids=str,
)
def test_chosen_names_kernels_and_weights(kernels, options, said):
    assert said in ad.RaggedModel(tiny(), **options).chosen


def test_memory_is_known_on_linux():
    if not Path("/proc/meminfo").exists():
        pytest.skip("needs /proc")
    assert 2**20 < machine.available_memory() < 2**60


def test_a_container_bounds_memory(tmp_path, monkeypatch):
    limits = [tmp_path / name for name in ("max", "current", "stat")]
    for file, text in zip(limits, ("5000", "4000", "anon 1\ninactive_file 500\n"), strict=True):
        file.write_text(text)
    monkeypatch.setattr(machine, "_GROUPS", [tuple(map(str, limits))])
    assert machine.available_memory() == 1500
    limits[0].write_text("max")
    assert machine.available_memory() > 5000


# Original weights that are not kept in memory


def in_a_file(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor's memory is that of a deleted file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= tensor.data_ptr() < int(last, 16):
            return "weights-" in line and line.endswith("(deleted)")
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_originals_are_kept_in_a_file(kernels, cache, dtype, tied):
    kept = ad.RaggedModel(tiny(tie_word_embeddings=tied).to(dtype))
    freed = ad.RaggedModel(tiny(tie_word_embeddings=tied).to(dtype), keep_weights=False)
    model = freed.model
    assert all(in_a_file(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert not any(in_a_file(weight) for weight in kept.model.parameters())
    assert list(cache.glob("weights-*")) == []
    for name, tensor in kept.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    settings = {**left_padded(PROMPTS), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**settings), kept.model.generate(**settings))
    ours = [ad.SpeculativeDecoder(each, ad.NGramDrafter()).generate(**settings) for each in (kept, freed)]
    assert torch.equal(*ours)


def test_changed_originals_are_packed_again(kernels):
    """LoRA's merge changes weights in this way."""
    freed = ad.RaggedModel(tiny(), keep_weights=False)
    with torch.no_grad():
        for layer in freed.model.model.layers:
            layer.mlp.down_proj.weight += 0.1
    settings = {**left_padded(PROMPTS), "max_new_tokens": 8, "do_sample": False}
    with pytest.warns(UserWarning, match="changed after they were prepacked"):
        found = ad.SpeculativeDecoder(freed, ad.NGramDrafter()).generate(**settings)
    assert torch.equal(found, freed.model.generate(**settings))
    assert in_a_file(freed.model.model.layers[0].mlp.down_proj.weight)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda model: model.share_memory(), "cannot free weights that lie in a file or on a device"),
        (None, "cannot move weights that were loaded in inference mode"),
    ],
    ids=["shared", "inference mode"],
)
def test_originals_that_cannot_be_freed_are_refused(kernels, spoil, match):
    if spoil is None:
        with torch.inference_mode():
            model = tiny()
    else:
        spoil(model := tiny())
    with pytest.raises(ValueError, match=match):
        ad.RaggedModel(model, keep_weights=False)


def test_originals_need_a_cache_folder(kernels, cache):
    cache.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=r"is a file, not a folder; .*name another path"):
        ad.RaggedModel(tiny(), keep_weights=False)
