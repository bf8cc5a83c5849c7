"""Shows one line on stderr about work that takes long."""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_line(what: str) -> Iterator[Callable[[float], None]]:
    """Yields a function that reports the seconds of some work: repeatedly in one line of a terminal, otherwise once.

    The line is erased from the terminal at the end. Logs ``what`` at level INFO. If INFO is shown, the function does
    nothing. It also does nothing if the level of the logger ``arbordraft`` was set: programs silence it that way.
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
