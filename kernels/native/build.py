"""Compiles the CPU kernels, once per machine, and keeps the library in the cache folder.

The compiler is called directly, not through `torch.utils.cpp_extension.load`. With one translation unit ninja has
nothing to schedule, and the ninja of a virtual environment that was not activated is not on the PATH. `load` also
guards its folder with a lock file: a killed build leaves the file there, and every later process waits for ever. Here
each build has a folder of its own, and only the finished library moves, atomically, to the cache. The module does not
import `cpp_extension` for torch's folders either: that imports setuptools, which alters the process and can be missing.
"""

import atexit
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from arbordraft.kernels.machine import ISA_VARIABLE, NEEDED_BY, cache_folder, cpu, cpu_features
from arbordraft.kernels.progress import phase

KERNELS = Path(__file__).resolve().parents[1]
SOURCE = Path(__file__).resolve().with_name("bindings.cpp")  # the one translation unit; it includes all others
TORCH = Path(torch.__file__).parent
LIBRARY = "arbordraft_native.so"

SCRATCH = ".build-"
SCRATCH_LIFE = 3600.0  # seconds after which a scratch folder belongs to a build that was killed
COMPILER_LIMIT = 1200.0  # seconds; far above the time on a busy machine, and below SCRATCH_LIFE
SEAL = hashlib.sha256().digest_size

# Without contraction: whether a product and a sum are fused must not depend on the code around them.
# Without trapping: floating-point exceptions would forbid computing both sides of a choice in vectors.
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-w"]
_X86 = platform.machine().lower() in ("x86_64", "amd64")
MACHINE_FLAGS = {
    "amx_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
    "avx512_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "avx512": ["-march=x86-64-v4"],
    "avx_vnni": ["-march=x86-64-v3", "-mavxvnni"],
    "avx2": ["-march=x86-64-v3"],
    "neon_bf16": ["-march=armv8.2-a+dotprod+i8mm+bf16"],
    "neon_dot": ["-march=armv8.2-a+dotprod"],
    "neon": ["-march=armv8-a"],
    "native": ["-march=native" if _X86 else "-mcpu=native"],
    "generic": ["-DARBORDRAFT_GENERIC"],
}
_MAC = sys.platform == "darwin"
_NOTICE = "building CPU kernels, once per machine (30 to 60 s)"


class Unavailable(Exception):
    """There is no native library for this process; the message says why and how to fix it."""


