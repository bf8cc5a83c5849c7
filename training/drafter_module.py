"""Trains a drafter with Lightning.

Shapes: B sequences, L tokens, S slots, R predictions, D draft vocabulary.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from arbordraft import TreeTopology
from arbordraft.checkpoints.reader import read_config
from arbordraft.training.batches import Batch
from arbordraft.training.chunked_loss import DraftRows, distillation_loss
from arbordraft.training.drafts import follow
from arbordraft.training.features import TeacherHead
from arbordraft.training.losses import loss_named, position_decay
from arbordraft.training.module import DistillationModule
from arbordraft.training.optimizers import MuonAdamW
from arbordraft.training.reports import acceptance_figure, card, tau_figure
from arbordraft.training.schedule import BEFORE_COOLDOWN, Phase, relative_rate
from arbordraft.training.students import EagleStudent, Student
from arbordraft.training.validation import decoded, expectations
from arbordraft.trees.drawing import tree_picture
from arbordraft.utils.checks import check_float, check_int
from arbordraft.utils.errors import UserError

_DIVERGED = (
    "the checkpoints written before are good. Lower model.lr or trainer.gradient_clip_val, or check the target's "
    "hidden states for infinities"
)


class TrainingDiverged(UserError):
    """The loss or a weight became NaN or infinite."""


class TrainingOutOfMemory(UserError):
    """A step did not fit into memory."""


class DrafterModule(DistillationModule):
    """Distils a target into a drafter, on the target's own text.

    Args:
        student: the drafter to train; an EAGLE head by default.
        begin_with: folder of a trained drafter of the same form to learn on from. It may be a shipped one, to adapt it
            to other text, or one whose training checkpoints are gone. The learning rate warms up again, which at first
            undoes the gain of the earlier cool-down; ``before-cooldown.ckpt`` goes on without loss. If several folders
            are given, whose trainings went on from one another, training begins with the mean of their weights. The
            mean drafts better than each of them; with ``lr=0`` and a single step it is published unchanged.
        phases: phases from easy to hard: unrolling costs time and pays only once single steps are good.
        decay: weight of a drafting step relative to the one before.
        lr: highest learning rate, reached after ``warmup`` optimizer steps and held until the cool-down.
        warmup: optimizer steps until the learning rate reaches ``lr``.
        cooldown: share of the training, by time (``trainer.max_time``) or steps, in which the learning rate finally
            falls to 0. The state before it is saved beside the other checkpoints, as ``before-cooldown.ckpt``. A longer
            training goes on from there as if it had been longer from the beginning.
        lookup_weight: weight, in [0, 1], of tokens that a lookup of the last three tokens in the text predicts.
            Decoding that tries lookups first needs no drafter for them: 0 leaves them out.
        chunk: positions whose rows of logits are in memory at a time.
        draft_steps: drafting steps that validation measures.
        tree: children per level of the tree whose block efficiency validation reports.
        walked_tokens: tokens of every held-out answer along which validation emulates decoding.
        decoded: held-out prompts that validation decodes with the drafter.
        decoded_tokens: longest answer to these prompts, in tokens.

    Raises:
        ValueError: if a number is out of range, or the phases name an unknown loss, have no steps, or do not ascend
            to 1.0.
    """

    def __init__(
        self,
        student: Student | None = None,
        begin_with: str | list[str] | None = None,
        phases: tuple[Phase, ...] = (Phase(0.45, 1, "kl"), Phase(0.65, 2, "kl"), Phase(1.0, 4, "lk_hybrid")),
        decay: float = 0.85,
        lr: float = 1e-3,
        warmup: int = 30,
        cooldown: float = 0.2,
        lookup_weight: float = 1.0,
        chunk: int = 256,
        draft_steps: int = 4,
        tree: tuple[int, ...] = (4, 2, 1, 1),
        walked_tokens: int = 128,
        decoded: int = 4,
        decoded_tokens: int = 64,
    ) -> None:
        super().__init__()
        if not phases or phases[-1].until < 1 or any(a.until >= b.until for a, b in pairwise(phases)):
            raise ValueError(f"the phases must end in ascending order, the last one at 1.0; got {list(phases)}")
        for phase in phases:  # checked now: the last one would fail only after hours
            loss_named(phase.loss)
            position_decay(phase.steps, decay)
        self.student = student or EagleStudent()
        self.begin_with = [begin_with] if isinstance(begin_with, str) else begin_with
        self.phases, self.decay = list(phases), decay
        self.lr, self.warmup, self.cooldown = lr, warmup, check_float("cooldown", cooldown, 0, 1)
        self.lookup_weight = check_float("lookup_weight", lookup_weight, 0, 1)
        self.chunk = check_int("chunk", chunk, least=1)
        self.walked_tokens = check_int("walked_tokens", walked_tokens, least=1)
        self.draft_steps, self.decoded, self.decoded_tokens = draft_steps, decoded, decoded_tokens
        self.tree = TreeTopology.from_k_config(tree)
        self.samples: dict[str, list[Any]] = {}

    def check_beginning(self) -> None:
        """Reads the settings of the networks to begin with; a training does so before its target is loaded.

        Raises:
            ValueError: if there is no such network.
        """
        for settings in map(read_config, self.begin_with or ()):
            self.student.adopt(settings)

    def save(self, folder: Path) -> None:
        """Writes the network as of the last validation, in the format of transformers."""
        self._whole.save(folder)

    def card(self, metrics: Mapping[str, float]) -> str:
        return card(type(self.student).__name__.removesuffix("Student") + "Drafter", self.data, metrics)

    def tables(self) -> dict[str, dict[str, list[Any]]]:
        return {"samples": self.samples} if self.samples else {}

    def figures(self, curve: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        return {"acceptance": acceptance_figure(curve), "tau": tau_figure(curve), "tree": tree_picture(self.tree)}

    def setup(self, stage: str) -> None:
        """Builds the network for the data's target.

        Raises:
            ValueError: if the target is on another device than the training, or ``begin_with`` does not fit.
        """
        here, there = self.trainer.strategy.root_device, self.data.target.device
        if here.type != there.type:
            raise ValueError(f"the target is on {there}, the training on {here}; leave data.target.device at auto")
        if not hasattr(self.student, "network"):
            self.check_beginning()
            self.student.build(self.data.target, self.data.frequent, self.data.spec.model)
            if self.begin_with:
                self.student.begin_with(self.begin_with, self.data.target)
        self.data.target.requires_grad_(False)  # its gradients would be computed in vain
        # Not registered as submodules: a checkpoint holds the drafter only.
        object.__setattr__(self, "_teacher", TeacherHead(self.data.target))
        object.__setattr__(self, "_whole", self.student)

    def configure_model(self) -> None:
        """Splits weights, gradients and optimizer state over all processes if a ``ModelParallelStrategy`` is used."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self, FSDPModule):
            mesh = init_device_mesh(self.trainer.strategy.root_device.type, (self.trainer.world_size,))
            # Not resharded within a step: students call parts of their networks separately.
            fully_shard(self, mesh=mesh, reshard_after_forward=False)
            register_fsdp_forward_method(self, "training_step")
            register_fsdp_forward_method(self, "validation_step")

    def configure_optimizers(self) -> MuonAdamW:
        return MuonAdamW(self.student, self.lr)

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        """Saves the state before the cool-down; otherwise works as the base class."""
        before = self._progress
        super().on_train_batch_end(outputs, batch, index)
        callback = self.trainer.checkpoint_callback
        if callback is not None and before < 1 - self.cooldown <= self._progress:
            self.trainer.save_checkpoint(Path(callback.dirpath) / BEFORE_COOLDOWN)

    def advance(self) -> None:
        """Updates the progress and sets the learning rate of the next step, also when a training is resumed."""
        super().advance()
        rate = self.lr * relative_rate(self.global_step, self._progress, self.warmup, self.cooldown)
        for optimizer in self.trainer.optimizers:
            optimizer.set_lr(rate)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Returns the distillation loss of all drafting steps of the current phase.

        Raises:
            TrainingDiverged: if the loss is not finite.
            TrainingOutOfMemory: if the step did not fit into memory; the message names the settings that help.
        """
        phase = next(phase for phase in self.phases if self._progress < phase.until or phase is self.phases[-1])
        with self._explained():
            every = self.trainer.log_every_n_steps
            return self._loss(batch, phase, measure=every > 0 and (self.global_step + 1) % every == 0)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Computes the gradients; raises TrainingOutOfMemory as :meth:`training_step` does."""
        with self._explained():
            super().backward(loss, *args, **kwargs)

    def _loss(self, batch: Batch, phase: Phase, *, measure: bool = False) -> Tensor:
        predictions = list(self.student.unroll(batch, self.data.target, phase.steps))
        ahead, teacher = predictions[0].ahead, self._teacher.part(self.student.tokens)
        wanted = batch.learned(self.data.learned).float()
        if self.lookup_weight < 1:
            wanted[batch.looked_up()] *= self.lookup_weight
        wanted = wanted[:, ahead:]
        places = wanted.flatten().nonzero()[:, 0]

        def rows(values: Tensor) -> Tensor:
            """Selects the rows of learned tokens from those of all slots."""
            return values[:, : wanted.shape[1]].flatten(0, 1).index_select(0, places)

        final, normalisers = rows(batch.final[:, ahead - 1 :]), rows(batch.normalisers[:, ahead - 1 :])
        weights = torch.stack([rows(wanted * found.trained(wanted.shape[1])) for found in predictions])
        weights /= weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        decay = position_decay(len(predictions), self.decay).to(weights.device)
        result = distillation_loss(
            [DraftRows(rows(f.hidden), f.head, f.bias, partial=f.slots is not None) for f in predictions],
            lambda part: teacher(final[part]) - normalisers[part, None],
            weights * (decay / decay.sum())[:, None],
            loss_named(phase.loss),
            self.chunk,
            measure=measure,
        )
        for name in ("acceptance", "agreement") if measure else ():
            for step, value in enumerate((getattr(result, name) * weights).sum(dim=1).tolist()):
                self.log(f"train/{name}_pos_{step + 1}", value, batch_size=1)
        if not (loss := result.loss).isfinite():
            raise TrainingDiverged(f"the loss became {loss.item()} at step {self.global_step}; {_DIVERGED}")
        self.log("train/loss", loss, prog_bar=True, batch_size=1)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Collects the drafts along held-out text, with their acceptance."""
        drafts = follow(self.student, batch, self.data.target, self._teacher, self.draft_steps)
        tensors = {name: getattr(drafts, name) for name in ("labels", "passes", "ranks", "valid")}
        tensors["temperatures"] = batch.temperatures[drafts.sequences]
        tensors["answers"] = drafts.answers + sum(len(seen["answers"]) for seen in self._collected)  # unique numbers
        self.collect(tensors)

    def on_validation_epoch_end(self) -> None:
        """Logs expected block efficiencies, acceptance by depth, and figures of a real decode."""
        metrics, acceptance = expectations(self.collected(), self.tree, self.walked_tokens)
        if acceptance:
            self.student.network.config.acceptance = acceptance
        self._gather()
        if self.decoded and not self.trainer.sanity_checking:
            prompts = self.data.held_out_prompts(self.decoded)
            figures, self.samples = decoded(
                self.data.target, self._whole, prompts, self.draft_steps, self.decoded_tokens
            )
            metrics |= figures
        taus = [value for name, value in metrics.items() if name.startswith("val/tau_") and name.endswith("chain")]
        metrics["val/tau"] = sum(taus) / max(1, len(taus))  # the metric that compares checkpoints
        self.log_dict(metrics, sync_dist=True)  # equal on all processes, except times

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        """Seeds the noise by the place in the data, so that a resumed training draws the same noise."""
        state = {name: self.data.state_dict()[name] for name in ("epoch", "position")}
        place = f"{self.data.seed} {state} {self.global_rank}"
        torch.manual_seed(random.Random(place).getrandbits(63))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuses weights that are not finite, so that the last checkpoint of a diverging training is good.

        Raises:
            TrainingDiverged: if a weight is NaN or infinite.
        """
        super().on_save_checkpoint(checkpoint)
        for name, parameter in self.named_parameters():
            if not parameter.isfinite().all():
                raise TrainingDiverged(f"{name} is not finite at step {self.global_step}; {_DIVERGED}")

    def _gather(self) -> None:
        """Keeps the student with all its weights, gathered if they are split; all processes must take part."""
        whole = self.student
        if isinstance(self, FSDPModule):
            self.unshard()
            whole = deepcopy(self.student)
            self.reshard()
        object.__setattr__(self, "_whole", whole)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns errors for lack of memory into TrainingOutOfMemory, which names the settings that help."""
        try:
            yield
        except RuntimeError as error:  # raised by PyTorch on a CPU; other devices raise a subclass
            if "out of memory" not in str(error).lower() and "can't allocate memory" not in str(error):
                raise
            raise TrainingOutOfMemory(
                f"{error}. Lower data.batch_tokens (now {self.data.batch_tokens}), model.chunk (now {self.chunk}), "
                "the draft vocabulary or the drafting steps of the last phase"
            ) from error
