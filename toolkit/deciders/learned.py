"""A decider that was trained for its drafter.

Shapes: R draft rows, V vocabulary, H hidden size of the drafter, K highest probabilities of a row.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from arbordraft.deciders.simple import PathSurvival
from arbordraft.types import TOP, Origin, StepView

WEIGHTS, CONFIG = "model.safetensors", "config.json"
UNLIKELY = 1e-6  # stands for smaller draft probabilities, whose logarithms would drown all other features


class LearnedDecider(PathSurvival):
    """Goes on while the path to some frontier node is likely enough to survive verification as a whole.

    Of every draft row q a small network predicts how much of the target's row p it covers, 1 - TV(p, q): the chance
    that a token drawn from q is accepted if the path above it is. The chance that a path survives is the product of the
    chances along it. Nothing is known yet of a root, whose path is empty and always survives: a threshold of up to 1
    drafts at least one level, a higher one nothing at all. Where a drafter has no rows, as lookups have none, the draft
    probability that it states is the chance.

    A row exists before the tokens drawn from it, so nothing is anticipated. Siblings beyond the first make a level
    likelier to survive than predicted: a threshold that suits chains is a little strict for trees.

    Args:
        hidden_size: H, to read what the drafter's head makes its rows from; 0 leaves it out.
        top_k: K, to read a row's highest probabilities and its entropy; 0 leaves both out.
        widths: sizes of the network's inner layers.
        threshold: least chance of survival.
        temperatures: by which the network's logits are divided, by depth of the row from the root's on; the last one
            holds for what is deeper.

    Raises:
        ValueError: if an argument is out of range.

    Source: the path's survival as the stop from SpecDec++ (Huang et al., 2024), 1 - TV and the temperatures from DSpark
    (arXiv:2607.05147), hidden state or entropy and top-10 probabilities from improved MCSD (Lu et al., 2024).
    """

    def __init__(
        self,
        hidden_size: int = 0,
        top_k: int = TOP,
        widths: Sequence[int] = (64,),
        threshold: float = 0.3,
        temperatures: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__(threshold)
        if hidden_size < 0 or not 0 <= top_k <= TOP or any(width < 1 for width in widths):
            raise ValueError(
                f"hidden_size must not be negative, top_k lie in 0..{TOP} and widths be positive, got {hidden_size}, "
                f"{top_k} and {list(widths)}"
            )
        if not temperatures or min(temperatures) <= 0:
            raise ValueError(f"temperatures must be positive, got {list(temperatures)}")
        self.hidden_size, self.top_k, self.widths = hidden_size, top_k, tuple(widths)
        self.temperatures = tuple(temperatures)
        sizes = [3 + (1 + top_k) * (top_k > 0) + hidden_size, *widths]
        layers: list[nn.Module] = []
        for before, after in zip(sizes, widths, strict=False):
            layers += [nn.Linear(before, after), nn.SiLU()]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    @torch.no_grad()
    def survival(self, view: StepView) -> list[list[float]]:
        chances = self._chances(view)
        return [
            [math.prod(chances.get(draw.origin, draw.probability) for draw in path) for path in nodes]
            for nodes in view.paths
        ]

    def logits(self, places: Tensor, statistics: Tensor, hidden: Tensor | None) -> Tensor:
        """``[R]`` logits of the chances, before any temperature.

        Args:
            places: ``[R, 3]``: depth of the node that the row belongs to, logarithm of the draft probability of the
                path down to it (each factor at least ``UNLIKELY``), 1 if the target decodes greedily.
            statistics: ``[R, 1 + K]`` entropy in nats and highest probabilities of the row; read if K > 0.
            hidden: ``[R, H]`` what the head made the row from; read if H > 0.
        """
        features = [places]
        if self.top_k:
            features.append(statistics)
        if self.hidden_size:
            assert hidden is not None
            features.append(functional.layer_norm(hidden, hidden.shape[-1:]))
        return self.network(torch.cat(features, dim=-1))[:, 0]

    def temperature(self, depth: int) -> float:
        """Of rows of nodes at ``depth``."""
        return self.temperatures[min(depth, len(self.temperatures) - 1)]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / CONFIG).write_text(json.dumps({"class": type(self).__name__, **self._config()}, indent=2) + "\n")
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, path / WEIGHTS)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **changes: Any) -> Self:
        """Reads what :meth:`save_pretrained` wrote.

        Args:
            folder: where it lies.
            **changes: settings other than the stored ones, such as ``threshold``.

        Raises:
            ValueError: if the folder holds no decider of this class, or a damaged one.
        """
        path = Path(folder)
        try:
            config = json.loads((path / CONFIG).read_text())
            if config.pop("class", None) != cls.__name__:
                raise ValueError(f"its {CONFIG} is that of something else")
            decider = cls(**config | changes)
            decider.load_state_dict(load_file(path / WEIGHTS))
        except (OSError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read as a {cls.__name__}: {error}") from error
        return decider

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self._config().items())

    def _config(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("hidden_size", "top_k", "widths", "threshold", "temperatures")}

    def _chances(self, view: StepView) -> dict[Origin, float]:
        """Predictions for all rows on the way to the frontier."""
        places: dict[Origin, tuple[int, float, bool]] = {}
        for path in (path for nodes in view.paths for path in nodes):
            reach = 0.0
            for depth, draw in enumerate(path):
                if draw.origin.read is not None:
                    places.setdefault(draw.origin, (depth, reach, view.greedy))
                reach += math.log(max(draw.probability, UNLIKELY))
        if not places:
            return {}
        like = next(self.parameters())
        # Entropy and top cost more than the network: they are asked for only if they are read.
        known = [[origin.entropy, *origin.top[: self.top_k]] if self.top_k else [] for origin in places]
        logits = self.logits(
            like.new_tensor(list(places.values())),
            like.new_tensor(known),
            torch.stack([self._shown(origin) for origin in places]).to(like) if self.hidden_size else None,
        )
        temperatures = like.new_tensor([self.temperature(depth) for depth, _, _ in places.values()])
        return dict(zip(places, (logits / temperatures).sigmoid().tolist(), strict=True))

    def _shown(self, origin: Origin) -> Tensor:
        size = 0 if origin.hidden is None else len(origin.hidden)
        if origin.hidden is None or size != self.hidden_size:
            raise ValueError(
                f"this decider reads hidden states of size {self.hidden_size}, the drafter shows {size or 'none'}; use "
                "it with the drafter that it was trained for, or train one with hidden_size=0"
            )
        return origin.hidden
