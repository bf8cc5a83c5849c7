"""The quantised blocks of a GGUF file, as the kernels read them: no weight is rounded a second time.

Shapes: O outputs, I inputs, G = I / 32 groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from arbordraft.kernels.prepacked_linear import Groups
from arbordraft.kernels.prepacked_linear.module import version_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEADER = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}  # halves before the codes of a block of 32 weights


class _Place(NamedTuple):
    """Where a tensor lies in the file, and the heads whose rows lie in another order there, 0 for none."""

    kind: str
    offset: int
    outputs: int
    inputs: int
    heads: int


@dataclass(frozen=True)
class FileBlocks:
    """What of a model's matrices its file holds in blocks that kernels read as they are.

    Args:
        path: the file, which is read whenever weights are packed.
        places: by the name of the parameter.
        others: number of tensors of each other kind, which are kept in 8 bits.
        versions: of the parameters when they equalled the file.
    """

    path: Path
    places: dict[str, _Place]
    others: dict[str, int]
    versions: dict[str, int]

    @classmethod
    def of(cls, path: Path, model: "PreTrainedModel") -> "FileBlocks":
        """Finds the blocks of a model that transformers has read from the same file, and compares all of them with it.

        Raises:
            ValueError: if there are none that kernels read.
        """
        import gguf

        reader = gguf.GGUFReader(str(path))
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        names = _names(reader, model)
        config = model.config.get_text_config()
        heads = [0, config.num_attention_heads, getattr(config, "num_key_value_heads", 0) or 0]
        places: dict[str, _Place] = {}
        others: dict[str, int] = {}
        for name, parameter in model.named_parameters():
            tensor = tensors.get(names(name))
            if tensor is None or parameter.ndim != 2:
                continue
            kind = tensor.tensor_type.name
            found = None
            if kind in _HEADER:
                outputs, inputs = parameter.shape
                orders = [number for number in heads if not number or outputs % (2 * number) == 0]
                candidates = (_Place(kind, int(tensor.data_offset), outputs, inputs, number) for number in orders)
                found = next((each for each in candidates if _same(_read(path, each), parameter)), None)
            if found:
                places[name] = found
            else:
                others[kind] = others.get(kind, 0) + 1
        if not places:
            kinds = ", ".join(sorted(others)) or "nothing that the model knows"
            raise ValueError(
                f"{path} holds {kinds}, and kernels read {', '.join(_HEADER)}: choose weights='int8' or 'int4', which "
                "quantise the model anew, or leave weights out"
            )
        versions = {name: version_of(parameter) for name, parameter in model.named_parameters()}
        return cls(path, places, others, versions)

    def finder(self, model: nn.Module) -> Callable[[Tensor], Groups | None]:
        """Finds the blocks of a model's parameter, with rows in the model's order, unless it was written to since."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def find(weight: Tensor) -> Groups | None:
            name = names.get(id(weight), "")
            known = name in self.places and version_of(weight) == self.versions[name]
            return _read(self.path, self.places[name]) if known else None

        return find


def _names(reader: Any, model: nn.Module) -> Callable[[str], str]:
    """What the file calls a parameter of the model."""
    import gguf

    field = reader.get_field("general.architecture")
    architecture = field.contents() if field else ""
    kind = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        return lambda name: ""
    known = gguf.get_tensor_name_map(kind, model.config.get_text_config().num_hidden_layers)  # type: ignore[operator, union-attr]
    return lambda name: known.get_name(name, try_suffixes=(".weight", ".bias")) or ""


def _read(path: Path, place: _Place) -> Groups:
    """Blocks as they lie there: scale and minimum, then codes, of 4 bits two in a byte that are 16 weights apart."""
    header, groups = _HEADER[place.kind], place.inputs // 32
    size = 2 * header + (32 if place.kind == "Q8_0" else 16)
    raw = np.memmap(path, np.uint8, "r", place.offset, (place.outputs, groups, size))
    blocks = torch.from_numpy(np.array(raw))
    halves = blocks[..., : 2 * header].contiguous().view(torch.float16)
    codes = blocks[..., 2 * header :]
    scale, minimum = halves[..., 0].contiguous(), None
    if place.kind == "Q8_0":
        codes = codes ^ 128  # as numbers from -128 on
    else:
        codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        minimum = halves[..., 1].contiguous() if header == 2 else scale * -8
    found = Groups(codes.flatten(1).contiguous(), scale, minimum)
    return found.map(lambda rows: _in_halves(rows, place.heads)) if place.heads else found


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """Llama's files have the channels that rotate together side by side, transformers has them half a head apart."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _same(groups: Groups, parameter: Tensor) -> bool:
    return torch.equal(groups.dense().to(parameter.dtype), parameter.detach())


__all__ = ["FileBlocks"]
