"""Builds a causal LM around the tensors of a mapped GGUF file.

Shapes: E experts, O outputs, I inputs.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from arbordraft.checkpoints.gguf_file import GgufFile, GgufTensor
from arbordraft.checkpoints.gguf_settings import gguf_config, gguf_generation_config
from arbordraft.checkpoints.reader import check_finite, few
from arbordraft.target.prepacked.gguf_blocks import TORCH_DTYPES, FileBlocks, check_kind

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Array = np.ndarray[Any, Any]
_FREQUENCIES = "rope_freqs.weight"  # divisors of rotary frequencies
# Stacked experts by their names in the model and in the file.
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}


def load_gguf(file: GgufFile, dtype: torch.dtype, *, blocks: bool = True) -> "PreTrainedModel":
    """Returns the model of a GGUF file in eval mode.

    Args:
        file: the file, which stays in use as long as the model.
        dtype: dtype of tensors in memory and of numbers dequantised from blocks.
        blocks: leave matrices in the file, as :class:`FileBlocks`. Otherwise all are dequantised into memory.

    Raises:
        ValueError: if the architecture is not supported, or the file lacks tensors or holds others than the model.
    """
    from transformers import AutoModelForCausalLM

    config = gguf_config(file)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    reading = _Reading(file, config, dtype, blocks)
    weights = dict(reading.weights(model))
    check_finite({name: weight for name, weight in weights.items() if not isinstance(weight, FileBlocks)}, file.path)
    if bad := [name for name, weight in weights.items() if isinstance(weight, FileBlocks) and not weight.finite()]:
        raise ValueError(f"{file.path} holds NaN or infinite scales ({few(bad)}): it is damaged; copy it again")
    found: PreTrainedModel = type(model).from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()
    found.name_or_path = found.config.name_or_path = str(file.path.parent)
    found.generation_config = gguf_generation_config(file, config)
    if (divisors := file.tensors.get(_FREQUENCIES)) is not None:
        _divide_frequencies(found, torch.from_numpy(_numbers(divisors)))
    return found


def check_kinds(file: GgufFile) -> None:
    """Raises ValueError if kernels do not read the blocks of some matrix."""
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1 and tensor.kind not in TORCH_DTYPES:
            try:
                check_kind(tensor.kind)
            except ValueError as error:
                raise ValueError(f"{file.path}, tensor {tensor.name!r}: {error}") from None


class _Reading:
    """Finds and converts the tensor of each parameter."""

    def __init__(self, file: GgufFile, config: Any, dtype: torch.dtype, blocks: bool) -> None:
        self._file, self._dtype, self._blocks = file, dtype, blocks
        self._undo = _undoing(file.architecture, config)
        self._named = _names(file.architecture, config.num_hidden_layers)
        # Layers that predict several tokens follow the others. Transformers' models have none.
        self._further = f"blk.{config.num_hidden_layers}." if file.setting("nextn_predict_layers") else None

    def weights(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields the parameters of a model by name; raises ValueError unless these are the file's tensors."""
        left, missing = self._file.tensors.keys() - {_FREQUENCIES}, []
        if self._further is not None:
            left = {name for name in left if not name.startswith(self._further)}
        for name, parameter in model.named_parameters():
            names = self._file_names(name)
            if any(part not in self._file.tensors for part in names):
                missing.append(name)
                continue
            parts = [self._file.tensors[part] for part in names]
            left -= set(names)
            value = self._value(parts, parameter.shape)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{self._file.path}: tensor {names[0]!r} is {list(value.shape)} instead of "
                    f"{list(parameter.shape)}, which the file's own settings ask for: copy or convert it again"
                )
            yield name, value
        if missing or left:
            problems = [f"lacks {few(missing)}"] * bool(missing) + [f"has no place for {few(left)}"] * bool(left)
            raise ValueError(
                f"{self._file.path}: the model {' and '.join(problems)}: copy or convert the file again, or load the "
                "model's safetensors folder if this is a variant of its architecture"
            )

    def _file_names(self, name: str) -> list[str]:
        if (experts := _EXPERTS.fullmatch(name)) is not None:
            return [f"blk.{experts[1]}.ffn_{part}_exps.weight" for part in _PARTS[experts[2]]]
        return [self._named(name)]

    def _value(self, parts: list[GgufTensor], shape: torch.Size) -> Tensor:
        """Returns the value of a parameter, whose parts lie side by side along the outputs."""
        first = parts[0]
        if len(shape) >= 2 and len({part.kind for part in parts}) == 1:
            stays, order = (True, None) if len(first.shape) > 2 else self._order(first)
            if stays:
                if order is None and len(parts) == 1 and TORCH_DTYPES.get(first.kind) is self._dtype:
                    return _mapped(first)
                held = FileBlocks(_rows(parts), first.kind, tuple(shape), self._dtype, order)
                return held if self._blocks else held.dense()
        numbers = [torch.from_numpy(self._processed(part, _numbers(part))) for part in parts]
        return torch.cat(numbers, dim=1 if len(parts) > 1 else 0).to(self._dtype)

    def _processed(self, tensor: GgufTensor, numbers: _Array) -> _Array:
        if tensor.name == "output.weight" or len(tensor.shape) > 2:  # transformers' own exceptions
            return numbers
        return np.ascontiguousarray(self._undo(numbers, tensor.name))

    def _order(self, tensor: GgufTensor) -> tuple[bool, Tensor | None]:
        """Returns whether at most rows of a matrix move, and the file's row of each row unless all are in order."""
        rows = np.arange(tensor.shape[0])[:, None]
        try:
            with np.errstate(all="ignore"):  # of logarithms: numbers that are computed are no order
                found = self._processed(tensor, rows)
        except ValueError:  # columns move, too
            return False, None
        if found.shape != rows.shape or not np.array_equal(np.sort(found, axis=0), rows):
            return False, None
        return True, None if np.array_equal(found, rows) else torch.from_numpy(found[:, 0])


