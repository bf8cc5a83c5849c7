"""MLflow for trainings and exports: its server, time limits, valid names and model versions."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.utils.files import check_writable

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"  # MLflow's own default, which `mlflow server` shows without options
CANDIDATE = "candidate"  # alias of the latest version that a training or an export registered


def resolve_uri(uri: str | None) -> str:
    """Returns the given tracking server, else ``MLFLOW_TRACKING_URI``, else a database in the working folder."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def import_mlflow() -> Any:
    """Returns the ``mlflow`` module; raises ImportError with the command that installs it."""
    try:
        import mlflow
    except ImportError as error:
        raise ImportError(f"MLflow cannot be imported ({error}); run: pip install 'arbordraft[mlops]'") from error
    return mlflow


def check_names(registered_model: str | None, alias: str = CANDIDATE) -> None:
    """Raises ValueError for names that MLflow would refuse only at the end of the work."""
    if registered_model is not None and not re.fullmatch(r"\w[\w .-]*", registered_model):
        raise ValueError(f"registered_model may hold letters, digits, '_', '-', '.', ' ', not {registered_model!r}")
    if not re.fullmatch(r"(?i:(?!v\d+$|latest$)[\w-]+)", alias):
        raise ValueError(f"an alias consists of letters, digits, '_' and '-', and is no version: {alias!r}")


def check_store(uri: str) -> None:
    """Opens a local database to detect errors at once, which MLflow would retry for 100 s.

    Raises:
        ValueError: if the file is no database.
        WriteError: if the file cannot be written.
    """
    database = uri.partition("sqlite:///")[2].partition("?")[0]
    if database and not database.startswith((":", "file:")):
        check_writable(database)
        Path(database).parent.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(database)) as opened:
                opened.execute("PRAGMA schema_version")
        except sqlite3.Error as error:
            raise ValueError(f"{database} is no database of MLflow ({error}); name another with --uri") from error


def register(
    client: MlflowClient, name: str, alias: str, model_id: str, run: str, tags: Mapping[str, str] | None = None
) -> str:
    """Registers a logged model as a version of a registered one; a failure leaves no version.

    Returns:
        The number of the version. Its alias is set last, so that the alias never finds an unfinished version.
    """
    from mlflow import MlflowException

    with contextlib.ExitStack() as undo:
        with contextlib.suppress(MlflowException):  # it exists; any other error shows in the next line
            client.create_registered_model(name)
            undo.callback(_try, client.delete_registered_model, name)
        client.get_registered_model(name)
        model = client.get_logged_model(model_id)
        # The source is a location: a database would look `models:/m-...` up on the global server, not on this one.
        made = client.create_model_version(
            name, model.artifact_location, run, dict(tags or {}), await_creation_for=0, model_id=model_id
        )
        version = str(made.version)
        undo.callback(_try, client.delete_model_version, name, version)
        _note_version(client, model_id, name, made.version)
        client.set_registered_model_alias(name, alias, version)
        undo.pop_all()
    return version


def _note_version(client: MlflowClient, model_id: str, name: str, version: Any) -> None:
    """Tags a logged model with its version, as a server does by itself and a database does not."""
    known = json.loads(client.get_logged_model(model_id).tags.get("mlflow.modelVersions", "[]"))
    if (name, str(version)) not in [(entry["name"], str(entry["version"])) for entry in known]:
        known.append({"name": name, "version": version})
        client.set_logged_model_tags(model_id, {"mlflow.modelVersions": json.dumps(known)})


def _try(undo: Any, *arguments: str) -> None:
    with contextlib.suppress(Exception):  # the first error is the one to report
        undo(*arguments)


@contextlib.contextmanager
def server(uri: str | None) -> Iterator[tuple[Any, MlflowClient]]:
    """Yields MLflow, which uses this server inside the block and the user's own afterwards, and a client.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if the file of a local database is no database.
        WriteError: if that file cannot be written.
    """
    mlflow, place, before = import_mlflow(), resolve_uri(uri), os.environ.get("MLFLOW_TRACKING_URI")
    check_store(place)
    mlflow.set_tracking_uri(place)  # also sets the environment variable
    try:
        with limits():
            yield mlflow, mlflow.MlflowClient(place)
    finally:
        mlflow.set_tracking_uri(None)  # restoring from its getter would fix the default
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def fetch_drafter(version: str, folder: str | os.PathLike[str], uri: str | None = None) -> tuple[Path, str]:
    """Downloads a drafter or decider that a training registered.

    Args:
        version: ``models:/NAME@ALIAS`` or ``models:/NAME/VERSION``.
        folder: where its files are written.
        uri: tracking server; by default ``$MLFLOW_TRACKING_URI``, or else ``sqlite:///mlflow.db``.

    Returns:
        Its folder, and the id of the run that it was trained in.

    Raises:
        ImportError: if MLflow is not installed.
        ValueError: if ``version`` names no version.
        Exception: errors of MLflow, if the server does not answer or knows no such version.
    """
    with server(uri) as (mlflow, client):
        entry = _version_named(client, version)
        return Path(mlflow.artifacts.download_artifacts(entry.source, dst_path=str(folder))), entry.run_id


def find_drafter(version: str, uri: str | None = None) -> str:
    """Returns where the files of a version lie, which never change; arguments and errors as :func:`fetch_drafter`."""
    with server(uri) as (_, client):
        return str(_version_named(client, version).source)


def _version_named(client: MlflowClient, version: str) -> Any:
    match = re.fullmatch(r"models:/([^/@]+)(?:@([\w-]+)|/(\d+))", version)
    if match is None:
        raise ValueError(f"{version} names no version; write models:/NAME@ALIAS or models:/NAME/VERSION")
    model, alias, number = match.groups()
    return client.get_model_version_by_alias(model, alias) if alias else client.get_model_version(model, number)


def reason(error: BaseException) -> str:
    """Returns an error as one short line, without credentials in URIs."""
    text = public(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= 300 else text[:299] + "…"


def public(text: str) -> str:
    """Returns the text without the credentials in its URIs."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


@contextlib.contextmanager
def explained(uri: str | None) -> Iterator[None]:
    """Turns errors of a server that does not know a name or does not answer into one line.

    Args:
        uri: tracking server, as for :func:`resolve_uri`.

    Raises:
        ValueError: for a name that the server does not know.
        ConnectionError: if the server does not answer.
    """
    try:
        yield
    except Exception as error:
        code, place = getattr(error, "error_code", None), public(resolve_uri(uri))
        if code == "RESOURCE_DOES_NOT_EXIST":
            raise ValueError(f"{place} does not have it: {getattr(error, 'message', error)}") from error
        if code is not None and isinstance(error.__context__, OSError):  # as those of requests are
            raise ConnectionError(
                f"the tracking server {place} does not answer ({reason(error.__context__)}): start it, or name another "
                "with --uri or MLFLOW_TRACKING_URI"
            ) from error
        raise


@contextlib.contextmanager
def limits(retries: int = 0, timeout: int | None = None) -> Iterator[None]:
    """Bounds the waiting for a server inside the block, unless the user's environment sets these bounds.

    Args:
        retries: retries of a failed request. MLflow's own seven take minutes, and may repeat a request that succeeded.
        timeout: seconds until an unanswered request counts as failed; by default MLflow's own.
    """
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries)}
    if timeout is not None:
        settings["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout)
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
