"""Phase ``smollm2``: tau and tokens per second of SmolLM2 on real prompts, if its weights are there."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from arbordraft.bench.decoding import DecodeRow, in_turns
from arbordraft.bench.workload import Workload, quiet, read_texts
from arbordraft.checkpoints.smollm2 import MANIFEST, NAME, WEIGHTS
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import load_drafter, trained_for
from arbordraft.drafters import NGramDrafter, NoDrafter
from arbordraft.kernels.machine import cache_folder
from arbordraft.loading import load_target
from arbordraft.utils.checkout import CHECKPOINTS
from arbordraft.utils.choices import SMALL, Dtype, Kernels
from arborlab.gpu.machine import Figure
from arborlab.gpu.setting import Item, Setting


def smollm2(setting: Setting) -> list[Item]:
    """Returns the items of the phase."""
    return [Item("plain, lookups and the trained head", partial(_decoded, setting))]


def weights(setting: Setting) -> str | None:
    """Returns the folder of the model to decode with: the given one, SmolLM2 in the cache, or beside the checkout.

    Nothing is downloaded.
    """
    if setting.model is not None:
        return setting.model
    if list(cache_folder().glob(f"{NAME.lower()}-*/{MANIFEST}")):
        return SMALL
    places = Path.cwd(), CHECKPOINTS.parents[1]
    found = [path.parent for place in places for path in sorted(place.glob(f"{NAME.lower()}*/{WEIGHTS}"))]
    return str(found[0]) if found else None


def _decoded(setting: Setting) -> Iterator[DecodeRow | Figure]:
    if (model := weights(setting)) is None:
        setting.log(
            f"the weights of {NAME} are neither in the cache nor in a folder {NAME.lower()}* here, and nothing is "
            "downloaded: phase smollm2 is left out; name a folder with --model"
        )
        yield Figure(f"weights of {NAME}", "not found: left out")
        return
    dtype, kernels = (Dtype.bfloat16, Kernels.auto) if setting.on_gpu else (Dtype.float32, Kernels.torch)
    target, _ = load_target(model, dtype, kernels, device=str(setting.device))
    decoders: dict[str, Any] = {"plain": SpeculativeDecoder(target, NoDrafter())}
    decoders["lookups"] = SpeculativeDecoder(target, NGramDrafter())
    if (folder := trained_for(target, CHECKPOINTS)) is None:
        setting.log("no head that was trained for this model is known: plain decoding and lookups alone")
    else:
        decoders[folder.name] = SpeculativeDecoder(target, load_drafter(folder, target))
    if setting.on_gpu:
        workload = Workload(tuple(read_texts(None, 4)), batch=1, new_tokens=128, repeats=2, seed=setting.seed)
    else:
        workload = Workload(tuple(read_texts(None, 1)), batch=1, new_tokens=4, repeats=1, seed=setting.seed)
    yield from in_turns(target, decoders, workload, quiet)
