"""Recurrent mixers of transformers whose own ``forward`` runs packed rows.

A mixer calls a convolution and a scan by their names in its module. A copy of its ``forward`` finds the operators under
these names.
"""

import inspect
from types import FunctionType, MethodType

import torch
from torch import Tensor

from arbordraft.kernels.recurrent_tree import (
    Paths,
    Schedule,
    commit_windows,
    gate,
    tree_convolution,
    tree_gated_delta,
    tree_selective_update,
)


class Memory:
    """Committed windows and states of one mixer, and the inputs of its last step."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.windows: Tensor | None = None
        self.states: Tensor | None = None
        self.paths: Paths
        self.schedule: Schedule
        self.inputs: Tensor
        self.replay = None

    def step(self, run, hidden, paths, commit=False):
        """Runs ``[T, D]`` rows on paths; with ``commit``, the rows are chains and all of them are kept."""
        self.paths, self.schedule = paths, paths.schedule(commit=commit)
        with torch.no_grad():
            out = run(hidden[None])[0]
        if commit:
            counts = torch.tensor(paths.rows).cumsum(0)
            self.commit_windows([int(end) - 1 for end in counts])
        return out

    def commit(self, ends):
        """Keeps the path that ends in one row of every sample."""
        if self.replay is not None:
            self.replay(*self.paths.accepted(ends))
        self.commit_windows(ends)

    def commit_windows(self, ends):
        history = self.paths.windows(ends, self.windows.shape[1] + 1)
        commit_windows(self.windows, self.inputs, history, torch.tensor(self.paths.states))

    def convolve(self, hidden_states, weight, bias=None, activation=None, **_):
        channels, width = weight.shape
        if self.windows is None:
            self.windows = hidden_states.new_zeros(self.samples, width - 1, channels)
        self.inputs = hidden_states[0].T.contiguous()
        taps, activate = weight.T.float(), activation is not None
        out = tree_convolution(self.inputs, self.windows, self.paths.history(width), taps, bias, activate=activate)
        return out.T[None]

    def scan(self, update, shape, *rows, **options):
        """Runs ``update`` on the rows, and keeps them for a replay."""
        if self.states is None:
            self.states = torch.zeros(self.samples, *shape)

        def replay(kept, chains):
            schedule = chains.schedule(commit=True)
            update(self.states, schedule, *(part[kept] for part in rows), **options)

        self.replay = replay
        return update(self.states, self.schedule, *rows, **options)

    def delta(self, query, key, value, *, g, beta, initial_state=None, use_qk_l2norm_in_kernel, **_):
        assert initial_state is None
        shape = value.shape[2], key.shape[3], value.shape[3]
        rows = (part[0] for part in (query, key, value, g, beta))
        return self.scan(tree_gated_delta, shape, *rows, normalize=use_qk_l2norm_in_kernel)[None], None

    def mamba2(self, hidden_states, dt, A, B, C, *, D, dt_bias, dt_limit, **_):
        steps = gate(dt[0], "softplus", dt_bias.float()).clamp(*dt_limit)
        shape = hidden_states.shape[2], B.shape[3], hidden_states.shape[3]

        def update(states, schedule, x, steps, B, C):
            return tree_selective_update(states, schedule, x, steps, A, B, C, D)

        return self.scan(update, shape, hidden_states[0], steps, B[0], C[0])[None]

    def mamba(self, hidden_states, dt, A, B, C, *, D, z, delta_bias, **_):
        steps = gate(dt[0].T, "softplus", delta_bias)

        def update(states, schedule, x, steps, B, C):
            return tree_selective_update(states, schedule, x, steps, A.T.contiguous(), B, C, D)

        out = self.scan(update, (1, *A.T.shape), hidden_states[0].T, steps, B[0].T, C[0].T)
        return out.T[None] * torch.nn.functional.silu(z)

    def functions(self):
        """Returns the functions by the names that mixers call."""
        return {
            "causal_conv1d_fn": self.convolve,
            "torch_chunk_gated_delta_rule": self.delta,
            "chunk_kimi_delta_attention": self.delta,
            "mamba2_chunk_scan": self.mamba2,
            "mamba_selective_scan": self.mamba,
        }


def rebound(mixer, functions):
    """Returns the mixer's ``forward`` with other functions under the names that it calls."""
    forward = inspect.unwrap(type(mixer).forward)
    names = {name: function for name, function in functions.items() if name in forward.__code__.co_names}
    assert names
    copy = FunctionType(
        forward.__code__, forward.__globals__ | names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    return MethodType(copy, mixer)
