"""One of the processes of ``test_distributed``; started by torchrun, it leaves what it found in a folder."""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from test_training import fit
from tiny_training import TRAINER, data, module

from arbordraft.training.distillation import SelfDistillation

RANK = os.environ.get("RANK", "0")
DDP = {"devices": 2, "strategy": "ddp"}


def log_generation(path: Path) -> None:
    """Notes every shard that this process writes."""
    write = SelfDistillation._write

    def noted(self, path_of_shard, index, done):
        with path.open("a") as file:
            file.write(f"{RANK} {index}\n")
        write(self, path_of_shard, index, done)

    SelfDistillation._write = noted


def main(world: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    log_generation(folder / "generated")
    torch.manual_seed(0)
    model = module()
    trainer = Trainer(**{**TRAINER, **DDP, "max_epochs": 2, "gradient_clip_val": 0.5, "limit_val_batches": 0})
    trainer.fit(model, data(world))
    torch.save(model.state_dict(), folder / f"weights-{RANK}")

    whole = fit(world, folder / "whole", **DDP)
    fit(world, folder / "stopped", kill=5, **DDP)
    rest = fit(world, folder / "stopped", **DDP)
    torch.save([whole, rest], folder / f"resumed-{RANK}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
