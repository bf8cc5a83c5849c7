"""Phase ``smollm2``: tau and tokens per second of SmolLM2 on real prompts, if its weights are in the cache."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from arbordraft.bench.decoding import DecodeRow, in_turns
from arbordraft.bench.workload import Workload, quiet, read_texts
from arbordraft.checkpoints.smollm2 import MANIFEST, NAME
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import load_drafter, trained_for
from arbordraft.drafters import NGramDrafter, NoDrafter
from arbordraft.kernels.machine import cache_folder
from arbordraft.loading import load_target
from arbordraft.utils.choices import SMALL, Dtype, Kernels
from arborlab.gpu.machine import Figure
from arborlab.gpu.setting import Item, Setting


def smollm2(setting: Setting) -> list[Item]:
    """Returns the items of the phase."""
    return [Item("plain, lookups and the trained head", partial(_decoded, setting))]


def _decoded(setting: Setting) -> Iterator[DecodeRow | Figure]:
    if not list(cache_folder().glob(f"{NAME.lower()}-*/{MANIFEST}")):
        setting.log(f"{NAME} is not in the cache, and nothing is downloaded here: phase smollm2 is left out")
        yield Figure(f"weights of {NAME}", "not in the cache: left out")
        return
    dtype, kernels = (Dtype.bfloat16, Kernels.auto) if setting.on_gpu else (Dtype.float32, Kernels.torch)
    target, _ = load_target(SMALL, dtype, kernels, device=str(setting.device))
    decoders: dict[str, Any] = {"plain": SpeculativeDecoder(target, NoDrafter())}
    decoders["lookups"] = SpeculativeDecoder(target, NGramDrafter())
    if (folder := trained_for(target)) is None:
        setting.log(f"no head that was trained for {NAME} is in the cache: plain decoding and lookups alone")
    else:
        decoders[folder.name] = SpeculativeDecoder(target, load_drafter(folder, target))
    if setting.on_gpu:
        workload = Workload(tuple(read_texts(None, 4)), batch=1, new_tokens=128, repeats=2, seed=setting.seed)
    else:
        workload = Workload(tuple(read_texts(None, 1)), batch=1, new_tokens=4, repeats=1, seed=setting.seed)
    yield from in_turns(target, decoders, workload, quiet)
