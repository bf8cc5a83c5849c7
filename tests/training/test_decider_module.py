"""Training a decider: labels and weights by hand, calibration, the choice of the threshold, and a whole training."""

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from support.models import VOCAB, check_greedy, context, grown, joined, next_logits, ragged, tiny
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.testing import assert_close
from torch.utils.data import DataLoader

import arbordraft as ad
from arbordraft.deciders import LearnedDecider
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.learned import UNLIKELY
from arbordraft.heads.eagle import EagleHead
from arbordraft.target.cache import RaggedKVCache
from arbordraft.training.batches import Batch
from arbordraft.training.calibration import drafted_lengths, ece, fit_temperature, tokens_per_second
from arbordraft.training.decider_module import THRESHOLDS, DeciderModule
from arbordraft.training.features import FreshFeatures, TeacherHead
from arbordraft.training.shards import ANSWER, GIVEN
from arbordraft.training.students import EagleStudent, LanguageModelStudent, MedusaStudent
from arbordraft.training.students.base import Prediction, Student

FREE = ad.CostTable((1, 8), (1.0, 1.0))


def drafting(seconds):
    """Returns a cost table in which one level of drafting takes ``seconds``."""
    return ad.CostTable((1,), (seconds,))


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


# Calibration.


def test_ece_is_the_mean_gap_of_the_bins():
    """Chances 0.2 and 0.4 share a bin with a gap of 0.2 and weight 2. Chance 0.9 has a gap of 0.4 and weight 2."""
    chances, labels, weights = tensor(0.2, 0.4, 0.9), tensor(0, 1, 0.5), tensor(1, 1, 2)
    assert ece(chances, labels, weights, bins=2) == pytest.approx((2 * 0.2 + 2 * 0.4) / 4)
    assert ece(chances, labels, torch.ones(3), bins=2) == pytest.approx((2 * 0.2 + 0.4) / 3)
    assert ece(chances, labels, weights, bins=1) == pytest.approx(abs(0.2 + 0.4 + 1.8 - 2) / 4)
    assert ece(labels, labels, weights) == 0
    assert ece(tensor(1.0), tensor(0.0), tensor(1.0)) == 1
    assert math.isnan(ece(tensor(), tensor(), tensor()))


@pytest.mark.parametrize("planted", [0.3, 1.0, 2.5])
def test_a_planted_temperature_is_found(planted):
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 2
    labels, nothing = (logits / planted).sigmoid(), torch.full((500,), 0.5)
    assert fit_temperature(logits, labels, torch.ones(500)) == pytest.approx(planted, rel=1e-6)
    both, mixed = torch.cat([logits, logits]), torch.cat([labels, nothing])
    assert fit_temperature(both, mixed, torch.arange(1000) < 500) == pytest.approx(planted, rel=1e-6)
    assert fit_temperature(both, mixed, torch.ones(1000)) > 1.2 * planted


def test_temperatures_have_bounds():
    assert fit_temperature(tensor(1, -1), tensor(1, 0), tensor(1, 1)) == pytest.approx(0.05)
    assert fit_temperature(tensor(1, -1), tensor(0, 1), tensor(1, 1)) == pytest.approx(20)
    assert fit_temperature(tensor(), tensor(), tensor()) == 1
    assert fit_temperature(tensor(1.0), tensor(0.0), tensor(0.0)) == 1


def test_drafted_lengths_follow_from_the_threshold():
    chances = torch.tensor([[0.9, 0.5, 0.2], [0.9, 0.9, 0.9], [0.1, 0.9, 0.9]])
    assert [drafted_lengths(chances, at).tolist() for at in (0.0, 0.3, 0.6, 0.95, 1.0, 1.1)] == [
        [3, 3, 3], [3, 3, 1], [3, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0]
    ]  # fmt: skip


def test_speed_in_closed_form():
    """Chains of n tokens that pass with chance a each emit (1 - a^(n+1)) / (1 - a) on average."""
    chance, seconds = 0.6, [1.0, 1.5, 2.0, 2.5]
    for length in range(4):
        expected = (1 - chance ** (length + 1)) / (1 - chance) / seconds[length]
        found = tokens_per_second(torch.full((7,), length), torch.full((3, 7), chance), seconds)
        assert found == pytest.approx(expected)
    passes = torch.tensor([[1.0, 0.5], [1.0, 1.0], [0.0, 1.0]])
    assert tokens_per_second(torch.tensor([3, 1]), passes, seconds) == pytest.approx((3 + 1.5) / (2.5 + 1.5))


