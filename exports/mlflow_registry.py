"""What exports do with MLflow's servers: take what a training registered, register what was logged, clean up behind."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.utils.mlflow_server import ALIASES, MODEL, NAMES, connect, limits, resolve_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient

TRAINING = "arbordraft.training_run"  # tag of runs, models and versions: the run that the drafter was trained in
_URI = "MLFLOW_TRACKING_URI"


def fetch_drafter(version: str, folder: str | os.PathLike[str], uri: str | None = None) -> tuple[Path, str]:
    """The drafter or decider that a training registered.

    Args:
        version: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        folder: where its files are put.
        uri: tracking server; by default as in :func:`log_decoder`.

    Returns:
        Its folder, and the id of the run that it was trained in.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if it names no version.
        Exception: whatever MLflow raises, if the server does not answer or knows no such version.
    """
    match = re.fullmatch(r"models:/([^/@]+)(?:@([\w-]+)|/(\d+))", version)
    if match is None:
        raise ValueError(f"{version} names no version; write models:/NAME@ALIAS or models:/NAME/VERSION")
    model, alias, number = match.groups()
    with server(uri) as (mlflow, client):
        entry = client.get_model_version_by_alias(model, alias) if alias else client.get_model_version(model, number)
        return Path(mlflow.artifacts.download_artifacts(source_of(client, entry), dst_path=str(folder))), entry.run_id


def source_of(client: "MlflowClient", entry: Any) -> str:
    """Where the files of a version lie; of ``models:/`` MLflow would ask the global server instead of ours."""
    logged = entry.tags.get(MODEL)
    return str(client.get_logged_model(logged).artifact_location if logged else entry.source)


def check_names(registered_model: str | None, alias: str) -> None:
    """Raises ValueError for names that MLflow would refuse, after everything else was done."""
    if registered_model is not None and not re.fullmatch(NAMES, registered_model):
        raise ValueError(f"registered_model may hold letters, digits, '_', '-', '.', ' ', not {registered_model!r}")
    if not re.fullmatch(ALIASES, alias):
        raise ValueError(f"an alias consists of letters, digits, '_' and '-', and is no version: {alias!r}")


@contextlib.contextmanager
def server(uri: str | None) -> Iterator["tuple[Any, MlflowClient]"]:
    """MLflow, whose functions talk to this server inside the block and to the user's again behind it; and a client.

    Raises:
        ImportError: if MLflow is not installed.
    """
    try:
        import mlflow
    except ImportError as error:
        raise ImportError(f"MLflow cannot be imported ({error}); run: pip install 'arbordraft[mlops]'") from error
    place, before = resolve_uri(uri), os.environ.get(_URI)  # which MLflow keeps in step with what it was told last
    mlflow.set_tracking_uri(place)
    try:
        with limits():
            yield mlflow, connect(place)
    finally:
        mlflow.set_tracking_uri(None)  # its own getter would make the default a choice
        if before is not None:
            os.environ[_URI] = before


@contextlib.contextmanager
def all_or_nothing(client: "MlflowClient", experiment: str, run: str) -> Iterator[list[Callable[[], object]]]:
    """Leaves no model of a run behind if the block fails; gives a list of what else has to be undone then."""
    undo: list[Callable[[], object]] = []
    try:
        yield undo
    except BaseException:
        for step in reversed(undo):
            with contextlib.suppress(Exception):  # the first error is the one to tell
                step()
        with contextlib.suppress(Exception):
            for model in client.search_logged_models([experiment], f"source_run_id = '{run}'"):
                client.delete_logged_model(model.model_id)
        raise


def training_models(client: "MlflowClient", run: str | None) -> list[Any]:
    """The models that a training logged, as inputs of another run; raises ValueError if there is no such run."""
    from mlflow import MlflowException
    from mlflow.entities import LoggedModelInput

    if run is None:
        return []
    try:
        outputs = client.get_run(run).outputs
    except MlflowException as error:
        raise ValueError(f"the server knows no training run {run!r} ({error}); name it as MLflow shows it") from error
    return [LoggedModelInput(output.model_id) for output in (outputs.model_outputs if outputs else [])]


def register(
    client: "MlflowClient",
    name: str,
    alias: str,
    info: Any,
    run: str,
    tags: dict[str, str],
    undo: list[Callable[[], object]],
) -> str:
    """A version of the registered model; the alias comes last, so that nobody finds it half finished."""
    from mlflow import MlflowException

    with contextlib.suppress(MlflowException):  # it exists; any other trouble shows in the next line
        client.create_registered_model(name)
        undo.append(lambda: client.delete_registered_model(name))
    client.get_registered_model(name)
    made = client.create_model_version(
        name,
        client.get_logged_model(info.model_id).artifact_location,
        run,
        tags={MODEL: info.model_id, **tags},
        await_creation_for=0,
        model_id=info.model_id,
    )
    undo.append(lambda: client.delete_model_version(name, str(made.version)))
    client.set_registered_model_alias(name, alias, str(made.version))
    return str(made.version)
