"""The model as it is run: module objects of our own around the user's tensors.

Our attention, the prepacked modules for prepacked layers and all listeners live in these copies. The user's model is
never touched, so others may call it, train it or decode with it in other threads meanwhile, and nothing has to be put
back.
"""

import operator
from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

# The tables in which a module keeps its listeners.
_HOOKS = tuple(name for name, value in vars(nn.Module()).items() if "hooks" in name and value is not None)
# What calls of a model and of its generate() change in it, though no logits depend on it.
_PASSING = frozenset(
    {
        "training",
        "generation_config",
        "_attn_implementation_internal",
        "_compiled_call_impl",
        "_output_capturing_hooks_installed",
        "_previous_max_cache_length",
    }
)


class ModelView:
    """A copy of a model's modules and configurations that shares every parameter and buffer with it.

    The copy is a snapshot: modules that are exchanged later, attributes that are set and hooks that are hung on show in
    :meth:`current`, not in the copy. New values of parameters do reach it, since both look into the same tables.

    Args:
        model: what to copy.
        attention: name of the attention that the copy's layers shall ask for; by default the model's own.
    """

    def __init__(self, model: nn.Module, attention: str | None = None) -> None:
        self._attention = attention
        self._inside = {id(module) for module in model.modules()}
        self._copies: dict[int, Any] = {}
        self._kept: list[Any] = []  # what was copied: its ids must stay its own
        self.model: Any = self._copied(model)
        self._originals = {id(self._copies[id(module)]): module for module in model.modules()}

        modules = list(model.modules())
        tables = [vars(module) for module in modules] + [module._modules for module in modules]
        tables += [vars(value) for value in self._kept if is_config(value)]
        tables += [value for module in modules for value in vars(module).values() if _holds_numbers(value)]
        self._tables: list[tuple[dict[str, Any], list[str], list[Any]]] = []
        for table in tables:
            names = _lasting(table)
            self._tables.append((table, names, [table[name] for name in names]))
        self._listeners = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._heard = self._hooks()

    def original(self, module: nn.Module) -> nn.Module:
        """The user's module that one of the copies was made from."""
        return self._originals[id(module)]

    def current(self) -> bool:
        """Whether the model still has the modules, attributes and listeners that were copied."""
        for table, names, values in self._tables:
            if list(table) != names and _lasting(table) != names:
                return False
            if not all(map(operator.is_, map(table.__getitem__, names), values)):
                return False
        return self._hooks() == self._heard

    def _hooks(self) -> list[int]:
        if not any(self._listeners):  # nearly always
            return []
        return [id(hook) for hooks in self._listeners for hook in heard(hooks)]

    def _copied(self, value: Any) -> Any:
        """The copy of a module or configuration, or what refers to the copies instead of the originals."""
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, nn.Module):
            # A scripted module keeps its state out of our reach, and holds no attention of ours.
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
        """A function that somebody put in a module's place may close over that module or its methods."""
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
    """Whether a value is a configuration, which names the attention that its model shall ask for."""
    return hasattr(type(value), "_attn_implementation")


def _holds_numbers(value: Any) -> bool:
    """Whether a value keeps numbers by name, as adapters keep their scales."""
    return type(value) is dict and bool(value) and all(isinstance(number, (int, float)) for number in value.values())


def _lasting(table: Mapping[str, Any]) -> list[str]:
    return [name for name in table if name not in _PASSING]


def heard(hooks: Mapping[int, Any]) -> list[Any]:
    """Those of a module's hooks that want to be called.

    transformers leaves hooks behind once hidden states were asked for; they only act when they are asked for again.
    """
    return [h for h in hooks.values() if getattr(h, "__module__", "") != "transformers.utils.output_capturing"]


__all__ = ["ModelView", "heard", "is_config"]
