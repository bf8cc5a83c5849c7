"""Exported graphs that replace torch networks, run by onnxruntime."""
