"""Runs a model's linears in Triton on a GPU, in place of torch's.

:mod:`arbordraft.target.fused_modules` calls a model's own linears. cuBLAS adds up their products in an order that
depends on the number of rows. :class:`RowInvariant` products run :mod:`arbordraft.kernels.fused_linear` instead, with
seven launches per layer. Those of :mod:`arbordraft.target.grouped_linears` read weights of 4 bits.

Shapes: T packed rows, H hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from arbordraft.kernels.fused_linear import gated_linear, linear
from arbordraft.target.attention import Attending, AttentionCall, Projection, UnsupportedModel
from arbordraft.target.fused_modules import NormForm, Recognised, is_tables
from arbordraft.target.model_view import active_hooks
from arbordraft.target.prepacked.probing import hooked, plain

_NO_NORM = NormForm(0.0, 0.0, False)


Run = Callable[[Tensor], Tensor]
Attend = Callable[[Any, int, Tensor, tuple[Tensor, Tensor]], Tensor]
"""Called with the :class:`~arbordraft.target.attention.Attending`, the layer, ``[T, H]`` rows and the tables of
cosines and sines; returns what the heads attended to."""


class Products(ABC):
    """Makes the products that replace a model's linears; ``None`` where it has no kernel for some."""

    @abstractmethod
    def attention(
        self, attention: Any, call: AttentionCall, linears: list[Any], found: Recognised
    ) -> tuple[Attend, Run] | None:
        """Returns the products before attention with it, and the one after it; linears are those of q, k, v and out."""

    @abstractmethod
    def mlp(self, linears: list[Any], activation: str) -> Run | None:
        """Returns a gated MLP; linears are those of its gate, its input and its output."""

    @abstractmethod
    def linear(self, module: Any) -> Run:
        """Returns one linear."""


def replace_linears(model: Any, found: Recognised, layers: Iterable[nn.Module], products: Products, wish: str) -> None:
    """Replaces the forwards of a view's attentions, MLPs and head.

    Args:
        model: the view.
        found: modules that :func:`~arbordraft.target.fused_modules.fuse` has recognised in it.
        layers: its decoder layers.
        products: makes the products that take their place.
        wish: the argument that needs them, for errors.

    Raises:
        UnsupportedModel: if a module with weights has no such product; names the first ones.
    """
    done: set[nn.Module] = set(found.norms)
    for attention, call in found.calls.items():
        parts: dict[str, Any] = dict(attention.named_children())
        linears = [parts[f"{name}_proj"] for name in "qkvo"]
        if call.dim == call.value_dim and _plain(linears[:3]) and _plain(linears[3:]):
            made = products.attention(attention, call, linears, found)
            if made is not None:
                vars(attention)["forward"] = partial(_run_attention, attention, call, *made, wish)
                done.update(linears)
    for mlp, activation in found.gates.items():
        parts = dict(mlp.named_children())
        linears = [parts[f"{name}_proj"] for name in ("gate", "up", "down")]
        if _plain(linears[:2]) and _plain(linears[2:]) and (run := products.mlp(linears, activation)) is not None:
            vars(mlp)["forward"] = run
            done.update(linears)
    head = model.get_output_embeddings()
    if _plain([head]):
        vars(head)["forward"] = products.linear(head)
        done.add(head)
    names = {module: name for name, module in model.named_modules()}
    known = (nn.Embedding,)  # looks rows up, so it needs no kernel
    left = [module for module in names if module._parameters and module not in done and not isinstance(module, known)]
    if left := left or [layer for layer in layers if layer not in found.layers]:
        listed = ", ".join(f"{names[module]} ({type(module).__name__})" for module in left[:5])
        raise UnsupportedModel(
            f"{wish} needs kernels for all modules with weights, and there are none for {listed}"
            + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        )


def _run_attention(
    attention: Any,
    call: AttentionCall,
    attend: Attend,
    out: Run,
    wish: str,
    *,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    ragged: Attending,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns the ``[1, T, H]`` output and no attention weights."""
    if attention_mask is not None or not is_tables(position_embeddings, call.dim, hidden_states):
        raise UnsupportedModel(f"{type(attention).__name__} was called with arguments that {wish} does not support")
    layer: int = attention.layer_idx
    ragged.layers[layer] = call
    cosine, sine = position_embeddings
    attended = attend(ragged, layer, hidden_states[0], (cosine[0], sine[0]))
    return out(attended.reshape(1, len(attended), -1)), None


class RowInvariant(Products):
    """Products of the model's own weights, in which no row's bits depend on the rows beside it."""

    def attention(
        self, attention: Any, call: AttentionCall, linears: list[Any], found: Recognised
    ) -> tuple[Attend, Run] | None:
        norms = [attention._modules[name] for name in ("q_norm", "k_norm") if name in attention._modules]
        form = _common_form(norms, found)
        if form is None or call.dim % 2:
            return None

        def attend(ragged: Attending, layer: int, rows: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
            weights, biases = _weights(linears[:3])
            projection = Projection(rows, weights, biases, [norm.weight for norm in norms], *form)
            return ragged.project_and_attend(layer, projection, call, tables)

        return attend, self.linear(linears[3])

    def mlp(self, linears: list[Any], activation: str) -> Run | None:
        def run(x: Tensor) -> Tensor:
            return down(gated_linear(x, *_weights(linears[:2]), activation))

        down = self.linear(linears[2])
        return run

    def linear(self, module: Any) -> Run:
        return lambda x: linear(x, module.weight.contiguous(), module.bias)


def _common_form(norms: list[nn.Module], found: Recognised) -> NormForm | None:
    """Returns the form that query and key norms share, or `_NO_NORM`; ``None`` if kernels cannot fuse them."""
    if not norms:
        return _NO_NORM
    forms = {found.norms.get(norm) for norm in norms}
    return forms.pop() if len(norms) == 2 and len(forms) == 1 and not any(map(_is_hooked, norms)) else None


def _plain(linears: list[Any]) -> bool:
    """Returns whether these are torch's own linears without hooks, all with a bias or all without."""
    return (
        all(
            type(module) is nn.Linear and not hooked(module) and all(map(plain, module.parameters()))
            for module in linears
        )
        and len({module.bias is None for module in linears}) == 1
    )


def _is_hooked(module: nn.Module) -> bool:
    """Returns whether a module whose forward we replaced has hooks."""
    return bool(active_hooks(module._forward_hooks) or active_hooks(module._forward_pre_hooks))


def _weights(linears: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the current weights and biases."""
    biases = [module.bias for module in linears]
    return [module.weight.contiguous() for module in linears], [] if biases[0] is None else biases


__all__ = ["Attend", "Products", "RowInvariant", "Run", "replace_linears"]
