"""How a command of the command line ends: errors in one line, interrupts by their status, noise kept aside."""

import contextlib
import dis
import errno
import logging
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from types import FrameType
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

TRACEBACK = "ARBORDRAFT_TRACEBACK"  # set to 1, it shows where an error comes from
_LINES = 1000  # of noise that are kept for the case of an error
_INPUT = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)
_PLACES = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
_USAGE: Any = typer.BadParameter.__base__  # typer brings its own click, or uses the one that is installed


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends whatever goes on as Ctrl-C does."""


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Runs a command: whatever goes wrong inside ends in one line on stderr and an exit status.

    The status is 2 for wrong input, 1 for any other error, 130 for SIGINT and 143 for SIGTERM. Of an error that nobody
    foresaw the line says where its traceback is, together with the noise of other packages before it.
    """
    with _interruptible(), _quiet() as noise:
        try:
            yield
            return
        except typer.Exit as done:
            status, said = done.exit_code, ""
        except SystemExit as done:  # Lightning ends with 1 after an interrupt
            if not isinstance(done.__context__, KeyboardInterrupt):
                raise
            status, said = _interrupted(done.__context__)
        except (KeyboardInterrupt, typer.Abort) as stop:
            status, said = _interrupted(stop)
        except BrokenPipeError:  # as behind `| head`: nobody reads on, and the rest is flushed at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            status, said = 1, ""
        except Exception as error:
            status, said = _status(error), _line(error, noise)
    if said:
        Console(stderr=True, soft_wrap=True).print(Text(said, style="red"))
    sys.exit(status)


def _interrupted(stop: BaseException) -> tuple[int, str]:
    return (143, "terminated") if isinstance(stop, Terminated) else (130, "interrupted")


def _status(error: Exception) -> int:
    if isinstance(error, OSError):
        return 2 if error.errno in _INPUT or isinstance(error, _PLACES) else 1
    return 2 if isinstance(error, (ValueError, _USAGE)) or (isinstance(error, TypeError) and _ours(error)) else 1


def _line(error: Exception, noise: deque[str]) -> str:
    """What to say of an error, in one line."""
    if os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    if isinstance(error, _USAGE):
        message, context = error.format_message(), error.ctx
        if not message:  # a group without a command: its help is the message
            return ""
        help_of = f" (see: {context.command_path} --help)" if context is not None else ""
        return f"error: {_flat(message)}{help_of}"
    message = _flat(str(error))
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"error: {error.filename}: {error.strerror}"
    if _ours(error) and message:
        return f"error: {message}"
    return f"error: {type(error).__name__}{': ' if message else ''}{message}{_details(error, noise)}"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _ours(error: BaseException) -> bool:
    """Whether the message is meant for users: we raised it, or it is about what is not there."""
    if isinstance(error, ImportError) or (isinstance(error, OSError) and error.errno is None):
        return True
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or not str(place.tb_frame.f_globals.get("__name__", "")).startswith("arbordraft"):
        return False
    return place.tb_frame.f_code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]  # not a slip of our code


def _details(error: BaseException, noise: deque[str]) -> str:
    """Writes the traceback, and what other packages said before it, to a file; says where."""
    if os.environ.get(TRACEBACK):
        return ""
    text = "".join([*(f"{line}\n" for line in noise), *traceback.format_exception(error)])
    try:
        with tempfile.NamedTemporaryFile("w", prefix="arbordraft-", suffix=".log", delete=False) as file:
            file.write(text)
    except OSError:
        return f" ({TRACEBACK}=1 shows where)"
    return f" (traceback: {file.name}, or {TRACEBACK}=1)"


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM raises as Ctrl-C does; both are as before behind the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Noise(logging.Handler):
    """Keeps what other packages log."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))
        self.lines: deque[str] = deque(maxlen=_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@contextlib.contextmanager
def _quiet() -> Iterator[deque[str]]:
    """Keeps the load bars, logs and warnings of other packages off the screen; ours are shown, one line each."""
    from huggingface_hub.utils.tqdm import enable_progress_bars
    from transformers.utils import logging as theirs

    noise, package = _Noise(), logging.getLogger("arbordraft")
    theirs.get_logger()  # which gives it the handler that is taken away here
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")  # its import would bring a handler of its own
    loud = [logging.getLogger(name) for name in ("", "transformers", "huggingface_hub", "mlflow")]
    before, bars, show = [logger.handlers for logger in loud], theirs.is_progress_bar_enabled(), warnings.showwarning
    shown = [logging.lastResort] if logging.lastResort is not None else []

    def told(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        if _warner().startswith("arbordraft"):
            package.warning(_flat(str(message)))
        else:
            noise.lines.append(warnings.formatwarning(message, category, filename, lineno).rstrip())

    theirs.disable_progress_bar()
    enable_progress_bars()  # of downloads, which take longer than anything else
    for logger in loud:
        logger.handlers = [noise]
    package.handlers, ours = shown, package.handlers
    warnings.showwarning = told
    try:
        yield noise.lines
    finally:
        warnings.showwarning = show
        package.handlers = ours
        for logger, handlers in zip(loud, before, strict=True):
            logger.handlers = handlers
        if bars:
            theirs.enable_progress_bar()


def _warner() -> str:
    """The module that is just warning; the place that a warning names is often that of a caller."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") == "warnings":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))
