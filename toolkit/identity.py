"""Recognises the classes of transformers by identity: other classes may have the same names."""

from importlib import import_module

_MODULES = ("transformers.generation.logits_process", "transformers.generation.stopping_criteria")
_NAMES: dict[type, str] = {}  # filled when it is first read, which no compiled code may be the first to do


def transformers_name(cls: type) -> str:
    """Name of a logits processor or stopping criterion of transformers; empty for other classes, also derived ones."""
    if not _NAMES:
        known = (entry for module in _MODULES for entry in vars(import_module(module)).values())
        _NAMES.update((one, one.__name__) for one in known if isinstance(one, type) and one.__module__ in _MODULES)
    return _NAMES.get(cls, "")


__all__ = ["transformers_name"]
