"""Trained drafters in the layouts that serving engines load."""

from arbordraft.exports.engines.export import LAYOUTS, export_engine, export_sglang, export_vllm

__all__ = ["LAYOUTS", "export_engine", "export_sglang", "export_vllm"]
