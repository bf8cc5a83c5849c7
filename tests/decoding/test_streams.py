"""The last event of a stream reaches its reader, whenever the stream ends."""

import asyncio
from collections import deque

import pytest

from arbordraft.decoding.requests import Request
from arbordraft.decoding.streams import Stream


class Racing(deque):
    """Ends a stream at the moment when its reader has found no event."""

    def __init__(self, end):
        super().__init__()
        self._end = end

    def __bool__(self):
        found = len(self) > 0
        if not found and self._end is not None:
            end, self._end = self._end, None
            end()
        return found


def read(end):
    stream = Stream([Request(prompt=[1])], lambda: True)
    stream._events = Racing(lambda: end(stream))

    async def events():
        return [event async for event in stream]

    return asyncio.run(asyncio.wait_for(events(), 20))


def test_an_end_during_reading_reaches_the_reader():
    assert [event.finish_reason for event in read(lambda stream: stream.end(0, "stop"))] == ["stop"]


def test_a_failure_during_reading_is_raised():
    with pytest.raises(MemoryError):
        read(lambda stream: stream.fail(MemoryError()))


def test_a_stream_is_done_when_all_answers_have_ended():
    stream = Stream([Request(prompt=[1], n=2), Request(prompt=[2])], lambda: True)
    for index in (1, 0, 2):
        assert not stream.done
        stream.end(index, "length")
    assert stream.done
    assert [event.answer for event in stream] == [1, 0, 2]
