"""Maps a GGUF file into memory and parses its header once.

The header holds fields (settings and vocabulary) and the place of each tensor. Tensors are read when they are used.
"""

import mmap
import os
import struct
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_Array = np.ndarray[Any, Any]
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_ALIGNMENT = 32  # of tensors, unless a field says otherwise
_MOST_DIMENSIONS = 4
# Numbers in fields by GGUF's number of their type.
_NUMBERS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING, _LIST = 8, 9
FRACTIONS = ("F32", "F16", "BF16")  # types of tensors without blocks


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Returns whether a name is that of a GGUF file."""
    return os.fspath(name).endswith(".gguf")


class GgufTensor(NamedTuple):
    """A tensor that lies in a file.

    Args:
        name: its name in the file.
        kind: GGUF's name of its type, such as ``Q4_K``.
        shape: sizes in torch's order: the last dimension is contiguous.
        raw: ``[..., bytes]`` uint8 memory-mapped rows; leading dimensions are those of ``shape``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    raw: _Array


class GgufFile:
    """A memory-mapped GGUF file: its fields and tensors.

    Args:
        path: the file, which stays in use as long as tensors or parts of them exist. It must not change meanwhile.

    Attributes:
        fields: numbers, strings, and lists of them, by their names.
        tensors: tensors by name, in the file's order.

    Raises:
        ImportError: if the package ``gguf``, which knows the types of tensors, is not installed.
        ValueError: if there is no such file, or it is no GGUF file, is cut or damaged, or is one part of several.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"{path} is no file: name a GGUF file on this machine")
        if find_spec("gguf") is None:
            raise ImportError(f"reading {path} needs gguf: pip install 'arbordraft[gguf]'")
        with self.path.open("rb") as stream:
            if stream.read(4) != _MAGIC:
                raise ValueError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()!r}")
            # Torch wants memory that could be written to; such writes would not reach the file.
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        header = _Header(self.path, mapped)
        self.fields: dict[str, Any] = header.fields
        if (parts := self.fields.get("split.count", 0)) > 1:
            raise ValueError(
                f"{path} is part {self.fields.get('split.no', 0) + 1} of {parts}: join the parts with llama.cpp's "
                "'llama-gguf-split --merge' and name the joined file"
            )
        self.tensors = {tensor.name: tensor for tensor in header.tensors()}

    @property
    def architecture(self) -> str:
        """Name of the architecture, or an empty string if the file gives none."""
        return str(self.fields.get("general.architecture", ""))

    def setting(self, name: str, default: Any = None) -> Any:
        """Returns a field of the architecture, such as ``context_length``."""
        return self.fields.get(f"{self.architecture}.{name}", default)


class _Header:
    """Reads values one after the other; errors name the file and the part that is missing."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._mapped, self._at = path, mapped, len(_MAGIC)
        self._part = "its version"
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            swapped = version.to_bytes(4, "big")[0] in _VERSIONS
            why = "is stored for big-endian machines" if swapped else f"has version {version} of the format"
            raise ValueError(
                f"{path} {why}, and only versions 2 and 3 for little-endian ones are read: convert it again"
            )
        self._tensors, count = self._unpack("<QQ")
        self.fields: dict[str, Any] = {}
        for number in range(count):
            self._part = f"field {number + 1} of {count}"
            name = self._string()
            self._part = f"field {name!r}"
            (kind,) = self._unpack("<I")
            self.fields[name] = self._value(kind)

    def tensors(self) -> list[GgufTensor]:
        """Reads the table of tensors, and checks that all lie in the file."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        entries = []
        for number in range(self._tensors):
            self._part = f"entry of tensor {number + 1} of {self._tensors}"
            name = self._string()
            self._part = f"entry of tensor {name!r}"
            (dimensions,) = self._unpack("<I")
            if not 0 < dimensions <= _MOST_DIMENSIONS:
                raise self._damaged(f"it has {dimensions} dimensions")
            shape = self._unpack(f"<{dimensions}Q")[::-1]
            kind, offset = self._unpack("<IQ")
            try:
                entries.append((name, GGMLQuantizationType(kind), shape, offset))
            except ValueError:
                raise ValueError(
                    f"{self._path}: tensor {name!r} is of the unknown type {kind}: update the package gguf, or copy "
                    "the file again if it is damaged"
                ) from None
        alignment = int(self.fields.get("general.alignment", _ALIGNMENT))
        if alignment <= 0:
            raise self._damaged(f"its alignment is {alignment}")
        start = self._at + -self._at % alignment
        everything = np.frombuffer(self._mapped, np.uint8)
        found: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in entries:
            weights, size = GGML_QUANT_SIZES[kind]
            if shape[-1] % weights or not prod(shape):
                raise ValueError(
                    f"{self._path} is damaged: tensor {name!r} has the shape {list(shape)}, and rows of {kind.name} "
                    f"are multiples of {weights}: copy the file again"
                )
            row = shape[-1] // weights * size
            begin, end = start + offset, start + offset + prod(shape[:-1]) * row
            if end > len(everything):
                raise ValueError(
                    f"{self._path} is cut: tensor {name!r} lies at bytes {begin} to {end}, and the file ends at "
                    f"{len(everything)}: copy it again"
                )
            if name in found:
                raise ValueError(f"{self._path} is damaged: it holds tensor {name!r} twice: copy it again")
            found[name] = GgufTensor(name, kind.name, shape, everything[begin:end].reshape(*shape[:-1], row))
        return list(found.values())

    def _value(self, kind: int) -> Any:
        if (number := _NUMBERS.get(kind)) is not None:
            return np.frombuffer(self._take(number.itemsize), number)[0].item()
        if kind == _STRING:
            return self._string()
        if kind != _LIST:
            raise self._damaged(f"its type is {kind}")
        inner, count = self._unpack("<IQ")
        if (number := _NUMBERS.get(inner)) is not None:
            return np.frombuffer(self._take(count * number.itemsize), number).tolist()
        if inner == _STRING:
            return self._strings(count)
        if inner == _LIST:
            return [self._value(_LIST) for _ in range(count)]
        raise self._damaged(f"its list is of type {inner}")

    def _strings(self, count: int) -> list[str]:
        """Reads many strings: a vocabulary has hundreds of thousands."""
        mapped, at, found = self._mapped, self._at, []
        length = partial(struct.Struct("<Q").unpack_from, mapped)
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length(at)[0]
                found.append(mapped[begin:at].decode())
        except (struct.error, UnicodeDecodeError, OverflowError, IndexError) as error:
            raise self._damaged(str(error)) from error
        self._at = at
        if at > len(mapped):
            raise self._damaged("the file ends before it")
        return found

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._damaged(str(error)) from error

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, length: int) -> bytes:
        if length > len(self._mapped) - self._at:
            raise self._damaged("the file ends before it")
        self._at += length
        return self._mapped[self._at - length : self._at]

    def _damaged(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._path} is truncated or damaged in its header, at {self._part} ({reason}): copy it again"
        )


__all__ = ["FRACTIONS", "GgufFile", "GgufTensor", "is_gguf"]
