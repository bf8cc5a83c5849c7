"""Settings derived from a target and its machine, and `train demo` for another kind of target."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from io import StringIO
from itertools import product
from math import log
from pathlib import Path
from string import ascii_lowercase

import pytest
import torch
from rich.console import Console
from support.chats import CHATML, END, START
from support.models import tiny
from support.tiny_training import TRAINER, save_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from arbordraft.training import demo, sizing
from arbordraft.training.shards import ShardError
from arbordraft.training.sizing import Sizes
from arbordraft.training.targets import Target

THINGS = ("bee", "river", "lamp", "garden", "train", "violin", "castle", "winter", "bridge", "story", "captain")
TRAITS = ("small", "old", "bright", "quiet", "heavy", "green", "famous", "slow", "gentle", "wide")
_USED = 600  # tokens that the texts use
_OTHERS = 400  # tokens that stand for all unused ones while the model is trained


def texts(source: random.Random) -> Iterator[list[dict[str, str]]]:
    """Yields conversations about things and their traits."""
    while True:
        thing, other = source.sample(THINGS, 2)
        one, two, three = source.sample(TRAITS, 3)
        ask = source.choice([f"What is the {thing}?", f"Tell me about the {thing} and the {other}.", f"Why a {thing}?"])
        answer = (
            f"The {thing} is {one} and {two}. It stands near the {other}, which is {three}. A {thing} is never {three}."
        )
        yield [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Learns byte-level BPE from these texts and fills the vocabulary up with words that they lack."""
    begun = Tokenizer(models.BPE())
    begun.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_USED, special_tokens=[START, END], initial_alphabet=alphabet, show_progress=False
    )
    source = texts(random.Random(0))
    begun.train_from_iterator((turn["content"] for _ in range(500) for turn in next(source)), trainer)
    learned = json.loads(begun.to_str())["model"]
    known = dict(learned["vocab"])
    words = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    while len(known) < vocabulary:
        known.setdefault(next(words), len(known))
    spelling = Tokenizer(models.BPE(known, [tuple(merge) for merge in learned["merges"]]))
    spelling.pre_tokenizer, spelling.decoder = begun.pre_tokenizer, decoders.ByteLevel()
    spelling.add_special_tokens([START, END])
    return PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token=END, chat_template=CHATML)


def save_talker(folder: Path, vocabulary: int = 151_936, steps: int = 200) -> Path:
    """Trains a small model for some seconds and saves it, with a larger vocabulary, beside its tokenizer."""
    spelling, source = tokenizer(vocabulary), texts(random.Random(1))
    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": spelling.convert_tokens_to_ids(END),
    }
    small = Qwen3ForCausalLM(Qwen3Config(vocab_size=_USED + _OTHERS, **settings))
    optimizer = torch.optim.Adam(small.parameters(), lr=3e-3)
    for _ in range(steps):
        chats = [spelling.apply_chat_template(next(source), return_dict=True)["input_ids"] for _ in range(8)]
        tokens = pad_sequence(list(map(torch.tensor, chats)), batch_first=True, padding_value=_USED)
        scores = small(tokens[:, :-1]).logits
        scores[..., _USED:] += log((vocabulary - _USED) / _OTHERS)
        functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=_USED).backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **settings))
    rows = torch.arange(vocabulary)
    rows = torch.where(rows < _USED, rows, _USED + rows % _OTHERS)
    weights = small.state_dict()
    whole.load_state_dict({n: w[rows] if len(w) == _USED + _OTHERS else w for n, w in weights.items()})
    whole.save_pretrained(folder)
    spelling.save_pretrained(folder)
    return folder


