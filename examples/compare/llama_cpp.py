"""Measures decoding on a CPU in one run: arbordraft, transformers' generate and llama.cpp.

llama.cpp's server decodes plainly, with each of its lookups and with a draft model. xllamacpp runs it within its own
process. See README.md and program.py.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

from peers import Config, Generate, Tokens

# Kind, tokens looked up, most tokens drafted: about the lengths that pay here, and the defaults of llama.cpp.
DRAFTS = ["simple:4:8", "simple:3:4", "simple:12:48", "map-k:4:8", "map-k:12:48", "mod:6:8", "mod:16:32"]


def load(settings: dict[str, Any]) -> Generate:
    """Starts a server within this process, with a slot for every prompt of the largest batch."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings["model"]
    for name, value in settings["parameters"].items():
        setattr(parameters, name, value)
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = settings["threads"]
    if settings["draft"]:
        kind, *sizes = settings["draft"]
        name = {"model": "DRAFT_SIMPLE"}.get(kind, f"NGRAM_{kind.replace('-', '_').upper()}")
        speculative = parameters.speculative
        speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{name}")]
        if kind == "model":
            speculative.draft.mparams.path, speculative.draft.n_max = settings["draft_model"], *sizes
            for threads in (speculative.draft.cpuparams, speculative.draft.cpuparams_batch):
                threads.n_threads = settings["threads"]
        elif kind == "mod":
            speculative.ngram_mod.n_match, speculative.ngram_mod.n_max = sizes
            speculative.ngram_mod.n_min = 1
        else:
            lookup = getattr(speculative, name.lower())
            lookup.size_n, lookup.size_m = sizes
    server = xllamacpp.Server(parameters)

    def generate(prompts: Tokens, new_tokens: int, temperature: float) -> tuple[Tokens, dict[str, Any]]:
        law: dict[str, Any] = {"temperature": 0, "samplers": ["top_k"], "top_k": 1}
        if temperature:
            law = {"temperature": temperature, "samplers": ["temperature"]}
        sampling = law | {"n_predict": new_tokens}

        def answer(prompt: list[int]) -> list[int]:
            asked = {"prompt": prompt, "return_tokens": True, "verbose": True, "cache_prompt": False}
            return server.handle_completions(asked | sampling)["__verbose"]["tokens"]  # OpenAI's reply has none

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(answer, prompts)), {}

    return generate


def quantised(source: Path, target: Path, kind: str) -> Path:
    """Writes a GGUF file with the matrices of another file in another format."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    known = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(target, known.pop("general.architecture").contents())
    known.pop("general.file_type", None)
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind}"])
    for name, field in known.items():
        element = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], element)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        wanted = GGMLQuantizationType[kind if len(tensor.shape) > 1 else "F32"]
        writer.add_tensor(tensor.name, quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def configs(arguments: argparse.Namespace, _model: Path, scratch: Path) -> list[list[Config]]:
    """Lists ways to run llama.cpp in groups: plain, each kind of lookup, draft model; the fastest are compared."""
    file = arguments.gguf
    if arguments.weights is not None:
        file = quantised(file, scratch / f"{arguments.weights}.gguf", arguments.weights)
    slots = max(arguments.batches)
    parameters = {
        "n_parallel": slots,
        "n_ctx": 2048 * slots,
        "fit_params": False,  # or llama.cpp would choose the size itself
        "cache_prompt": False,  # the other engines read every prompt anew
        "cache_ram_mib": 0,
        "n_threads_http": slots,
    }

    def config(draft: str | None) -> Config:
        kind, *sizes = draft.split(":") if draft else [""]
        settings = {
            "model": str(file),
            "draft_model": str(arguments.draft_model),
            "parameters": parameters,
            "threads": arguments.threads,
            "draft": [kind, *map(int, sizes)] if draft else None,
        }
        return Config(f"{file.stem}, {draft or 'plain'}", settings)

    drafts = arguments.drafts + [f"model:{length}" for length in arguments.lengths if arguments.draft_model]
    kinds = [list(group) for _, group in groupby(drafts, lambda draft: draft.partition(":")[0])]
    return [[config(draft) for draft in group] for group in ([None], *kinds)]


def options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of llama.cpp alone."""
    parser.add_argument("--gguf", type=Path, required=True, help="file of the model")
    parser.add_argument("--weights", choices=["Q8_0", "Q4_0", "Q4_1", "BF16"], help="another format than the file's")
    parser.add_argument("--drafts", nargs="*", default=DRAFTS, metavar="KIND:LOOKED-UP:DRAFTED", help="its lookups")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8], help="tokens that the draft model drafts")


if __name__ == "__main__":
    from program import PeerKind, run

    sys.exit(run(PeerKind("llama.cpp", "xllamacpp", __file__, options, configs), __doc__))