# The choice of the threshold.


def planted_part(easy, count=1000, steps=4):
    """Builds drafts that the decider can tell apart: a share ``easy`` passes at chance 0.9, the rest at 0.3."""
    chances = torch.where(torch.arange(count) < easy * count, 0.9, 0.3).expand(steps, -1)
    return {
        "logits": torch.logit(chances),
        "passes": chances,
        "labels": chances,
        "valid": torch.ones(steps, count, dtype=torch.bool),
        "weights": torch.cat([torch.ones(1, count), chances[:-1]]).cumprod(0),
    }


def eagle_student(target):
    torch.manual_seed(0)
    student = EagleStudent(layers=[0, 1, 2])
    student.network = EagleHead.for_target(target.model, list(range(3, VOCAB)), hidden_layers=[0, 1, 2])
    return student


def chosen(fit, judge=None, **settings):
    module = DeciderModule(eagle_student(ragged()), draft_steps=4, **settings)
    metrics = module._choose(fit, judge or fit)
    return module, metrics


def test_the_threshold_is_chosen_by_speed():
    """A drafted token costs a quarter of a target forward; the best acceptance rate would stop after one token."""
    part, costs = planted_part(easy=0.5), StepCosts(FREE, drafting(0.25))
    module, metrics = chosen(part, costs=costs)
    seconds = [1 + 0.25 * drafted for drafted in range(5)]
    speeds, shares = {}, {}
    for threshold in THRESHOLDS:
        lengths = drafted_lengths(part["passes"], threshold)
        accepted = sum(
            sum(0.9**s if index < 500 else 0.3**s for s in range(1, n + 1)) for index, n in enumerate(lengths)
        )
        speeds[threshold] = float((1000 + accepted) / sum(seconds[n] for n in lengths))
        shares[threshold] = float(accepted / max(1, lengths.sum()))
    fastest = max(speeds, key=speeds.__getitem__)
    assert module.decider.threshold == metrics["threshold"] == fastest
    assert max(shares, key=shares.__getitem__) != fastest
    assert metrics["tokens_per_second"] == pytest.approx(speeds[fastest])
    fixed = [tokens_per_second(torch.full((1000,), depth), part["passes"], seconds) for depth in range(5)]
    assert metrics["tokens_per_second_fixed"] == max(fixed) == fixed[metrics["fixed_depth"]]
    assert metrics["tokens_per_second"] > metrics["tokens_per_second_fixed"]


def test_the_costs_of_drafting_move_the_threshold():
    part = planted_part(easy=0.5)
    assert chosen(part, costs=StepCosts(FREE, drafting(1e-9)))[0].decider.threshold == 0
    assert chosen(part, costs=StepCosts(FREE, drafting(10.0)))[0].decider.threshold > 1
    assert chosen(part, costs=StepCosts(FREE, drafting(0.1), decide=10.0))[0].decider.threshold > 1


def test_the_judging_part_does_not_change_the_threshold():
    """The threshold is chosen on the first part; the speed is reported for the second."""
    costs = StepCosts(FREE, drafting(0.25))
    (one, own), (other, foreign) = (
        chosen(planted_part(easy=0.5), judge, costs=costs) for judge in (None, planted_part(easy=0.0))
    )
    assert one.decider.threshold == other.decider.threshold
    assert own["tokens_per_second"] > foreign["tokens_per_second"]


# Labels, weights and features.