GB = 10**9
LLAMA = {"num_key_value_heads": 8, "max_position_embeddings": 4096}
MODELS = {
    "SmolLM2-135M": ("llama", (576, 1536, 30, 9, 49152), {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    "Qwen3-0.6B": ("qwen3", (1024, 3072, 28, 16, 151936), {**LLAMA, "head_dim": 128, "tie_word_embeddings": True}),
    "Llama-3.1-8B": ("llama", (4096, 14336, 32, 32, 128256), LLAMA),
}


def weightless(name: str) -> torch.nn.Module:
    """Builds a model of these sizes on the meta device, where it takes no memory."""
    kind, numbers, more = MODELS[name]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **dict(zip(names, numbers, strict=True)), **more)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "memory", "disk", "expected"),
    [
        ("SmolLM2-135M", 20, 66, Sizes(8192, 2.5e-3, 128, 256, 3072, cache=True)),
        ("SmolLM2-135M", 2, 10, Sizes(8192, 2.5e-3, 16, 64, 3072, cache=False)),
        ("Qwen3-0.6B", 20, 200, Sizes(8192, 1.875e-3, 32, 256, 3072, cache=True)),
        ("Llama-3.1-8B", 60, 500, Sizes(32768, 9.375e-4, 64, 256, 3072, cache=True)),
    ],
    ids=["a small model", "little memory", "a large vocabulary", "a large model"],
)
def test_sizes_follow_from_target_and_machine(name, memory, disk, expected):
    assert asdict(Sizes.of(weightless(name), memory * GB, disk * GB)) == pytest.approx(asdict(expected))


def test_more_memory_never_takes_less():
    sizes = [Sizes.of(weightless("Qwen3-0.6B"), memory * GB, 0) for memory in (3, 6, 12, 24, 1000)]
    for name in ("generation_batch", "per_shard", "batch_tokens"):
        found = [getattr(size, name) for size in sizes]
        assert found == sorted(found)
    assert len({size.generation_batch for size in sizes}) > 2


def test_the_draft_vocabulary_is_at_most_the_targets():
    assert Sizes.of(tiny(), GB, GB).vocabulary == 61


def test_the_error_for_too_little_memory_names_the_least_that_suffices():
    with pytest.raises(ValueError, match=r"1\.0 GB of memory are free.*takes at least (\d+\.\d) GB") as error:
        Sizes.of(weightless("Llama-3.1-8B"), GB, GB)
    least = float(re.search(r"at least (\S+) GB", str(error.value))[1])
    assert Sizes.of(weightless("Llama-3.1-8B"), int((least + 0.1) * GB), GB).batch_tokens >= 1024
    with pytest.raises(ValueError, match="takes at least"):
        Sizes.of(weightless("Llama-3.1-8B"), int((least - 0.1) * GB), GB)


def test_free_memory_leaves_room_for_the_target_and_its_copy(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: 10**6)
    model = tiny()
    assert sizing.free_memory(model) == 10**6 - 2 * sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(sizing, "available_memory", lambda: None)
    with pytest.raises(ValueError, match="does not say how much memory is free"):
        sizing.free_memory(model)


