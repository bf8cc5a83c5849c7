"""The CPU kernels in C++: built on first use, then run by `torch.ops.arbordraft` on a CPU.

Callers call `load()` first; until it has loaded the library, these operators run their references.
"""

import ctypes
import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from arbordraft.kernels.machine import ISA_VARIABLE, chosen_isa, cpu_features
from arbordraft.kernels.native.build import KERNELS, SOURCE, Build, Unavailable
from arbordraft.kernels.native.threads import TooManyThreads, too_many_threads


class NativeKernelsUnavailable(RuntimeWarning):
    """The native CPU kernels cannot be used, so slower ones take their place."""


class NativeKernelsNotCached(RuntimeWarning):
    """The native CPU kernels work but could not be cached, so every process builds them anew."""


class Extension:
    """One library of operators, which a process loads at most once: torch cannot register an operator twice.

    The value of `$ARBORDRAFT_ISA` at loading time therefore decides. `off` also takes effect later, in :meth:`problem`,
    which is called before kernels are chosen for a model. Operators call :meth:`load` each time.
    """

    def __init__(self, source: Path, root: Path, loaded: Callable[[bool], Warning | None]):
        """Takes `loaded`, called after loading with whether the process was forked before; it may return a warning."""
        self.source, self.root, self.loaded = source, root, loaded
        self._tried = self._forked = self._ready = False
        self._problem: str | None = None
        self._notice: Warning | None = None
        self._lock = threading.Lock()
        self.functions: ctypes.PyDLL | None = None

    def after_fork(self) -> None:
        """Replaces the lock in a forked child, where a thread that held the old lock no longer runs."""
        self._lock = threading.Lock()
        self._forked = True

    def load(self) -> bool:
        return self._ready or self.problem() is None

    def problem(self) -> str | None:
        isa = chosen_isa()
        if isa == "off":
            return f"{ISA_VARIABLE}=off turns them off; unset the variable to use them"
        if not self._tried:
            self._settle(isa)
        if self._notice:  # outside the lock: a filter may raise it as an error, or a handler may call this again
            notice, self._notice = self._notice, None
            warnings.warn(notice, stacklevel=4)
        self._ready = self._problem is None
        return self._problem

    def load_in_background(self) -> None:
        """Starts to load, and to build if needed; :meth:`problem` waits for the outcome and warns."""
        isa = chosen_isa()
        if isa != "off" and not self._tried:
            threading.Thread(target=self._settle, args=(isa,), name="arbordraft-kernels", daemon=True).start()

    def _settle(self, isa: str) -> None:
        if not self._tried:
            with self._lock:
                if not self._tried:
                    self._notice = self._try(isa)
                    self._tried = True

    def _open(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self.functions = ctypes.PyDLL(str(library))  # keeps the lock of Python: a call is shorter than to get it back

    def _try(self, isa: str) -> Warning | None:
        try:
            obstacle = Build(isa, self.source, self.root).load(self._open)
            notice = self.loaded(self._forked)
        except (Unavailable, OSError, RuntimeError) as error:
            reason = str(error)
            if not isinstance(error, Unavailable):  # torch hides the message of the loader in the cause
                reason = f"{error.__cause__ or error}; set CXX to another compiler, or {ISA_VARIABLE}=off"
            self._problem = reason
            return NativeKernelsUnavailable(f"the native CPU kernels give way to slower ones: {reason}")
        if obstacle is None:
            return notice
        return NativeKernelsNotCached(
            f"the CPU kernels could not be kept ({obstacle}), so that every process builds them anew; "
            "set ARBORDRAFT_CACHE to a folder that can be written"
        )


def _loaded(forked: bool) -> Warning | None:
    if chosen_isa() == "amx_bf16" != torch.ops.arbordraft.isa():
        raise Unavailable(f"Linux grants this process no tiles, which {ISA_VARIABLE}=amx_bf16 asks for; unset it")
    if forked:  # torch's threads, which the kernels use, may have stayed in the parent
        torch.ops.arbordraft.work_alone()
        return None
    return too_many_threads()


_kernels = Extension(SOURCE, KERNELS, _loaded)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_kernels.after_fork)


def load() -> bool:
    """Returns whether the native kernels can be used; the first call loads them, and builds them if needed."""
    return _kernels.load()


def functions() -> ctypes.PyDLL | None:
    """Returns the functions of the kernels that take addresses, ``None`` without kernels.

    A call takes a microsecond, a tenth of an operator's: small trees need it.
    """
    return _kernels.functions if load() else None


def load_in_background() -> None:
    """Starts to load the kernels, so that a program can read a model's weights while they are built."""
    _kernels.load_in_background()


def fast_bfloat16() -> bool:
    """Returns whether this processor multiplies bfloat16 faster than float32; loads no kernels."""
    chosen = ("native", "amx_bf16", "avx512_bf16", "neon_bf16", "off")
    return chosen_isa() in chosen and not cpu_features().isdisjoint({"avx512_bf16", "bf16"})


def problem() -> str | None:
    """Returns why the kernels cannot be used and how to fix it, or None if they can be used."""
    return _kernels.problem()


def isa() -> str | None:
    """Returns the instruction set of the loaded kernels: amx_bf16, avx2, ... or generic; None without kernels."""
    return torch.ops.arbordraft.isa() if load() else None


__all__ = [
    "NativeKernelsNotCached",
    "NativeKernelsUnavailable",
    "TooManyThreads",
    "fast_bfloat16",
    "functions",
    "isa",
    "load",
    "load_in_background",
    "problem",
]
