"""Examines this machine and this installation for ``arbordraft doctor``."""

import os
import platform
import re
import timeit
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from math import prod
from typing import Any

from packaging.requirements import Requirement

from arbordraft.kernels.machine import available_memory, best_isa, cache_folder, chosen_isa, cores, cpu

_DEVELOPERS = {"dev", "docs"}  # extras that users do not need
_MOST_BYTES = 2**28  # read to measure the memory: several times the last-level cache of most machines


def measured(model: str, drafter: str, **options: Any) -> dict[str, Any]:
    """Measures the costs of a step in milliseconds, without a time limit; raises ValueError if nothing is drafted."""
    from arbordraft.deciders import CostAware
    from arbordraft.loading import load

    decoder = load(model, drafter, costs="renew", **options)
    if not isinstance(decoder.decider, CostAware):
        raise ValueError(f"drafter {drafter!r} has no drafting costs to measure: name another one")
    costs = decoder.decider.costs
    return {
        "model": model,
        "drafter": type(decoder.drafter).__name__,
        "forward": {rows: 1e3 * seconds for rows, seconds in zip(costs.target.rows, costs.target.seconds, strict=True)},
        "level": {rows: 1e3 * seconds for rows, seconds in zip(costs.draft.rows, costs.draft.seconds, strict=True)},
        "besides": 1e3 * costs.rest,
    }


def described(name: str, dtype: str | None, weights: str | None) -> dict[str, Any]:
    """Describes a GGUF file or a folder from its header, ready for JSON.

    Args:
        name: the file or folder.
        dtype: see :func:`~arbordraft.load`.
        weights: see :func:`~arbordraft.load`.

    Raises:
        ValueError: if it is damaged, incomplete or not supported.
    """
    import torch

    from arbordraft.checkpoints.gguf_file import FRACTIONS, GgufFile
    from arbordraft.checkpoints.gguf_settings import gguf_config, gguf_generation_config
    from arbordraft.checkpoints.reader import read_config, stored_tensors
    from arbordraft.kernels.precision import fast_dtype
    from arbordraft.target.prepacked.room import cache_bytes, needed_memory
    from arbordraft.target.sources import source_of

    precision: torch.dtype = getattr(torch, dtype) if dtype else fast_dtype(torch.device("cpu"))
    source, about = source_of(name), {}
    if isinstance(source, GgufFile):
        settings = gguf_config(source)
        config, architecture = settings.to_dict(), source.architecture
        tensors = [(tensor.kind, prod(tensor.shape), tensor.raw.nbytes) for tensor in source.tensors.values()]
        if tokens := source.fields.get("tokenizer.ggml.tokens"):
            ends = gguf_generation_config(source, settings).eos_token_id
            ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
            about = {
                "tokens": len(tokens),
                "chat template": "tokenizer.chat_template" in source.fields,
                "ends": [tokens[end] for end in ends],
            }
    else:
        config = read_config(name)
        architecture, config = str(config.get("model_type")), config.get("text_config") or config
        sizes = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2}
        tensors = [
            (kind, prod(shape), prod(shape) * sizes.get(kind, 1)) for kind, shape in stored_tensors(name).values()
        ]
    kinds: dict[str, dict[str, int]] = {}
    for kind, _, size in tensors:
        part = kinds.setdefault(kind, {"tensors": 0, "bytes": 0})
        part["tensors"], part["bytes"] = part["tensors"] + 1, part["bytes"] + size
    dense = str(precision).removeprefix("torch.")
    default = "the file's blocks" if isinstance(source, GgufFile) and not kinds.keys() <= set(FRACTIONS) else dense
    return {
        "name": name,
        "architecture": architecture,
        "weights": sum(count for _, count, _ in tensors),
        "kinds": dict(sorted(kinds.items(), key=lambda kind: -kind[1]["bytes"])),
        "packed in": {None: default, "file": default, "dense": dense}.get(weights, weights),
        "needed": needed_memory(source, precision, weights),
        "positions": config.get("max_position_embeddings"),
        "cache per token": cache_bytes(config, precision, 1),
    } | about


