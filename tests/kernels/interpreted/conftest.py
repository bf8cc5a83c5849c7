"""Fixtures of the tests of Triton kernels in Triton's interpreter, which must be on when the process starts.

On a GPU, without the interpreter, the same tests run the compiled kernels. Each kernel gets copies of the CPU tensors,
and its results are copied back.

    pytest tests/kernels/interpreted
"""

import inspect
import os
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from arbordraft.kernels import choice
from arbordraft.kernels.dispatch import Operator

ON_GPU = os.environ.get(choice.INTERPRETER) != "1"
if ON_GPU and not torch.cuda.is_available():
    raise pytest.UsageError(f"there is no GPU: set {choice.INTERPRETER}=1 to run these tests")

GUARD = 64
collect_ignore = ["test_work.py"] if ON_GPU else []  # it watches the interpreter


@pytest.fixture(scope="session", autouse=True)
def _on_gpu():
    """Runs the kernels on the GPU, with copies of the CPU tensors of the tests."""
    if not ON_GPU:
        yield
        return
    launch = Operator._launch

    def copied(operator, *arguments):
        moved = tree_map_only(Tensor, lambda tensor: tensor.cuda(), arguments)
        result = launch(operator, *moved)
        for argument, given, used in zip(operator.default._schema.arguments, arguments, moved, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and given is not None:
                several = isinstance(given, list)
                for mine, its in zip(given if several else [given], used if several else [used], strict=True):
                    mine.copy_(its)
        return tree_map_only(Tensor, lambda tensor: tensor.cpu(), result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "interpreted", lambda: True)
        patch.setattr(Operator, "_launch", copied)
        yield


@pytest.fixture(scope="session", autouse=True)
def _listed_once():
    """Caches the list of Triton's language, which the interpreter makes at every function call: a third of the time."""
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    @cache
    def names(package):  # builtins only; the first call comes before any patch
        return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]

    once = SimpleNamespace(**vars(inspect))
    once.getmembers = lambda package: [(name, getattr(package, name)) for name in names(package)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "inspect", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _patched_once(_listed_once):
    """Spares the interpreter three kinds of repeated work, which take half of the remaining time.

    It patches Triton's language at every function call within a kernel. It builds a table of number types at every
    look-up. It computes integers twice to detect overflow, which compiled kernels do not check.
    """
    if ON_GPU:
        yield
        return
    from triton.runtime import interpreter

    patch_language, run, type_of = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    patched, types = set(), {}

    @cache
    def languages(function):
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(module.__name__ for module in modules if module in (interpreter.tl, interpreter.tl.core))

    def launched(executor, *arguments, **options):
        patched.clear()
        return run(executor, *arguments, **options)

    def patch_lang(function):
        seen = languages(function)
        if seen and seen in patched:  # this launch has patched them, and undoes it at its end
            return interpreter._LangPatchScope()
        patched.add(seen)
        return patch_language(function)

    def np_dtype(kind):
        scalar = kind.scalar
        if scalar.name not in types:
            types[scalar.name] = type_of(scalar)
        return types[scalar.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_lang)
        patch.setattr(interpreter.GridExecutor, "__call__", launched)
        patch.setattr(interpreter, "_get_np_dtype", np_dtype)
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True)
def compiled_alone():
    """Resets TorchDynamo after each test: all operators share one frame, compiled for at most eight of them."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def guarded(monkeypatch):
    """Fills output buffers of kernels, and guard bands around them, with NaN. Checks the guard bands at the end."""
    made, plain = [], torch.Tensor.new_empty

    def new_empty(self, *size, dtype=None, device=None):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        numel = torch.Size(shape).numel()
        dtype = dtype or self.dtype
        buffer = plain(self, numel + 2 * GUARD, dtype=dtype, device=device)
        buffer.fill_(float("nan") if dtype.is_floating_point else -77)
        made.append((buffer, numel))
        return buffer[GUARD : GUARD + numel].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield made
    assert made
    for buffer, numel in made:
        for band in (buffer[:GUARD], buffer[GUARD + numel :]):
            assert band.isnan().all() if buffer.is_floating_point() else (band == -77).all()
