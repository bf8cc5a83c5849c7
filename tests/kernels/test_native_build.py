"""Building and loading the C++ kernels: failures of other machines, on small sources that compile at once."""

import ctypes
import fnmatch
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from arbordraft.kernels import machine, native, progress
from arbordraft.kernels.native import Extension, NativeKernelsNotCached, NativeKernelsUnavailable, build

ROOT = Path(__file__).resolve().parents[2]
TOY = """
#include "answer.h"
#include <omp.h>
extern "C" int answer() { return ANSWER; }
extern "C" int threads() {
  int count = 0;
#pragma omp parallel
#pragma omp single
  count = omp_get_num_threads();
  return count;
}
"""
MACROS = """
#define STRING(x) #x
#define REPORT(name, macro) extern "C" int name() { return STRING(macro)[0] == '1'; }
REPORT(amx_bf16, __AMX_BF16__)
REPORT(avx512_bf16, __AVX512BF16__)
REPORT(avx512, __AVX512F__)
REPORT(avx2, __AVX2__)
REPORT(fast_math, __FAST_MATH__)
"""

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("g++") is None, reason="needs Linux and g++"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ARBORDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ARBORDRAFT_ISA", raising=False)
    return tmp_path / "cache" / "native"


@pytest.fixture
def toy(tmp_path) -> Extension:
    return write_toy(tmp_path / "toy")


def write_toy(folder: Path, answer: int = 42, source: str = TOY) -> Extension:
    folder.mkdir(exist_ok=True)
    (folder / "answer.h").write_text(f"#define ANSWER {answer}\n")
    (folder / "toy.cpp").write_text(source)
    return Extension(folder / "toy.cpp", folder, lambda forked: None)


def again(toy: Extension) -> Extension:
    """Returns the extension as the next process would see it."""
    return Extension(toy.source, toy.root, toy.loaded)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def key(toy: Extension, isa: str = "native") -> str:
    return build.Build(isa, toy.source, toy.root).key


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def unavailable(extension: Extension) -> str:
    """Returns the problem, after checking that repeated loads give one warning and no exception."""
    with pytest.warns(NativeKernelsUnavailable) as caught:
        assert [extension.load() for _ in range(3)] == [False] * 3
    assert len(caught) == 1
    problem = extension.problem()
    assert problem is not None
    assert problem in str(caught[0].message)
    return problem


def forbid_building(monkeypatch):
    monkeypatch.setattr(build.Build, "_compile", lambda *_, **__: pytest.fail("it was built again"))


def test_built_once_then_found(cache, toy, monkeypatch):
    assert toy.load()
    assert toy.problem() is None
    library = cache / key(toy) / "arbordraft_native.so"
    assert files(cache) == [library]
    assert ctypes.CDLL(str(library)).answer() == 42
    forbid_building(monkeypatch)
    assert toy.load()
    assert again(toy).load()


def test_a_built_library_is_found_without_a_scratch_folder(cache, toy, monkeypatch):
    assert toy.load()
    forbid_building(monkeypatch)
    monkeypatch.setattr(build, "_scratch_folder", lambda _: pytest.fail("it needs no scratch folder"))
    assert again(toy).load()


@pytest.mark.parametrize("variable", ["", "no-such-compiler", "'"])
def test_no_compiler(cache, toy, tmp_path, monkeypatch, variable):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", variable)
    problem = unavailable(toy)
    assert "install g++" in problem
    assert (repr(variable) if variable else "g++, c++, clang++") in problem


def test_compiler_error(cache, tmp_path):
    broken = write_toy(tmp_path / "toy", source="#error the moon is full\nint f( {\n")
    problem = unavailable(broken)
    assert "error: #error the moon is full" in problem
    assert "CXX" in problem  # the fix
    log = cache / key(broken) / "build.log"
    assert str(log) in problem
    assert "toy.cpp:2" in log.read_text()
    assert files(cache) == [log]


def test_linker_error(cache, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "TORCH", tmp_path)
    assert "cannot find -ltorch_cpu" in unavailable(toy)


def test_library_that_does_not_load_is_not_kept(cache, tmp_path):
    text = TOY + 'extern "C" int nowhere(); extern "C" int f() { return nowhere(); }'
    assert "undefined symbol: nowhere" in unavailable(write_toy(tmp_path / "toy", source=text))
    assert files(cache) == []


