"""What training and exports share about MLflow: which server, how long to wait for it, and names."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from arbordraft.utils.files import check_writable

if TYPE_CHECKING:
    from mlflow import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"  # MLflow's own default, so that a bare `mlflow ui` shows it
MODEL = "arbordraft.model"  # tag of a version with its logged model; MLflow's databases do not keep its model_id
NAMES, ALIASES = r"\w[\w .-]*", r"(?i:(?!v\d+$|latest$)[\w-]+)"  # of registered models and of their versions
CANDIDATE = "candidate"  # alias of a version that a training or an export has just registered


def resolve_uri(uri: str | None) -> str:
    """The given tracking server, or else that of ``MLFLOW_TRACKING_URI``, or else a file in the working folder."""
    return uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def connect(uri: str) -> MlflowClient:
    """A client of its own, which leaves alone what the user's code does through ``mlflow``.

    Raises:
        ValueError: if a local database is something else.
        WriteError: if it cannot be written.
    """
    from mlflow import MlflowClient

    database = uri.partition("sqlite:///")[2].partition("?")[0]
    if database and not database.startswith((":", "file:")):  # where this fails, MLflow would go on trying for 100 s
        check_writable(database)
        Path(database).parent.mkdir(parents=True, exist_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(database)) as opened:
                opened.execute("PRAGMA schema_version")
        except sqlite3.Error as error:
            raise ValueError(f"{database} is no database of MLflow ({error}); name another with --uri") from error
    return MlflowClient(uri)


def reason(error: BaseException) -> str:
    """An error in one short line, without the credentials that a URI may hold."""
    text = _public(" ".join(f"{type(error).__name__}: {error}".split()))
    return text if len(text) <= 300 else text[:299] + "…"


@contextlib.contextmanager
def explained(uri: str | None) -> Iterator[None]:
    """Says in a line for people what a server does not know, or that it does not answer.

    Args:
        uri: tracking server, as for :func:`resolve_uri`.

    Raises:
        ValueError: for a name that the server does not know.
        ConnectionError: if it does not answer.
    """
    try:
        yield
    except Exception as error:
        code, place = getattr(error, "error_code", None), _public(resolve_uri(uri))
        if code == "RESOURCE_DOES_NOT_EXIST":
            raise ValueError(f"{place} does not have it: {getattr(error, 'message', error)}") from error
        if code is not None and isinstance(error.__context__, OSError):  # as those of requests are
            raise ConnectionError(
                f"the tracking server {place} does not answer ({reason(error.__context__)}): start it, or name another "
                "with --uri or MLFLOW_TRACKING_URI"
            ) from error
        raise


def _public(text: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]*@", "", text)


@contextlib.contextmanager
def limits(timeout: int | None = None) -> Iterator[None]:
    """Bound the waiting for a server inside the block, as far as the user's environment does not.

    Args:
        timeout: seconds until an unanswered request counts as failed; by default as MLflow says.
    """
    # MLflow's own seven retries take minutes, and as they are blind, they would create runs twice.
    settings = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    if timeout is not None:
        settings["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(timeout)
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)
