"""A real model in float32: every decoder emits the tokens that transformers' own greedy search emits."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from support.models import greedy_reference, left_padded, new_tokens

import arbordraft as ad
from arbordraft.builders import eagle
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.deciders import Heuristic, LearnedDecider
from arbordraft.training.decider_module import DeciderModule
from arbordraft.training.drafter_module import DrafterModule
from arbordraft.training.fit import run

CHECKPOINTS = Path(__file__).resolve().parents[2] / "examples" / "checkpoints"
SHIPPED = CHECKPOINTS / "smollm2-135m-instruct-eagle"
NEW_TOKENS = 16
QUESTIONS = [
    "Hi!",
    "What is the capital of Portugal?",
    "Repeat this sentence four times: the green turtle slowly crosses the sandy road.",
    "Count from 1 to 20, one number per line.",
    "Write a Python function that reverses a linked list. Comment every line.",
    "Copy this list and add one more item:\n- red apples\n- green apples\n- yellow apples\n- red pears\n- green pears",
    "Here is a note from our caretaker. 'The lift will be out of service on Monday from eight to noon, because the "
    "cable has to be changed. Please use the stairs at the back of the house, since those at the front are being "
    "painted. The heating will be checked on Tuesday; someone should be at home between nine and eleven. Bicycles "
    "that are still in the hall on Wednesday will be brought to the cellar.' Which stairs should I use, and why?",
    "Say the word banana ten times.",
]
ALONE = 2  # this prompt is also decoded by itself


@pytest.fixture(scope="module")
def target():
    return ad.RaggedModel(*load_smollm2(progress=False), kernels="torch")


@pytest.fixture(scope="module")
def prompts(target):
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [target.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


@pytest.fixture(scope="module")
def batch(target, prompts):
    return left_padded(prompts, target.tokenizer.pad_token_id)


@pytest.fixture(scope="module")
def expected(target, prompts, batch):
    """Returns the new tokens of every prompt, the same in a batch and alone."""
    sequences = target.model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    found = [row[batch["input_ids"].shape[1] :].tolist() for row in sequences]
    end = target.model.generation_config.eos_token_id
    found = [tokens[: tokens.index(end) + 1] if end in tokens else tokens for tokens in found]
    assert greedy_reference(target.model, [prompts[ALONE]], max_new_tokens=NEW_TOKENS) == [found[ALONE]]
    return found


@pytest.fixture(scope="module")
def half(target):
    """Builds a draft model that rounds differently from the target and so sometimes errs."""
    return ad.RaggedModel(copy.deepcopy(target.model).to(torch.bfloat16), target.tokenizer, kernels="torch")


def decoders(target, half):
    """Returns builders: every drafter, chains and trees, with and without a decider, a coupling of each kind."""
    lookup = ad.Coupling.matching(2)
    drawn = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    hubs = ad.Coupling(ad.TopTail(1, 1), ad.Lifted(ad.SpecHub()))
    chain, tree, slim = (ad.TreeTopology.from_k_config(counts) for counts in ((1, 1, 1, 1), (2, 2, 1), (2, 1, 1, 1)))
    return {
        "n-gram chain": lambda: ad.SpeculativeDecoder(target, ad.NGramDrafter(), chain, lookup),
        "n-gram tree": lambda: ad.SpeculativeDecoder(target, ad.NGramDrafter(), tree, lookup, Heuristic()),
        "early exit": lambda: ad.SpeculativeDecoder(target, ad.EarlyExitDrafter(target, 24), slim, drawn),
        "bf16 copy, chain": lambda: ad.SpeculativeDecoder(target, ad.LanguageModelDrafter(half), chain, drawn),
        "bf16 copy, tree": lambda: ad.SpeculativeDecoder(
            target, ad.LanguageModelDrafter(half), slim, hubs, ad.ConfidenceThreshold(0.3)
        ),
        "trained, dynamic tree": lambda: eagle(target, SHIPPED),
        "trained, after lookups": lambda: eagle(target, SHIPPED, lookup=True),
        "trained, drawn tree": lambda: ad.SpeculativeDecoder(
            target, ad.EagleDrafter.from_pretrained(SHIPPED, target), slim, hubs
        ),
        "trained, learned stop": lambda: ad.SpeculativeDecoder(
            target,
            ad.EagleDrafter.from_pretrained(SHIPPED, target),
            ad.TreeTopology.chain(6),
            ad.Coupling.matching(),
            LearnedDecider.from_pretrained(CHECKPOINTS / "smollm2-135m-instruct-decider"),
        ),
    }


@pytest.mark.parametrize("name", decoders(None, None))
def test_greedy_tokens_are_those_of_transformers(target, half, prompts, batch, expected, name):
    decoder = decoders(target, half)[name]()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    output = decoder.generate(**batch, **options)
    assert new_tokens(output.sequences, prompts, output.stats.emitted) == expected
    assert output.stats.tau > 1.1  # drafts were accepted
    assert (output.stats.pad_rows, output.stats.pad_keys) == (0, 0)
    single = decoder.generate(torch.tensor([prompts[ALONE]]), **options)
    assert single.sequences[0, len(prompts[ALONE]) :].tolist() == expected[ALONE]


@pytest.mark.parametrize(
    ("name", "module", "score", "limit"),
    [("eagle", DrafterModule, "tau", 20_000_000), ("decider", DeciderModule, "ece", 200_000)],
)
def test_shipped_checkpoints_are_small_and_document_their_training(name, module, score, limit):
    folder = CHECKPOINTS / f"smollm2-135m-instruct-{name}"
    files = {path.name for path in folder.iterdir()}
    assert files == {"README.md", "config.json", "metrics.json", "model.safetensors", "training.yaml"}
    assert (folder / "model.safetensors").stat().st_size <= limit
    recipe = ["fit", "--config", str(folder / "training.yaml"), "--trainer.logger", "false"]
    if name == "decider":
        recipe += ["--model.drafter", str(SHIPPED)]
    run(module, recipe, go=False)
    card = (folder / "README.md").read_text()
    assert re.search(r"digest of the data: [0-9a-f]{64}", card)
    assert f"| {score} | {json.loads((folder / 'metrics.json').read_text())[f'val/{score}']:.4g} |" in card


def test_seeded_sampling_does_not_depend_on_the_batch(target, prompts, batch):
    """Both models are in float32: in half precision, a draft model may draft other tokens in another batch."""
    coupling = ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()))
    decoder = ad.SpeculativeDecoder(target, ad.EarlyExitDrafter(target, 24), ad.TreeTopology.fork(2, 2), coupling)
    options = {"max_new_tokens": 8, "do_sample": True, "top_p": 0.9, "return_dict_in_generate": True}
    output = decoder.generate(**batch, seeds=range(8), **options)
    single = decoder.generate(torch.tensor([prompts[ALONE]]), seeds=[ALONE], **options)
    together = new_tokens(output.sequences, prompts, output.stats.emitted)[ALONE]
    assert single.sequences[0, len(prompts[ALONE]) :].tolist() == together