def test_unknown_isa(cache, toy, monkeypatch):
    monkeypatch.setenv("ARBORDRAFT_ISA", "avx1024")
    with pytest.raises(ValueError, match=r"one of amx_bf16, .*, neon, native, generic, off, not 'avx1024'"):
        toy.load()


def test_unsupported_isa(cache, toy, monkeypatch):
    monkeypatch.setenv("ARBORDRAFT_ISA", "avx512")
    monkeypatch.setattr(machine, "cpu", lambda: {"flags": " ".join(machine.NEEDED_BY["avx2"])})
    assert "lacks avx512bw, avx512cd, avx512dq, avx512f, avx512vl" in unavailable(toy)
    assert not cache.exists()  # nothing was built or run

    monkeypatch.setenv("ARBORDRAFT_ISA", "avx2")
    assert build.Build("avx2", toy.source, toy.root)


def test_arm_features_are_recognised(cache, toy, monkeypatch):
    """ARM lists its features under another name than x86; fast bfloat16 products need all of them."""
    monkeypatch.setattr(machine, "cpu", lambda: {"Features": "fp asimd asimddp"})
    assert build.Build("neon_dot", toy.source, toy.root)
    with pytest.raises(build.Unavailable, match="this CPU lacks bf16, i8mm, which ARBORDRAFT_ISA=neon_bf16 asks for"):
        build.Build("neon_bf16", toy.source, toy.root)
    assert not native.fast_bfloat16()

    monkeypatch.setattr(machine, "cpu", lambda: {"Features": "fp asimd asimddp i8mm bf16"})
    assert build.Build("neon_bf16", toy.source, toy.root)
    assert native.fast_bfloat16()


@pytest.mark.skipif(not build._X86, reason="names instruction sets of x86")
@pytest.mark.parametrize("isa", ["amx_bf16", "avx512_bf16", "avx512", "avx_vnni", "avx2", "generic"])
def test_isa_reaches_the_compiler(cache, tmp_path, monkeypatch, isa):
    if not machine.NEEDED_BY[isa] <= set(machine.cpu()["flags"].split()):
        pytest.skip("this CPU lacks it")
    monkeypatch.setenv("ARBORDRAFT_ISA", isa)
    toy = write_toy(tmp_path / "toy", source=MACROS)
    assert toy.load()
    library = ctypes.CDLL(str(cache / key(toy, isa) / build.LIBRARY))
    macros = (library.amx_bf16, library.avx512_bf16, library.avx512, library.avx2, library.fast_math)
    expected = {
        "amx_bf16": (1, 1, 1, 1, 0),
        "avx512_bf16": (0, 1, 1, 1, 0),
        "avx512": (0, 0, 1, 1, 0),
        "avx_vnni": (0, 0, 0, 1, 0),
        "avx2": (0, 0, 0, 1, 0),
        "generic": (0, 0, 0, 0, 0),
    }
    assert tuple(macro() for macro in macros) == expected[isa]


def test_off_gives_no_warning_and_can_be_undone(cache, toy, monkeypatch):
    monkeypatch.setenv("ARBORDRAFT_ISA", "off")
    with warnings.catch_warnings(action="error"):
        assert not toy.load()
        assert "ARBORDRAFT_ISA=off" in toy.problem()
        assert not cache.exists()
        monkeypatch.delenv("ARBORDRAFT_ISA")
        assert toy.load()


