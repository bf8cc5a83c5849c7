"""Tuning: the fastest setting wins, and a saved choice is read back."""

import json
import time

import pytest
from support.models import PROMPTS, generated, greedy_reference, ragged, tiny_tokenizer

from arbordraft import CostTable, EarlyExitDrafter, NGramDrafter, RaggedModel, builders
from arbordraft.bench.tuned import Choice, Setting, Tuned
from arbordraft.deciders.costs import StepCosts
from arborlab.tuning import grid, tune

CHEAP = StepCosts(CostTable((1, 8), (1.0, 1.0)), CostTable((1, 8), (0.01, 0.01)))
TEXTS = ["a b c", "c", "b a"]


def tokenizer():
    found = tiny_tokenizer()
    found.eos_token = found.pad_token = "c"
    return found


@pytest.fixture
def target():
    return RaggedModel(ragged().model, tokenizer(), kernels="torch")


def test_drafters_without_a_model_have_fewer_settings():
    kinds = {setting.kind for setting in grid(NGramDrafter())}
    assert kinds == {"plain", "lookup"}
    assert {setting.kind for setting in grid(EarlyExitDrafter(ragged(), 1))} == kinds | {"tree", "lookup or tree"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("slow", "temperature"), [("speculation", 0.0), ("plain", 0.0), ("plain", 1.0)])
def test_the_fastest_wins(target, monkeypatch, slow, temperature):
    """Only steps and readings move this clock. Steps of one kind are slow, so the other kind must be chosen."""
    real, now = Setting.decoder, [0.0]

    def read() -> float:
        now[0] += 1e-6
        return now[0]

    def slowed(self, *arguments, **options):
        decoder = real(self, *arguments, **options)
        step = decoder.stepper.step

        def timed(state):
            now[0] += 1.0 if (self.kind == "plain") == (slow == "plain") else 0.001
            return step(state)

        decoder.stepper.step = timed
        return decoder

    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(Setting, "decoder", slowed)
    told = []
    found = tune(
        target,
        target.tokenizer,
        "early-exit:1",
        EarlyExitDrafter(target, 1),
        TEXTS,
        batches=(2,),
        temperature=temperature,
        new_tokens=8,
        on_progress=told.append,
    )
    (choice,) = found.choices
    assert choice.pays == (slow == "plain")
    assert choice.tokens_per_second == max(choice.rivals[str(choice.setting)], choice.tokens_per_second)
    assert choice.plain == choice.rivals["plain"]
    assert any("settings left" in line for line in told)


def tuned():
    setting, plain = Setting("tree", 8), Setting("plain")
    choices = [Choice(2, setting, 5.0, 4.0, {"plain": 4.0}), Choice(8, plain, 9.0, 9.0)]
    return Tuned("early-exit:1", 0.0, CHEAP, choices)


def test_a_saved_choice_is_read_back_and_decodes(tmp_path):
    path = tmp_path / "tuned.json"
    tuned().save(path)
    assert Tuned.load(path) == tuned()
    target = ragged()
    decoder = Tuned.load(path).decoder(target, batch=4)
    assert decoder.decider.nodes == 8
    assert isinstance(decoder.drafter, EarlyExitDrafter)
    found, _ = generated(decoder, max_new_tokens=8, do_sample=False)
    assert found == greedy_reference(target.model, PROMPTS, max_new_tokens=8)
    assert Tuned.load(path).decoder(target, batch=1).decider.nodes == 8
    plain = Tuned.load(path).decoder(target, batch=20, drafter=EarlyExitDrafter(target, 1))
    assert type(plain.drafter) is type(builders.plain(target).drafter)


@pytest.mark.parametrize(
    "damage", ["", "{}", '{"drafter": 1}', {"choices": []}, {"temperature": -1}, {"costs": {}}, {"choices": 3}], ids=str
)
def test_other_files_are_refused(tmp_path, damage):
    path = tmp_path / "tuned.json"
    tuned().save(path)
    path.write_text(damage if isinstance(damage, str) else json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(ValueError, match=r"tuned.json is not a result of tuning: .*; run 'arbordraft tune' again"):
        Tuned.load(path)


def test_an_unknown_setting_is_refused(tmp_path):
    path = tmp_path / "tuned.json"
    tuned().save(path)
    fields = json.loads(path.read_text())
    fields["choices"][0]["setting"]["kind"] = "magic"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="no way of speculating called 'magic'"):
        Tuned.load(path).decoder(ragged(), batch=2)
