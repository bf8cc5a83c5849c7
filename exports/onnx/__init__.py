"""Drafters, deciders, targets, verification and draws as graphs, compared with the originals when they are written.

Importing this module loads none of the libraries that write and run graphs: ``pip install 'arbordraft[onnx]'`` brings
them.
"""

from arbordraft.exports.onnx.genai import export_ort_genai
from arbordraft.exports.onnx.parity import ParityError
from arbordraft.exports.onnx.sources import export
from arbordraft.utils.choices import Quantization

__all__ = ["ParityError", "Quantization", "export", "export_ort_genai"]
