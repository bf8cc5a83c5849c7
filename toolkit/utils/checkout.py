"""Programs of the source checkout, which wheels do not hold."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from arbordraft.utils.errors import UserError

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_PROGRAMS = _EXAMPLES / "benchmarks"
CHECKPOINTS = _EXAMPLES / "checkpoints"  # folders of trained drafters and deciders; a wheel lacks them


class NoCheckoutError(UserError):
    """A program of the source checkout was asked for, and this package is installed without the checkout."""


def laboratory(module: str, asked: str) -> Any:
    """Imports a module of ``examples/benchmarks/arborlab`` from the checkout that holds this package.

    Args:
        module: its name there, such as ``plots``.
        asked: command or option that needs it, for the error.

    Raises:
        NoCheckoutError: if this package lies outside a checkout.
    """
    if not (_PROGRAMS / "arborlab" / "__init__.py").is_file():
        raise NoCheckoutError(
            f"'{asked}' needs examples/benchmarks of the source checkout, which this installation lacks: "
            "run 'pip install --editable .' in a checkout, then the same command again"
        )
    if str(_PROGRAMS) not in sys.path:
        sys.path.append(str(_PROGRAMS))  # last: scripts there have short names, which must not hide other packages
    return import_module(f"arborlab.{module}")


__all__ = ["CHECKPOINTS", "NoCheckoutError", "laboratory"]
