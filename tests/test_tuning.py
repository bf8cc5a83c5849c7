"""Tuning: what it predicts, that the best setting wins, and that its choice survives a file."""

import json

import pytest
from models import PROMPTS, greedy_reference, left_padded, new_tokens, ragged, tiny_tokenizer

from arbordraft import CostTable, EarlyExitDrafter, NGramDrafter, RaggedModel, builders
from arbordraft.costs import StepCosts
from arbordraft.measuring import measure_costs
from arbordraft.tuning import Choice, Setting, Tuned, grid, measure_acceptance, plausible, predict, tune

CHEAP = StepCosts(CostTable((1, 8), (1.0, 1.0)), CostTable((1, 8), (0.01, 0.01)))
DEAR = StepCosts(CostTable((1, 64), (1.0, 64.0)), CostTable((1, 64), (1.0, 64.0)))
TEXTS = ["a b c", "c", "b a"]


def tokenizer():
    found = tiny_tokenizer()
    found.eos_token = found.pad_token = "c"
    return found


@pytest.fixture
def target():
    return RaggedModel(ragged().model, tokenizer(), kernels="torch")


def test_chains_are_predicted_by_a_geometric_sum():
    drafter = EarlyExitDrafter(ragged(), 1)
    found = predict(Setting("chain", 3), CHEAP, [0.5], drafter, batch=1)
    assert found == pytest.approx((1 + 0.5 + 0.25 + 0.125) / 1.03)
    assert predict(Setting("chain", 2), DEAR, [0.8, 0.5], drafter, batch=2) == pytest.approx(2 * 2.2 / (6 + 2 * 2))
    assert predict(Setting("lookup"), CHEAP, [0.5], drafter, batch=1) is None


def test_trees_are_predicted_by_the_acceptance_of_ranks():
    drafter = EarlyExitDrafter(ragged(), 1)
    first, second = drafter.acceptance[:2]
    found = predict(Setting("tree", 4), CHEAP, [0.5], drafter, batch=1)
    best = max(1 + first + first**2 + first**3, 1 + first + first**2 + second, 1 + first + second + first * second)
    assert found == pytest.approx(best / (1 + 0.01 * (3 if best == 1 + first + first**2 + first**3 else 2)))


def test_what_cannot_win_is_left_out():
    drafter = EarlyExitDrafter(ragged(), 1)
    long, short = (
        {setting.size for setting in plausible(costs, [rate], drafter, 1) if setting.kind == "chain"}
        for costs, rate in ((CHEAP, 0.9), (DEAR, 0.1))
    )
    assert 8 in long
    assert 1 not in long
    assert 1 in short
    assert 8 not in short
    kinds = {setting.kind for setting in grid(NGramDrafter())}
    assert kinds == {"plain", "lookup", "chain"}
    assert {setting.kind for setting in grid(drafter)} == kinds | {"tree", "lookup or tree"}


def test_costs_and_acceptance_are_measured(target):
    drafter = EarlyExitDrafter(target, 1)
    costs = measure_costs(target, drafter, target.tokenizer, TEXTS)
    assert costs.draft.rows[0] == 1
    assert len(costs.draft.rows) > 2
    assert min(*costs.draft.seconds, *costs.target.seconds, costs.rest) > 0
    rates = measure_acceptance(target, drafter, target.tokenizer, TEXTS, 0.0, 12)
    assert 1 <= len(rates) <= 4
    assert all(0 <= rate <= 1 for rate in rates)
    assert measure_acceptance(target, NGramDrafter(9, 9), target.tokenizer, TEXTS, 0.0, 4) == [0.0]


@pytest.mark.parametrize(("slow", "temperature"), [("speculation", 0.0), ("plain", 0.0), ("plain", 1.0)])
def test_the_fastest_wins(target, monkeypatch, slow, temperature):
    """One of both is made slow: the other must be chosen."""
    import time

    real = Setting.decoder

    def slowed(self, *arguments, **options):
        decoder = real(self, *arguments, **options)
        if (self.kind == "plain") == (slow == "plain"):
            step = decoder.step
            decoder.step = lambda state: (time.sleep(0.02), step(state))[1]
        return decoder

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
        tell=told.append,
    )
    (choice,) = found.choices
    assert choice.pays == (slow == "plain")
    assert choice.tokens_per_second == max(choice.rivals[str(choice.setting)], choice.tokens_per_second)
    assert choice.plain == choice.rivals["plain"]
    assert any("settings left" in line for line in told)


def tuned():
    setting, plain = Setting("chain", 3), Setting("plain")
    choices = [Choice(2, setting, 5.0, 4.0, {"plain": 4.0}), Choice(8, plain, 9.0, 9.0)]
    return Tuned("early-exit:1", 0.0, CHEAP, [0.5, 0.25], choices)


def test_a_choice_survives_a_file_and_decodes(tmp_path):
    path = tmp_path / "tuned.json"
    tuned().save(path)
    assert Tuned.load(path) == tuned()
    target = ragged()
    decoder = Tuned.load(path).decoder(target, batch=4)
    assert decoder.topology.max_depth == 3
    assert isinstance(decoder.drafter, EarlyExitDrafter)
    output = decoder.generate(**left_padded(PROMPTS), max_new_tokens=8, do_sample=False, return_dict_in_generate=True)
    found = new_tokens(output.sequences, PROMPTS, output.stats.emitted)
    assert found == greedy_reference(target.model, PROMPTS, max_new_tokens=8)
    assert Tuned.load(path).decoder(target, batch=1).topology.max_depth == 3
    plain = Tuned.load(path).decoder(target, batch=20, drafter=EarlyExitDrafter(target, 1))
    assert type(plain.drafter) is type(builders.plain(target).drafter)


@pytest.mark.parametrize("damage", ["", "{}", '{"drafter": 1}'])
def test_other_files_are_named(tmp_path, damage):
    path = tmp_path / "tuned.json"
    path.write_text(damage)
    with pytest.raises(ValueError, match="is not what tuning writes"):
        Tuned.load(path)


def test_an_unknown_setting_is_refused(tmp_path):
    path = tmp_path / "tuned.json"
    tuned().save(path)
    fields = json.loads(path.read_text())
    fields["choices"][0]["setting"]["kind"] = "magic"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="no way of speculating called 'magic'"):
        Tuned.load(path).decoder(ragged(), batch=2)
