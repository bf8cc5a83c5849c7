"""Measures decoding on a CPU in one run: arbordraft, transformers' generate and OpenVINO GenAI.

OpenVINO's continuous batching pipeline decodes plainly, with its prompt lookup, with a draft model and with an EAGLE-3
head. The draft model is the model itself in four bits. See README.md and program.py.
"""

import argparse
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from peers import Config, Generate, Tokens

# The rows of SmolLM2 split into groups of 64: 576 = 9 x 64. The default of 128 would leave layers at 8 bits.
FORMATS = {
    "bfloat16": ["--weight-format", "fp16"],  # converted to the precision of computation when loaded
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "64", "--ratio", "1.0", "--sym"],
}
NGRAMS = ["4:3", "8:3", "3:2"]
TREES = ["4", "16:4:5"]  # drafted tokens of a chain; drafted tokens of a tree, children of a node and depth


def load(settings: dict[str, Any]) -> Generate:
    """Converts models that are not converted yet, and starts the pipeline."""
    import numpy
    import openvino
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig, draft_model

    folder = Path(settings["converted"])
    for source, weights, place in (settings["target"], *filter(None, [settings["draft"]])):
        if not Path(place).exists():
            (_convert_head if weights == "head" else _convert)(source, weights, place)
    properties = dict(settings["properties"])
    if settings["draft"]:
        properties["draft_model"] = draft_model(settings["draft"][-1], "CPU", **settings["properties"])
    scheduler = SchedulerConfig()
    for name, value in settings["scheduler"].items():
        setattr(scheduler, name, value)
    pipeline = ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)

    def generate(prompts: Tokens, new_tokens: int, temperature: float) -> tuple[Tokens, dict[str, Any]]:
        sampling = GenerationConfig(str(folder / "generation_config.json")) if folder.is_dir() else GenerationConfig()
        if folder.is_file():
            sampling.eos_token_id = _end(folder)
        sampling.max_new_tokens, sampling.do_sample = new_tokens, temperature > 0
        if temperature:
            sampling.temperature, sampling.top_p, sampling.top_k = temperature, 1.0, 1 << 30
        for name, value in settings["sampling"].items():
            setattr(sampling, name, value)
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [sampling] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results], {}

    return generate


@cache
def _end(file: Path) -> int:
    """Returns the token that ends answers of a GGUF file, which a pipeline with lookups does not take from it."""
    from gguf import GGUFReader

    return int(GGUFReader(file).fields["tokenizer.ggml.eos_token_id"].contents())


def _convert(source: str, weights: str, place: str) -> None:
    command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", source]
    subprocess.run([*command, "--task", "text-generation-with-past", *FORMATS[weights], place], check=True)


def _convert_head(source: str, _: str, place: str) -> None:
    """Converts an EAGLE-3 head; skips the check of its class in optimum for libraries that heads do not use."""
    from optimum.exporters.openvino import main_export
    from transformers import dynamic_module_utils

    dynamic_module_utils.check_imports = dynamic_module_utils.get_relative_imports
    main_export(source, place, task="text-generation-with-past", trust_remote_code=True, local_files_only=True)


def configs(arguments: argparse.Namespace, model: Path, scratch: Path) -> list[list[Config]]:
    """Lists ways to run OpenVINO in groups: plain, lookup, draft model, head; each group's fastest is compared."""
    target = arguments.gguf or scratch / arguments.weights
    kind = arguments.gguf.stem if arguments.gguf else arguments.weights
    lengths = [] if arguments.gguf else arguments.lengths
    itself = (str(model), "int4", str(scratch / "int4"))
    head = (str(arguments.eagle), "head", str(scratch / "head"))

    def config(batched: int, way: str, sampling: dict[str, int], draft: tuple[str, str, str] | None = None) -> Config:
        numbers = ":".join(map(str, sampling.values()))
        name = " ".join(filter(None, [f"{kind},", way, numbers])) + f", {batched} batched"
        settings = {
            "converted": str(target),
            "target": (str(model), arguments.weights, str(target)),
            "draft": draft,
            "scheduler": {
                "cache_size": 2,  # gigabytes
                "enable_prefix_caching": False,  # the other engines read every prompt anew
                "max_num_seqs": 32,
                "max_num_batched_tokens": batched,
            },
            "properties": {
                "INFERENCE_NUM_THREADS": arguments.threads,
                "INFERENCE_PRECISION_HINT": arguments.precision,
                **({"prompt_lookup": True} if way == "lookup" else {}),
            },
            "sampling": sampling,
        }
        return Config(name, settings)

    ways: list[list[tuple[Any, ...]]] = [
        [("plain", {})],
        [("lookup", _numbers(ngram, "num_assistant_tokens", "max_ngram_size")) for ngram in arguments.ngrams],
        [("itself in int4", {"num_assistant_tokens": length}, itself) for length in lengths],
    ]
    if arguments.eagle is not None:
        names = ("num_assistant_tokens", "branching_factor", "tree_depth")
        ways.append([("EAGLE-3", _numbers(tree, *names), head) for tree in arguments.trees])
    return [[config(batched, *way) for batched in arguments.batched for way in group] for group in ways if group]


def _numbers(text: str, *names: str) -> dict[str, int]:
    return dict(zip(names, map(int, text.split(":")), strict=False))


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of OpenVINO alone."""
    parser.add_argument("--gguf", type=Path, help="GGUF file that OpenVINO reads, without a draft model")
    parser.add_argument("--weights", choices=FORMATS, default="bfloat16", help="of OpenVINO")
    parser.add_argument("--precision", choices=["bf16", "f32"], default="bf16", help="of OpenVINO's computation")
    parser.add_argument("--batched", type=int, nargs="+", default=[256, 2048], help="max_num_batched_tokens")
    parser.add_argument("--ngrams", nargs="*", default=NGRAMS, metavar="DRAFTED:LONGEST", help="its lookups")
    parser.add_argument("--lengths", type=int, nargs="*", default=[4, 8], help="tokens that the model in int4 drafts")
    parser.add_argument("--eagle", type=Path, help="folder that 'arbordraft export sglang' wrote, for EAGLE-3")
    parser.add_argument("--trees", nargs="+", default=TREES, metavar="DRAFTED[:CHILDREN:DEPTH]", help="of EAGLE-3")


if __name__ == "__main__":
    from program import PeerKind, run

    sys.exit(run(PeerKind("OpenVINO GenAI", "openvino_genai", __file__, options, configs), __doc__))
