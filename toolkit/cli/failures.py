"""Ends commands: prints errors in one line, sets the exit status, holds back logs of other packages."""

import contextlib
import errno
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from types import FrameType
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from arbordraft.utils.errors import UserError

TRACEBACK = "ARBORDRAFT_TRACEBACK"  # environment variable: 1 prints the tracebacks of errors
_RECORDS = 1000  # log records of other packages that are kept for the report of an error
_FORMAT = logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s")
_INPUT = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
_PLACES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_USAGE: Any = typer.BadParameter.__base__  # typer brings its own click, or uses the one that is installed
_FOR_USERS = (UserError, ValueError, FloatingPointError, ImportError, OSError)  # any other error is a bug


class Terminated(KeyboardInterrupt):
    """Raised on SIGTERM, which ends a command as Ctrl-C does."""


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Runs a command and turns its failure into one line on stderr and an exit status.

    The status is 2 for wrong input, 1 for any other error, 130 for SIGINT and 143 for SIGTERM. For a bug, the line
    names the file that holds the traceback and earlier logs of other packages.
    """
    with _interruptible(), _quiet() as noise:
        try:
            yield
            return
        except typer.Exit as done:
            status, message = done.exit_code, ""
        except (KeyboardInterrupt, typer.Abort, SystemExit) as stop:
            cause = stop.__context__ if isinstance(stop, SystemExit) else stop  # Lightning ends with 1 after Ctrl-C
            if not isinstance(cause, (KeyboardInterrupt, typer.Abort)):
                raise
            status, message = (143, "terminated") if isinstance(cause, Terminated) else (130, "interrupted")
        except BrokenPipeError:  # as with `| head`; the rest is flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status, message = 1, ""
        except Exception as error:
            status, message = _status(error), _line(error, noise)
    if message:
        print_error(message)
    sys.exit(status)


def print_error(message: str) -> None:
    """Prints a message as one red line on stderr."""
    Console(stderr=True, soft_wrap=True).print(Text(" ".join(message.split()), style="red"))


def _status(error: Exception) -> int:
    wrong = isinstance(error, (ValueError, _USAGE, *_PLACES)) or getattr(error, "errno", None) in _INPUT
    return 2 if wrong else 1


def _line(error: Exception, noise: list[logging.LogRecord]) -> str:
    """Describes an error; for a bug, writes its traceback and earlier logs to a file and names that file."""
    shown = bool(os.environ.get(TRACEBACK))
    if shown:
        traceback.print_exception(error)
    if isinstance(error, _USAGE):
        message, context = error.format_message(), error.ctx  # without a message it is a group's help
        help_of = f" (see: {context.command_path} --help)" if context is not None else ""
        return f"error: {message}{help_of}" if message else ""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"error: {error.filename}: {error.strerror}"
    if isinstance(error, _FOR_USERS) and str(error):
        return f"error: {error}"
    line = f"error: {type(error).__name__}{': ' if str(error) else ''}{error}"
    if shown:
        return line
    try:
        with tempfile.NamedTemporaryFile("w", prefix="arbordraft-", suffix=".log", delete=False) as file:
            file.writelines(f"{_FORMAT.format(record)}\n" for record in noise)
            file.writelines(traceback.format_exception(error))
    except OSError:
        return f"{line} ({TRACEBACK}=1 shows where)"
    return f"{line} (traceback: {file.name}, or {TRACEBACK}=1)"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Makes SIGTERM raise as Ctrl-C does inside the block, and restores both handlers after it."""

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # other threads may not set handlers
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _quiet() -> Iterator[list[logging.LogRecord]]:
    """Hides progress bars, logs and warnings of other packages; shows ours, one line each."""
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    noise = BufferingHandler(_RECORDS)

    def warned(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        frame: FrameType | None = sys._getframe(1)  # `filename` is often that of a caller of the module that warns
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        if frame is not None and str(frame.f_globals.get("__name__")).startswith("arbordraft"):
            logging.getLogger("arbordraft").warning(" ".join(str(message).split()))
        else:
            logging.getLogger().warning(warnings.formatwarning(message, category, filename, lineno).rstrip())

    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")  # its import would add a log handler
    handlers: dict[str, Any] = {name: [noise] for name in ("", "transformers", "huggingface_hub", "mlflow")}
    handlers["arbordraft"] = [logging.lastResort]
    with contextlib.ExitStack() as restored:
        for logger, chosen in ((logging.getLogger(name), chosen) for name, chosen in handlers.items()):
            restored.callback(setattr, logger, "handlers", logger.handlers)
            logger.handlers = chosen
        # transformers adds its own handler when it is imported, which happens later.
        theirs: Any = logging.getLogger("transformers")
        theirs.addHandler = lambda handler: None
        restored.callback(delattr, theirs, "addHandler")
        restored.callback(setattr, warnings, "showwarning", warnings.showwarning)
        warnings.showwarning = warned
        restored.callback(enable_progress_bars)
        disable_progress_bars()  # transformers asks for this once, when it is imported: loading shows no bars
        if (imported := sys.modules.get("transformers.utils.logging")) and imported.is_progress_bar_enabled():
            imported.disable_progress_bar()
            restored.callback(imported.enable_progress_bar)
        enable_progress_bars("huggingface_hub")  # downloads keep theirs: they take longest
        yield noise.buffer
