"""Measures the progress of a training in time or steps, which schedules the phases and the learning rate.

While the learning rate is constant, the state does not depend on the given time or steps: a longer training can go on
from there.
"""

from typing import NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer

BEFORE_COOLDOWN = "before-cooldown.ckpt"


class Phase(NamedTuple):  # in a default tuple, command lines can print it, but not a dataclass
    """A part of training.

    Args:
        until: its end, as a share of the whole training.
        steps: drafting steps to unroll.
        loss: one of :data:`~arbordraft.training.losses.LOSSES`.
    """

    until: float
    steps: int
    loss: str


def progress(trainer: Trainer) -> float:
    """Returns the share of a training that is over, in [0, 1], by the limit that ends it first: time, steps or epochs.

    Time includes validations and, in a resumed training, the time before its checkpoint. All processes get the same
    answer. A training without an end stays at 0.
    """
    share = float(trainer.global_step / max(1, trainer.estimated_stepping_batches))
    for timer in trainer.callbacks:  # max_time adds Lightning's timer, whose state checkpoints keep
        if isinstance(timer, Timer) and (left := timer.time_remaining()) is not None:
            elapsed = timer.time_elapsed()
            share = float(trainer.strategy.broadcast(max(share, elapsed / max(elapsed + left, 1e-9))))
    return min(1.0, share)


def relative_rate(step: int, done: float, warmup: int, cooldown: float) -> float:
    """Returns the learning rate relative to its highest: warm-up, plateau, then a cool-down to 0 along 1 - sqrt.

    Args:
        step: optimizer steps so far.
        done: share of the training that is over.
        warmup: optimizer steps of the warm-up.
        cooldown: share of the training, in [0, 1], that the cool-down takes.

    Source: Hägele et al., NeurIPS 2024 (arXiv 2405.18392).
    """
    warm = min(1.0, (step + 1) / max(1, warmup))
    left = 1 - done
    return warm * (1 - (1 - left / cooldown) ** 0.5 if left < cooldown else 1.0)