def test_free_disk_of_a_missing_folder_is_its_parents(tmp_path):
    assert sizing.free_disk(tmp_path / "a" / "b") == pytest.approx(sizing.free_disk(tmp_path), rel=0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the parent's memory")
def test_the_peak_excludes_memory_of_the_parent_process():
    child = (
        "import resource; from arbordraft.training.sizing import peak_memory; "
        "print(peak_memory(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    large = f"import subprocess, sys; kept = b'1' * (2 * 10**9); subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run([sys.executable, "-c", large], capture_output=True, text=True, check=True)
    peak, control = map(int, done.stdout.split())
    assert 10**8 < peak < 1.9 * 10**9 < control


@pytest.mark.parametrize(("minutes", "clock"), [(0.5, "00:00:00:30"), (90, "00:01:30:00"), (2881, "02:00:01:00")])
def test_minutes_are_written_as_lightning_reads_them(minutes, clock):
    assert demo._clock(minutes) == clock


# -- whole demo runs


def small(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Limits trainings to one step and returns the list of their arguments."""
    asked: list[list[str]] = []
    options = {
        "data.recipe.max_new_tokens": 12,
        "data.recipe.max_tokens": 100,
        "data.target.kernels": "torch",
        "data.validation": 2,
        "model.decoded": 0,
        "model.draft_steps": 2,
        "model.tree": "[2, 1]",
        "trainer.max_steps": 1,
        "trainer.val_check_interval": 1,
        **{f"trainer.{name}": str(value).lower() for name, value in TRAINER.items() if name != "enable_checkpointing"},
    }
    fit = demo.run

    def run(module: type, arguments: list[str]) -> None:
        asked.append(arguments)
        fit(module, [*arguments, *(f"--{name}={value}" for name, value in options.items())])

    monkeypatch.setattr(demo, "run", run)
    return asked


@pytest.mark.parametrize("kind", ["block", "medusa"])
def test_other_drafters_come_without_a_decider(tmp_path, monkeypatch, kind):
    asked, shown = small(monkeypatch), StringIO()
    target = Target(str(save_target(tmp_path / "target", max_position_embeddings=256)))
    trained = demo.train_demo(Console(file=shown, width=200), target, tmp_path / "out", kind, conversations=8)
    config = json.loads((trained / "config.json").read_text())
    assert config["model_type"] == f"arbordraft_{kind}"
    assert config["acceptance"]
    assert len(asked) == 1
    assert not (tmp_path / "out" / "decider").exists()
    assert "61 tokens, hidden size 32" in shown.getvalue()
    assert re.search(r"At most \d+\.\d GB of memory were in use", shown.getvalue())


def test_a_folder_keeps_its_shards_and_its_target(tmp_path, monkeypatch):
    asked, console = small(monkeypatch), Console(file=StringIO())
    target = Target(str(save_target(tmp_path / "target", max_position_embeddings=256)))
    of = Sizes.of
    monkeypatch.setattr(Sizes, "of", lambda *given: replace(of(*given), per_shard=4))
    demo.train_demo(console, target, tmp_path / "out", "medusa", conversations=8)
    monkeypatch.setattr(Sizes, "of", of)  # as if more memory were free now
    (tmp_path / "out" / "drafter" / "checkpoints" / "last.ckpt").unlink(missing_ok=True)
    demo.train_demo(console, target, tmp_path / "out", "medusa", conversations=8)
    assert all("--data.recipe.per_shard=4" in arguments for arguments in asked)
    assert len(asked) == 2
    other = Target(str(save_target(tmp_path / "other", seed=1, max_position_embeddings=256)))
    with pytest.raises(ShardError, match="begun with another"):
        demo.train_demo(console, other, tmp_path / "out", "medusa", conversations=8)


def test_drafters_without_training_are_refused(tmp_path):
    with pytest.raises(ValueError, match="eagle, block, medusa, got 'ngram'"):
        demo.train_demo(Console(), Target(), tmp_path, "ngram")


@pytest.mark.soak
def test_a_target_of_another_kind_with_a_large_vocabulary(tmp_path):
    """Runs the command for a Qwen3 of 151,936 tokens with tied embeddings, in bounded memory."""
    target = save_talker(tmp_path / "talker")
    command = ["train", "demo", "--target", str(target), "--folder", str(tmp_path / "out"), "--dtype", "float32"]
    command += ["--conversations", "96", "--training-minutes", "0.5"]
    done = subprocess.run(
        [sys.executable, "-c", "from arbordraft.cli.main import main; main()", *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "250", "HF_HUB_OFFLINE": "1"},
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    assert "151,936 tokens, hidden size 64" in done.stdout
    assert "vocabulary 512" in done.stdout
    assert float(re.search(r"At most (\S+) GB", done.stdout)[1]) < 3
    curve = json.loads((tmp_path / "out" / "drafter" / "curve.json").read_text())
    assert max(point["val/tau_greedy_chain"] for point in curve) > 1.3
    for kind in ("drafter", "decider"):
        assert (tmp_path / "out" / kind / "best" / "model.safetensors").exists()
    rows = [line for line in done.stdout.splitlines() if "trained, tree of 16" in line]
    assert len(rows) == 4  # alone and after lookups, greedy and sampled
    assert all("lossy" not in row for row in rows)
