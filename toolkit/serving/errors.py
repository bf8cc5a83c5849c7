"""Error responses in the format that OpenAI clients expect."""

import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from arbordraft.decoding.engine import EngineClosed, QueueFull
from arbordraft.grammars import GrammarError

_LOG = logging.getLogger(__name__)
# Messages in terms of JSON, by pydantic's error types.
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
    """Error response of the server.

    Args:
        status: status of the HTTP response.
        message: cause and fix.
        param: request field that caused the error.
        code: machine-readable code.
        headers: headers of the HTTP response.
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
        super().__init__(status, _encodable(message), dict(headers or {}))
        self.param, self.code = param and _encodable(param), code


def wrong(field: str, reason: str, code: str | None = None) -> ApiError:
    """Returns an error about a request field; the message begins with the field's name."""
    return ApiError(400, f"{field}: {reason}", param=field, code=code)


def as_body(error: HTTPException) -> dict[str, Any]:
    """Returns the JSON body of an error response, or of an error event in a stream."""
    return {
        "error": {
            "message": error.detail,
            "type": _KINDS.get(error.status_code, "server_error"),
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }


def invalid(problems: Sequence[Mapping[str, Any]], media_type: str) -> ApiError:
    """Returns the error for a request body that fails validation.

    Args:
        problems: pydantic's errors; only the first one is reported.
        media_type: ``Content-Type`` header of the request.
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
    """Returns the error for a request that the engine refused.

    Args:
        error: error of the engine; its message begins with a field's name if that field caused it.
        fields: names of the request's fields.
    """
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": "1"})
    if isinstance(error, EngineClosed):
        return closing()
    name = re.match(r"\w*", str(error))[0]  # type: ignore[index]  # matches any text
    return ApiError(400, str(error), param=name if name in fields else None)


def failed(error: Exception) -> HTTPException:
    """Returns the error for an answer that failed after it had begun."""
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
    return internal_error()


def internal_error() -> ApiError:
    """Returns the error for an unexpected failure; its details go to the log only."""
    return ApiError(500, "the request failed inside the server, whose log says why", code="internal_error")


def closing() -> ApiError:
    """Returns the error for a request that arrives during shutdown."""
    return ApiError(503, "the server is shutting down: retry later, or ask another server", code="shutting_down")


def _encodable(text: str) -> str:
    """Escapes unpaired surrogates so that the text can be encoded."""
    return text.encode(errors="backslashreplace").decode()
