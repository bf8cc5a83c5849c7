"""Errors in the shape that OpenAI's clients expect."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from arbordraft.decoding.engine import EngineClosed, QueueFull
from arbordraft.grammars import GrammarError

_LOG = logging.getLogger(__name__)
# Reasons in words of JSON, by pydantic's kinds of errors.
_REASONS = {
    **dict.fromkeys(("dict_type", "model_attributes_type", "model_type"), "it has to be a JSON object"),
    **dict.fromkeys(("is_instance_of", "list_type", "sequence_type"), "it has to be a list"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "it has to be true or false"),
    **dict.fromkeys(("int_from_float", "int_parsing", "int_type"), "it has to be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "it has to be a number"),
    "missing": "this field is required",
    "string_type": "it has to be a text",
    "string_unicode": "half of a surrogate pair is no text",
    "too_long": "at most {max_length} entries, got {actual_length}",
    "too_short": "at least {min_length} entry, got {actual_length}",
}
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
        super().__init__(status, _speakable(message), dict(headers or {}))
        self.param, self.code = param and _speakable(param), code


def wrong(field: str, reason: str, code: str | None = None) -> ApiError:
    """An error about a field of the request, which the message names first."""
    return ApiError(400, f"{field}: {reason}", param=field, code=code)


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


def invalid(problems: Sequence[Mapping[str, Any]], media_type: str) -> ApiError:
    """Why a body is no request.

    Args:
        problems: as pydantic tells them, the first one is told on.
        media_type: of the body, as the client has it.
    """
    first = problems[0]
    kind, reason = first["type"], first["msg"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is no JSON: {first['ctx']['error']}", code="invalid_json")
    where = ".".join(str(part) for part in first["loc"][1:] if part != "[key]")
    if not where and "json" not in media_type:
        return ApiError(400, "the body has to be JSON: send it with the header Content-Type: application/json")
    if kind == "extra_forbidden":
        return ApiError(400, f"{where} is not supported: leave it out", param=where, code="unsupported")
    if kind == "value_error":
        reason = first["ctx"]["error"]
    elif kind in _REASONS:
        reason = _REASONS[kind].format(**first.get("ctx", {}))
    return ApiError(400, f"{where or 'the body'}: {reason}", param=where or None)


def refused(error: Exception, fields: Collection[str] = ()) -> ApiError:
    """Why an engine does not take a request.

    Args:
        error: the engine's, which begins with the name of a field if that is to blame.
        fields: of the request.
    """
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosed):
        return closing()
    name = re.match(r"\w*", str(error))[0]  # type: ignore[index]  # it matches everything
    return ApiError(400, str(error), param=name if name in fields else None)


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
    """An unexpected error, whose details go to the log only."""
    return ApiError(500, "the request failed inside the server, whose log says why", code="internal_error")


def closing() -> ApiError:
    """The server is shutting down and takes no request."""
    return ApiError(503, "the server is shutting down: ask another one, or again later", code="shutting_down")


def _speakable(text: str) -> str:
    """Escapes halves of surrogate pairs, so that the text can be encoded."""
    return text.encode(errors="backslashreplace").decode()
