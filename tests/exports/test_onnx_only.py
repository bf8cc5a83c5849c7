"""The example without torch: a whole decode loop on graphs says what the torch model says, and samples by its law."""

import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from companions import target, texts
from models import PROMPTS
from onnx_graphs import origin

from arbordraft.exports.onnx import decisions, plans
from arbordraft.exports.onnx.writing import write

SCRIPT = Path(__file__).parents[2] / "examples" / "onnx_only.py"


@pytest.fixture(scope="module")
def folders(graphs, tmp_path_factory):
    """By tops and tails: folders as the example wants them."""
    root = tmp_path_factory.mktemp("onnx-only")
    write(lambda: [plans.causal_lm(target(), origin())], root / "target")

    def made(tops, tails):
        folder = root / f"{tops}-{tails}"
        if not folder.exists():
            folder.mkdir()
            write(lambda: [decisions.verification(tops, tails)], folder / "verdict")
            shutil.copytree(root / "target", folder / "target")
            shutil.copytree(graphs("exit").folder, folder / "draft")
        return folder

    return made


@pytest.fixture(scope="module")
def decode():
    example = runpy.run_path(str(SCRIPT))
    loaded = {}

    def run(folder, prompt, new_tokens, **options):
        if folder not in loaded:
            loaded[folder] = example["load"](folder)
        return example["decode"](*loaded[folder], prompt, new_tokens, **options)

    return run


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(("tops", "tails"), [(1, 1), (0, 1), (2, 2)], ids=["SpecHub", "chain", "four children"])
def test_greedy_tokens_are_the_torch_models_own(folders, decode, tops, tails, depth):
    forwards = 0
    for prompt, text in zip(PROMPTS, texts(), strict=True):
        tokens, steps = decode(folders(tops, tails), prompt, 20, depth=depth)
        assert tokens == text[len(prompt) :]
        forwards += steps
    assert forwards < 20 * len(PROMPTS), "nothing was ever accepted"


def test_an_end_of_text_ends_it(folders, decode):
    answer = texts()[0][len(PROMPTS[0]) :]
    tokens, _ = decode(folders(1, 1), PROMPTS[0], 20, ends=[answer[5]])
    assert tokens == answer[: answer.index(answer[5]) + 1]


def test_samples_follow_the_targets_law(folders, decode):
    """First and second tokens of seeded texts against the exact probabilities; what was wrong would add up."""
    draws, temperature = 600, 0.7
    found = [decode(folders(1, 1), PROMPTS[0], 2, temperature=temperature, depth=1, seed=s)[0] for s in range(draws)]
    with torch.no_grad():
        model = target().model
        first = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / temperature).softmax(-1)
        behind = torch.tensor([[*PROMPTS[0], token] for token in range(len(first))])
        second = first @ (model(behind).logits[:, -1] / temperature).softmax(-1)
    for place, law in enumerate((first, second)):
        counts = Counter(tokens[place] for tokens in found)
        seen = torch.tensor([counts[token] for token in range(len(law))]) / draws
        # Of multinomial counts, E sum (seen - law)^2 = (1 - sum law^2) / draws.
        assert ((seen - law) ** 2).sum() < 3 * (1 - (law**2).sum()) / draws
        assert ((seen - law.roll(1)) ** 2).sum() > 3 * (1 - (law**2).sum()) / draws, "it would not see another law"


def test_it_runs_as_a_command_without_torch(folders):
    script = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); "
        "print('torch' in sys.modules or 'arbordraft' in sys.modules)"
    )
    code = script.replace("sys.argv[1]", repr(str(SCRIPT)))
    arguments = [str(folders(1, 1)), ",".join(map(str, PROMPTS[0])), "--new-tokens", "6"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    tokens, told, torch_was_there = done.stdout.splitlines()
    assert tokens == ",".join(map(str, texts()[0][len(PROMPTS[0]) :][:6]))
    assert told.endswith("tokens per forward of the target")
    assert torch_was_there == "False"
