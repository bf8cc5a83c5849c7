"""What went wrong, in the shape in which OpenAI's clients expect it."""

import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from arbordraft.engine import EngineClosed, QueueFull
from arbordraft.grammars import GrammarError

_LOG = logging.getLogger(__name__)
_KINDS = {429: "rate_limit_error", **dict.fromkeys((400, 401, 404, 405, 413), "invalid_request_error")}


class ApiError(HTTPException):
    """An answer that is an error.

    Args:
        status: of the HTTP response.
        message: the cause and the fix.
        param: the field of the request that is to blame.
        code: a word for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.param, self.code = param, code


def as_body(error: HTTPException) -> dict[str, Any]:
    """The JSON body that tells of an error; in a stream, an event with it."""
    return {
        "error": {
            "message": error.detail,
            "type": _KINDS.get(error.status_code, "server_error"),
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def refused(error: Exception) -> ApiError:
    """Why an engine does not take a request."""
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosed):
        return closing()
    return ApiError(400, str(error))


def failed(error: Exception) -> HTTPException:
    """Why an answer that had begun does not come to its end."""
    if isinstance(error, HTTPException):
        return error
    if isinstance(error, EngineClosed):
        return closing()
    if isinstance(error, FloatingPointError):
        _LOG.warning("an answer failed: %s", error)
        return ApiError(500, f"{error}: this prompt or the weights are to blame", code="not_finite")
    if isinstance(error, GrammarError):
        _LOG.warning("an answer failed: %s", error)
        return ApiError(400, f"{error}: simplify the schema", code="grammar_failed")
    _LOG.error("an answer failed", exc_info=error)
    return crashed()


def crashed() -> ApiError:
    """What nobody foresaw; what exactly is not for clients."""
    return ApiError(500, "the request failed inside the server, whose log says why", code="internal_error")


def closing() -> ApiError:
    """Nothing is taken any more, and what could not be finished in time ends."""
    return ApiError(503, "the server is shutting down: ask another one, or again later", code="shutting_down")