def batch_of(target, layers, lengths=(24, 17, 20), temperatures=(0.0, 0.7, 1.0), given=4, seed=0):
    """Builds a batch of texts that the target writes: greedily at temperature 0, sampled otherwise."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length, temperature in zip(lengths, temperatures, strict=True):
        text = torch.randint(3, VOCAB, (given,), generator=generator).tolist()
        while len(text) < length:
            logits = next_logits(target.model, text)
            row = (logits / temperature).softmax(-1) if temperature else (logits == logits.max()).float()
            text.append(int(torch.multinomial(row, 1, generator=generator)))
        texts.append(text)
    features = FreshFeatures(target, layers)(texts)
    roles = [torch.tensor([GIVEN] * given + [ANSWER] * (len(text) - given), dtype=torch.uint8) for text in texts]
    return Batch(
        pad_sequence([torch.tensor(text) for text in texts], batch_first=True),
        pad_sequence(roles, batch_first=True),
        torch.tensor(temperatures),
        *(pad_sequence(list(rows), batch_first=True) for rows in zip(*features, strict=True)),
    )


def attached(student, target, **settings):
    module = DeciderModule(student, **settings)
    module.attach(target)
    return module


def forced_draft(drafter, target, text, start, steps, greedy, temperature):
    """Returns draft rows and deciders' hidden states while the drafter must draft the text from ``start`` on."""
    views, rows = [], []

    def decide(view):
        views.append(view)
        return [True]

    def force(ids, scores):
        rows.append((scores / (temperature or 1)).softmax(-1)[0])
        forced = rows[-1].new_full((1, VOCAB), -torch.inf)
        forced[0, text[start + len(rows) - 1]] = 0
        return forced

    cache = RaggedKVCache()
    handle = cache.open(64)
    hidden = target.prefill({handle: text[: start - 1]}, cache, hidden=drafter.hidden_layers)
    state = joined(drafter, [text[:start]], cache, [handle])
    drafter.take_hidden(state, {0: hidden[handle]})
    step = context([text[:start]], ad.TreeTopology.chain(steps), ad.Fixed(1), greedy=greedy, processors=[force])
    grown(drafter, state, step, decide=decide)
    return rows, [view.paths[0][0][-1].origin.hidden for view in views[1:]]


def test_labels_weights_and_features_by_hand():
    """Compares drafts of a batch with the drafter itself, fed with the text, and with the target without a cache."""
    target, steps = ragged(sharpness=3.0), 3
    module = attached(eagle_student(target), target, draft_steps=steps, top_k=3)
    drafter = ad.EagleDrafter(eagle_student(target).network, target)
    batch = batch_of(target, module.hidden_layers(target))
    drafts = module.drafts(batch)
    lengths = [24, 17, 20]
    # A draft needs a hidden state from before its root. Every answer follows four given tokens, so each draft has one.
    assert len(drafts.sequences) == sum(length - 4 for length in lengths)
    seen = 0
    for sample, (length, temperature) in enumerate(zip(lengths, [0.0, 0.7, 1.0], strict=True)):
        text = batch.tokens[sample, :length].tolist()
        for index, start in enumerate(range(4, length)):
            column = (drafts.sequences == sample).nonzero()[index, 0]
            count = min(steps, length - start)
            assert drafts.valid[:, column].tolist() == [True] * count + [False] * (steps - count)
            if start % 4:
                continue
            # Deciders never see the last step of a chain, so one more step is drafted.
            rows, hidden = forced_draft(drafter, target, [*text, 5], start, count + 1, temperature == 0, temperature)
            reach = weight = 1.0
            for step in range(count):
                token, draft = text[start + step], rows[step]
                scores = next_logits(target.model, text[: start + step])
                p = (scores / temperature).softmax(-1) if temperature else (scores == scores.max()).float()
                q = draft if temperature else (draft == draft.max()).float()
                label = 1 - (p - q).abs().sum().item() / 2
                passes = min(1.0, (q[token] / p[token]).item())
                assert drafts.labels[step, column].item() == pytest.approx(label, abs=1e-4)
                assert drafts.passes[step, column].item() == pytest.approx(passes, abs=1e-4)
                assert drafts.weights[step, column].item() == pytest.approx(weight, abs=1e-4)
                assert_close(
                    drafts.places[step, column],
                    torch.tensor([step, math.log(reach), temperature == 0]),
                    rtol=1e-3,
                    atol=1e-3,
                )
                entropy = torch.special.entr(draft).sum()[None]
                statistics = torch.cat([entropy, draft.topk(3).values])
                assert_close(drafts.statistics[step, column], statistics, rtol=1e-3, atol=1e-4)
                assert_close(drafts.hidden[step, column], hidden[step], rtol=1e-3, atol=1e-3)
                reach *= max(draft[token].item(), UNLIKELY)
                weight *= passes
                seen += 1
            assert (drafts.weights[count:, column] == 0).all()
            assert (drafts.passes[count:, column] == 0).all()
    assert seen > 20
    assert (drafts.weights[1:, drafts.sequences == 0] == 1).any()  # some greedy drafts were right


