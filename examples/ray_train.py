"""Trains a drafter on many machines with Ray Train.

    python examples/ray_train.py --workers 16 --gpu --storage /shared/ray --config drafter/eagle \
        --data.folder /shared/data --results.output /shared/drafter

Its own options come first; all others are those of ``arbordraft train drafter fit``. All machines must see the folders.
If a worker is lost, Ray restarts all workers from the last epoch's checkpoint, at most ``--retries`` times.
``RAY_ADDRESS`` names a cluster; without it Ray starts on this machine.
"""

import argparse
from pathlib import Path

import ray.train
from ray.train.lightning import RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer

from arbordraft.training.drafter_module import DrafterModule
from arbordraft.training.fit import run

RAY = [
    "--trainer.devices=auto",
    "--trainer.strategy.class_path=ray.train.lightning.RayDDPStrategy",
    "--trainer.plugins=ray.train.lightning.RayLightningEnvironment",
    "--trainer.callbacks+=ray.train.lightning.RayTrainReportCallback",
]


def train(config: dict[str, list[str]]) -> None:
    """Trains on every worker, from the last checkpoint if there is one."""
    cli = run(DrafterModule, ["fit", *config["arguments"], *RAY], go=False)
    trainer, checkpoint = prepare_trainer(cli.trainer), ray.train.get_checkpoint()
    if checkpoint is None:
        trainer.fit(cli.model, cli.datamodule)
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(cli.model, cli.datamodule, ckpt_path=Path(folder, RayTrainReportCallback.CHECKPOINT_NAME))


def main() -> None:
    """Starts the workers and prints the metrics that they reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes that train, one for each GPU")
    parser.add_argument("--gpu", action="store_true", help="give every worker a GPU")
    parser.add_argument("--storage", type=Path, default=Path("ray-results"), help="where Ray keeps checkpoints")
    parser.add_argument("--retries", type=int, default=3, help="how often to go on after a failure")
    settings, arguments = parser.parse_known_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"arguments": arguments},
        scaling_config=ray.train.ScalingConfig(num_workers=settings.workers, use_gpu=settings.gpu),
        run_config=ray.train.RunConfig(
            storage_path=str(settings.storage.absolute()),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
            failure_config=ray.train.FailureConfig(max_failures=settings.retries),
        ),
    )
    metrics = trainer.fit().metrics or {}
    print(f"{metrics['step']} steps, {metrics['val/tau']:.2f} tokens per target forward on held-out text")


if __name__ == "__main__":
    main()
