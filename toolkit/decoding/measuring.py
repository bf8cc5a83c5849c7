"""Costs of forwards and steps on this machine: measured once, when it pays, and kept in the cache folder."""

import hashlib
import json
import math
import random
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from arbordraft.deciders import CostAware
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.decoding.prompts import chat_batches, check_texts
from arbordraft.decoding.timing import measure_rows, measure_steps, rough_costs
from arbordraft.drafters import Drafter
from arbordraft.kernels.machine import cache_folder, cpu
from arbordraft.kernels.progress import phase
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kept = TypeVar("Kept", CostTable, StepCosts)

_MOST_READ = 2048  # tokens of prompts in one forward
# Kernels take rows in blocks: the first row of a block may cost as much as all of it.
_KEPT_ROWS = (1, 2, 4, 5, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 49, 64)
_KEPT_REPEATS, _KEPT_BATCHES = 6, (1, 4, 16)  # a measurement that is kept for good may take some seconds
_SECONDS = {"forwards of this model": 4.0, "drafts for it": 6.0}  # limit of each measurement, unless renew=True
_METHOD = 3  # version of the method; a change of it renews all kept measurements


def known_rows(target: RaggedModel, *, renew: bool = False) -> CostTable:
    """Loads the costs that :func:`measure_rows` found for this kind of model on this machine, or measures them now.

    Costs are kept in the cache folder, by processor, threads, versions, the model's shapes, dtype and kernels. If a
    file is damaged, they are measured again, with a warning. Measuring takes some seconds and reports progress on
    stderr (:func:`~arbordraft.kernels.progress.phase`). After 4 s the rows timed so far form the table.

    Args:
        renew: measure again in any case, without a time limit.
    """
    return _rows_known(target, renew)


def _rows_known(target: RaggedModel, renew: bool, hurry: Callable[[], bool] | None = None) -> CostTable:
    rows = [count for count in _KEPT_ROWS if count <= (target.max_positions or count)]

    def measure(enough: Callable[[], bool]) -> CostTable:
        return measure_rows(target, rows, repeats=_KEPT_REPEATS, enough=enough)

    return _known("forwards of this model", cost_file(target), CostTable, measure, renew, hurry)


def rows_within(target: RaggedModel, seconds: float = 0.2) -> int:
    """Returns how many prompt tokens a forward reads in ``seconds``: ``max_rows`` of an engine, to bound stalls.

    Costs come from :func:`known_rows`. The result is between 1 and 2,048, the most that one forward over prompts takes.
    """
    return known_rows(target).within(seconds, _MOST_READ)


def known_costs(target: RaggedModel, drafter: Drafter, *, renew: bool = False) -> StepCosts:
    """Loads the costs of whole steps with a drafter, or measures them now.

    The costs are those of :func:`known_rows`, and those that :func:`measure_steps` finds on short random texts in at
    most 6 s more.

    Args:
        renew: measure again in any case, without a time limit.
    """
    return _costs_known(target, drafter, renew)


def _costs_known(
    target: RaggedModel, drafter: Drafter, renew: bool, hurry: Callable[[], bool] | None = None
) -> StepCosts:
    rows = _rows_known(target, renew, hurry)

    def measure(enough: Callable[[], bool]) -> StepCosts:
        source = random.Random(0)
        texts = [[source.randrange(target.vocab_size) for _ in range(8)] for _ in range(max(_KEPT_BATCHES))]
        return measure_steps(target, drafter, texts, batches=2 * _KEPT_BATCHES, new_tokens=12, rows=rows, enough=enough)

    drafts = _known("drafts for it", cost_file(target, drafter), StepCosts, measure, renew, hurry)
    return replace(drafts, target=rows)


def cost_aware(target: RaggedModel, drafter: Drafter) -> CostAware:
    """Builds a decider that uses the costs of this machine, which are measured only once that pays.

    Costs that were measured before are read from the cache folder. Otherwise :func:`rough_costs` serve at first, which
    the program's clock corrects. An idle engine measures after 512 tokens. A caller of ``generate`` waits for it only
    once it takes at most a twentieth of the time of decoding. Costs change no greedy text and none with shared noise.

    Args:
        target: the target.
        drafter: the drafter.
    """
    if cost_file(target).exists() and cost_file(target, drafter).exists():
        return CostAware(known_costs(target, drafter), running=True)

    def measure(hurry: Callable[[], bool] | None) -> StepCosts | None:
        try:
            return _costs_known(target, drafter, False, hurry)
        except _Hurry:
            return None

    decider = CostAware(rough_costs(target, drafter), running=True)
    decider.measure = measure
    return decider


def _known(
    what: str,
    path: Path,
    kind: type[Kept],
    measure: Callable[[Callable[[], bool]], Kept],
    renew: bool,
    hurry: Callable[[], bool] | None,
) -> Kept:
    """Loads costs from a file, or measures and saves them; with ``hurry`` no progress is reported.

    Raises:
        _Hurry: if ``hurry()`` becomes true during the measurement.
    """
    if not renew and path.exists():
        try:
            return kind.load(path)
        except ValueError as error:
            warnings.warn(f"{error}: measuring now", stacklevel=4)
    limit = math.inf if renew else _SECONDS[what]
    bound = "as long as it takes" if renew else f"at most {limit:.0f} s"
    begun = time.monotonic()

    def enough() -> bool:
        if hurry is not None and hurry():
            raise _Hurry
        return time.monotonic() - begun >= limit

    line = phase(f"measuring {what}, once per machine and kind of model ({bound})")
    with line if hurry is None else nullcontext():
        costs = measure(enough)
    try:
        costs.save(path)
    except OSError as error:
        warnings.warn(f"step costs are measured in every process: {error}", stacklevel=4)
    return costs


class _Hurry(Exception):
    """Breaks off a measurement, which has found too little to be kept."""


def cost_file(target: RaggedModel, drafter: Drafter | None = None) -> Path:
    """Returns the path at which :func:`known_rows`, or with a drafter :func:`known_costs`, keeps its measurement."""
    model = target.model
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu()
    versions = [torch.__version__, *map(version, ("arbordraft", "transformers"))]
    kernels = [str(model.dtype), target.backend, str(target.prepacking)]
    asked = [_METHOD, _KEPT_ROWS, [part.name for part in fields(StepCosts)]]
    parts = [device, torch.get_num_threads(), versions, type(model).__name__, shapes, kernels, asked]
    if drafter is not None:
        network = drafter.state_dict()
        parts += [repr(drafter), [(name, list(tensor.shape)) for name, tensor in network.items()]]
    return cache_folder() / "costs" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"


def measure_costs(
    target: RaggedModel, drafter: Drafter, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]
) -> StepCosts:
    """Times forwards of the target, levels of drafting by their rows, and the remaining work of a step.

    Args:
        prompts: first user turns of conversations.

    Raises:
        TypeError: if ``prompts`` is not a list of texts.
        ValueError: if ``prompts`` is empty.
    """
    check_texts(prompts)
    texts = [inputs["input_ids"][0].tolist() for inputs in chat_batches(tokenizer, prompts, 1)]
    return measure_steps(target, drafter, texts)


__all__ = [
    "cost_aware",
    "cost_file",
    "known_costs",
    "known_rows",
    "measure_costs",
    "measure_rows",
    "measure_steps",
    "rough_costs",
    "rows_within",
]
