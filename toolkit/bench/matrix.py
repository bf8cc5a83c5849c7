"""The matrix of speeds beside plain decoding: requests, batches, clients and contexts, for the drafters of a model."""

from collections.abc import Sequence
from pathlib import Path

from arbordraft.bench import suites
from arbordraft.bench.clients import fields
from arbordraft.bench.decoding import case_of
from arbordraft.bench.report import Report
from arbordraft.bench.workload import Workload
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import trained_for
from arbordraft.target.model import RaggedModel
from arbordraft.utils.checkout import CHECKPOINTS

HEAD = "head"  # stands for the drafter that was trained for the model


def loaded(target: RaggedModel, drafters: Sequence[str], report: Report) -> dict[str, SpeculativeDecoder]:
    """Builds plain decoding and the decoder of each drafter; leaves out those that the model cannot have.

    Args:
        target: the model.
        drafters: names as :func:`~arbordraft.load` takes them, or ``head`` for the drafter that was trained for it.
        report: notes the drafters that are left out.
    """
    found = {"plain": suites.loaded(target, "none")}
    for name in drafters:
        try:
            found[Path(name).name if Path(name).is_dir() else name] = suites.loaded(target, _named(name, target))
        except ValueError as error:
            report.leave_out(f"{name}: {error}")
    return found


def measurable(workloads: Sequence[Workload], target: RaggedModel, report: Report) -> list[Workload]:
    """Returns the workloads that can be measured, and notes the others.

    Raises:
        ValueError: if none can be measured.
    """
    reasons = [_obstacle(workload, target) for workload in workloads]
    for reason in dict.fromkeys(filter(None, reasons)):
        report.leave_out(reason)
    found = [workload for workload, reason in zip(workloads, reasons, strict=True) if not reason]
    if not found:
        raise ValueError("; ".join(["nothing is left to measure", *report.left_out]))
    return found


def _named(name: str, target: RaggedModel) -> str:
    if name != HEAD:
        return name
    if (folder := trained_for(target, CHECKPOINTS)) is None:
        raise ValueError("no drafter was trained for this model: train one, or name the folder of one")
    return str(folder)


def _obstacle(workload: Workload, target: RaggedModel) -> str:
    """Returns why a workload cannot be measured; nothing if it can."""
    if not workload.fits(target):
        return f"{case_of(workload)}: the model has {target.max_positions} positions"
    if workload.served:
        try:
            fields(workload)
        except ValueError as error:
            return f"{case_of(workload)} with clients: {error}"
    return ""


__all__ = ["loaded", "measurable"]
