"""Measures decoding on a CPU in one run: arbordraft, transformers' generate and vLLM's CPU build.

vLLM decodes plainly, with its lookup, with suffix decoding and with an EAGLE-3 head, each in its fastest setting. See
README.md and program.py.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from peers import Config, Generate, Tokens

NGRAMS = ["4:3:5", "5:4:4", "2:2:4"]  # lookups as in our tree; as in vLLM's documentation; short drafts
LENGTHS = [2, 4]  # tokens that a head drafts


def load(settings: dict[str, Any]) -> Generate:
    """Starts ``vllm.LLM``; its counters are the metrics of speculation, if ``settings`` let it keep any."""
    from vllm import LLM, SamplingParams

    llm = LLM(**settings)

    def generate(prompts: Tokens, new_tokens: int, temperature: float) -> tuple[Tokens, dict[str, Any]]:
        sampling = SamplingParams(temperature=temperature, max_tokens=new_tokens, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        counted = {} if settings.get("disable_log_stats", True) else counters(llm)
        return [list(each.outputs[0].token_ids) for each in outputs], counted

    return generate


def counters(llm: Any) -> dict[str, Any]:
    """Returns vLLM's counters of speculation: numbers, or lists by position in the draft."""
    prefix = "vllm:spec_decode_"
    metrics = {each.name.removeprefix(prefix): each for each in llm.get_metrics() if each.name.startswith(prefix)}
    return {name: list(each.values) if hasattr(each, "values") else each.value for name, each in metrics.items()}


def config(
    name: str,
    model: Path,
    dtype: str = "bfloat16",
    speculative: dict[str, Any] | None = None,
    *,
    reserved: int = 0,
    preload: str = "",
    counted: bool = False,
) -> Config:
    """Builds one way to run vLLM.

    Args:
        name: name for people.
        model: folder of the model.
        dtype: type of the weights and of the computation.
        speculative: ``speculative_config`` of ``vllm.LLM``, or ``None`` to decode plainly.
        reserved: cores that vLLM leaves to its scheduler, ``VLLM_CPU_NUM_OF_RESERVED_CPU``; 1 is its default.
        preload: libraries for ``LD_PRELOAD``; without an OpenMP library among them, vLLM adds PyTorch's.
        counted: whether vLLM counts drafts and their acceptance.
    """
    settings = {
        "model": str(model),
        "dtype": dtype,
        "max_model_len": 2048,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,  # the other engines read every prompt anew
        **({"speculative_config": speculative} if speculative else {}),
        **({"enforce_eager": True, "disable_log_stats": False} if counted else {}),
    }
    return Config(name, settings, environment(reserved, preload))


def environment(reserved: int = 0, preload: str = "") -> dict[str, str]:
    """Returns environment variables for vLLM, besides those that are set already."""
    return {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": str(reserved),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # gigabytes
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": preload} if preload else {}),
    }


def configs(arguments: argparse.Namespace, model: Path, _scratch: Path) -> list[list[Config]]:
    """Lists ways to run vLLM, grouped by kind of drafts and reserved cores; each group's fastest is compared."""
    groups = []
    for reserved in arguments.reserved:
        options: dict[str, Any] = {"reserved": reserved, "preload": arguments.preload}
        groups.append([config(f"plain, {reserved} reserved", model, **options)])
        groups.append(
            [
                config(f"n-gram {ngram}, {reserved} reserved", model, speculative=lookup(ngram), **options)
                for ngram in arguments.ngrams
            ]
        )
        if arguments.suffix:
            # No memory of past answers: rounds of the same prompts would find those of the round before.
            suffix = {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0}
            groups.append([config(f"suffix, {reserved} reserved", model, speculative=suffix, **options)])
        if arguments.eagle is not None:
            head = {"method": "eagle3", "model": str(arguments.eagle)}
            lengths = {f"EAGLE-3 {length}": {"num_speculative_tokens": length} for length in arguments.lengths}
            groups.append(
                [
                    config(f"{name}, {reserved} reserved", model, speculative=head | length, **options)
                    for name, length in lengths.items()
                ]
            )
    return [group for group in groups if group]


def lookup(ngram: str) -> dict[str, Any]:
    """Returns ``speculative_config`` for ``drafted tokens:shortest:longest suffix to look up``."""
    names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    return {"method": "ngram", **dict(zip(names, map(int, ngram.split(":")), strict=True))}


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of vLLM alone."""
    parser.add_argument("--preload", default="", metavar="LIBRARIES", help="LD_PRELOAD for vLLM")
    parser.add_argument("--reserved", type=int, nargs="+", default=[0, 1], help="VLLM_CPU_NUM_OF_RESERVED_CPU")
    parser.add_argument("--ngrams", nargs="*", default=NGRAMS, metavar="DRAFTED:SHORTEST:LONGEST", help="its lookups")
    parser.add_argument("--suffix", action="store_true", help="suffix decoding, for which vLLM needs arctic-inference")
    parser.add_argument("--eagle", type=Path, help="folder that 'arbordraft export vllm' wrote")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens that the head drafts")


if __name__ == "__main__":
    from program import PeerKind, run

    sys.exit(run(PeerKind("vLLM", "vllm", __file__, options, configs), __doc__))
