"""Signals that wait until a training can be saved."""

import logging
import signal
import threading
from types import FrameType
from typing import Any

_LOG = logging.getLogger("arbordraft")


class DeferredSignals:
    """Holds back the first SIGINT or SIGTERM until :meth:`restore`; a second one takes effect at once.

    In a thread other than the main one, signals keep their effect.
    """

    def __init__(self) -> None:
        self.pending: tuple[int, FrameType | None] | None = None
        self._before: dict[int, Any] = {}

    def defer(self) -> None:
        """Begins to hold signals back."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        self.pending = None
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._hold)

    def restore(self) -> None:
        """Restores the handlers; calls the one of a signal that was held back, which usually raises."""
        pending, self.pending = self.pending, None
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        if pending is not None and callable(before.get(pending[0])):
            before[pending[0]](*pending)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self.pending is None:
            self.pending = number, frame
            _LOG.warning("saving the training after this step or validation; another signal ends it at once")
        else:
            self.restore()


__all__ = ["DeferredSignals"]
