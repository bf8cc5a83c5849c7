"""HEAD and OPTIONS requests, and requests from pages of other origins."""

import httpx
import pytest
from fastapi.testclient import TestClient
from support.served import serving, tiny_decoder

from arbordraft.decoding.engine import Engine
from arbordraft.serving.app import build_app
from arbordraft.serving.service import Service

PAGE = "http://localhost:3000"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
}
GRANT = "Access-Control-Allow-Origin"


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def app(decoder):
    def made(**options):
        return TestClient(build_app(Service(Engine(decoder, max_cache_tokens=1000), "tiny"), **options))

    return made


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/v1/models", "/v1/models/tiny"])
def test_head_is_get_without_a_body(app, path):
    client = app()
    got, headed = client.get(path), client.head(path)
    assert (headed.status_code, headed.content) == (200, b"")
    assert headed.headers["content-type"] == got.headers["content-type"]
    assert "content-length" in headed.headers


def test_head_has_the_status_of_get(app):
    client = app(api_key="secret")
    assert client.head("/v1/models").status_code == 401
    assert client.head("/nowhere").status_code == 404
    refused = client.head("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "OPTIONS, POST")


def test_a_connection_stays_usable_after_head(decoder):
    with serving(decoder) as served, httpx.Client(base_url=served.url) as client:
        assert [client.head("/health").status_code, client.get("/health").json()] == [200, {"status": "ok"}]


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/chat/completions", "OPTIONS, POST"), ("/health", "GET, HEAD, OPTIONS")]
)
def test_options_lists_the_methods_and_grants_nothing(app, path, methods):
    reply = app(api_key="secret").options(path, headers=PREFLIGHT)
    assert (reply.status_code, reply.headers["allow"], reply.content) == (204, methods, b"")
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert app().options("/nowhere", headers=PREFLIGHT).status_code == 404


def test_other_origins_are_not_allowed_by_default(app):
    reply = app().get("/v1/models", headers={"Origin": PAGE})
    assert reply.status_code == 200
    assert GRANT not in reply.headers


@pytest.mark.parametrize(("cors", "grant"), [([PAGE], PAGE), (["http://[::1]:80", PAGE], PAGE), (["*"], "*")])
def test_pages_of_allowed_origins_may_send_requests(app, cors, grant):
    client = app(cors=cors, api_key="secret")
    reply = client.options("/v1/chat/completions", headers=PREFLIGHT)
    assert (reply.status_code, reply.headers[GRANT]) == (200, grant)
    assert "POST" in reply.headers["Access-Control-Allow-Methods"]
    assert reply.headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "Access-Control-Allow-Credentials" not in reply.headers
    refused = client.post("/v1/chat/completions", json={}, headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers[GRANT]) == (401, grant)  # pages must be able to read errors, too


def test_pages_of_other_origins_get_no_grant(app):
    client = app(cors=["https://chat.example.org"])
    assert GRANT not in client.options("/v1/chat/completions", headers=PREFLIGHT).headers
    assert GRANT not in client.get("/v1/models", headers={"Origin": PAGE}).headers


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/", "HTTP://localhost", "", "https://*/"])
def test_invalid_origins_are_refused_when_the_app_is_built(app, origin):
    with pytest.raises(ValueError, match="no origin: write scheme"):
        app(cors=[origin])
    with pytest.raises(TypeError, match="list of origins"):
        app(cors=origin)
