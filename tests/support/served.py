"""A real server with a tiny model, for tests of its clients."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import openai
import torch

from arbordraft import LanguageModelDrafter, NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.decoding.detokenizing import IncrementalDetokenizer
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.streams import Answer
from arbordraft.drafters import HybridDrafter
from arbordraft.serving.app import build_app
from arbordraft.serving.server import Server, bound, url_of
from arbordraft.serving.service import Service
from support.chats import chat_tokenizer
from support.models import ragged, tiny

HELLO = [{"role": "user", "content": "hello there"}]
POSITIONS = 512


def free_port() -> int:
    with bound("127.0.0.1", 0) as listener:
        return listener.getsockname()[1]


def chat(client: openai.OpenAI, messages: Sequence[object] = HELLO, **settings: object) -> object:
    return client.chat.completions.create(model="tiny", messages=messages, **settings)


def tiny_decoder(**options: object) -> SpeculativeDecoder:
    """Returns a decoder with one letter per token, and a drafter that is sometimes right."""
    target = RaggedModel(tiny(max_position_embeddings=POSITIONS), chat_tokenizer(), kernels="torch", self_test=False)
    draft = ragged(seed=3, max_position_embeddings=POSITIONS)
    drafter = HybridDrafter(NGramDrafter(), LanguageModelDrafter(draft))
    return SpeculativeDecoder(target, drafter, TreeTopology.from_k_config((2, 2, 1)), **options)


def poisoned_decoder() -> SpeculativeDecoder:
    """Returns a decoder whose model gives NaN after any "9", which is drafted only if the text has it."""
    model, tokenizer = tiny(max_position_embeddings=POSITIONS), chat_tokenizer()
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids("9")] = float("nan")
    target = RaggedModel(model, tokenizer, kernels="torch", self_test=False)
    return SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(3))


def answered_alone(
    decoder: SpeculativeDecoder, prompt: list[int], stop: str | Sequence[str] = (), **settings: object
) -> tuple[list[Answer], list[str]]:
    """Returns the answers of an engine without a server and without other requests, and their texts."""
    request = Request(prompt=prompt, stop=stop, **{"temperature": 1.0, **settings})
    answers, texts = Engine(decoder, max_cache_tokens=12_000).submit(request).result(), []
    for answer in answers:
        detokenizer = IncrementalDetokenizer(decoder.target.tokenizer, [stop] if isinstance(stop, str) else stop)
        texts.append(detokenizer.add(answer.tokens) + detokenizer.end())
    return answers, texts


@dataclass
class Served:
    """A running server.

    Args:
        engine: engine of the server.
        server: uvicorn's server.
        url: address of the server.
        thread: thread of the server.
    """

    engine: Engine
    server: Server
    url: str
    thread: threading.Thread
    key: str = "none"
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def client(self) -> openai.OpenAI:
        """OpenAI's client, which never retries."""
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=30)
        self.clients.append(made)
        return made

    def stop(self) -> None:
        """Stops the server as SIGTERM does."""
        self.server.should_exit = True


@contextmanager
def serving(
    decoder: SpeculativeDecoder,
    *,
    max_samples: int = 4,
    max_tokens: int = 4000,
    max_waiting: int | None = None,
    default_tokens: int = 40,
    grace: float = 5.0,
    **options: object,
) -> Iterator[Served]:
    """Runs a server in a thread, at a free port, until the block ends."""
    engine = Engine(decoder, max_samples=max_samples, max_cache_tokens=max_tokens, max_rows=64, max_waiting=max_waiting)
    listener, ready = bound("127.0.0.1", 0), threading.Event()
    app = build_app(Service(engine, "tiny", default_tokens), **options)
    server = Server(app, grace=grace, ready=ready.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    served = Served(engine, server, url_of(listener), thread, str(options.get("api_key") or "none"))
    thread.start()
    try:
        assert ready.wait(20)
        yield served
    finally:
        for client in served.clients:
            client.close()
        served.stop()
        thread.join(20)
        assert not thread.is_alive()
