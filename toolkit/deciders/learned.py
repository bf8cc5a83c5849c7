"""Deciders that predict the survival of rows, and one that is trained for its drafter.

Shapes: R draft rows, V vocabulary, H hidden size of the drafter, K highest probabilities of a row.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from arbordraft.checkpoints.reader import CONFIG, WEIGHTS, few, read_config, read_tensors
from arbordraft.deciders.decisions import TOP, Origin, StepView
from arbordraft.deciders.simple import PathSurvival
from arbordraft.utils.checks import check_int, check_positive, check_sequence
from arbordraft.utils.files import new_file

_WIDEST = 2**16  # greatest width of a layer; a larger one is a mistake that would exhaust memory
UNLIKELY = 1e-6  # replaces smaller draft probabilities, whose logarithms would dominate all other features


class RowSurvival(PathSurvival):
    """Goes on while the path to some frontier node is likely enough to survive verification as a whole.

    For every draft row q, the decider predicts its overlap with the target's row p, 1 - TV(p, q). This is the chance
    that a token drawn from q is accepted if the path above it is. The chance that a path survives is the product of the
    chances along it. The path of a root is empty and always survives. So a threshold of up to 1 drafts at least one
    level, a higher one drafts nothing. If a drafter has no rows, such as a lookup, the draft probability that it states
    is the chance.

    A row exists before the tokens drawn from it, so nothing is anticipated. Siblings beyond the first make a level
    likelier to survive than predicted, so a threshold that suits chains is a little strict for trees.

    Args:
        threshold: least chance of survival.
        hidden_size: H, if predictions use the hidden state that the drafter's head turns into the row; otherwise 0.
        top_k: K, at most ``TOP``, if predictions use a row's highest probabilities and its entropy; otherwise 0.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.
    """

    def __init__(self, threshold: float, hidden_size: int, top_k: int) -> None:
        super().__init__(threshold)
        self.hidden_size = check_int("hidden_size", hidden_size, 0, _WIDEST)
        self.top_k = check_int("top_k", top_k, 0, TOP)

    @torch.no_grad()
    def survival(self, view: StepView) -> list[list[float]]:
        chances = self._all_chances(view)
        return [
            [math.prod(chances.get(draw.origin, draw.probability) for draw in path) for path in nodes]
            for nodes in view.paths
        ]

    def chances(self, places: Tensor, statistics: Tensor, hidden: Tensor | None) -> Tensor:
        """Returns ``[R]`` predictions.

        Args:
            places: ``[R, 3]``: depth of the row's node, logarithm of the draft probability of the path down to it, and
                1 if drafts cannot change the text. Each factor of a path's probability is at least ``UNLIKELY``.
            statistics: ``[R, 1 + K]`` entropy in nats and highest probabilities of the row; ``[R, 0]`` if K = 0.
            hidden: ``[R, H]`` hidden states that the head turned into the rows; ``None`` if H = 0.
        """
        raise NotImplementedError

    def _all_chances(self, view: StepView) -> dict[Origin, float]:
        """Returns the predictions for all rows on the way to the frontier."""
        places: dict[Origin, tuple[int, float, bool]] = {}
        for path in (path for nodes in view.paths for path in nodes):
            reach = 0.0
            for depth, draw in enumerate(path):
                if draw.origin.read is not None:
                    places.setdefault(draw.origin, (depth, reach, view.pathwise))
                reach += math.log(max(draw.probability, UNLIKELY))
        if not places:
            return {}
        # Entropy and top cost more than the network, so they are computed only if it reads them.
        known = [[origin.entropy, *origin.top[: self.top_k]] if self.top_k else [] for origin in places]
        chances = self.chances(
            torch.tensor(list(places.values()), dtype=torch.float32),
            torch.tensor(known, dtype=torch.float32),
            torch.stack([self._shown(origin) for origin in places]) if self.hidden_size else None,
        )
        return dict(zip(places, chances.tolist(), strict=True))

    def _shown(self, origin: Origin) -> Tensor:
        if origin.hidden is None or len(origin.hidden) != self.hidden_size:
            size = "none" if origin.hidden is None else len(origin.hidden)
            raise ValueError(
                f"this decider reads hidden states of size {self.hidden_size}, the drafter shows {size}; use "
                "it with the drafter that it was trained for, or train one with hidden_size=0"
            )
        return origin.hidden


class LearnedDecider(RowSurvival):
    """Goes on while a small network predicts, row by row, that some path is likely enough to survive.

    See :class:`RowSurvival` for the prediction and the stopping rule.

    Args:
        hidden_size: H, to read the hidden state that the drafter's head turns into a row; 0 leaves it out.
        top_k: K, to read a row's highest probabilities and its entropy; 0 leaves both out.
        widths: sizes of the network's inner layers.
        threshold: least chance of survival.
        temperatures: divisors of the network's logits, above 0, by depth of the row's node from 0 on. The last one also
            applies to greater depths.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Source: stopping by the path's survival is from SpecDec++ (Huang et al., 2024). 1 - TV and the temperatures are from
    DSpark (arXiv:2607.05147). Hidden state, entropy and top-10 probabilities are from improved MCSD (Lu et al., 2024).
    """

    def __init__(
        self,
        hidden_size: int = 0,
        top_k: int = TOP,
        widths: Sequence[int] = (64,),
        threshold: float = 0.3,
        temperatures: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__(threshold, hidden_size, top_k)
        self.widths = check_sequence("widths", widths, lambda name, value: check_int(name, value, 1, _WIDEST))
        self.temperatures = check_sequence("temperatures", temperatures, check_positive)
        if not self.temperatures:
            raise ValueError("temperatures must hold at least one, got none")
        sizes = [3 + (1 + self.top_k) * (self.top_k > 0) + self.hidden_size, *self.widths]
        layers: list[nn.Module] = []
        for before, after in zip(sizes, self.widths, strict=False):
            layers += [nn.Linear(before, after), nn.SiLU()]
        self.network = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def chances(self, places: Tensor, statistics: Tensor, hidden: Tensor | None) -> Tensor:
        like = next(self.parameters())
        temperatures = like.new_tensor(self.temperatures)
        depths = places[:, 0].long().clamp(max=len(self.temperatures) - 1)
        hidden = None if hidden is None else hidden.to(like)
        logits = self.logits(places.to(like), statistics.to(like), hidden)
        return (logits / temperatures[depths.to(like.device)]).sigmoid()

    def logits(self, places: Tensor, statistics: Tensor, hidden: Tensor | None) -> Tensor:
        """Returns ``[R]`` logits of the chances, before any temperature.

        Args:
            places: as in :meth:`chances`.
            statistics: read if K > 0.
            hidden: read if H > 0.
        """
        features = [places]
        if self.top_k:
            features.append(statistics)
        if self.hidden_size:
            assert hidden is not None
            features.append(functional.layer_norm(hidden, hidden.shape[-1:]))
        return self.network(torch.cat(features, dim=-1))[:, 0]

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Writes ``config.json`` and ``model.safetensors``."""
        config = json.dumps({"class": type(self).__name__, **self.settings()}, indent=2) + "\n"
        with new_file(Path(folder) / CONFIG) as settings, new_file(Path(folder) / WEIGHTS) as weights:
            settings.write_text(config)
            save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, weights)

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str], **changes: Any) -> Self:
        """Loads a decider from a folder that :meth:`save_pretrained` wrote.

        Args:
            folder: the folder.
            **changes: settings that replace stored ones, such as ``threshold``.

        Raises:
            ValueError: if the folder holds no decider of this class, or a damaged one.
        """
        try:
            config = read_config(folder)
            if config.pop("class", None) != cls.__name__:
                raise ValueError(f"its {CONFIG} is that of something else")
            decider = cls(**config | changes)
            tensors = read_tensors(folder)
            if strange := [name for name, tensor in tensors.items() if not tensor.is_floating_point()]:
                raise ValueError(f"{few(strange)} must be stored as floating-point numbers")
            decider.load_state_dict(tensors)
        except (AttributeError, OSError, TypeError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())  # torch says it in several lines
            raise ValueError(f"{folder} cannot be read as a {cls.__name__}: {reason}") from error
        return decider