def test_drafts_end_with_the_answer():
    """A given token within an answer is not drafted, and drafts that reach it end there."""
    target = ragged()
    module = attached(eagle_student(target), target, draft_steps=4)
    batch = batch_of(target, module.hidden_layers(target), lengths=(12,), temperatures=(1.0,))
    batch.roles[0, 7] = GIVEN
    drafts = module.drafts(batch)
    assert drafts.valid.sum(dim=0).tolist() == [3, 2, 1, 4, 3, 2, 1]
    assert not drafts.weights[~drafts.valid].any()


@pytest.mark.parametrize(
    "student", [MedusaStudent(num_heads=2, vocabulary=None), LanguageModelStudent(2)], ids=["medusa", "language model"]
)
def test_students_with_few_steps_and_with_equal_steps(student):
    """Covers a student with fewer drafting steps than asked, and one whose steps are all alike."""
    target = ragged()
    student.build(target, lambda count: list(range(count)))
    module = attached(student, target, draft_steps=3, hidden=False)
    drafts = module.drafts(batch_of(target, ()))
    if isinstance(student, MedusaStudent):
        assert drafts.valid[:2].any(dim=1).all()
        assert not drafts.valid[2].any()
    else:  # step 1 of a draft is step 0 of the draft that begins one token later
        inside = drafts.valid[1, :-1]
        assert_close(drafts.labels[1, :-1][inside], drafts.labels[0, 1:][inside])
        assert_close(drafts.statistics[1, :-1][inside], drafts.statistics[0, 1:][inside])


# Training.


class Data(LightningDataModule):
    """Batches of a tiny target's text; the last ones are held out."""

    def __init__(self, target, layers, train=2, held_out=2, **settings):
        super().__init__()
        self.target, self.spec = target, SimpleNamespace(model="tiny")
        self.batches = [batch_of(target, layers, seed=seed, **settings) for seed in range(train + held_out)]
        self.train = train

    def train_dataloader(self):
        return DataLoader(self.batches[: self.train], batch_size=None)

    def val_dataloader(self):
        return DataLoader(self.batches[self.train :], batch_size=None)

    def held_out_prompts(self, count):
        return [batch.tokens[0, :4].tolist() for batch in self.batches[self.train :]][:count]

    def description(self):
        return {"fingerprint": "f00d"}

    def profile(self):
        return {"conversations": 12}


def trainer(folder, epochs=1, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        default_root_dir=folder,
        log_every_n_steps=1,
        **quiet,
        **settings,
    )


class Moody(Student):
    """Student that predicts the target's row after even tokens and a uniform row after odd ones."""

    steps_alike = True

    def __init__(self, target):
        super().__init__()
        self.network = nn.Module()
        self.network.config = SimpleNamespace(hidden_size=target.model.config.hidden_size)
        self.network.head = nn.Linear(1, 1)
        self.head = TeacherHead(target).weight

    def hidden_layers(self, target):
        return ()

    def unroll(self, batch, target, steps):
        knows = (batch.tokens[:, :-1] % 2 == 0)[..., None]
        yield Prediction(batch.final * knows, self.head, None, ahead=1, first=0)

    def drafter(self, target):
        return None


def test_a_planted_signal_is_learned(tmp_path):
    """The entropy of a row tells good rows from uniform ones; only a trained decider uses it."""
    target = ragged(sharpness=3.0)
    data = Data(target, (), train=4, held_out=2)
    module = DeciderModule(
        Moody(target), hidden=False, widths=(16,), draft_steps=3, lr=0.02, costs=StepCosts(FREE, drafting(0.25))
    )
    runner = trainer(tmp_path, epochs=30, enable_checkpointing=False, num_sanity_val_steps=0)
    (before,) = runner.validate(module, data, verbose=False)
    runner.fit(module, data)
    after = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert after["val/bce"] < before["val/bce"] - 0.1
    assert after["val/ece"] < 0.1
    assert after["val/tokens_per_second"] > before["val/tokens_per_second"]
    assert after["val/ece"] < after["val/ece_uncalibrated"]


