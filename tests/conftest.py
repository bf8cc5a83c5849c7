"""Settings of the whole suite: tests are deterministic, and small machines can run them."""

import gc

gc.disable()  # until the tests are collected; it would take a fifth of the time of imports and of the collection

import contextlib
import warnings
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import settings
from support.models import PAYS

from arbordraft import builders, loading
from arbordraft.deciders import CostAware
from arbordraft.kernels import native

settings.register_profile("arbordraft", derandomize=True, deadline=None, database=None)
settings.load_profile("arbordraft")


def pytest_configure(config):
    config.addinivalue_line("markers", "one_in(n): of the test's cases, all but one in n soak; see `thin`")


def thin(items):
    """Marks the cases that ``one_in(n)`` leaves to the soak.

    A case runs if the sum of its places along all parametrisations is a multiple of ``n``. So if one of them has ``n``
    or more values, each combination of the others has a case that runs.
    """
    places = defaultdict(dict)  # along each parametrisation of a test, by the values there
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is None:
            continue
        place = 0
        for axis, (names, *_) in enumerate(one.args for one in item.iter_markers("parametrize")):
            names = names.split(",") if isinstance(names, str) else names
            known = places[item.function, axis]
            place += known.setdefault(tuple(id(item.callspec.params[name.strip()]) for name in names), len(known))
        if place % mark.args[0]:
            item.add_marker(pytest.mark.soak)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items):
    """Runs long files first: at the end they would leave other workers idle.

    These are files that start processes, that soak, or that have many cases.
    """
    thin(items)
    yield  # pytest deselects
    waiting = {"ray", "runpy", "subprocess"}
    first = {
        item.path
        for item in items
        if item.get_closest_marker("soak") or waiting & vars(getattr(item, "module", None) or object).keys()
    }
    cases = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in first, -cases[item.path]))


def pytest_collection_finish(session):
    """Excludes the collected tests from garbage collection, which would take a tenth of all time."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def pytest_sessionfinish(session):
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _reproducible():
    """Sets one thread (tiny models are slower with more), and the same seed for every test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _quoted(monkeypatch):
    """Gives cost-aware decoders fixed costs: a measurement takes seconds and never gives the same costs twice."""
    for module in (builders, loading):
        monkeypatch.setattr(module, "known_costs", lambda *_, **__: PAYS)
    monkeypatch.setattr(loading, "cost_aware", lambda *_: CostAware(PAYS))


@pytest.fixture
def no_hub(monkeypatch):
    """Turns the Hub off, so that unknown names fail at once; without a network, requests take half a minute."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session", autouse=True)
def _native_problem():
    """Builds the native kernels before any test reads stderr, where a line announces the build."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", native.NativeKernelsUnavailable)
        return native.problem()


@pytest.fixture(scope="session")
def kernels(_native_problem):
    """Skips tests of the native kernels on machines that cannot build them."""
    if _native_problem:
        pytest.skip(_native_problem)


@pytest.fixture(scope="session")
def uri(tmp_path_factory):
    """Creates one MLflow database for all tests, which takes seconds; each test has its own experiment."""
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("mlflow")
    with contextlib.chdir(folder):  # MLflow puts artifacts below the folder in which a database is first used
        MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments()
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(scope="session")
def client(uri):
    """Returns the MLflow client of that database."""
    from mlflow import MlflowClient

    return MlflowClient(uri)


@pytest.fixture(scope="session")
def graphs(request, tmp_path_factory):
    """Returns exports by name; only one of the processes that run tests makes each."""
    from support.onnx_graphs import Graphs

    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # parallel workers have folders side by side
        folder = folder.parent
    folder /= "graphs"
    folder.mkdir(exist_ok=True)
    return Graphs(folder)
