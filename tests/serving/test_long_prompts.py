"""A prompt that takes long to tokenise does not delay short prompts."""

import asyncio
import threading

import pytest
from support.served import POSITIONS, tiny_decoder

from arbordraft.decoding.engine import Engine
from arbordraft.serving.chats import ChatRequest
from arbordraft.serving.completions import CompletionRequest
from arbordraft.serving.errors import ApiError
from arbordraft.serving.service import Service


def completion(prompt):
    return CompletionRequest(prompt=prompt, max_tokens=1)


def conversation(text):
    return ChatRequest(messages=[{"role": "user", "content": text}], max_tokens=1)


@pytest.mark.parametrize("long", [completion("a b" * 8000), completion([3] * 20_000), conversation("ab" * 10_000)])
def test_short_questions_do_not_wait_for_long_questions(long):
    service = Service(Engine(tiny_decoder()), "tiny")
    begun, go, kind = threading.Event(), threading.Event(), type(long)

    class Waiting(kind):
        """Waits for ``go`` before it is tokenised."""

        def encode(self, *how):
            begun.set()
            assert go.wait(20)
            return super().encode(*how)

    async def ask():
        waiting = asyncio.create_task(service.take(Waiting(**long.model_dump(exclude_unset=True))))
        await asyncio.to_thread(begun.wait, 20)
        calls = [await service.take(question("short")) for question in (completion, conversation)]
        assert not waiting.done()
        go.set()
        with pytest.raises(ApiError, match="fit: shorten the prompt") as refused:
            await waiting
        assert refused.value.code == "context_length_exceeded"
        return calls

    assert len(asyncio.run(ask())) == 2
    asyncio.run(service.close())


def test_a_far_too_long_prompt_is_refused_by_its_number_of_characters(monkeypatch):
    decoder = tiny_decoder()
    service, asked = Service(Engine(decoder), "tiny"), []
    known = type(service.tokenizer).__call__
    monkeypatch.setattr(
        type(service.tokenizer),
        "__call__",
        lambda self, text, **how: asked.append(len(text)) or known(self, text, **how),
    )
    for question in (completion("a" * 2**20), conversation("a" * 2**20)):
        with pytest.raises(ApiError, match=r"1048\d{3} characters is too long, at most \d+ tokens fit") as refused:
            asyncio.run(service.take(question))
        assert refused.value.code == "context_length_exceeded"
    assert sum(asked) < POSITIONS
    asyncio.run(service.close())
