"""uvicorn server whose shutdown lets running answers end, or fails them with an error."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from arbordraft.utils.checks import check_float, check_int


class Server(uvicorn.Server):
    """Serves an app until SIGINT or SIGTERM.

    Then it answers 503 to new requests, lets running answers end for ``grace`` seconds, and fails the rest.
    A second SIGINT ends the wait.

    Args:
        app: result of :func:`~arbordraft.serving.app.build_app`.
        grace: seconds that running answers have to end.
        ready: called when clients can connect.
    """

    def __init__(self, app: FastAPI, *, grace: float = 30.0, ready: Callable[[], None] = lambda: None) -> None:
        # Clients keep idle connections for five seconds; the server must not close them first.
        timeouts = {"timeout_keep_alive": 30, "timeout_graceful_shutdown": 5}
        super().__init__(uvicorn.Config(app, log_level="warning", access_log=False, **timeouts))
        self._service, self._grace, self._ready = app.state.service, check_float("grace", grace, 0), ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to listen, then calls ``ready``."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends running answers while still listening, then stops listening."""
        await self._service.close(self._grace, lambda: self.force_exit)
        await super().shutdown(sockets)


def bound(host: str, port: int) -> socket.socket:
    """Binds a socket without listening, so that an early client is refused instead of left waiting.

    Args:
        host: name or address.
        port: 0 for any free port.

    Raises:
        ValueError: if the address cannot be used.
    """
    check_int("port", port, 0, 65535)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}; choose others") from error
    return listener


@contextmanager
def running(app: FastAPI, *, grace: float = 5.0) -> Iterator[tuple[Server, str]]:
    """Runs a server in a thread, at a free port of this machine, until the block ends.

    Args:
        app: result of :func:`~arbordraft.serving.app.build_app`.
        grace: seconds that running answers have to end.

    Yields:
        The server, which answers, and its URL.

    Raises:
        RuntimeError: if it does not start.
    """
    over = threading.Event()
    server = Server(app, grace=grace, ready=over.set)

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            over.set()

    with bound("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=run, name="arbordraft-server")
        thread.start()
        try:
            over.wait()
            if not server.started:
                raise RuntimeError("the server did not start; its log says why")
            yield server, url_of(listener)
        finally:
            server.should_exit = True
            thread.join()


def url_of(listener: socket.socket) -> str:
    """Returns the URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