class Build:
    """Build of the library of `source` on this machine; `key` is a hash of everything that can change the library.

    Every .h and .cpp file below `root` is part of the source.
    """

    def __init__(self, isa: str, source: Path = SOURCE, root: Path = KERNELS):
        if sys.platform == "win32":
            raise Unavailable("they need the flags of GCC or Clang, which Windows lacks; use Linux, or WSL")
        if lacking := NEEDED_BY[isa] - cpu_features():
            names = ", ".join(sorted(lacking))
            raise Unavailable(f"this CPU lacks {names}, which {ISA_VARIABLE}={isa} asks for; unset the variable")
        self.source = source
        self.compiler, version = _compiler()
        self.flags = [*FLAGS, *(["-Xclang", "-fopenmp"] if _MAC else ["-fopenmp"])]
        self.flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *MACHINE_FLAGS[isa]]
        files = sorted(path for path in root.rglob("*") if path.suffix in (".h", ".cpp"))
        texts = {path.relative_to(root).as_posix(): path.read_bytes().hex() for path in files}
        parts = [texts, self.compiler, version, self.flags, torch.__version__, platform.machine(), cpu()]
        self.key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def load(self, load: Callable[[Path], None]) -> str | None:
        """Builds the library if needed, calls `load` with it, and returns why it could not be cached, or None.

        The library moves to the cache only after it was loaded, so every library in the cache is known to work.
        """
        try:
            kept = cache_folder() / "native" / self.key / LIBRARY
            with contextlib.suppress(OSError):  # a library that does not load is built again, once
                if _is_sealed(kept):
                    load(kept)
                    return None
            scratch = _scratch_folder(kept.parents[1])
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
            obstacle = str(error)
        else:
            with scratch as folder:
                load(library := self._compile(Path(folder), log=kept.with_name("build.log")))
                try:
                    kept.parent.mkdir(exist_ok=True)
                    os.replace(library, kept)
                except OSError as error:
                    return str(error)
            return None
        with tempfile.TemporaryDirectory(prefix="arbordraft-", ignore_cleanup_errors=True) as private:
            load(self._compile(Path(private), log=None))
        return obstacle

    def _compile(self, folder: Path, log: Path | None) -> Path:
        part, library = folder / "kernels.o", folder / LIBRARY
        headers = [f"-I{TORCH / 'include'}", f"-I{TORCH / 'include/torch/csrc/api/include'}"]
        compiling: list[str | Path] = [*self.flags, *headers, "-c", self.source, "-o", part]
        # No -fopenmp here: it would link the system's OpenMP runtime beside the one that torch brings along, and two
        # runtimes are two thread pools that compete for the cores. The symbols come from libtorch_cpu, which must stay
        # linked even if the linker finds no use of it.
        system = ["-undefined", "dynamic_lookup"] if _MAC else ["-Wl,--no-as-needed"]
        libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
        linking: list[str | Path] = ["-shared", part, *system, *libraries, "-o", library]
        with phase(_NOTICE):
            for arguments in (compiling, linking):
                self._run(arguments, folder, log)
        content = library.read_bytes()
        library.write_bytes(content + hashlib.sha256(content).digest())
        return library

    def _run(self, arguments: list[str | Path], folder: Path, log: Path | None) -> None:
        environment = os.environ | {"LC_ALL": "C", "TMPDIR": str(folder)}  # a killed compiler leaves its files there
        fix = f"install a newer g++, name another compiler in CXX, or set {ISA_VARIABLE}=off to do without"
        command = [*self.compiler, *arguments]
        try:
            status, text = _finished(command, environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"the compiler could not run ({error}); {fix}") from error
        if not status:
            return
        output = text.decode(errors="replace")
        where = ""
        if log:
            with contextlib.suppress(OSError):
                log.parent.mkdir(exist_ok=True)
                log.write_text(f"{shlex.join(map(str, command))}\n{output}")
                where = f" (all of its output: {log})"
        lines = [line for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror\b|undefined|(cannot|unable to) find", line)]
        output = "\n".join((errors or lines[-3:])[:3])
        raise Unavailable(f"{self.compiler[0]} failed{where}; {fix}. It said:\n{output}")


def _finished(command: list[str | Path], environment: dict[str, str]) -> tuple[int, bytes]:
    """Runs the compiler; kills it with all its processes if the wait ends early."""
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    atexit.register(kill)  # the waiting thread may be a daemon, which ends with the process
    try:
        output, _ = process.communicate(timeout=COMPILER_LIMIT)
        return process.returncode, output
    except BaseException:
        kill()
        process.wait()
        raise
    finally:
        atexit.unregister(kill)


def _scratch_folder(parent: Path) -> "tempfile.TemporaryDirectory[str]":
    """Creates a folder on the file system of the cache, since a library can only move atomically within one."""
    parent.mkdir(parents=True, exist_ok=True)
    for old in parent.glob(f"{SCRATCH}*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > SCRATCH_LIFE:
                shutil.rmtree(old, ignore_errors=True)
    return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=parent, ignore_cleanup_errors=True)


def _is_sealed(library: Path) -> bool:
    """Returns whether the file is whole: loading half a library can kill the process instead of raising."""
    content = library.read_bytes() if library.is_file() else b""
    return hashlib.sha256(content[:-SEAL]).digest() == content[-SEAL:]


def _compiler() -> tuple[list[str], str]:
    """Returns the command of the C++ compiler and the line that names its version."""
    chosen = os.environ.get("CXX")
    names = [chosen] if chosen else ["g++", "c++", "clang++"]
    for name in names:
        with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
            command = shlex.split(name)
            version = subprocess.run([*command, "--version"], capture_output=True, timeout=60, check=True).stdout
            return command, version.decode(errors="replace").splitlines()[0]
    fault = f"CXX={chosen!r} does not run" if chosen else f"there is no C++ compiler ({', '.join(names)}) on the PATH"
    raise Unavailable(f"{fault}; install g++ (Debian, Ubuntu: apt install g++) or name a compiler in CXX")
