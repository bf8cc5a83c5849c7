"""Generates a drafter's data on many machines with Ray Data: every row is one shard, every actor holds the target.

    python examples/ray_generate.py --actors 8 --gpus-per-actor 1 --config drafter/eagle --data.folder /shared/data

Its own options come first; all others are those of ``arbordraft train drafter fit``. All machines must see the folder.
Every actor writes equal shards, and existing shards are kept: after an interruption, start the script again. A training
with the same options then finds everything done. ``RAY_ADDRESS`` names a cluster; without it Ray starts on this
machine.
"""

import argparse
from typing import Any

import ray

from arbordraft.training.fit import data_of


class ShardWriter:
    """An actor that generates the shards it is given."""

    def __init__(self, arguments: list[str], shards: int) -> None:
        self.data, self.shards = data_of(arguments), shards

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Generates the shards of some rows; with as many shares as shards, each share is one shard."""
        for index in rows["shard"].tolist():
            self.data.generate(index, self.shards)
        return rows


def main() -> None:
    """Distributes the shards over the actors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=2, help="processes, each with the target in memory")
    parser.add_argument("--cpus-per-actor", type=float, default=1)
    parser.add_argument("--gpus-per-actor", type=float, default=0)
    settings, arguments = parser.parse_known_args()
    data = data_of(arguments)
    shards = data.recipe.shards
    rows = [{"shard": index} for index in range(shards)]
    done = ray.data.from_items(rows, override_num_blocks=shards).map_batches(
        ShardWriter,
        fn_constructor_args=[arguments, shards],
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=settings.actors),
        num_cpus=settings.cpus_per_actor,
        num_gpus=settings.gpus_per_actor,
    )
    print(f"{done.materialize().count()} shards are in {data.folder.folder}")


if __name__ == "__main__":
    main()