@pytest.fixture(scope="module")
def target():
    return ad.RaggedModel(tiny(sharpness=3.0), kernels="torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, target):
    """Returns the folder of a trained drafter."""
    path = tmp_path_factory.mktemp("drafter")
    eagle_student(target).save(path)
    return str(path)


class Validations(Callback):
    """Records the steps of validations."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(("held_out", "expected"), [(3, [3, 5]), (4, [5])])
def test_the_final_network_is_validated_and_early_validations_wait(tmp_path, target, folder, held_out, expected):
    seen = Validations()
    module = DeciderModule(folder, draft_steps=3, widths=(16,), costs=StepCosts(FREE, drafting(0.25)))
    data = Data(target, module.hidden_layers(target), train=5, held_out=held_out)
    options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "val_check_interval": 3}
    runner = trainer(tmp_path, callbacks=[seen], **options)
    runner.fit(module, data)
    assert seen.steps == expected
    assert runner.limit_val_batches == 1.0, "the trainer's own limit must come back"


def test_a_whole_training(tmp_path, target, folder):
    """Trains a decider for a saved drafter with measured costs, then decodes; the drafter stays unchanged."""
    module = DeciderModule(folder, draft_steps=3, widths=(16,), timed_tokens=8)
    weights = {name: tensor.clone() for name, tensor in module.student.state_dict().items()}
    data = Data(target, module.hidden_layers(target))
    runner = trainer(tmp_path, epochs=2)
    runner.fit(module, data)
    metrics = {name: float(value) for name, value in runner.callback_metrics.items()}
    assert metrics["val/threshold"] == module.decider.threshold
    assert module.decider.threshold in THRESHOLDS
    assert {"val/ece", "val/bce", "val/tokens_per_second_fixed"} <= metrics.keys()
    assert len(module.decider.temperatures) == 3
    assert module.costs.draft(1) > 0
    assert module.costs.rest > 0
    for name, tensor in module.student.state_dict().items():
        assert torch.equal(tensor, weights[name])
    assert "LearnedDecider.from_pretrained" in module.card(metrics)

    module.save(tmp_path / "decider")
    decider = LearnedDecider.from_pretrained(tmp_path / "decider")
    assert (decider.threshold, decider.temperatures) == (module.decider.threshold, module.decider.temperatures)
    drafter = ad.EagleDrafter.from_pretrained(folder, target)
    coupling = ad.Coupling.matching()
    decoder = ad.SpeculativeDecoder(target, drafter, ad.TreeTopology.chain(3), coupling, decider)
    prompts = data.held_out_prompts(2)
    check_greedy(decoder, prompts, 8)


def test_a_training_is_resumed(tmp_path, target, folder):
    """A training resumed after one epoch equals one of two epochs; the checkpoint holds only the decider."""
    settings = {"draft_steps": 2, "widths": (8,), "costs": StepCosts(FREE, drafting(0.25))}
    modules = []
    for epochs, checkpoint in ((2, None), (1, None), (2, tmp_path / "one.ckpt")):
        torch.manual_seed(0)
        module = DeciderModule(folder, **settings)
        runner = trainer(tmp_path, epochs, enable_checkpointing=False)
        runner.fit(module, Data(target, module.hidden_layers(target)), ckpt_path=checkpoint)
        if epochs == 1:
            runner.save_checkpoint(tmp_path / "one.ckpt")
        modules.append(module)
    straight, _, resumed = modules
    stored = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert all(name.startswith("decider.") for name in stored["state_dict"])
    fresh = DeciderModule(folder, **settings)
    fresh.on_load_checkpoint(stored)
    assert fresh.decider.threshold == modules[1].decider.threshold
    assert fresh.decider.temperatures == modules[1].decider.temperatures != (1.0,)
    assert stored["state_dict"].keys() == straight.state_dict().keys()
    for name, weight in straight.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name])
    assert resumed.decider.temperatures == straight.decider.temperatures


def test_too_little_held_out_text_is_refused(tmp_path, target, folder):
    module = DeciderModule(folder, draft_steps=8, costs=StepCosts(FREE, drafting(0.25)))
    data = Data(target, module.hidden_layers(target), lengths=(9,), temperatures=(0.0,))
    with pytest.raises(ValueError, match=r"raise data\.validation, or lower model\.draft_steps"):
        trainer(tmp_path).validate(module, data, verbose=False)


def test_another_target_or_folder_is_refused(tmp_path, folder):
    with pytest.raises(ValueError, match="trained for another target"):
        DeciderModule(folder).attach(ragged(num_hidden_layers=3))
    with pytest.raises(ValueError, match="holds no trained drafter"):
        DeciderModule(str(tmp_path))
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a model of type 'llama', not an EAGLE head"):
        DeciderModule(str(tmp_path))


def test_bad_settings_are_refused(folder):
    with pytest.raises(ValueError, match="draft_steps"):
        DeciderModule(folder, draft_steps=0)
