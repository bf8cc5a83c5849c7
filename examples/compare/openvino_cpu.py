"""Greedy decoding on a CPU, measured in one run: arbordraft, transformers' generate and OpenVINO GenAI.

OpenVINO decodes plainly and with its prompt lookup by its continuous batching pipeline; see README.md and program.py.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import Config, Generate, Tokens

# Groups as long as the rows of SmolLM2 can be cut into: 576 = 9 x 64; the default of 128 would leave layers at 8 bits.
FORMATS = {
    "bfloat16": ["--weight-format", "fp16"],  # widened or narrowed to what it computes in when it is loaded
    "int8": ["--weight-format", "int8"],
    "int4": ["--weight-format", "int4", "--group-size", "64", "--ratio", "1.0", "--sym"],
}
NGRAMS = ["4:3", "8:3", "3:2"]


def load(settings: dict[str, Any]) -> Generate:
    """Converts the model if nobody has, and starts the pipeline."""
    import numpy
    import openvino
    from openvino_genai import ContinuousBatchingPipeline, GenerationConfig, SchedulerConfig

    folder = Path(settings["converted"])
    if not folder.exists():
        command = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", settings["model"]]
        command += ["--task", "text-generation-with-past", *settings["format"], folder]
        subprocess.run(command, check=True)
    scheduler = SchedulerConfig()
    for name, value in settings["scheduler"].items():
        setattr(scheduler, name, value)
    pipeline = ContinuousBatchingPipeline(str(folder), scheduler, "CPU", settings["properties"])

    def generate(prompts: Tokens, new_tokens: int) -> tuple[Tokens, dict[str, Any]]:
        sampling = GenerationConfig(str(folder / "generation_config.json"))
        sampling.max_new_tokens, sampling.do_sample = new_tokens, False
        for name, value in settings["sampling"].items():
            setattr(sampling, name, value)
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [sampling] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results], {}

    return generate


def configs(arguments: argparse.Namespace, model: Path, scratch: Path) -> list[list[Config]]:
    """Plain and with prompt lookup; of each the fastest is compared."""

    def config(batched: int, ngram: str | None) -> Config:
        name = f"{arguments.weights}, {f'lookup {ngram}' if ngram else 'plain'}, {batched} batched"
        drafted, longest = map(int, ngram.split(":")) if ngram else (0, 0)
        settings = {
            "model": str(model),
            "converted": str(scratch / arguments.weights),
            "format": FORMATS[arguments.weights],
            "scheduler": {
                "cache_size": 2,  # gigabytes
                "enable_prefix_caching": False,  # the other engines read every prompt anew
                "max_num_seqs": 32,
                "max_num_batched_tokens": batched,
            },
            "properties": {
                "INFERENCE_NUM_THREADS": arguments.threads,
                "INFERENCE_PRECISION_HINT": "bf16",
                **({"prompt_lookup": True} if ngram else {}),
            },
            "sampling": {"num_assistant_tokens": drafted, "max_ngram_size": longest} if ngram else {},
        }
        return Config(name, settings)

    lookups = [config(batched, ngram) for batched in arguments.batched for ngram in arguments.ngrams]
    return [[config(batched, None) for batched in arguments.batched], lookups]


def options(parser: argparse.ArgumentParser) -> None:
    """Those of OpenVINO alone."""
    parser.add_argument("--weights", choices=FORMATS, default="bfloat16", help="of OpenVINO")
    parser.add_argument("--batched", type=int, nargs="+", default=[256, 2048], help="max_num_batched_tokens")
    parser.add_argument("--ngrams", nargs="+", default=NGRAMS, metavar="DRAFTED:LONGEST", help="of OpenVINO")


if __name__ == "__main__":
    from program import PeerKind, run

    sys.exit(run(PeerKind("OpenVINO GenAI", "openvino_genai", __file__, options, configs), __doc__))
