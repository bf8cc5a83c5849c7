"""Large freed blocks stay with the process, if the C library has a setting for that; servers collect less garbage."""

import gc
import subprocess
import sys

import pytest

from arbordraft.utils import allocator

FAULTS = """
import resource, statistics
import torch
from arbordraft.utils.allocator import keep_freed_memory

def typical():
    faults = []
    for turn in range(13):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(3 << 24).add_(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(faults)

print(typical())
assert keep_freed_memory()
print(typical())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_freed_memory_is_used_again():
    """Compares page faults of a tensor of 192 MB: by default as many as it has pages, with the setting almost none.

    Takes the median of several tensors, since a system that is short of memory may take pages away between them.
    """
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    by_default, kept = map(int, done.stdout.split())
    assert kept * 10 < by_default


@pytest.mark.parametrize(("platform", "library"), [("darwin", None), ("linux", object())])
def test_other_libraries_are_not_changed(monkeypatch, platform, library):
    monkeypatch.setattr(allocator.sys, "platform", platform)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    assert not allocator.keep_freed_memory()


def test_older_versions_get_a_lower_threshold(monkeypatch):
    taken = []

    class Old:
        @staticmethod
        def mallopt(setting, value):
            taken.append((setting, value))
            return int(setting != -3 or value <= 1 << 25)

    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: Old)
    assert allocator.keep_freed_memory()
    assert (-3, 1 << 25) in taken
    Old.mallopt = staticmethod(lambda setting, value: 0)
    assert not allocator.keep_freed_memory()


@pytest.fixture
def scanned():
    """A heap that garbage collection scans, as in a user's process; the test suite excludes its own."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_objects_are_excluded_from_collection_for_a_while(scanned):
    with allocator.heap_left_alone():
        excluded = gc.get_freeze_count()
        assert excluded > 10_000
        with allocator.heap_left_alone():
            pass
        assert gc.get_freeze_count() == pytest.approx(excluded, rel=0.01), "the block around it goes on"
    assert gc.get_freeze_count() == 0


def test_objects_that_a_process_excluded_itself_stay_so():
    gc.freeze()
    with allocator.heap_left_alone():
        pass
    assert gc.get_freeze_count() > 0
