"""``arbordraft serve`` as users start it."""

import os
import signal
import sys
import threading
import time

import httpx
import openai
import pytest
from fastapi.testclient import TestClient
from support.chats import chat_tokenizer
from support.models import tiny_checkpoint
from support.served import free_port
from typer.testing import CliRunner

from arbordraft.cli import decoders
from arbordraft.cli import serve as module
from arbordraft.cli.main import app, main
from arbordraft.decoding import measuring
from arbordraft.serving import server
from arbordraft.serving.server import bound


@pytest.fixture
def folder(tmp_path):
    """Returns a tiny model that can chat."""
    return str(tiny_checkpoint(tmp_path / "tiny-model", chat_tokenizer(), max_position_embeddings=512))


def test_a_server_answers_until_sigterm(folder, capsys, monkeypatch):
    """The server has the main thread, which receives signals; a second thread is the client."""
    port, chunks = free_port(), []

    def use() -> None:
        try:
            for _ in range(600):
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.ConnectError:
                    time.sleep(0.05)
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="secret", max_retries=0) as client:
                asked = {"model": "tiny-model", "messages": [{"role": "user", "content": "hello"}], "seed": 1}
                stream = client.chat.completions.create(**asked, max_tokens=50, stream=True)
                chunks.append(next(stream))
                os.kill(os.getpid(), signal.SIGTERM)  # during the answer
                chunks.extend(stream)
        except BaseException:
            os.kill(os.getpid(), signal.SIGTERM)
            raise

    command = ["arbordraft", "serve", folder, "--drafter", "ngram", "--port", str(port), "--api-key", "secret"]
    monkeypatch.setattr(sys, "argv", [*command, "--kernels", "torch"])
    client = threading.Thread(target=use)
    client.start()
    with pytest.raises(SystemExit) as ended:
        main()
    client.join(20)
    shown = capsys.readouterr()
    assert ended.value.code == 143
    assert f"tiny-model is at http://127.0.0.1:{port}/v1" in shown.out
    *before, last = shown.err.splitlines()
    assert last == "terminated"
    assert all(line.startswith("arbordraft: measuring forwards") for line in before)  # if no costs are kept
    assert len(chunks) > 5
    assert chunks[-1].choices[0].finish_reason is not None  # the answer was finished


def test_a_taken_port_is_reported_before_the_model_is_read(monkeypatch):
    monkeypatch.setattr(decoders, "load_decoder", lambda *_, **__: pytest.fail("the model was read"))
    with bound("127.0.0.1", 0) as listener:
        listener.listen()
        result = CliRunner().invoke(app, ["serve", "nothing", "--port", str(listener.getsockname()[1])])
    assert isinstance(result.exception, ValueError)
    assert "cannot listen on 127.0.0.1" in str(result.exception)


@pytest.fixture
def made(monkeypatch, folder):
    """Returns a function that builds the app which a command with the given options would serve."""

    def make(*options):
        apps = []
        monkeypatch.setattr(measuring, "rows_within", lambda target: 123)
        monkeypatch.setattr(server, "Server", lambda made, **_: apps.append(made) or sys.exit("made"))
        command = ["serve", folder, "--port", "0", "--drafter", "none", "--kernels", "torch", *options]
        CliRunner().invoke(app, command)
        return apps[0]

    return make


DEFAULTS = {"generation_config": "model", "max_rows": 123, "reasoning": True}


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ([], {}),
        (["--max-rows", "7"], {"max_rows": 7}),
        (["--reasoning", "off"], {"reasoning": False}),
        (["--generation-config", "none"], {"generation_config": "none"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_reach_the_service(made, options, others):
    service = made(*options).state.service
    engine = service.engine
    found = (engine.decoder.generation_config, engine.max_rows, service.reasoning)
    assert dict(zip(DEFAULTS, found, strict=True)) == DEFAULTS | others


def test_origins_are_allowed_one_by_one(made):
    origins = ["http://localhost:3000", "https://chat.example.org"]
    options = [part for origin in origins for part in ("--cors", origin)]
    client = TestClient(made(*options))
    for origin in (*origins, "https://example.org"):
        granted = client.get("/v1/models", headers={"Origin": origin}).headers.get("Access-Control-Allow-Origin")
        assert granted == (origin if origin in origins else None)


def test_missing_libraries_are_named(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "uvicorn" else name)
    result = CliRunner().invoke(app, ["serve"])
    assert isinstance(result.exception, ImportError)
    assert str(result.exception) == "serving needs uvicorn; run: pip install 'arbordraft[serve]'"
