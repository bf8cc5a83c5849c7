"""Runs a model's own torch functions so that no row's bits depend on the other rows, where that is possible.

Torch rounds some functions of a number by its place in a tensor, and sums in an order that depends on the shape. Around
recurrent layers that no kernel runs as a whole, models call a few of them. Here they get one definition, in terms of
operations that IEEE 754 defines (:mod:`arbordraft.kernels.recurrent_tree`).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from arbordraft.kernels.recurrent_tree import gate
from arbordraft.kernels.recurrent_tree.arithmetic import exp, pairwise_sum, sqrt
from arbordraft.target.attention import Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.topology import TreeTopology, ancestor_words

# Functions that move numbers, or compute each by one operation of IEEE 754 from numbers of its own row; and those that
# say something about tensors. Without the "_" at the end of functions that work in place.
_ROWWISE = frozenset(
    name.rstrip("_")
    for name in (
        *("__get__", "__len__", "size", "dim", "numel", "stride", "is_floating_point", "is_contiguous", "is_inference"),
        *(
            "view",
            "reshape",
            "transpose",
            "permute",
            "flatten",
            "unflatten",
            "unsqueeze",
            "squeeze",
            "expand",
            "repeat",
        ),
        *("chunk", "split", "unbind", "cat", "concat", "concatenate", "stack", "__getitem__", "select", "repeat"),
        *("to", "float", "bfloat16", "type", "type_as", "promote_types", "detach", "clone", "contiguous", "copy"),
        *("add", "sub", "mul", "neg", "div", "clamp", "relu", "square", "where", "masked_fill", "embedding"),
        *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__", "__imul__"),
        *("__neg__", "__truediv__", "__itruediv__", "index_copy", "repeat_interleave", "tensor", "tolist"),
        *("arange", "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_empty", "zeros_like", "empty_like"),
    )
)
_OURS = "arbordraft"  # namespace of operators, whose C++ kernels treat every row by itself


def _gated(activation: str) -> Callable[..., Tensor]:
    def run(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return gate(x.reshape(-1, x.shape[-1]), activation).view(x.shape).to(x.dtype)

    return run


def _exp(x: Tensor) -> Tensor:
    return exp(x.float()).to(x.dtype)


def _rsqrt(x: Tensor) -> Tensor:
    return (1.0 / sqrt(x.float())).to(x.dtype)


def _mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    total = pairwise_sum(x.float(), dim) / x.shape[dim]
    return (total.unsqueeze(dim) if keepdim else total).to(x.dtype)


def _pow(x: Tensor, exponent: float) -> Tensor:
    if exponent != 2:
        raise TypeError(f"squares alone are defined here, not powers of {exponent}")
    return x * x


_INSTEAD: Mapping[Any, Callable[..., Tensor]] = {
    torch.sigmoid: _gated("sigmoid"),
    Tensor.sigmoid: _gated("sigmoid"),
    F.silu: _gated("silu"),
    F.softplus: _gated("softplus"),
    torch.exp: _exp,
    Tensor.exp: _exp,
    torch.rsqrt: _rsqrt,
    Tensor.mean: _mean,
    Tensor.pow: _pow,
}


class RowWise(TorchFunctionMode):
    """Replaces torch's functions while it is entered.

    Args:
        odd: gets the names of functions that were called and may mix rows, or round them by their place.
    """

    def __init__(self, odd: set[str] | None = None) -> None:
        super().__init__()
        self.odd, self.paused = odd, False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (instead := _INSTEAD.get(function)) is not None and not self.paused:
            try:
                return instead(*args, **kwargs)
            except TypeError:  # called in another way: torch's own runs
                self._record(function)
        elif self.odd is not None and not self.paused and not _is_rowwise(function):
            self._record(function)
        return function(*args, **kwargs)

    def _record(self, function: Any) -> None:
        if self.odd is not None:
            self.odd.add(resolve_name(function) or str(function))


def _is_rowwise(function: Any) -> bool:
    return getattr(function, "__name__", "").rstrip("_") in _ROWWISE or _OURS in str(function)


def odd_functions(model: nn.Module, vocab_size: int) -> set[str]:
    """Returns the functions that a forward of packed trees calls and that may mix rows, or round them by their place.

    Args:
        model: a view of the model that runs packed rows.
        vocab_size: number of its tokens.
    """
    odd: set[str] = set()
    mode = RowWise(odd)

    def pause(*_: Any) -> None:
        mode.paused = True

    def resume(*_: Any) -> None:
        mode.paused = False

    hooks = []
    for module in model.modules():
        if is_rotary(module):
            hooks += [module.register_forward_pre_hook(pause), module.register_forward_hook(resume)]
    topology = TreeTopology.from_parents([-1, 0, 0, 1])
    cache = RaggedKVCache()
    samples = [cache.open(topology.num_nodes) for _ in range(2)]
    words = ancestor_words(topology.visible.cpu()).repeat(2, 1)
    run = Forward(cache.lay_out(samples, [topology.depth_list] * 2, words), cache, native=True)
    tokens = torch.randint(vocab_size, (1, len(run.batch.positions)), generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad(), mode:
            model(tokens, position_ids=run.batch.positions[None], use_cache=False, ragged=run)
    finally:
        for hook in hooks:
            hook.remove()
    return odd


def is_rotary(module: nn.Module) -> bool:
    """Returns whether a module of transformers makes rotary tables; other libraries may use such names, too."""
    return type(module).__module__.startswith("transformers.models.") and "RotaryEmbedding" in type(module).__name__


__all__ = ["RowWise", "is_rotary", "odd_functions"]
