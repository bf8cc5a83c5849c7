"""The example without torch: a decode loop on graphs emits the torch model's tokens and samples by its law.

With shared noise, it emits the same tokens as plain decoding with the same seed.
"""

import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support.companions import target, texts
from support.models import PROMPTS, left_padded
from support.numpy_noise import gumbel
from support.onnx_graphs import origin

from arbordraft import builders
from arbordraft.exports.onnx import plans
from arbordraft.exports.onnx.writing import write

SCRIPT = Path(__file__).parents[2] / "examples" / "onnx_only.py"


@pytest.fixture(scope="module")
def folders(graphs, tmp_path_factory):
    """Returns a function that makes the example's folder for given numbers of tops and tails."""
    root = tmp_path_factory.mktemp("onnx-only")
    write(lambda: [plans.causal_lm(target(), origin())], root / "target")

    def made(tops, tails):
        folder = root / f"{tops}-{tails}"
        if not folder.exists():
            folder.mkdir()
            shutil.copytree(root / "target", folder / "target")
            for part, name in (("verdict", f"verification-{tops}-{tails}"), ("draft", "exit")):
                shutil.copytree(graphs(name).folder, folder / part)
        return folder

    return made


@pytest.fixture(scope="module")
def shared(folders, graphs):
    """Returns a folder with the draw in place of a verdict."""
    folder = folders(1, 1).with_name("shared")
    shutil.copytree(graphs("draw").folder, folder / "draw")
    for part in ("target", "draft"):
        (folder / part).symlink_to(folders(1, 1) / part)
    return folder


@pytest.fixture(scope="module")
def decode():
    example = runpy.run_path(str(SCRIPT))
    loaded = {}

    def run(folder, prompt, new_tokens, width=2, **options):
        if (folder, width) not in loaded:
            loaded[folder, width] = example["load"](folder, width)
        return example["decode"](*loaded[folder, width], prompt, new_tokens, **options)

    return run


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    ("tops", "tails"),
    [(1, 1), pytest.param(0, 1, marks=pytest.mark.soak), (2, 2)],
    ids=["SpecHub", "chain", "four children"],
)
def test_greedy_tokens_are_the_torch_models_own(folders, decode, tops, tails, depth):
    forwards = 0
    for prompt, text in zip(PROMPTS, texts(), strict=True):
        tokens, steps = decode(folders(tops, tails), prompt, 20, depth=depth)
        assert tokens == text[len(prompt) :]
        forwards += steps
    assert forwards < 20 * len(PROMPTS), "nothing was ever accepted"


def test_a_stop_token_ends_the_text(folders, decode):
    answer = texts()[0][len(PROMPTS[0]) :]
    tokens, _ = decode(folders(1, 1), PROMPTS[0], 20, ends=[answer[5]])
    assert tokens == answer[: answer.index(answer[5]) + 1]


def plain(temperature, seed, new_tokens=20):
    """Returns the toolkit's tokens for the prompts, decoded without drafts."""
    output = builders.plain(target()).generate(
        **left_padded(PROMPTS),
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=new_tokens,
        eos_token_id=None,
        seeds=[seed] * len(PROMPTS),
    )
    return output[:, -new_tokens:].tolist()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_the_text_of_a_seed_is_that_of_plain_decoding(shared, decode, temperature, seed):
    found = [decode(shared, prompt, 20, temperature=temperature, seed=seed) for prompt in PROMPTS]
    assert [tokens for tokens, _ in found] == plain(temperature, seed)
    assert found[0][0] != decode(shared, PROMPTS[0], 20, temperature=temperature, seed=seed ^ 2**40)[0]


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (1, 6), (2, 2), (3, 3), (5, 1), (100, 1)])
def test_no_tree_changes_the_text(shared, decode, width, depth):
    texts_of_seed, forwards = plain(0.7, 3), 0
    for prompt, expected in zip(PROMPTS, texts_of_seed, strict=True):
        tokens, steps = decode(shared, prompt, 20, width, temperature=0.7, depth=depth, seed=3)
        assert tokens == expected
        forwards += steps
    assert forwards < 20 * len(PROMPTS), "nothing was ever accepted"


@pytest.mark.parametrize("depth", [1, 3])
def test_drafts_of_the_target_itself_are_all_accepted(shared, decode, tmp_path, depth):
    """This holds only if each draft uses the noise of its own position."""
    for part, of in (("target", "target"), ("draft", "target"), ("draw", "draw")):
        (tmp_path / part).symlink_to(shared / of)
    tokens, forwards = decode(tmp_path, PROMPTS[0], 20, 1, temperature=1.0, depth=depth, seed=4)
    assert tokens == plain(1.0, 4)[0]
    assert forwards == 20 / (depth + 1)


def test_the_text_follows_the_definition(shared, decode):
    """Checks without the toolkit's decoder: each token has the highest sum of logit and noise at its position."""
    text, seed, temperature = list(PROMPTS[1]), 11, 0.9
    tokens, _ = decode(shared, text, 12, temperature=temperature, seed=seed)
    for token in tokens:
        with torch.no_grad():
            logits = target().model(torch.tensor([text])).logits[0, -1].numpy()
        scores = (logits / np.float32(temperature)).astype(np.float64) + gumbel([seed], [len(text)], len(logits))[0]
        assert token == scores.argmax()
        text.append(token)


def test_greedy_decoding_has_no_noise(shared, decode):
    for prompt, text in zip(PROMPTS, texts(), strict=True):
        assert decode(shared, prompt, 20, seed=5)[0] == text[len(prompt) :]


@pytest.mark.parametrize("coupling", ["SpecHub", "shared noise"])
def test_samples_follow_the_targets_law(folders, shared, decode, coupling):
    """Compares first and second tokens of seeded texts with the exact probabilities; errors would add up."""
    draws, temperature = 600, 0.7
    folder = shared if coupling == "shared noise" else folders(1, 1)
    found = [decode(folder, PROMPTS[0], 2, temperature=temperature, depth=1, seed=s)[0] for s in range(draws)]
    with torch.no_grad():
        model = target().model
        first = (model(torch.tensor([PROMPTS[0]])).logits[0, -1] / temperature).softmax(-1)
        behind = torch.tensor([[*PROMPTS[0], token] for token in range(len(first))])
        second = first @ (model(behind).logits[:, -1] / temperature).softmax(-1)
    for place, law in enumerate((first, second)):
        counts = Counter(tokens[place] for tokens in found)
        seen = torch.tensor([counts[token] for token in range(len(law))]) / draws
        # For multinomial counts, E sum (seen - law)^2 = (1 - sum law^2) / draws.
        assert ((seen - law) ** 2).sum() < 3 * (1 - (law**2).sum()) / draws
        assert ((seen - law.roll(1)) ** 2).sum() > 3 * (1 - (law**2).sum()) / draws, "another law must be detected"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_example_runs_as_a_command_without_torch(shared, temperature):
    script = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); "
        "print('torch' in sys.modules or 'arbordraft' in sys.modules)"
    )
    code = script.replace("sys.argv[1]", repr(str(SCRIPT)))
    arguments = [str(shared), ",".join(map(str, PROMPTS[0])), "--new-tokens", "6", "--width", "3"]
    arguments += ["--temperature", str(temperature), "--seed", str(2**64 - 1)]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    tokens, told, torch_was_there = done.stdout.splitlines()
    greedy = texts()[0][len(PROMPTS[0]) :]
    assert tokens == ",".join(map(str, (plain(temperature, 2**64 - 1)[0] if temperature else greedy)[:6]))
    assert told.endswith("tokens per forward of the target")
    assert torch_was_there == "False"
