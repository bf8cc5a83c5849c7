"""Middleware of the endpoints: limit on bodies, HEAD requests, and pages of other origins (CORS)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from arbordraft.serving.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Refuses bodies longer than ``most`` bytes.

    A long body is read to its end, since many clients read the response only then; none of it is kept.
    """

    def __init__(self, app: "ASGIApp", most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        length = 0

        async def limited() -> "Message":
            nonlocal length
            while True:
                message = await receive()
                length += len(message.get("body", b""))
                if length <= self.most:
                    return message
                if not message.get("more_body"):
                    raise ApiError(413, f"the body is longer than {self.most} bytes", code="body_too_large")

        await self.app(scope, limited, send)


class Head:
    """Answers HEAD requests as GET requests, without the body."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        async def send_head(message: "Message") -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope, send_all = {**scope, "method": "GET"}, send_head
            await self.app(scope, receive, send_all)
        else:
            await self.app(scope, receive, send)


def allowed(methods: str) -> str:
    """Returns the ``Allow`` header of an address, given the methods of its endpoint."""
    known = set(methods.split(", ")) | {"OPTIONS"}
    return ", ".join(sorted(known | {"HEAD"} if "GET" in known else known))


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Returns arguments of Starlette's ``CORSMiddleware`` that allow requests from these origins.

    Args:
        origins: such as ``http://localhost:3000``; ``*`` for all.

    Raises:
        TypeError: if ``origins`` is not a list of texts.
        ValueError: if an entry is not an origin.
    """
    if isinstance(origins, str) or not all(isinstance(origin, str) for origin in origins):
        raise TypeError(f"cors must be a list of origins, got {origins!r}")
    for origin in origins:
        parts = urlsplit(origin)
        if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}".lower()):
            raise ValueError(f"cors: {origin!r} is no origin: write scheme://host:port in small letters, or *")
    return {
        "allow_origins": list(origins),
        "allow_methods": ["GET", "HEAD", "POST"],
        "allow_headers": ["*"],
        "expose_headers": ["Retry-After"],
        "allow_private_network": True,
    }
