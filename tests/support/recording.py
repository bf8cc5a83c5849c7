"""A stand-in for CUDA graphs, which records on a CPU."""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._pytree import tree_leaves


class Record:
    """A graph that does again, into the same buffers, what was done while it was recorded."""

    made = replays = 0

    def replay(self):
        Record.replays += 1
        for kept, new in zip(tree_leaves(self.out), tree_leaves(self.again()), strict=True):
            kept.copy_(new)


def record_on_cpu(monkeypatch, module):
    """Lets a module record its calls where there is no GPU; returns the class that counts them."""
    Record.made = Record.replays = 0
    record = module.record

    def kept(run, memory, what):
        graph, out = record(run, memory, what)
        graph.out, graph.again = out, run
        return graph, out

    @contextmanager
    def graph(graph, pool):
        Record.made += 1
        yield

    class Stream:
        def wait_stream(self, other):
            pass

    monkeypatch.setattr(module, "record", kept)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Record)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    return Record
