"""Copies of a model's modules that share its tensors; forwards run in these copies.

Our attention, the prepacked modules and all hooks live in the copies. The user's model is never modified, so nothing
has to be restored. Other threads may call it, train it or decode with it meanwhile.
"""

import operator
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

# Attributes in which a module keeps its hooks.
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and value is not None)
# Attributes that calls of a model and of its generate() change, though no logits depend on them.
_PASSING = frozenset(
    {
        "training",
        "generation_config",
        "_attn_implementation_internal",
        "_compiled_call_impl",
        "_output_capturing_hooks_installed",
        "_previous_max_cache_length",
        "conv1d_state",
        "recurrent_states",
    }
)


class ModelView:
    """A copy of a model's modules and configurations that shares every parameter and buffer with it.

    The copy is a snapshot. It does not follow later changes of modules, attributes and hooks; :meth:`current` detects
    them. New values of parameters do reach the copy, since both share the dictionaries of parameters.

    Args:
        model: the model to copy.
        attention: name under which the copy's layers look up their attention function; by default the model's own.
    """

    def __init__(self, model: nn.Module, attention: str | None = None) -> None:
        self._attention = attention
        self._inside = {id(module) for module in model.modules()}
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # originals, kept alive so that their ids are not reused
        self.model: Any = self._copied(model)
        self._originals = {id(self._copies[id(module)]): module for module in model.modules()}

        modules = list(model.modules())
        tables = [vars(module) for module in modules] + [module._modules for module in modules]
        tables += [vars(value) for value in self._kept if is_config(value)]
        tables += [value for module in modules for value in vars(module).values() if _holds_numbers(value)]
        self._tables: list[tuple[dict[str, Any], list[str], list[Any]]] = []
        for table in tables:
            names = _persistent(table)
            self._tables.append((table, names, [table[name] for name in names]))
        self._hook_tables = [
            hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        self._seen_hooks = self._hook_ids()

    def original(self, module: nn.Module) -> nn.Module:
        """Returns the user's module that a copy was made from."""
        return self._originals[id(module)]

    def current(self) -> bool:
        """Returns whether the model still has the modules, attributes and hooks that were copied."""
        for table, names, values in self._tables:
            if list(table) != names and _persistent(table) != names:
                return False
            if not all(map(operator.is_, map(table.__getitem__, names), values)):
                return False
        return self._hook_ids() == self._seen_hooks

    def _hook_ids(self) -> list[int]:
        if not any(self._hook_tables):  # nearly always
            return []
        return [id(hook) for hooks in self._hook_tables for hook in active_hooks(hooks)]

    def _copied(self, value: Any) -> Any:
        """Returns a copy of a module, a configuration or a callable that refers to one, and any other value itself."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, nn.Module):
            # A scripted module hides its state, and cannot hold our attention.
            known = id(value) in self._inside and not isinstance(value, torch.jit.ScriptModule)
            return self._copied_module(value) if known else value
        if is_config(value):
            return self._copied_config(value)
        if isinstance(value, MethodType):
            return MethodType(self._copied(value.__func__), self._copied(value.__self__))
        if isinstance(value, partial):
            args, kwargs = map(self._copied, value.args), {k: self._copied(v) for k, v in value.keywords.items()}
            return partial(self._copied(value.func), *args, **kwargs)
        if isinstance(value, FunctionType):
            return self._copied_function(value)
        return value

    def _copied_module(self, module: nn.Module) -> nn.Module:
        copy: nn.Module = object.__new__(type(module))
        self._remember(module, copy)
        state = {name: self._copied(value) for name, value in vars(module).items()}
        state |= {name: state[name].copy() for name in _HOOKS}
        state["_modules"] = {name: self._copied(child) for name, child in module._modules.items()}
        if "_compiled_call_impl" in state:
            state["_compiled_call_impl"] = None  # compiled around the original
        vars(copy).update(state)
        return copy

    def _copied_config(self, config: Any) -> Any:
        copy = object.__new__(type(config))
        self._remember(config, copy)
        vars(copy).update({name: self._copied(value) for name, value in vars(config).items()})
        if self._attention is not None:
            vars(copy)["_attn_implementation_internal"] = self._attention
        return copy

    def _copied_function(self, function: FunctionType) -> FunctionType:
        """Copies a function, as one that replaces a method may close over its module or the module's methods."""
        if compiled := getattr(function, "_torchdynamo_orig_callable", None):
            return self._copied(compiled)
        if not function.__closure__:
            return function
        self._remember(function, function)  # it may close over itself
        try:
            before = [cell.cell_contents for cell in function.__closure__]
        except ValueError:  # a cell that is still empty
            return function
        after = [self._copied(value) for value in before]
        if all(map(operator.is_, before, after)):
            return function
        cells = tuple(map(CellType, after))
        copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
        copy.__kwdefaults__ = function.__kwdefaults__
        self._remember(function, copy)
        return copy

    def _remember(self, value: Any, copy: Any) -> None:
        self._copies[id(value)] = copy
        self._kept.append(value)


def is_config(value: Any) -> bool:
    """Returns whether a value is a model configuration, which names the attention function to use."""
    return hasattr(type(value), "_attn_implementation")


def _holds_numbers(value: Any) -> bool:
    """Returns whether a value is a dictionary of numbers, as adapters have for their scales."""
    return type(value) is dict and bool(value) and all(isinstance(number, (int, float)) for number in value.values())


def _persistent(table: Mapping[str, Any]) -> list[str]:
    return [name for name in table if name not in _PASSING]


def active_hooks(hooks: Mapping[int, Any]) -> list[Any]:
    """Returns the hooks that have an effect.

    After a call that asked for hidden states, transformers leaves hooks that act only when these are asked for again.
    """
    return [h for h in hooks.values() if getattr(h, "__module__", "") != "transformers.utils.output_capturing"]


__all__ = ["ModelView", "active_hooks", "is_config"]
