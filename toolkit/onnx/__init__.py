"""Exported graphs in the places of torch's networks, run by onnxruntime."""
