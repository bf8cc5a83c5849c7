"""Runs the tests of the Triton kernels in a separate process: the interpreter cannot be switched on later."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("cases", ["not soak", pytest.param("soak", marks=pytest.mark.soak)])
def test_triton_kernels_in_the_interpreter(cases):
    command = [sys.executable, "-m", "pytest", "-q", "-m", cases, "-p", "no:cacheprovider", "-p", "no:xdist"]
    command.append(str(FOLDER))
    found = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert "skipped" not in found.stdout
