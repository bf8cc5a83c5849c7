"""A drafter from the command line to decoding, and trainings that resume exactly wherever they stop."""

import csv
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file
from support.models import check_greedy
from support.tiny_training import TRAINER, Losses, data, fit, module, same, save_config, save_world, stored
from typer.testing import CliRunner

from arbordraft import Coupling, EagleDrafter, Fixed, Matching, SpeculativeDecoder, TopDown, TreeTopology
from arbordraft.cli.train import app
from arbordraft.kernels import native, precision
from arbordraft.kernels.precision import fast_dtype
from arbordraft.training.drafter_module import DrafterModule
from arbordraft.training.fit import known_configs, resolve_configs, run
from arbordraft.training.recording import Recorder
from arbordraft.training.shards import ANSWER
from arbordraft.training.signals import DeferredSignals
from arbordraft.training.targets import Target

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")  # resumed trainings find their own

NAMES = {"val/tau", "val/tau_greedy_chain", "val/tau_greedy_tree", "val/tau_sampled_chain", "val/decode_tau"}
NAMES |= {f"val/acceptance_{kind}_pos_{step}" for kind in ("greedy", "sampled") for step in (1, 2)}
NAMES |= {"val/draft_ms", "val/target_ms"}
FILES = {"config.json", "model.safetensors", "README.md", "metrics.json", "training.yaml"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    """Returns the command line and the folder of an overfitted drafter."""
    folder = tmp_path_factory.mktemp("trained")
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(folder)}}
    config = save_config(
        folder / "config.yaml",
        world,
        trainer={"max_epochs": 16, "check_val_every_n_epoch": 8, "logger": logger},
        model={
            "lr": 0.01,
            "phases": [{"until": 0.5, "steps": 1, "loss": "kl"}, {"until": 1, "steps": 2, "loss": "kl"}],
        },
    )
    return run(DrafterModule, ["fit", "--config", str(config)]), folder


def drafter_of(folder, target):
    drafter = EagleDrafter.from_pretrained(folder, target)
    return SpeculativeDecoder(target, drafter, TreeTopology.chain(2), Coupling.matching())


def recorder(cli):
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, Recorder))


def test_a_tiny_data_set_is_learned_by_heart(trained):
    _, folder = trained
    with next(folder.glob("lightning_logs/*/metrics.csv")).open() as file:
        rows = list(csv.DictReader(file))
    loss, agreement, second = (
        [float(row[f"train/{name}"]) for row in rows if row[f"train/{name}"]]
        for name in ("loss", "agreement_pos_1", "agreement_pos_2")
    )
    epoch = len(loss) // 16
    assert sum(loss[-epoch:]) < 0.2 * sum(loss[:epoch])
    assert sum(agreement[-epoch:]) > 0.6 * epoch > 0.2 * epoch > sum(agreement[:epoch])
    assert len(second) == len(loss) // 2, "the second phase begins halfway"
    assert sum(second[-epoch:]) > 0.3 * epoch


