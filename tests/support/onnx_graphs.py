"""Exported graphs that tests share: one export of each kind, made at its first use."""

import fcntl
import pickle
from collections.abc import Callable
from pathlib import Path

from arbordraft import RaggedModel
from arbordraft.deciders import LearnedDecider
from arbordraft.exports.folder import Export
from arbordraft.exports.onnx import decisions, noise, plans
from arbordraft.exports.onnx.writing import write
from support.companions import EXIT, target, texts, trained


def origin() -> plans.Origin:
    return plans.Origin(target(), "tiny", texts())


def small() -> RaggedModel:
    """Returns the draft model of two layers."""
    return RaggedModel(trained("model").network, kernels="torch")


def decider() -> LearnedDecider:
    """Returns a decider with random weights, which is unsure of every decision."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(5)
        found = LearnedDecider(hidden_size=32, top_k=4, temperatures=(1.0, 0.8, 1.3), threshold=0.4)
        for parameter in found.parameters():
            torch.nn.init.normal_(parameter, std=2 / parameter.shape[-1] ** 0.5)
    return found


PLANS: dict[str, Callable[[], list[plans.GraphSpec]]] = {
    "block": lambda: plans.block(trained("block").network, origin()),
    "peagle": lambda: plans.block(trained("peagle").network, origin()),
    "eagle": lambda: plans.eagle(trained("eagle").network, origin()),
    "medusa": lambda: [plans.medusa(trained("medusa").network, origin())],
    "exit": lambda: [plans.early_exit(origin(), EXIT, trained("exit").network)],
    "model": lambda: [plans.causal_lm(small(), origin(), (1, 2))],
    "decider": lambda: [decisions.decider(decider())],
    "draw": lambda: [noise.draw()],
    "verification-0-1": lambda: [decisions.verification(0, 1)],
    "verification-1-1": lambda: [decisions.verification(1, 1)],
    "verification-2-2": lambda: [decisions.verification(2, 2)],
}


class Graphs:
    """Exports by name and options; tests must not change them.

    Args:
        root: folder of the exports; processes with the same root share them, and the first that needs one makes it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.exports: dict[str, Export] = {}

    def __call__(self, name: str, **options: object) -> Export:
        key = "-".join([name, *(f"{option}-{value}" for option, value in options.items())])
        if key not in self.exports:
            self.exports[key] = self._made(key, PLANS[name], options)
        return self.exports[key]

    def _made(self, key: str, specs: Callable[[], list[plans.GraphSpec]], options: dict[str, object]) -> Export:
        known = self.root / f"{key}.pickle"
        with (self.root / f"{key}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if known.exists():
                return pickle.loads(known.read_bytes())
            made = write(specs, self.root / key, **options)
            known.write_bytes(pickle.dumps(made))
            return made