def _undoing(architecture: str, config: Any) -> Callable[[_Array, str], _Array]:
    """Returns a function that undoes changes of llama.cpp's converter to a tensor, given the tensor's name.

    It changes orders of rows, transposes, offsets of norms, and the form of decays.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    if architecture.startswith("qwen35"):
        return partial(_undo_qwen3_5, config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    return lambda numbers, name: (
        processor.process(numbers, name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}).weights
    )


def _undo_qwen3_5(config: Any, numbers: _Array, name: str) -> _Array:
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    part = name.split(".", 2)[-1] if name.startswith("blk.") else name

    def grouped(rows: _Array) -> _Array:
        """Orders the rows of value heads by key head; the file has the first value head of each key head first."""
        if heads == groups:
            return rows
        return rows.reshape(heads // groups, groups, len(rows) // heads, -1).swapaxes(0, 1).reshape(rows.shape)

    if part == "ssm_a":
        return grouped(np.log(-numbers))
    if part in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_dt.bias"):
        return grouped(numbers)
    if part in ("attn_qkv.weight", "ssm_conv1d.weight"):  # queries and keys, then values
        first = 2 * groups * config.linear_key_head_dim
        joined = np.concatenate([numbers[:first], grouped(numbers[first:])])
        return joined[:, None] if part.startswith("ssm") else joined
    if part == "ssm_out.weight":
        return grouped(numbers.T).T if heads != groups else numbers
    if part == "ffn_gate_inp_shexp.weight":
        return numbers.reshape(1, -1)
    return numbers - 1 if name.endswith("norm.weight") and part != "ssm_norm.weight" else numbers


class JoinedRows:
    """Rows of several memory-mapped arrays, read as one array of rows: E times the rows of each part in turn.

    Args:
        parts: ``[E, O, bytes]`` uint8 each, of the same E and bytes.
    """

    def __init__(self, parts: list[_Array]) -> None:
        self.parts = parts
        self.shape = (len(parts[0]) * sum(part.shape[1] for part in parts), parts[0].shape[2])

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> _Array:
        return np.concatenate(self.parts, axis=1).reshape(self.shape)

    def __getitem__(self, index: Any) -> _Array:
        places = np.arange(len(self))[index]
        expert, row = np.divmod(places, len(self) // len(self.parts[0]))
        found = np.empty((len(places), self.shape[1]), np.uint8)
        for part in self.parts:
            own = (row >= 0) & (row < part.shape[1])
            found[own] = part[expert[own], row[own]]
            row = row - part.shape[1]
        return found


def _rows(parts: list[GgufTensor]) -> Any:
    """Returns the raw ``[rows, bytes]`` of a matrix or of stacked experts."""
    if len(parts) > 1:
        return JoinedRows([part.raw for part in parts])
    return parts[0].raw.reshape(-1, parts[0].raw.shape[-1])


def _mapped(tensor: GgufTensor) -> Tensor:
    """Returns a tensor of fractions that stays in the file."""
    return torch.from_numpy(tensor.raw).view(TORCH_DTYPES[tensor.kind])


def _numbers(tensor: GgufTensor) -> _Array:
    """Returns the float32 numbers of a tensor."""
    if tensor.kind in TORCH_DTYPES:
        return _mapped(tensor).float().numpy()
    rows = tensor.raw.reshape(-1, tensor.raw.shape[-1])
    shape = (len(rows), tensor.shape[-1])
    return FileBlocks(rows, tensor.kind, shape, torch.float32).dense().view(tensor.shape).numpy()


def _names(architecture: str, layers: int) -> Callable[[str], str]:
    """Returns a function from a parameter's name in the model to its name in the file."""
    import gguf

    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    known = gguf.get_tensor_name_map(kind, layers)

    def named(name: str) -> str:
        module = name.replace(".dt_bias", ".dt_proj.bias")
        return known.get_name(module, try_suffixes=(".weight", ".bias")) or name

    return named


def _divide_frequencies(model: nn.Module, divisors: Tensor) -> None:
    """Divides rotary frequencies as Llama 3.1 and later stretch them; the file holds the divisors."""
    for module in model.modules():
        for name in ("inv_freq", "original_inv_freq"):
            if isinstance(frequencies := getattr(module, name, None), Tensor):
                frequencies.div_(divisors.to(frequencies))


__all__ = ["JoinedRows", "check_kinds", "load_gguf"]
