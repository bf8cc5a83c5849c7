"""Names of the choices of `load` and the command line; imports nothing slow."""

from enum import StrEnum
from typing import Literal

SMALL = "smollm2"  # short name of SmolLM2-135M-Instruct


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
    dense = "dense"


class Settings(StrEnum):
    """Source of the settings that a request leaves open; see ``SpeculativeDecoder``."""

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
    int8 = "int8"  # weights, and at run time inputs, in 8 bits
    int4 = "int4"  # blocks of weights in 4 bits; the head's in 8


Law = Literal["iid", "without-replacement", "top-tail", "fixed", "shared"]
Verifier = Literal["top-down", "lifted"]  # how tree verifiers apply their rule

__all__ = ["SMALL", "Dtype", "Kernels", "Law", "Quantization", "Settings", "Verifier", "Weights"]
