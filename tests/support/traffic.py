"""Requests that join a batch late, while others are cancelled."""

import itertools
import random
from collections.abc import Mapping, Sequence

from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from support.models import VOCAB


def text(length: int, seed: int) -> list[int]:
    """Returns random tokens."""
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def requests(count: int, kinds: Sequence[Mapping[str, object]]) -> list[Request]:
    """Returns requests of all lengths, whose settings take turns."""
    return [
        Request(prompt=text(1 + 7 * number % 40, number), max_new_tokens=1 + 5 * number % 23, seed=number, **kind)
        for number, kind in zip(range(count), itertools.cycle(kinds), strict=False)
    ]


def answers_amid_others(engine: Engine, asked: Sequence[Request]) -> list[list[list[int]]]:
    """Returns the answers to requests, each of which is followed by another one that is cancelled soon."""
    streams = []
    for number, request in enumerate(asked):
        streams.append(engine.submit(request))
        lost = engine.submit(Request(prompt=text(20, number), max_new_tokens=30))
        for _ in range(number % 4):
            engine.step()
        lost.cancel()
    engine.run()
    return [[answer.tokens for answer in stream.answers] for stream in streams]
