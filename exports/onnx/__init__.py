"""Drafters, deciders, targets, verification and draws as graphs, compared with the originals as they are written.

Importing this loads none of the libraries that write and run graphs: ``pip install 'arbordraft[onnx]'`` brings them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from arbordraft.exports.folder import Quantization

if TYPE_CHECKING:
    from arbordraft.exports.onnx.genai import export_ort_genai
    from arbordraft.exports.onnx.parity import ParityError
    from arbordraft.exports.onnx.sources import export

_PLACES = {"ParityError": "parity", "export": "sources", "export_ort_genai": "genai"}


def __getattr__(name: str) -> Any:
    """Imports what is asked for when it is: the command line names it before it knows what to do."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


__all__ = ["ParityError", "Quantization", "export", "export_ort_genai"]
