"""A stand-in for CUDA graphs that records on a CPU."""

from contextlib import contextmanager, nullcontext
from weakref import WeakSet

import torch
from torch.utils._pytree import tree_leaves

from arbordraft.decoding.static import recording


class Record:
    """A graph that repeats the recorded work into the same buffers."""

    made = replays = 0

    def replay(self):
        Record.replays += self.counts
        for kept, new in zip(tree_leaves(self.out), tree_leaves(self.again()), strict=True):
            kept.copy_(new)


def record_on_cpu(monkeypatch, title="a step"):
    """Lets steps be recorded without a GPU; returns the class that counts recordings of a title.

    As with CUDA, memory that graphs share is freed with the last of them. Then no other graph can use it.
    """
    Record.made = Record.replays = 0
    record = recording.record
    sharing = {}

    def kept(run, memory, what):
        graph, out = record(run, memory, what)
        graph.out, graph.again, graph.counts = out, run, title in what
        Record.made += graph.counts
        return graph, out

    @contextmanager
    def graph(graph, pool, capture_error_mode):
        assert capture_error_mode == "thread_local", "another thread's call would end the recording"
        if pool in sharing and not sharing[pool]:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        sharing.setdefault(pool, WeakSet()).add(graph)
        yield

    class Stream:
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(recording, "record", kept)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Record)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return Record


def as_on_a_gpu(decoder):
    """Gives a decoder the shared graph memory that decoders of a GPU have."""
    recorder = decoder.static.recorder
    reset = recorder.reset
    recorder.reset = lambda device: (reset(device), setattr(recorder, "memory", "shared"))
    return decoder
