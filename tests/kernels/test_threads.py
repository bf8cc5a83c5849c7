"""More threads than processors cause one warning."""

import os
import subprocess
import sys

import pytest
import torch

from arbordraft.kernels.native import threads

OWN = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


LIMITS = {
    "none": ({}, 64),
    "no limit": ({"cpu.max": "max 100000\n"}, 64),
    "whole": ({"cpu.max": "300000 100000\n"}, 3),
    "a half more": ({"cpu.max": "250000 100000\n"}, 3),
    "below one": ({"cpu.max": "20000 100000\n"}, 1),
    "above": ({"cpu.max": "9900000 100000\n"}, 64),
    "odd": ({"cpu.max": "what\n"}, 64),
    "no limit, v1": ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
    "whole, v1": ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    "half of v1": ({"cpu/cpu.cfs_quota_us": "400000\n"}, 64),
}


@pytest.mark.parametrize(("files", "expected"), LIMITS.values(), ids=LIMITS)
def test_processors_of_a_container(monkeypatch, tmp_path, files, expected):
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert threads.usable_processors(tmp_path) == expected


@pytest.mark.parametrize(("usable", "told"), [(1, True), (2, True), (3, False), (4, False)])
def test_more_threads_than_processors(monkeypatch, usable, told):
    monkeypatch.setattr(threads, "usable_processors", lambda: usable)
    torch.set_num_threads(3)
    notice = threads.too_many_threads()
    assert (notice is not None) == told
    if notice:
        assert f"set OMP_NUM_THREADS={usable}" in str(notice)


def test_too_many_threads_give_one_warning(kernels):
    code = f"""
import torch
from arbordraft.kernels import native
torch.set_num_threads({OWN + 1})
for _ in range(3):
    native.load()
    native.problem()
"""
    run = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.count("TooManyThreads") == 1
