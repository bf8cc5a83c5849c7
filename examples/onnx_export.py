"""Exports a trained drafter and its decider as ONNX graphs, compares them, and decodes with them."""

import tempfile
from pathlib import Path

import arbordraft as ad
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.deciders import Decider, LearnedDecider
from arbordraft.decoding.prompts import chat_batch
from arbordraft.drafter_names import load_drafter
from arbordraft.drafters import Drafter
from arbordraft.exports.onnx import export
from arbordraft.onnx.decider import OnnxDecider

CHECKPOINTS = Path(__file__).parent / "checkpoints"
HEAD, DECIDER = CHECKPOINTS / "smollm2-135m-instruct-eagle", CHECKPOINTS / "smollm2-135m-instruct-decider"

model, tokenizer = load_smollm2()
target = ad.RaggedModel(model, tokenizer)
inputs = chat_batch(tokenizer, ["What is the capital of France?", "Name three colours.", "Count from one to ten."])


def answers(drafter: Drafter, decider: Decider) -> tuple[list[str], ad.DecodeStats]:
    """Returns greedy answers of a batch and counts; the decider may stop the drafted chains."""
    coupling = ad.Coupling.matching()
    decoder = ad.SpeculativeDecoder(target, drafter, ad.TreeTopology.chain(5), coupling, decider)
    output = decoder.generate(**inputs, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
    texts = tokenizer.batch_decode(output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts, output.stats


with tempfile.TemporaryDirectory() as folder:
    for source, name in ((HEAD, "head"), (DECIDER, "decider")):
        written = export(source, f"{folder}/{name}", on_progress=print)
        for check, value in written.parity.items():
            print(f"  {check}: {value if value is True else f'{value:.1e}'}")
    exported = load_drafter(f"{folder}/head", target)
    actual = answers(exported, OnnxDecider.from_pretrained(f"{folder}/decider"))
    expected = answers(ad.EagleDrafter.from_pretrained(HEAD, target), LearnedDecider.from_pretrained(DECIDER))

print(*actual[0], sep="\n---\n")
for name, (_, stats) in (("onnxruntime", actual), ("torch", expected)):
    milliseconds = 1e3 * stats.seconds["draft"] / max(stats.forwards)
    print(f"{name}: {stats.tau:.2f} tokens per forward, {milliseconds:.1f} ms per draft step")
print("same answers:", actual[0] == expected[0])
