"""Detects changes of a model's weights."""

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.utils.errors import UserError

_SAMPLED = 16  # elements of each tensor that are compared
_VERSION = operator.attrgetter("_version")


class WeightsChanged(UserError):
    """The model's weights changed while answers were decoded with them."""


class WeightWatch:
    """Records the weights of modules as they are now, and compares them later.

    Parameters and persistent buffers count as weights. Other buffers, such as rotary frequencies, may change with each
    forward.

    Args:
        modules: the modules, without their children.
        leave: ids of tensors that are not watched.
    """

    def __init__(self, modules: Iterable[nn.Module], leave: Collection[int] = ()) -> None:
        places = [place for module in modules for place in _places(module) if id(place[2]) not in leave]
        self._owners = [table for table, _, _ in places], [name for _, name, _ in places]
        self._tensors = [tensor for _, _, tensor in places]
        own = list({id(tensor): tensor for tensor in self._tensors if _has_memory(tensor)}.values())
        self._own = own
        self._addresses = list(map(Tensor.data_ptr, own))
        self._counting = [tensor for tensor in own if not tensor.is_inference()]
        self._versions = list(map(_VERSION, self._counting))
        samples: dict[Any, list[Tensor]] = defaultdict(list)
        for tensor in own:
            samples[tensor.device, tensor.dtype].append(_sampled(tensor))
        self._samples = list(samples.values())
        self._found = self._read()

    def unchanged(self) -> bool:
        """Returns whether all tensors are still in place and torch has counted no write to them."""
        return (
            all(map(operator.is_, map(dict.get, *self._owners), self._tensors))
            and list(map(_VERSION, self._counting)) == self._versions
            and list(map(Tensor.data_ptr, self._own)) == self._addresses
        )

    def current(self) -> bool:
        """Returns whether the weights are still the same.

        Writes through ``.data``, through numpy or in inference mode change no version counter. They are noticed only if
        they change one of a few sampled elements, spread evenly over each tensor.
        """
        return self.unchanged() and all(map(torch.equal, self._read(), self._found))

    def _read(self) -> list[Tensor]:
        """Returns the bytes of the sampled elements, since NaN never equals NaN."""
        return [torch.cat(samples).view(torch.uint8) for samples in self._samples]


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yields the weights that a module holds itself, each with its table and its name there."""
    for table, passing in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
        for name, tensor in table.items():
            if tensor is not None and name not in passing:
                yield table, name, tensor


def _has_memory(tensor: Tensor) -> bool:
    """Returns whether a tensor is plain memory that can be written to, not blocks of a file or a wrapper of tensors."""
    return type(tensor) in (Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided and not tensor.is_meta


def _sampled(tensor: Tensor) -> Tensor:
    """Returns a few elements of a tensor, as a view of its memory."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    step = max(1, reach // _SAMPLED)
    return tensor.detach().as_strided((0 if not tensor.numel() else -(-reach // step),), (step,))


__all__ = ["WeightWatch", "WeightsChanged"]
