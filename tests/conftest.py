"""Settings of the whole suite: deterministic, and kind to small machines."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("arbordraft", derandomize=True, deadline=None, database=None)
settings.load_profile("arbordraft")


@pytest.fixture(autouse=True)
def _reproducible():
    """One thread (tiny models are slower with more), and the same seed for every test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
