"""Layers around the endpoints: longest body, HEAD, and pages of other origins."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from arbordraft.serving.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """Refuses long bodies, of which it keeps nothing; they are read to their end, as many clients listen only then."""

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
    """Answers HEAD as GET, without the body."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        async def bodiless(message: "Message") -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope, send_all = {**scope, "method": "GET"}, bodiless
            await self.app(scope, receive, send_all)
        else:
            await self.app(scope, receive, send)


def allowed(methods: str) -> str:
    """The ``Allow`` header of an address, given the methods of its endpoint."""
    known = set(methods.split(", ")) | {"OPTIONS"}
    return ", ".join(sorted(known | {"HEAD"} if "GET" in known else known))


def cors_options(origins: Sequence[str]) -> dict[str, Any]:
    """Arguments of Starlette's ``CORSMiddleware`` that let pages of these origins ask.

    Args:
        origins: such as ``http://localhost:3000``; ``*`` for all.

    Raises:
        TypeError: if this is no list of texts.
        ValueError: if one is no origin.
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
