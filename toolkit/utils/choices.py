"""Names of what `load` and the command line let users choose; imports nothing that takes time."""

from enum import StrEnum
from typing import Literal

SMALL = "smollm2"  # names SmolLM2-135M-Instruct wherever a model is named


class Dtype(StrEnum):
    """Precision of the weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(StrEnum):
    """Bits of the weights that native kernels read; see ``RaggedModel``."""

    int4 = "int4"
    int8 = "int8"
    int8_weight_only = "int8-weight-only"
    file = "file"


class Settings(StrEnum):
    """Where settings come from that a request leaves open; see ``SpeculativeDecoder``."""

    model = "model"
    none = "none"


class Kernels(StrEnum):
    """Runners of a model's layers; see ``RaggedModel``."""

    auto = "auto"
    native = "native"
    torch = "torch"
    triton = "triton"


class Quantization(StrEnum):
    """Precision of the matrices of an exported graph."""

    none = "none"
    int8 = "int8"  # weights and, when it runs, inputs in 8 bits
    int4 = "int4"  # blocks of weights in 4 bits, those of the head in 8


Law = Literal["iid", "without-replacement", "top-tail", "fixed", "shared"]
Verifier = Literal["top-down", "lifted"]  # how tree verifiers apply their rule

__all__ = ["SMALL", "Dtype", "Kernels", "Law", "Quantization", "Settings", "Verifier", "Weights"]