def test_windows_is_reported_as_unsupported(cache, toy, monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Windows" in unavailable(toy)


def test_cache_that_cannot_be_written(cache, toy, monkeypatch):
    cache.parent.write_text("a file where the folder should be")
    with pytest.warns(NativeKernelsNotCached, match=r"every process builds.*set ARBORDRAFT_CACHE") as caught:
        assert [toy.load() for _ in range(3)] == [True] * 3
    assert len(caught) == 1
    with pytest.warns(NativeKernelsNotCached):
        assert again(toy).load()


def test_no_home_folder(toy, monkeypatch, cache):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.warns(NativeKernelsNotCached, match="home directory"):
        assert toy.load()


@pytest.mark.parametrize(
    "damage",
    [
        lambda library: os.truncate(library, 100),
        lambda library: os.truncate(library, library.stat().st_size * 2 // 3),  # loading it would kill the process
        lambda library: library.write_bytes(b""),
        lambda library: library.write_bytes((b := b"no library") + build.hashlib.sha256(b).digest()),
    ],
    ids=["no-header", "half", "empty", "sealed-rubbish"],
)
def test_damaged_library_is_rebuilt(cache, toy, tmp_path, damage):
    # The library must not be loaded yet: the loader would take a new file of that name for the open one.
    builder = build.Build("native", toy.source, toy.root)
    library = cache / builder.key / build.LIBRARY
    library.parent.mkdir(parents=True)
    os.replace(builder._compile(tmp_path, log=None), library)
    damage(library)
    assert toy.load()
    assert ctypes.CDLL(str(library)).answer() == 42


def test_key_changes_with_every_input_of_the_build(cache, toy, monkeypatch):
    keys = [key(toy), key(toy, "generic")]
    (toy.root / "unrelated.py").write_text("")
    assert key(toy) == keys[0]

    (toy.root / "answer.h").write_text("#define ANSWER 43\n")
    keys.append(key(toy))
    (toy.root / "below").mkdir()
    (toy.root / "below" / "new.h").write_text("")
    keys.append(key(toy))
    for where, name, other in [
        (torch, "__version__", "0.0"),
        (build, "_compiler", lambda: (["g++"], "g++ 99")),
        (build, "cpu", lambda: {"model name": "Z80"}),
        (torch, "compiled_with_cxx11_abi", lambda: not torch._C._GLIBCXX_USE_CXX11_ABI),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(where, name, other)
            keys.append(key(toy))
    assert len(set(keys)) == len(keys) == 8
    assert key(toy) == keys[3]


def test_source_change_is_built(cache, toy, tmp_path):
    assert toy.load()
    changed = write_toy(tmp_path / "toy", answer=7)
    assert changed.load()
    assert ctypes.CDLL(str(cache / key(changed) / build.LIBRARY)).answer() == 7


def fork(target, *arguments) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    return process


def test_two_processes_at_once(cache, toy, tmp_path, monkeypatch):
    """Each compiler waits until the other one runs, so neither process can find the other's library."""
    both = f'touch {tmp_path}/$$.up; while [ $(ls {tmp_path}/*.up | wc -l) -lt 2 ]; do sleep 0.02; done; exec g++ "$@"'
    wrapper = script(tmp_path / "cxx", f'if [ "$1" = --version ]; then exec g++ --version; fi; {both}')
    monkeypatch.setenv("CXX", wrapper)
    processes = [fork(lambda: os._exit(0 if toy.load() else 1)) for _ in range(2)]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert files(cache) == [cache / key(toy) / build.LIBRARY]
    assert list(cache.glob(".*")) == []


def test_a_killed_build_does_not_block_the_next(cache, toy, tmp_path, monkeypatch):
    half = 'while [ "$1" != -o ]; do shift; done; echo half > "$2"; exec sleep 60'
    slow = script(tmp_path / "cxx", f'[ "$1" = --version ] && exec g++ --version\n{half}')
    with monkeypatch.context() as patch:
        patch.setenv("CXX", slow)
        process = fork(lambda: (os.setsid(), toy.load()))
        deadline = time.monotonic() + 60
        while not (parts := list(cache.glob(".build-*/*.o"))) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.join()
    remains = parts[0].parent

    assert toy.load()
    assert remains.exists()  # it might belong to a running build
    os.utime(remains, (0, time.time() - build.SCRATCH_LIFE - 1))
    assert write_toy(tmp_path / "toy", answer=7).load()
    assert not remains.exists()


def test_threads_try_once(cache, toy, monkeypatch):
    tries, answers, try_ = [], [], Extension._try

    def slow_try(*arguments):
        tries.append(arguments)
        time.sleep(0.1)
        return try_(*arguments)

    monkeypatch.setattr(Extension, "_try", slow_try)
    threads = [threading.Thread(target=lambda: answers.append(toy.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4
    assert len(tries) == 1


def test_forked_child_can_load(cache, toy):
    """The parent's library stays usable, and a lock that a thread of the parent held is released in the child."""
    assert toy.load()
    library = ctypes.CDLL(str(cache / key(toy) / build.LIBRARY))
    with native._kernels._lock:
        process = fork(lambda: os._exit(library.answer() * toy.load() * native._kernels._lock.acquire(timeout=5)))
        process.join(30)
    assert process.exitcode == 42


def test_a_build_is_announced_on_an_enabled_log(cache, toy, caplog, capsys):
    with caplog.at_level("INFO", logger="arbordraft"):
        assert toy.load()
    begun, ended = (record.getMessage() for record in caplog.records)
    assert begun == "building CPU kernels, once per machine (30 to 60 s) ..."
    assert re.fullmatch(r"building CPU kernels, once per machine \(30 to 60 s\): \d+\.\d s", ended)
    assert capsys.readouterr() == ("", "")


def test_a_build_is_announced_on_stderr_without_an_enabled_log(cache, toy, capsys, monkeypatch):
    monkeypatch.setattr(progress, "MIN_DURATION", 0.01)
    assert toy.load()
    shown, said = capsys.readouterr()
    assert shown == ""
    assert said.startswith("arbordraft: building CPU kernels, once per machine (30 to 60 s) ...\n")


def test_a_log_level_above_info_silences_the_announcement(cache, toy, caplog, capsys, monkeypatch):
    monkeypatch.setattr(progress, "MIN_DURATION", 0.01)
    with caplog.at_level("WARNING", logger="arbordraft"):
        assert toy.load()
    assert (caplog.records, capsys.readouterr()) == ([], ("", ""))


def test_a_quick_build_is_not_announced(cache, toy, capsys, monkeypatch):
    monkeypatch.setattr(progress, "MIN_DURATION", 60.0)
    assert toy.load()
    assert capsys.readouterr() == ("", "")


def test_load_waits_for_the_background_build(cache, toy, monkeypatch):
    tries, begun, go_on, try_ = [], threading.Event(), threading.Event(), Extension._try

    def slow_try(*arguments):
        tries.append(threading.current_thread())
        begun.set()
        go_on.wait(10)
        return try_(*arguments)

    monkeypatch.setattr(Extension, "_try", slow_try)
    toy.load_in_background()
    assert begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    assert toy.load()
    toy.load_in_background()  # already built
    assert len(tries) == 1
    assert tries[0] is not threading.current_thread()


def test_a_failed_background_build_warns_at_the_next_load(cache, toy, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    toy.load_in_background()
    assert "no-such-compiler" in unavailable(toy)


def test_a_failure_after_loading_makes_the_kernels_unavailable(cache, toy):
    called = []
    toy.loaded = called.append
    assert toy.load()
    assert called == [False]

    def raises(forked):
        raise RuntimeError("this CPU is on fire")

    toy.loaded = raises
    assert "this CPU is on fire" in unavailable(again(toy))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_one_openmp_runtime(cache, toy):
    """Runs in a fresh process, since other tests may load libraries that bring a runtime along."""
    assert toy.load()
    library = cache / key(toy) / build.LIBRARY
    program = f"""
import ctypes, re, torch
from arbordraft.kernels import machine
from arbordraft.kernels.native import Extension
from pathlib import Path
toy = Extension(Path({str(toy.source)!r}), Path({str(toy.root)!r}), lambda forked: None)
assert toy.load(), toy.problem()
toy = ctypes.CDLL({str(library)!r})
torch.set_num_threads(3)
assert toy.threads() == 3, f"torch asked for 3 threads, not {{toy.threads()}}"
print(*{{name for name in Path("/proc/self/maps").read_text().split() if re.search("lib(g|i)?omp[^/]*$", name)}})
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) == 1, run.stdout
    content = library.read_bytes()
    assert b"GOMP_parallel" in content or b"__kmpc_fork_call" in content  # it has a parallel region
    assert not any(name in content for name in (b"libgomp.so", b"libomp.so", b"libiomp5.so"))  # and links no runtime


def test_sources_are_part_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for path in (ROOT / "kernels").rglob("*"):
        if path.suffix in (".h", ".cpp"):
            package = ".".join(["arbordraft", *path.parent.relative_to(ROOT).parts])
            assert package in settings["packages"], path
            assert any(fnmatch.fnmatch(path.name, pattern) for pattern in settings["package-data"]["*"]), path
