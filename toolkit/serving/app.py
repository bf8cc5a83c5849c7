"""HTTP endpoints; one event loop serves all of their streams."""

import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from openai import BaseModel
from openai.types import Model
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from arbordraft.serving.answers import ChatShape, Report, Shape, TextShape, report_of, written
from arbordraft.serving.api_request import ApiRequest, StreamOptions
from arbordraft.serving.chats import ChatRequest
from arbordraft.serving.completions import CompletionRequest
from arbordraft.serving.deltas import AnswerDelta
from arbordraft.serving.errors import ApiError, as_body, internal_error, invalid
from arbordraft.serving.middleware import BodyLimit, Head, allowed, cors_options
from arbordraft.serving.page import page
from arbordraft.serving.responding import ResponseShape
from arbordraft.serving.responses import ResponsesRequest, renamed
from arbordraft.serving.service import Call, Service
from arbordraft.utils.allocator import heap_left_alone
from arbordraft.utils.checks import check_int


def build_app(
    service: Service, *, api_key: str | None = None, max_body: int = 4 * 2**20, cors: Sequence[str] = ()
) -> FastAPI:
    """Builds the ASGI app; :class:`~arbordraft.serving.server.Server` or any other ASGI server runs it.

    Args:
        service: service that answers; it starts and stops with the app.
        api_key: key that clients of ``/v1`` must send; by default none.
        max_body: longest body of a request, in bytes.
        cors: origins whose pages may send requests from a browser, ``*`` for all; by default only the server's own.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a value is out of range.
    """
    check_int("max_body", max_body, 1)
    options = cors_options(cors)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with heap_left_alone():
            service.engine.start()
            yield
            await service.close()

    # FastAPI's own pages would fetch their scripts from other servers.
    app = FastAPI(title="arbordraft", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(_endpoints(service, api_key))
    app.add_middleware(BodyLimit, most=max_body)
    app.add_middleware(Head)
    if cors:
        app.add_middleware(CORSMiddleware, **options)
    app.add_exception_handler(HTTPException, _error_response)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unexpected)

    @app.get("/", response_class=HTMLResponse)
    def show() -> str:
        return page()

    @app.get("/health")
    def health() -> Response:
        return JSONResponse({"status": service.problem or "ok"}, 503 if service.problem else 200)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


def _endpoints(service: Service, api_key: str | None) -> APIRouter:
    def authorized(http: Request) -> None:
        shown = http.headers.get("Authorization", "").removeprefix("Bearer ")
        if api_key is not None and not hmac.compare_digest(shown.encode(), api_key.encode()):
            raise ApiError(401, "wrong or no API key: send Authorization: Bearer KEY", code="invalid_api_key")

    router = APIRouter(prefix="/v1", dependencies=[Depends(authorized)])
    known = Model(
        id=service.name,
        object="model",
        created=service.created,
        owned_by="arbordraft",
        exactness=service.exactness,  # our extension: the promise about the output law
    )

    @router.get("/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [known.to_dict()]}

    @router.get("/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return known.to_dict()

    @router.post("/chat/completions")
    async def chat(body: ChatRequest, http: Request) -> Response:
        return await _answer(service, body, http, ChatShape)

    @router.post("/completions")
    async def complete(body: CompletionRequest, http: Request) -> Response:
        return await _answer(service, body, http, TextShape)

    @router.post("/responses")
    async def respond(responses_body: ResponsesRequest, http: Request) -> Response:
        try:
            return await _answer(
                service, responses_body.chat(), http, partial(ResponseShape, responses_body=responses_body)
            )
        except ApiError as error:
            raise renamed(error) from error

    return router


async def _answer(
    service: Service, body: ApiRequest, http: Request, kind: Callable[[Service, ApiRequest], Shape]
) -> Response:
    call = await service.take(body)
    shape = kind(service, body)
    if body.stream:
        chunks = _chunks(call, http, shape, body.stream_options)
        first = await anext(chunks)  # errors before the first chunk get their own status
        return StreamingResponse(
            _events(shape, first, chunks), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
    answers = [AnswerDelta(index) for index in range(body.count)]
    async for delta in call.deltas(http):
        answers[delta.index] += delta
    return Response(written(shape.response(answers, _report(call))), media_type="application/json")


async def _chunks(call: Call, http: Request, shape: Shape, options: StreamOptions) -> AsyncGenerator[BaseModel, None]:
    running = len(call.stream.answers)
    async with aclosing(call.deltas(http)) as deltas:
        async for delta in deltas:
            running -= delta.finish_reason is not None
            figures = {} if running or options.include_usage else _report(call).figures
            for chunk in shape.chunks(delta, figures):
                if options.continuous_usage_stats:
                    chunk = chunk.model_copy(update={"usage": _report(call).usage})
                elif options.include_usage:
                    chunk = chunk.model_copy(update={"usage": None})
                yield chunk
    for chunk in shape.end(_report(call), options):
        yield chunk


def _report(call: Call) -> Report:
    return report_of(call.stream, call.detokenizer.reasoning_tokens)


async def _events(shape: Shape, first: BaseModel, others: AsyncGenerator[BaseModel, None]) -> AsyncIterator[str]:
    """Yields server-sent events; the last one marks the end or reports an error."""
    async with aclosing(others):
        try:
            yield shape.event(first)
            async for chunk in others:
                yield shape.event(chunk)
            yield shape.closing
        except HTTPException as error:
            yield shape.error_event(error)


async def _error_response(http: Request, error: HTTPException) -> Response:
    if error.status_code == 405 and error.headers:
        error.headers = {"Allow": allowed(error.headers["Allow"])}
        if http.method == "OPTIONS":  # lists the methods, and grants nothing to pages of other origins
            return Response(status_code=204, headers=error.headers)
    return JSONResponse(as_body(error), error.status_code, error.headers)


async def _unexpected(http: Request, error: Exception) -> Response:
    return await _error_response(http, internal_error())  # uvicorn logs it


async def _invalid(http: Request, error: RequestValidationError) -> Response:
    return await _error_response(http, invalid(error.errors(), http.headers.get("Content-Type", "")))
