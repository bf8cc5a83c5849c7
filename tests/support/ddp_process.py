"""One process of ``test_distributed``, started by torchrun; writes its results to a folder."""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch.strategies import ModelParallelStrategy

from arbordraft.training.distillation import SelfDistillation
from support.tiny_training import fit

RANK = os.environ.get("RANK", "0")


def log_generation(path: Path) -> None:
    """Appends every shard that this process writes to a log."""
    write = SelfDistillation._write

    def noted(self, path_of_shard, index, done):
        with path.open("a") as file:
            file.write(f"{RANK} {index}\n")
        write(self, path_of_shard, index, done)

    SelfDistillation._write = noted


def strategy(name: str) -> object:
    """Returns a new strategy: Lightning accepts each one for one trainer only."""
    return ModelParallelStrategy(save_distributed_checkpoint=False) if name == "fsdp" else name


def main(world: Path, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    log_generation(folder / "generated")
    runs = {"plain": {"noise": 0.0}, "whole": {}, "stopped": {"kill": 5}, "resumed": {}}
    found = {
        run: fit(
            world,
            folder / run.replace("resumed", "stopped"),
            devices=2,
            strategy=strategy(name),
            gradient_clip_val=0.5,
            **settings,
        )
        for run, settings in runs.items()
    }
    torch.save(found, folder / RANK)
    if torch.distributed.is_initialized():  # threads that outlive main would abort the process
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    world, folder, name = sys.argv[1:]
    main(Path(world), Path(folder), name)