def examine(*, quick: bool = False) -> dict[str, Any]:
    """Collects findings by section, ready for JSON; ``faults`` lists the faults that keep the package from working.

    Args:
        quick: skip all that needs torch: its threads and GPUs, the kernels, the memory bandwidth.
    """
    requirements = _requirements()
    missing = [
        f"{name} is {problem}: pip install '{name}'" for name, problem in requirements.pop("").items() if problem
    ]
    cache, obstacles = _cache()
    processor, faults = cpu(), [*missing, *obstacles]
    try:
        chosen_isa()
    except ValueError as error:  # an invalid environment variable
        faults.append(str(error))
    report: dict[str, Any] = {
        "versions": {"python": platform.python_version(), **_versions("arbordraft", "torch", "transformers", "scipy")},
        "machine": {
            "cpu": processor.get("model name", processor["processor"]) or platform.machine(),
            "cores": cores(),
            "instruction set": best_isa(),
        },
        "memory": _memory(),
        "cache": cache,
        "extras": {
            extra: {
                "missing": [name if why == "missing" else f"{name} ({why})" for name, why in parts.items() if why],
                "install": f"pip install 'arbordraft[{extra}]'",
            }
            for extra, parts in requirements.items()
        },
    }
    if not quick and not faults:
        import torch

        report["machine"] |= {
            "threads": torch.get_num_threads(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        }
        report["memory"] |= _bandwidth()
        report["kernels"], faults = _kernels()
    return report | {"broken": faults}


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):  # the requirements report it
            found[name] = version(name)
    return found


def _memory() -> dict[str, float]:
    """Returns total memory and memory available to this process in GiB, if the system tells them."""
    total, available = None, available_memory()
    with suppress(AttributeError, ValueError, OSError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {"total": total, "available": available}
    return {name: size / 2**30 for name, size in sizes.items() if size is not None}


def _bandwidth() -> dict[str, float]:
    """Measures GB/s of reading (summing a tensor) and of copying (bytes read plus bytes written).

    The best of several rounds with torch's threads bounds the speed of a forward, which reads all weights once.
    """
    import torch

    source = torch.ones(min(_MOST_BYTES, (available_memory() or _MOST_BYTES * 8) // 8) // 4)
    copy = torch.empty_like(source)
    read, copied = (min(timeit.repeat(run, number=1, repeat=6)) for run in (source.sum, lambda: copy.copy_(source)))
    return {"read": source.nbytes / read / 1e9, "copy": 2 * source.nbytes / copied / 1e9}


def _kernels() -> tuple[dict[str, Any], list[str]]:
    """Wraps a small model in each precision; returns its kernels with the reasons, and faults of its self-test."""
    import torch

    from arbordraft.kernels import native
    from arbordraft.target.model import RaggedModel
    from arbordraft.testing import tiny_model

    found: dict[str, Any] = {"instruction set": native.isa(), "problem": native.problem(), "chosen": {}}
    faults = []
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        model: Any = tiny_model(hidden_size=64, head_dim=16, intermediate_size=96)  # its layers can be fused
        try:
            found["chosen"][name] = RaggedModel(model.to(dtype)).chosen
        except (ValueError, RuntimeError) as error:
            faults.append(f"the kernels fail in {name}: {error}")
    return found, faults


def _cache() -> tuple[dict[str, Any], list[str]]:
    """Returns the cache folder with its visible entries, and the reasons why it cannot be used."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        return {"folder": None, "entries": []}, [f"no cache folder: {error}; set ARBORDRAFT_CACHE to one"]
    faults = [] if os.access(folder, os.W_OK) else [f"{folder} cannot be written; set ARBORDRAFT_CACHE to another"]
    entries = []
    for place in sorted(folder.glob("[!.]*")):
        sizes = [file.stat().st_size for file in (place, *place.rglob("*")) if file.is_file()]
        entries.append({"name": place.name, "files": len(sizes), "bytes": sum(sizes)})
    return {"folder": str(folder), "entries": entries}, faults


def _requirements() -> dict[str, dict[str, str | None]]:
    """Returns required distributions by extra ("" is the package itself), each with its problem or ``None``."""
    lines = [Requirement(line) for line in requires("arbordraft") or ()]
    extras = {extra for line in lines for extra in re.findall(r'extra == "([^"]+)"', str(line.marker))}

    def asked(line: Requirement, extra: str) -> bool:
        return line.marker is None or line.marker.evaluate({"extra": extra})

    def parts(extra: str) -> Iterator[tuple[str, str | None]]:
        for line in lines:
            if not asked(line, extra) or (extra and asked(line, "")):  # not of this extra, or of the package itself
                continue
            if line.name == "arbordraft":
                for other in line.extras:
                    yield from parts(other)
            else:
                yield line.name, _problem(line)

    return {extra: dict(parts(extra)) for extra in ("", *sorted(extras - _DEVELOPERS))}


def _problem(line: Requirement) -> str | None:
    try:
        there = version(line.name)
    except PackageNotFoundError:
        return "missing"
    return None if line.specifier.contains(there, prereleases=True) else f"{there}, not {line.specifier}"


__all__ = ["described", "examine", "measured"]
