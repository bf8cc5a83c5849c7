"""Measures the progress of a training in its time or steps, and schedules phases and the learning rate by it.

As long as the learning rate is constant, the state does not depend on how much time or how many steps were given: a
longer training can go on from there.
"""

from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

BEFORE_COOLDOWN = "before-cooldown.ckpt"


class Phase(NamedTuple):  # which command lines can print as a default, unlike a dataclass in a tuple
    """A part of training.

    Args:
        until: where it ends, as a share of the whole.
        steps: drafting steps to unroll.
        loss: one of :data:`~arbordraft.training.losses.LOSSES`.
    """

    until: float
    steps: int
    loss: str


def progress(trainer: Trainer) -> float:
    """Returns the share of a training that is over, in [0, 1], by the limit that ends it first: time, steps or epochs.

    Time counts what passed before the checkpoint that the training goes on from, and validations, too. All processes
    get the same answer. A training without an end stays at 0.
    """
    share = float(trainer.global_step / max(1, trainer.estimated_stepping_batches))
    for timer in trainer.callbacks:  # Lightning's own, which max_time puts there and checkpoints keep
        if isinstance(timer, Timer) and (left := timer.time_remaining()) is not None:
            elapsed = timer.time_elapsed()
            share = float(trainer.strategy.broadcast(max(share, elapsed / max(elapsed + left, 1e-9))))
    return min(1.0, share)


def relative_rate(step: int, done: float, warmup: int, cooldown: float) -> float:
    """Returns the learning rate relative to its highest: warm-up, plateau, then a cool-down to 0 along 1 - sqrt.

    Args:
        step: optimizer steps so far.
        done: share of the training that is over.
        warmup: optimizer steps.
        cooldown: share of the training, in [0, 1], at its end.

    Source: Hägele et al., NeurIPS 2024 (arXiv 2405.18392).
    """
    warm = min(1.0, (step + 1) / max(1, warmup))
    left = 1 - done
    return warm * (1 - (1 - left / cooldown) ** 0.5 if left < cooldown else 1.0)
