"""Runs a model's linears in Triton on a GPU, so that no row's bits depend on the rows beside it.

:mod:`arbordraft.target.fused_modules` calls a model's own linears. cuBLAS adds up their products in an order that
depends on the number of rows. The forwards here run :mod:`arbordraft.kernels.fused_linear` instead, with seven launches
per layer.

Shapes: T packed rows, H hidden size.
"""

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from arbordraft.kernels.fused_linear import gated_linear, linear
from arbordraft.target.attention import Attending, AttentionCall, Projection, UnsupportedModel
from arbordraft.target.fused_modules import NormForm, Recognised, is_tables
from arbordraft.target.model_view import active_hooks
from arbordraft.target.prepacked.probing import hooked, plain

_NO_NORM = NormForm(0.0, 0.0, False)


def fuse_linears(model: Any, found: Recognised, layers: Iterable[nn.Module]) -> None:
    """Replaces the forwards of a view's attentions, MLPs and head by ones that multiply in Triton.

    Args:
        model: the view.
        found: modules that :func:`~arbordraft.target.fused_modules.fuse` has recognised in it.
        layers: its decoder layers.

    Raises:
        UnsupportedModel: if a module with weights has no such kernel; names the first ones.
    """
    done: set[nn.Module] = set(found.norms)
    for attention, call in found.calls.items():
        parts: dict[str, Any] = dict(attention.named_children())
        linears = [parts[f"{name}_proj"] for name in "qkvo"]
        norms = [parts[name] for name in ("q_norm", "k_norm") if name in parts]
        form = _common_form(norms, found)
        even = call.dim == call.value_dim and call.dim % 2 == 0
        if form is not None and even and plain_linears(linears[:3]) and plain_linears(linears[3:]):
            vars(attention)["forward"] = partial(_run_attention, attention, call, linears, norms, form)
            done.update(linears)
    for mlp, activation in found.gates.items():
        parts = dict(mlp.named_children())
        linears = [parts[f"{name}_proj"] for name in ("gate", "up", "down")]
        if plain_linears(linears[:2]) and plain_linears(linears[2:]):
            vars(mlp)["forward"] = partial(_run_mlp, linears, activation)
            done.update(linears)
    head = model.get_output_embeddings()
    if plain_linears([head]):
        vars(head)["forward"] = partial(_run_linear, head)
        done.add(head)
    refuse_others(model, found, done, layers, "row_invariant=True")


def refuse_others(
    model: Any, found: Recognised, done: Collection[nn.Module], layers: Iterable[nn.Module], wish: str
) -> None:
    """Raises UnsupportedModel if modules with weights have no kernel for a wish; names the first ones.

    Args:
        model: the view.
        found: modules that :func:`~arbordraft.target.fused_modules.fuse` has recognised in it.
        done: modules with weights that have such a kernel.
        layers: the view's decoder layers, all of which must be recognised.
        wish: the argument that needs the kernels.
    """
    names = {module: name for name, module in model.named_modules()}
    known = (nn.Embedding,)  # looks rows up, so it needs no kernel
    left = [module for module in names if module._parameters and module not in done and not isinstance(module, known)]
    if left := left or [layer for layer in layers if layer not in found.layers]:
        listed = ", ".join(f"{names[module]} ({type(module).__name__})" for module in left[:5])
        raise UnsupportedModel(
            f"{wish} needs kernels for all modules with weights, and there are none for {listed}"
            + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        )


def _common_form(norms: list[nn.Module], found: Recognised) -> NormForm | None:
    """Returns the form that query and key norms share, or `_NO_NORM`; ``None`` if kernels cannot fuse them."""
    if not norms:
        return _NO_NORM
    forms = {found.norms.get(norm) for norm in norms}
    return forms.pop() if len(norms) == 2 and len(forms) == 1 and not any(map(_is_hooked, norms)) else None


def plain_linears(linears: list[Any]) -> bool:
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


def _run_linear(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight.contiguous(), module.bias)


def _run_mlp(linears: list[Any], activation: str, x: Tensor) -> Tensor:
    """Maps ``[..., H]`` to ``[..., H]``."""
    return _run_linear(linears[2], gated_linear(x, *_weights(linears[:2]), activation))


def _run_attention(
    attention: Any,
    call: AttentionCall,
    linears: list[Any],
    norms: list[Any],
    form: NormForm,
    *,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    ragged: Attending,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns the ``[1, T, H]`` output and no attention weights."""
    if attention_mask is not None or not is_tables(position_embeddings, call.dim, hidden_states):
        raise UnsupportedModel(
            f"{type(attention).__name__} was called with arguments that row_invariant=True does not support"
        )
    layer: int = attention.layer_idx
    ragged.layers[layer] = call
    weights, biases = _weights(linears[:3])
    projection = Projection(hidden_states[0], weights, biases, [norm.weight for norm in norms], *form)
    cosine, sine = position_embeddings
    out = ragged.project_and_attend(layer, projection, call, (cosine[0], sine[0]))
    return _run_linear(linears[3], out.reshape(1, len(out), -1)), None


__all__ = ["fuse_linears", "plain_linears", "refuse_others"]
