"""Base of all students.

Shapes: B sequences, S slots, H hidden size, D draft vocabulary, V vocabulary.
"""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arbordraft import RaggedModel
from arbordraft.checkpoints.reader import few, load_network, read_config
from arbordraft.drafters import Drafter
from arbordraft.heads.base import Companion, DraftHead
from arbordraft.training.batches import Batch
from arbordraft.training.features import TeacherHead


class Prediction(NamedTuple):
    """The predictions of a student's drafting step s: the (s + 1)-th token of every draft.

    Args:
        hidden: ``[B, S, H]`` inputs of its head. Slot j predicts token ``j + ahead``, as part of the draft that began
            at slot j - s.
        head: ``[D, H]`` weight of the head.
        bias: ``[D]`` bias of the head.
        ahead: distance from a slot to the token it predicts, equal for all steps of a student.
        first: slots before this one have no prediction.
        slots: ``[S]`` bool: slots from ``first`` on that have a prediction; ``None`` if all have one. Outside training
            all have one.
    """

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    ahead: int
    first: int
    slots: Tensor | None = None

    def trained(self, count: int) -> Tensor:
        """Returns ``[count]`` bool: which of the first slots have a prediction."""
        slots = torch.ones(count, dtype=torch.bool, device=self.hidden.device) if self.slots is None else self.slots
        return slots[:count] & (torch.arange(count, device=slots.device) >= self.first)


class Student(nn.Module):
    """A drafter in training.

    ``network`` is the module to train; :meth:`build` creates it.
    """

    network: PreTrainedModel
    drafter_class: type[Any]  # constructed from a network and the target
    steps_alike = False  # whether all drafting steps predict the same along a text; unroll then yields only one

    @property
    def tokens(self) -> Tensor | None:
        """``[D]`` target ids that the student can draft, ``None`` for all."""
        return self.network.tokens if isinstance(self.network, DraftHead) else None

    @abstractmethod
    def hidden_layers(self, target: RaggedModel) -> tuple[int, ...]:
        """Returns which of the target's hidden states it reads, as transformers numbers them."""

    @abstractmethod
    def build(self, target: RaggedModel, frequent: Callable[[int], list[int]], name: str | None = None) -> None:
        """Creates the network.

        Args:
            target: the model it is to draft for.
            frequent: returns the given number of most frequent tokens of the data.
            name: name of the target.

        Raises:
            ValueError: if it cannot draft for this target.
        """

    def adopt(self, settings: Mapping[str, Any]) -> None:
        """Takes the size of the draft vocabulary from a trained network that is to be trained on, before building."""
        if hasattr(self, "vocabulary") and "draft_vocab_size" in settings:
            self.vocabulary = settings["draft_vocab_size"]

    def begin_with(self, folders: Sequence[str | os.PathLike[str]], target: RaggedModel) -> None:
        """Replaces the new network and its draft vocabulary by a trained network, or by the mean of several.

        :meth:`adopt` prepares the new one, so that their vocabularies have one size.

        Networks whose trainings went on from one another lie in the same valley of the loss. Their mean has less of
        the noise that the last steps of each training left.

        Raises:
            ValueError: if one is damaged, of another form or draft vocabulary, or was trained for another target.

        Source: averaging checkpoints of one trajectory is stochastic weight averaging (Izmailov et al., 2018);
        averaging several trainings from one beginning, model soups (Wortsman et al., 2022).
        """
        mean, *others = (self._trained(folder, target) for folder in folders)
        with torch.no_grad():
            for folder, other in zip(folders[1:], others, strict=True):
                if not all(map(torch.equal, mean.buffers(), other.buffers())):
                    raise ValueError(
                        f"{folder} has another draft vocabulary than {folders[0]}: name folders of one vocabulary"
                    )
                for ours, theirs in zip(mean.parameters(), other.parameters(), strict=True):
                    ours.add_(theirs)
            for parameter in mean.parameters():
                parameter.div_(len(folders))
        self.network = mean

    def _trained(self, folder: str | os.PathLike[str], target: RaggedModel) -> PreTrainedModel:
        read_config(folder)  # raises for a missing folder, which transformers would take for a repository's name
        new = self.network
        kind = type(new)
        read = kind.from_pretrained if isinstance(new, Companion) else partial(load_network, kind.from_pretrained)
        network: PreTrainedModel = read(folder)
        if isinstance(network, Companion):
            network.check_target(target.model)
        ours, theirs = _form(new), _form(network)
        if differing := [name for name in ours | theirs if ours.get(name) != theirs.get(name)]:
            raise ValueError(
                f"{folder} has another form than model.student asks for; different are {few(differing)}. Give the "
                "settings of model.student with which it was trained; its training.yaml has them"
            )
        return network.float().train()

    @abstractmethod
    def unroll(self, batch: Batch, target: RaggedModel, steps: int) -> Iterator[Prediction]:
        """Yields the predictions of its first ``steps`` drafting steps, or of fewer if it drafts no further."""

    def drafter(self, target: RaggedModel) -> Drafter:
        """Builds a drafter with a copy of the network in its current state."""
        drafter: Drafter = self.drafter_class(deepcopy(self.network), target)
        return drafter

    def save(self, folder: Path) -> None:
        """Writes the network in the format of transformers, in float16: half the size, and drafters need no more."""
        deepcopy(self.network).half().save_pretrained(folder)


def _form(network: PreTrainedModel) -> dict[str, object]:
    """Returns the shapes and layers that must be equal for one network to replace another."""
    shapes: dict[str, object] = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    return shapes | {"hidden_layers": getattr(network.config, "hidden_layers", None)}


def shift(x: Tensor, by: int = 1) -> Tensor:
    """Shifts ``[B, S, ...]`` by ``by`` slots: slot j gets the values of slot j - by, the first slots get zeros."""
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, : x.shape[1] - by]], dim=1)


def check_plain_head(target: RaggedModel) -> None:
    """Raises ValueError if the target caps its logits, since losses do not cap a student's."""
    if TeacherHead(target).softcap is not None:
        raise ValueError(
            f"{type(target.model).__name__} caps its logits, and losses do not cap a student's: train one with a head "
            "of its own"
        )
