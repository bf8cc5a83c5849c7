"""Says on stderr which work takes long, and how long it took."""

import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator

LIVE_AFTER = 0.3  # seconds of work before a terminal shows it
MIN_DURATION = 2.0  # seconds of work before it is reported in lines that stay


class _Phase:
    def __init__(self, work: str, live: bool) -> None:
        self.work, self.live, self.begun, self.shown = work, live, time.monotonic(), False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun


class _Reporter:
    """Reports the innermost of all running phases, in a thread of its own while there is one."""

    def __init__(self) -> None:
        self._running: list[_Phase] = []  # in the order of their beginnings
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None

    def begin(self, own: _Phase) -> None:
        with self._condition:
            self._running.append(own)
            if self._thread is None:
                self._thread = threading.Thread(target=self._report, name="arbordraft-progress", daemon=True)
                self._thread.start()
            self._condition.notify()

    def end(self, own: _Phase) -> None:
        with self._condition:
            if own in self._running:  # else the process was forked meanwhile
                self._running.remove(own)
            if own.shown and (own.seconds >= MIN_DURATION or not _live(own)):
                _print(f"arbordraft: {own.work}: {own.seconds:.1f} s", keep=True)
            elif own.shown:
                _print("", keep=False)
            self._condition.notify()

    def _report(self) -> None:
        with self._condition:
            while self._running:
                last = self._running[-1]
                live = _live(last)
                if (waits := (LIVE_AFTER if live else MIN_DURATION) - last.seconds) <= 0:
                    if live:
                        _print(f"arbordraft: {last.work}: {last.seconds:.0f} s", keep=False)
                    elif not last.shown:
                        _print(f"arbordraft: {last.work} ...", keep=True)
                    last.shown = True
                self._condition.wait(waits if waits > 0 else 1.0)
            self._thread = None


def _live(shown: _Phase) -> bool:
    """Returns whether a terminal shows the passing seconds of some work."""
    return shown.live and sys.stderr is not None and sys.stderr.isatty()


_reporter = _Reporter()


def _renew() -> None:
    """Replaces the reporter in a forked child, which has no thread that reports."""
    global _reporter
    _reporter = _Reporter()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def phase(work: str, *, live: bool = True) -> Iterator[None]:
    """Reports some work on stderr once it has lasted two seconds, and its duration at the end.

    A terminal shows it from the first second, in a line that disappears if the work was short.

    Of nested phases, the innermost one is reported. Logs ``work`` and the duration at level INFO. If INFO is shown, or
    the level of the logger ``arbordraft`` was set, nothing else is reported: programs silence it that way.

    Args:
        work: a few words, such as ``reading weights``.
        live: show passing seconds in one line of a terminal, which must not be shared with other progress bars.
    """
    logger = logging.getLogger("arbordraft")
    logger.info("%s ...", work)
    own = _Phase(work, live)
    silent = logger.isEnabledFor(logging.INFO) or logger.level != logging.NOTSET or sys.stderr is None
    if not silent:
        _reporter.begin(own)
    try:
        yield
    finally:
        logger.info("%s: %.1f s", work, own.seconds)
        if not silent:
            _reporter.end(own)


def _print(line: str, *, keep: bool) -> None:
    """Writes a line, on a terminal over the last one unless that was kept."""
    if (stream := sys.stderr) is None:
        return
    with contextlib.suppress(OSError, ValueError):  # closed, which is no reason to fail
        begin = "\r\x1b[K" if stream.isatty() else ""
        if not keep:  # a wrapped line could not be erased
            line = line[: shutil.get_terminal_size().columns - 1]
        print(f"{begin}{line}", end="\n" if keep else "", file=stream, flush=True)


__all__ = ["LIVE_AFTER", "MIN_DURATION", "phase"]
