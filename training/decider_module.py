"""Trains a decider with Lightning, for a drafter that is already trained.

Shapes: G drafting steps, M drafts along held-out text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from arbordraft import RaggedModel
from arbordraft.checkpoints.reader import read_config
from arbordraft.deciders import LearnedDecider
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.measuring import measure_steps
from arbordraft.drafters import Drafter
from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.training.batches import Batch
from arbordraft.training.calibration import drafted_lengths, ece, fit_temperature, tokens_per_second
from arbordraft.training.drafts import Drafts, follow
from arbordraft.training.features import TeacherHead
from arbordraft.training.module import DistillationModule
from arbordraft.training.reports import card
from arbordraft.training.students import EagleStudent, Student
from arbordraft.utils.checks import check_int

# Candidate thresholds on the chance of survival; above 1 nothing is drafted.
THRESHOLDS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 2.0)
_TIMED = 4  # prompts that are decoded to measure the costs of a decoding step


class DeciderModule(DistillationModule):
    """Teaches a decider the chance that the target accepts each draft, on the target's own text.

    The label of a draft row is 1 - TV(target row, draft row). Its weight is the chance that the path above it survives,
    so that each depth counts as often as decoding visits it. Validation calibrates the decider depth by depth, and
    chooses the threshold that decodes most tokens per second. Both use one half of the held-out text; the metrics come
    from the other half.

    Args:
        drafter: folder of a trained EAGLE head, or a student with its network. Its weights do not change.
        hidden: whether to read the drafter's hidden state.
        top_k: how many of a row's highest probabilities to read, besides its entropy; 0 reads neither.
        widths: widths of the network's inner layers.
        draft_steps: depth to which drafts are followed: that of the topology that the decider is meant for.
        lr: learning rate.
        costs: costs of decoding steps; measured on this machine by default.
        timed_tokens: length of the answers that are decoded to measure costs.

    Raises:
        ValueError: if an argument is out of range, or the folder holds no plain EAGLE head.

    Source: label and calibration from DSpark (arXiv:2607.05147), survival from SpecDec++ (Huang et al., 2024).
    """

    _target: RaggedModel
    _teacher: TeacherHead
    _drafter: Drafter

    def __init__(
        self,
        drafter: str | Student,
        hidden: bool = True,
        top_k: int = 10,
        widths: Sequence[int] = (64,),
        draft_steps: int = 6,
        lr: float = 1e-3,
        costs: StepCosts | None = None,
        timed_tokens: int = 48,
    ) -> None:
        super().__init__()
        check_int("draft_steps", draft_steps, 1)
        student = _load(drafter) if isinstance(drafter, str) else drafter
        # Not registered as submodules, like the target's parts below: a checkpoint holds the decider only.
        object.__setattr__(self, "student", student.eval().requires_grad_(False))
        config = student.network.config
        size = getattr(config, "hidden_size", None) or config.target_hidden_size
        self.decider = LearnedDecider(size if hidden else 0, top_k, widths)
        self.draft_steps, self.lr, self.costs, self.timed_tokens = draft_steps, lr, costs, timed_tokens
        self._sequences = 0

    def save(self, folder: Path) -> None:
        self.decider.save_pretrained(folder)

    def card(self, metrics: Mapping[str, float]) -> str:
        return card("LearnedDecider", self.data, metrics)

    def setup(self, stage: str) -> None:
        self.attach(self.data.target)

    def attach(self, target: RaggedModel) -> None:
        """Attaches the target, its output head and a drafter for it.

        Raises:
            ValueError: if the drafter was trained for another target.
        """
        self.student.to(target.device)
        parts = {"_target": target, "_teacher": TeacherHead(target), "_drafter": self.student.drafter(target)}
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    def configure_optimizers(self) -> Optimizer:
        return AdamW(self.decider.parameters(), lr=self.lr)

    def drafts(self, batch: Batch) -> Drafts:
        top_k, hidden_size = self.decider.top_k, self.decider.hidden_size
        return follow(self.student, batch, self._target, self._teacher, self.draft_steps, top_k, hidden_size)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Returns the cross entropy of the chances, weighted by survival."""
        drafts = self.drafts(batch)
        kept = drafts.weights > 0
        logits = self.decider.logits(drafts.places[kept], drafts.statistics[kept], drafts.hidden[kept])
        loss = _cross_entropy(logits, drafts.labels[kept], drafts.weights[kept])
        self.log("train/bce", loss, prog_bar=True, batch_size=1)
        return loss

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._sequences = 0

    def validation_step(self, batch: Batch, index: int) -> None:
        """Collects logits along held-out text; every second sequence calibrates, the others judge."""
        drafts = self.drafts(batch)
        rows = (values.flatten(0, 1) for values in (drafts.places, drafts.statistics, drafts.hidden))
        tensors = {name: getattr(drafts, name) for name in ("labels", "passes", "weights", "valid")}
        tensors["logits"] = self.decider.logits(*rows).float().view_as(drafts.labels)
        tensors["judges"] = ((self._sequences + drafts.sequences) % 2 == 1).expand_as(drafts.labels)
        self.collect(tensors)
        self._sequences += len(batch.tokens)

    def on_validation_epoch_end(self) -> None:
        """Calibrates the decider, chooses its threshold, and logs the metrics.

        Raises:
            ValueError: if too little text is held out.
        """
        if self.trainer.sanity_checking:
            return
        seen = self.collected()
        judges, complete = seen["judges"][0], seen["valid"].all(dim=0)
        if not (complete & judges).any() or not (complete & ~judges).any():
            raise ValueError(
                f"there are no two held-out answers as long as {self.draft_steps} drafting steps, one to calibrate and "
                "one to judge; raise data.validation, or lower model.draft_steps: some drafters have only few steps"
            )
        fit, judge = ({name: values[:, half] for name, values in seen.items()} for half in (~judges, judges))
        self.decider.temperatures = tuple(
            fit_temperature(fit["logits"][step], fit["labels"][step], fit["weights"][step])
            for step in range(self.draft_steps)
        )
        metrics = self._calibration_errors(judge) | self._choose(fit, judge)
        self.log_dict({f"val/{name}": value for name, value in metrics.items()}, rank_zero_only=False, sync_dist=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["calibration"] = self.decider.temperatures, self.decider.threshold

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.decider.temperatures, self.decider.threshold = checkpoint["calibration"]

    def _calibrated(self, part: Mapping[str, Tensor]) -> Tensor:
        """Returns ``[G, M]`` logits at their temperatures."""
        return part["logits"] / torch.tensor(self.decider.temperatures)[:, None]

    def _calibration_errors(self, part: Mapping[str, Tensor]) -> dict[str, float]:
        """Measures the errors of the chances, before and after calibration."""
        reached = part["weights"] > 0
        before, after, labels, weights = (
            values[reached] for values in (part["logits"], self._calibrated(part), part["labels"], part["weights"])
        )
        return {
            "bce": float(_cross_entropy(after, labels, weights)),
            "ece": ece(after.sigmoid(), labels, weights),
            "ece_uncalibrated": ece(before.sigmoid(), labels, weights),
        }

    def _choose(self, fit: Mapping[str, Tensor], judge: Mapping[str, Tensor]) -> dict[str, float]:
        """Chooses the threshold, and a fixed depth to compare with, on ``fit``; returns their speeds on ``judge``."""
        if self.costs is None:
            measured = self._measure() if self.trainer.is_global_zero else None
            self.costs = self.trainer.strategy.broadcast(measured)
        depths = range(self.draft_steps + 1)
        learned, fixed = (
            [costs.step(1, drafted) for drafted in depths] for costs in (self.costs, replace(self.costs, decide=0.0))
        )

        def speeds(part: Mapping[str, Tensor]) -> tuple[dict[float, float], dict[int, float]]:
            complete = part["valid"].all(dim=0)
            chances, passes = self._calibrated(part)[:, complete].sigmoid(), part["passes"][:, complete]
            always = torch.ones_like(passes[0], dtype=torch.int64)
            return (
                {at: tokens_per_second(drafted_lengths(chances, at), passes, learned) for at in THRESHOLDS},
                {depth: tokens_per_second(always * depth, passes, fixed) for depth in depths},
            )

        by_threshold, by_depth = speeds(fit)
        threshold, depth = max(by_threshold, key=by_threshold.__getitem__), max(by_depth, key=by_depth.__getitem__)
        self.decider.threshold = threshold
        by_threshold, by_depth = speeds(judge)
        return {
            "tokens_per_second": by_threshold[threshold],
            "threshold": threshold,
            "tokens_per_second_fixed": by_depth[depth],
            "fixed_depth": depth,
        }

    def _measure(self) -> StepCosts:
        return measure_steps(
            self._target,
            self._drafter,
            self.data.held_out_prompts(_TIMED),
            self.decider,
            batches=[1] * _TIMED,
            depth=self.draft_steps,
            new_tokens=self.timed_tokens,
            rows=range(1, self.draft_steps + 2),
        )


def _load(folder: str) -> Student:
    config = read_config(folder)
    if (kind := config.get("model_type", config.get("class"))) != EagleConfig.model_type:
        raise ValueError(
            f"{folder} holds a model of type {kind!r}, not an EAGLE head; pass any other drafter as a student"
        )
    network = EagleHead.from_pretrained(folder).float()
    network.config.check_plain("the training of deciders")
    student = EagleStudent(layers=network.config.hidden_layers)
    student.network = network
    return student


def _cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Returns the weighted mean cross entropy, or 0 without any weight."""
    losses = functional.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(torch.float32).tiny)
