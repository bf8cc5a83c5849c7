"""The kernels on processors of other kinds, built with a cross compiler and without PyTorch.

An emulated processor has only the instructions of its model. A kernel that uses any other instruction crashes. Without
an emulator, programs whose instructions this machine has run on it. Nothing is timed.
"""

import platform
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from arbordraft.kernels import machine
from arbordraft.kernels.gumbel import gumbel_reference
from arbordraft.kernels.native import build
from arbordraft.kernels.recurrent_tree import ACTIVATIONS
from arbordraft.kernels.recurrent_tree.reference import gate_reference, scan_reference

MASK = 2**64 - 1
SEED = torch.tensor([0x9ABCDEF012345678 - 2**64])  # the driver's seed is unsigned
DRIVER = Path(__file__).with_name("emulated") / "main.cpp"
PACKAGES = "qemu-user g++ g++-aarch64-linux-gnu"  # of Debian and Ubuntu
HERE = platform.machine().lower()


class Processor(NamedTuple):
    compiler: str
    isa: str
    emulator: tuple[str, ...]

    @property
    def command(self) -> tuple[str, ...]:
        """The start of a command: empty if there is no emulator but this machine has the instructions."""
        native = HERE in self.compiler and machine.NEEDED_BY[self.isa] <= machine.cpu_features()
        return () if native and shutil.which(self.emulator[0]) is None else self.emulator

    @property
    def tools(self) -> tuple[str, ...]:
        return (self.compiler, *self.command[:1])


def x86(isa: str, cpu: str) -> Processor:
    return Processor("x86_64-linux-gnu-g++", isa, ("qemu-x86_64", "-cpu", cpu))


def arm(isa: str, cpu: str) -> Processor:
    return Processor("aarch64-linux-gnu-g++", isa, ("qemu-aarch64", "-cpu", cpu))


PROCESSORS = {
    "x86-avx2": x86("avx2", "max"),  # without AVX512, which the emulator does not support
    "arm-neon": arm("neon", "cortex-a72"),
    "arm-neon_dot": arm("neon_dot", "neoverse-n1"),
    "arm-neon_bf16": arm("neon_bf16", "max"),
}


def lacking(tools):
    return [tool for tool in tools if shutil.which(tool) is None]


def need(tools):
    if missing := lacking(tools):
        pytest.skip(f"no {', '.join(missing)}; on Debian: apt install {PACKAGES}")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Builds the programs of all processors that can run here, in parallel."""
    folder = tmp_path_factory.mktemp("emulated")
    flags = [*build.FLAGS, "-fopenmp", "-static", f"-I{build.KERNELS}"]
    running = {
        name: subprocess.Popen(
            [processor.compiler, *flags, *build.MACHINE_FLAGS[processor.isa], DRIVER, "-o", folder / name],
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, processor in PROCESSORS.items()
        if not lacking(processor.tools)
    }
    for name, process in running.items():
        said = process.communicate()[1]
        assert process.returncode == 0, f"{name}: {said}"
    return {name: folder / name for name in running}


def run(program: Path, emulator: tuple[str, ...], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*emulator, program, *options], capture_output=True, text=True, timeout=120, check=False)


def report(output: str) -> dict[str, list[str]]:
    return {words[0]: words[1:] for line in output.splitlines() if (words := line.split())}


def digest(numbers: torch.Tensor) -> str:
    """Hashes float64 or float32 numbers by FNV-1a, one word at a time."""
    found = 14695981039346656037
    for word in numbers.view(torch.int64 if numbers.dtype == torch.float64 else torch.uint32).tolist():
        found = (found ^ (word & MASK)) * 1099511628211 & MASK
    return f"{found:016x}"


def spread(*shape: int, salt: int) -> torch.Tensor:
    """Returns exact numbers from -2 to 2; see emulated/recurrent.h."""
    count = torch.Size(shape).numel()
    return (((torch.arange(count) * 7919 + salt * 104729) % 2001 - 1000).float() / 512).view(shape)


def recurrent_digest() -> str:
    """Computes the bits of emulated/recurrent.h by the references."""
    rows, heads, keys, values = 5, 2, 21, 19
    places = [torch.tensor(part) for part in ([0, 5], [0, -1, -2, -1, -2], [-2, -1, -2, -1, -1])]
    states = spread(1, heads, keys, values, salt=1)
    query, key = (spread(rows, 1, keys, salt=salt) for salt in (2, 3))
    value, steps = (spread(rows, heads, values, salt=salt) for salt in (4, 5))
    rates, beta = spread(heads, keys, values, salt=6), spread(rows, heads, salt=7)
    decays = steps.flatten()[: rows * heads].view(rows, heads)
    found = [gate_reference(steps, None, None, kind) for kind in range(len(ACTIVATIONS))]
    of_rows = states, *places, query, key, value
    found.append(scan_reference(*of_rows, decays, None, beta, 0.25, 1e-6, 1))
    found.append(scan_reference(*of_rows, steps, rates, None, 0.25, 0.0, 1))
    return digest(torch.cat([part.flatten() for part in found]))


@pytest.fixture(scope="module")
def reports(programs):
    return {name: run(program, PROCESSORS[name].command) for name, program in programs.items()}


@pytest.mark.parametrize("name", PROCESSORS)
def test_kernels_are_right_on_emulated_processors(name, reports):
    need(PROCESSORS[name].tools)
    done = reports[name]
    assert done.returncode == 0, done.stderr
    found = report(done.stdout)
    assert found["isa"] == [PROCESSORS[name].isa]
    assert found["failures"] == ["0"]
    if "arm-neon" in reports:  # which multiplies floats only
        plain = report(reports["arm-neon"].stdout)
        assert [*map(float, found["layers"])] == pytest.approx([*map(float, plain["layers"])], rel=1e-2, abs=1e-2)
    assert found["recurrent"] == [recurrent_digest()]
    assert found["noise"] == [digest(gumbel_reference(SEED, torch.tensor([77]), 1000)[0])]


@pytest.mark.parametrize("name", ["x86-avx2", "arm-neon_bf16"])
def test_every_check_can_fail(name, programs):
    need(PROCESSORS[name].tools)
    done = run(programs[name], PROCESSORS[name].command, "--fault")
    assert done.returncode == 1
    found = report(done.stdout)
    assert found["failures"] == found["checks"]


@pytest.mark.parametrize(
    ("name", "cpu"), [("x86-avx2", "qemu64"), ("arm-neon_dot", "cortex-a72"), ("arm-neon_bf16", "neoverse-n1")]
)
def test_an_older_processor_lacks_instructions(name, cpu, programs):
    """The build uses its instruction set, and the emulator of an older processor rejects it."""
    emulator = PROCESSORS[name].emulator[0]
    need([PROCESSORS[name].compiler, emulator])
    done = run(programs[name], (emulator, "-cpu", cpu))
    assert done.returncode < 0
    assert "failures" not in report(done.stdout)