def test_a_drafter_learns_from_a_target_with_recurrent_layers(tmp_path):
    world = save_world(tmp_path / "world", architecture="qwen3_next")
    logger = {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": str(tmp_path)}}
    trainer = {"max_epochs": 6, "check_val_every_n_epoch": 6, "logger": logger}
    config = save_config(tmp_path / "config.yaml", world, trainer=trainer, model={"lr": 0.01})
    cli = run(DrafterModule, ["fit", "--config", str(config)])
    with next(tmp_path.glob("lightning_logs/*/metrics.csv")).open() as file:
        loss = [float(row["train/loss"]) for row in csv.DictReader(file) if row["train/loss"]]
    epoch = len(loss) // 6
    assert sum(loss[-epoch:]) < 0.8 * sum(loss[:epoch])
    decoder = drafter_of(tmp_path / "results" / "best", cli.datamodule.target)
    check_greedy(decoder, cli.datamodule.held_out_prompts(2), 12)


def test_validation_reports_its_metrics_under_their_names(trained):
    cli, _ = trained
    metrics = {name: float(value) for name, value in cli.trainer.callback_metrics.items() if name.startswith("val/")}
    assert metrics.keys() == NAMES
    assert 1 <= metrics["val/tau_greedy_chain"] <= 3
    assert metrics["val/tau_greedy_tree"] >= metrics["val/tau_greedy_chain"]
    assert metrics["val/tau"] == pytest.approx((metrics["val/tau_greedy_chain"] + metrics["val/tau_sampled_chain"]) / 2)


def test_results_are_a_folder_that_decodes_losslessly(trained):
    cli, folder = trained
    best = folder / "results" / "best"
    assert {path.name for path in best.iterdir()} == FILES
    curve = json.loads((folder / "results" / "curve.json").read_text())
    assert [point["step"] for point in curve] == [64, 128]
    winner = max(curve, key=lambda point: point["val/tau"])
    assert json.loads((best / "metrics.json").read_text()) == {k: v for k, v in winner.items() if k != "step"}
    assert "| tau |" in (best / "README.md").read_text()
    assert load_file(best / "model.safetensors")["fc.weight"].dtype == torch.float16
    again = run(DrafterModule, ["fit", "--config", str(best / "training.yaml")], go=False)
    assert recorder(again).config == recorder(cli).config == (best / "training.yaml").read_text()

    target, prompts = cli.datamodule.target, cli.datamodule.held_out_prompts(3)
    decoder = drafter_of(best, target)
    check_greedy(decoder, prompts, 20)


def test_tau_of_validation_is_that_of_decoding_the_same_answers(trained):
    """Decodes every held-out greedy answer to its end, with chains and with trees."""
    cli, _ = trained
    (metrics,) = cli.trainer.validate(cli.model, cli.datamodule, verbose=False)
    target = cli.datamodule.target
    for topology, name in ((TreeTopology.chain(2), "chain"), (cli.model.tree, "tree")):
        law = Fixed(topology.width)
        drafter = cli.model.student.drafter(target)
        decoder = SpeculativeDecoder(target, drafter, topology, Coupling(law, TopDown(Matching())))
        tokens = rounds = 0
        for batch in cli.datamodule.val_dataloader():
            for text, roles, temperature in zip(batch.tokens, batch.roles, batch.temperatures, strict=True):
                at = (roles == ANSWER).nonzero()[:, 0]
                if temperature == 0:
                    stats = decoder.generate(
                        text[None, : at[0]], max_new_tokens=len(at), do_sample=False, return_dict_in_generate=True
                    ).stats
                    assert stats.emitted == [len(at)]
                    tokens, rounds = tokens + len(at), rounds + stats.forwards[0]
        assert metrics[f"val/tau_greedy_{name}"] == pytest.approx(tokens / rounds, rel=1e-6)
        assert tokens > rounds > 10


def test_the_command_line_resumes_and_validates(world, tmp_path):
    config = save_config(tmp_path / "config.yaml", world, checkpoints={"every_n_train_steps": 3})
    run(DrafterModule, ["fit", "--config", str(config)])
    last = tmp_path / "results" / "checkpoints" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 15
    run(DrafterModule, ["fit", "--config", str(config), "--ckpt_path", str(last), "--trainer.max_epochs", "3"])
    assert torch.load(last, weights_only=True)["global_step"] == 24
    curve = json.loads((tmp_path / "results" / "curve.json").read_text())
    assert [point["step"] for point in curve] == [8, 16, 24]
    others = "--model.student.init_args.layers=[1,2]"
    with pytest.raises(ValueError, match=r"that of another training: .*fc\.weight are missing, unexpected"):
        run(DrafterModule, ["fit", "--config", str(config), others, "--ckpt_path", str(last)])
    validated = run(DrafterModule, ["validate", "--config", str(config), "--ckpt_path", str(last)])
    assert float(validated.trainer.callback_metrics["val/tau"]) == pytest.approx(curve[-1]["val/tau"])


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
@pytest.mark.parametrize("name", [name for name in known_configs() if name.startswith("drafter/")])
def test_types_that_are_not_given_are_those_that_the_processor_is_fast_at(tmp_path, monkeypatch, caplog, name, fast):
    """The recorded configuration names them."""
    monkeypatch.setattr(native, "fast_bfloat16", lambda: fast)
    precision._warn.cache_clear()
    usual = ["fit", "--config", name, "--trainer.accelerator", "cpu", "--trainer.logger", "false"]
    usual += ["--results.output", str(tmp_path)]
    with caplog.at_level(logging.WARNING, "arbordraft"):
        cli = run(DrafterModule, usual, go=False)
        assert not caplog.messages
        given = run(DrafterModule, [*usual, "--trainer.precision", "bf16-mixed"], go=False)
    expected = ("bf16-mixed", "bfloat16") if fast else ("32-true", "float32")
    assert (cli.trainer.precision, cli.datamodule.spec.dtype) == expected
    (recorder,) = (each for each in cli.trainer.callbacks if isinstance(each, Recorder))
    recorded = yaml.safe_load(recorder.config)
    assert (recorded["trainer"]["precision"], recorded["data"]["target"]["dtype"]) == expected
    assert given.trainer.precision == "bf16-mixed"
    assert [message.partition(",")[0] for message in caplog.messages] == (
        [] if fast else ["trainer.precision: bfloat16 is slow here"]
    )


@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_a_target_takes_the_type_that_the_processor_is_fast_at(world, monkeypatch, fast):
    monkeypatch.setattr(native, "fast_bfloat16", lambda: fast)
    assert Target(str(world / "target"), kernels="torch").load().model.dtype == fast_dtype("cpu")
    assert Target(str(world / "target"), dtype="float16").weight_type("cpu") == torch.float16


@pytest.mark.parametrize("tokens", [512, 40])
def test_other_batch_sizes_finish_an_epoch_and_then_read_whole_ones(world, tmp_path, tokens):
    """Lightning's own count of epochs agrees."""
    before, losses, trained = fit(world, tmp_path, 1, kill=5)[1], Losses(), data(world, batch_tokens=tokens)
    trainer = Trainer(**{**TRAINER, "max_epochs": 2, "limit_val_batches": 0}, callbacks=[losses])
    trainer.fit(module(), trained, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    read = [tuple(filter(None, row)) for seen in (before, losses.seen) for _, batch in seen for row in batch]
    texts = len(read) // 2
    assert trainer.current_epoch == 2
    assert trained.state_dict()["epoch"] == 2
    assert sorted(read[:texts]) == sorted(read[texts:])


def printed(*arguments: str, capsys) -> str:
    """Returns the output of ``--print_config``."""
    with pytest.raises(SystemExit) as stopped:
        run(DrafterModule, ["fit", *arguments, "--print_config"])
    assert stopped.value.code == 0
    shown = capsys.readouterr()
    assert "Unable to serialize" not in shown.out + shown.err
    return shown.out


def test_defaults_can_be_printed_and_read_again(tmp_path, capsys):
    text = printed(capsys=capsys)
    assert yaml.safe_load(text)["model"]["phases"][0] == {"until": 0.45, "steps": 1, "loss": "kl"}
    path = tmp_path / "defaults.yaml"
    path.write_text(text)
    assert printed("--config", str(path), capsys=capsys) == text


@pytest.mark.parametrize("name", [name for name in known_configs() if not name.startswith("decider/")])
def test_configurations_of_the_package_are_found_by_name_and_by_path(name, capsys):
    text = printed("--config", name, capsys=capsys)
    assert printed(f"--config={resolve_configs(['--config', name])[1]}", capsys=capsys) == text


def test_the_package_has_configurations():
    assert "drafter/eagle" in known_configs()
    listed = CliRunner().invoke(app, ["configs"])
    assert listed.output.split() == known_configs()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model.learning_rate", "1"], "--model.learning_rate"),
        (["--model.phases", "[{until: 1, steps: 1, loss: kl, extra: 2}]"], "extra"),
        (["--data.recipe.temperature", "1"], "temperature"),
        (["--model.student.init_args.vocab", "1"], "vocab"),
        (["--nonsense", "1"], "--nonsense"),
    ],
)
def test_unknown_options_are_named(world, tmp_path, capsys, arguments, named):
    config = save_config(tmp_path / "config.yaml", world)
    with pytest.raises(SystemExit):
        run(DrafterModule, ["fit", "--config", str(config), *arguments])
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("section", ["model", "data", "results", "trainer", "nonsense"])
def test_unknown_keys_of_files_are_named(world, tmp_path, capsys, section):
    config = save_config(tmp_path / "config.yaml", world, **{section: {"unheard_of": 1}})
    with pytest.raises(SystemExit):
        run(DrafterModule, ["fit", "--config", str(config)])
    shown = capsys.readouterr().err
    assert "unheard_of" in shown or "'nonsense'" in shown


