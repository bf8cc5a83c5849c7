"""One line on stderr about what takes long, for whoever waits."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_line(what: str) -> Iterator[Callable[[float], None]]:
    """A function that tells of work that has taken some seconds: over and over in one line of a terminal, else once.

    The line of a terminal goes at the end. Logs ``what`` at level INFO; where that is shown, and where the level of the
    logger ``arbordraft`` was set, which is how a program asks for silence, the function does nothing.
    """
    logger = logging.getLogger("arbordraft")
    logger.info(what)
    if logger.isEnabledFor(logging.INFO) or logger.level != logging.NOTSET or sys.stderr is None:
        yield lambda _: None
        return
    stream, terminal, shown = sys.stderr, sys.stderr.isatty(), -1

    def tell(seconds: float) -> None:
        nonlocal shown
        if terminal and int(seconds) > shown:
            print(f"\rarbordraft: {what}: {seconds:.0f} s", end="", file=stream, flush=True)
        elif shown < 0:
            print(f"arbordraft: {what}", file=stream, flush=True)
        shown = int(seconds)

    try:
        yield tell
    finally:
        if terminal and shown >= 0:
            print("\r\x1b[K", end="", file=stream, flush=True)


__all__ = ["progress_line"]