def test_unknown_configurations_are_named():
    with pytest.raises(ValueError, match=r"'drafter/unheard-of'.*drafter/eagle"):
        run(DrafterModule, ["fit", "--config", "drafter/unheard-of"])


def test_shares_of_the_data_can_be_generated_apart(world, tmp_path):
    written = {}
    for folder, part, of in (("shared", 1, 2), ("shared", 0, 2), ("alone", 0, 1)):
        config = save_config(tmp_path / "config.yaml", world, data={"folder": str(tmp_path / folder)})
        done = CliRunner().invoke(app, ["generate", "--part", str(part), "--of", str(of), "--config", str(config)])
        assert done.exit_code == 0, done.output
        written[folder, part] = [path.name for path in sorted((tmp_path / folder).glob("tokens-*"))]
    assert written["shared", 1] == ["tokens-00001.safetensors"]
    assert same(stored(tmp_path / "shared"), stored(tmp_path / "alone"))


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Returns uninterrupted trainings: plain, with accumulated gradients, and limited by steps."""
    settings = {
        "plain": {},
        "accumulated": {"accumulate_grad_batches": 2},
        "counted": {"max_steps": 16, "max_epochs": -1},
    }
    return {
        name: (changes, *fit(world, tmp_path_factory.mktemp("whole"), **changes)) for name, changes in settings.items()
    }


def check_training(found, seen, expected, seen_then):
    """Checks that a resumed training has the state and the batches of an uninterrupted one."""
    assert 0 < len(seen) < len(seen_then)
    assert seen == seen_then[len(seen_then) - len(seen) :]
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "SelfDistillationDataModule"):
        assert same(found[name], expected[name]), name


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("changed", "every"), [("plain", 0), ("plain", 1), ("accumulated", 2), ("accumulated", 0), ("counted", 3)]
)
def test_stopped_trainings_resume_exactly(world, whole, tmp_path, changed, every):
    """Compares weights, optimizer, schedule, order of batches, noise and the record of validations."""
    source = random.Random(every)
    changes, expected, seen = whole[changed]
    steps = expected["global_step"]
    fit(world, tmp_path, every, source.randrange(steps // 2 + 1 if every == 0 else every + 1, steps), **changes)
    found, rest = fit(world, tmp_path, every, **changes)
    check_training(found, rest, expected, seen)
    curves = [checkpoint["callbacks"]["Recorder"]["curve"] for checkpoint in (found, expected)]
    assert len(curves[0]) > 2
    assert same(*curves)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("every", "kills"), [(1, (3, 5, 12)), (2, (8, 15)), (3, (7, 11)), (0, (5, 13))])
def test_trainings_that_are_stopped_repeatedly_resume_exactly(world, whole, tmp_path, every, kills):
    for kill in kills:
        fit(world, tmp_path, every, kill)
    check_training(*fit(world, tmp_path, every), *whole["plain"][1:])


def test_noise_is_drawn_and_matters(whole, world, tmp_path):
    """Negative control: noise changes the weights, so the tests above cover its state."""
    found, _ = fit(world, tmp_path, noise=0.0)
    assert not same(found["state_dict"], whole["plain"][1]["state_dict"])


def test_checkpoints_hold_the_drafter_only(whole, world):
    _, checkpoint, _ = whole["plain"]
    assert all(name.startswith("student.network.") for name in checkpoint["state_dict"])
    held = sum(tensor.nbytes for tensor in checkpoint["state_dict"].values())
    everything = [*checkpoint["optimizer_states"][0]["state"].values()]
    state = sum(tensor.nbytes for entry in everything for tensor in entry.values())
    assert state <= 2.1 * held
    assert "hyper_parameters" not in checkpoint


def test_a_killed_process_leaves_a_checkpoint_to_resume_from(world, whole, tmp_path):
    script = (
        "import sys; from pathlib import Path; from support.tiny_training import fit; "
        "fit(Path(sys.argv[1]), Path(sys.argv[2]), 1)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", script, str(world), str(tmp_path)], env=environment)
    last = tmp_path / "checkpoints" / "last.ckpt"
    try:
        for _ in range(6000):
            if last.exists() or process.poll() is not None:
                break
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    stopped = torch.load(last, weights_only=True)["global_step"]
    expected, seen = whole["plain"][1:]
    assert stopped < expected["global_step"]
    found, rest = fit(world, tmp_path, 1)
    assert rest == seen[stopped:]
    assert same(found["state_dict"], expected["state_dict"])
    assert EagleDrafter.from_pretrained(tmp_path / "results" / "best", data(world).target)


def test_validating_alone_publishes_nothing(world, whole, tmp_path):
    recorder = Recorder(str(tmp_path / "results"))
    trainer = Trainer(**TRAINER, callbacks=[recorder])
    (metrics,) = trainer.validate(module(), data(world), verbose=False)
    assert metrics.keys() == NAMES
    assert not recorder.result.exists()


class Interrupt(Callback):
    """Sends a signal in the middle of a training step, or of a validation."""

    def __init__(self, number, step, *, validating=False):
        self.number, self.step, self.validating = number, step, validating

    def on_before_optimizer_step(self, trainer, *_):
        if trainer.global_step == self.step and not self.validating:
            os.kill(os.getpid(), self.number)

    def on_validation_batch_start(self, trainer, module, batch, index, *_):
        if trainer.global_step == self.step and self.validating and index == 0:
            os.kill(os.getpid(), self.number)


def test_a_second_signal_takes_effect_at_once():
    signals, before = DeferredSignals(), signal.getsignal(signal.SIGINT)
    signals.defer()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.pending[0] == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("number", "step", "validating"),
    [(signal.SIGINT, 0, False), (signal.SIGTERM, 5, False), (signal.SIGINT, 12, False), (signal.SIGINT, 8, True)],
)
def test_an_interrupt_loses_no_step(world, whole, tmp_path, monkeypatch, caplog, number, step, validating):
    """A training goes on where the signal came, although no checkpoint was due."""
    monkeypatch.setattr("support.tiny_training.Kill", lambda _: Interrupt(number, step, validating=validating))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):  # Lightning turns the interrupt into an exit
            fit(world, tmp_path, 1000, kill=True)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    saved = tmp_path / "results" / "checkpoints" / "interrupted.ckpt"
    assert torch.load(saved, weights_only=True)["global_step"] == step + (not validating)
    assert f"goes on with the same command and --ckpt_path {saved}" in caplog.text
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    saved.rename(tmp_path / "checkpoints" / "last.ckpt")
    monkeypatch.undo()
    found, rest = fit(world, tmp_path, 1000)
    check_training(found, rest, *whole["plain"][1:])
    assert same(*(one["callbacks"]["Recorder"]["curve"] for one in (found, whole["plain"][1])))
