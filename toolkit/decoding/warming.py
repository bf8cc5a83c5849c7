"""Steps that nobody asked for, so that no request waits for kernels to be compiled and steps to be recorded."""

from contextlib import suppress

from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.decoding.step import Stepper
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.target.cache import CacheOverflow

_PROMPT = 128  # tokens; as many rows take the largest tiles of the attention
_SAID = 8  # of which these are said again and again, for lookups to find
_DEPTHS = 4  # levels that most trees have at most


def warm_up(stepper: Stepper, samples: int, max_tokens: int | None) -> None:
    """Takes steps of one sample, greedy and drawn, with trees of every depth up to 4 and the greatest.

    Args:
        stepper: takes them.
        samples: how many a batch will have at a time, at most.
        max_tokens: bound on the rows of each KV cache; ``None`` for none.
    """
    deepest = stepper.topology.max_depth
    state = stepper.open(samples, max_tokens)
    try:
        for greedy in (True, False):
            for depth in sorted({*range(min(deepest, _DEPTHS) + 1), deepest}):
                with suppress(CacheOverflow):  # a small cache has room for smaller trees
                    _step(stepper, state, depth, greedy)
    finally:
        stepper.close(state)


def _step(stepper: Stepper, state: DecodeState, depth: int, greedy: bool) -> None:
    limits = stepper.target.max_positions, state.cache.max_tokens and state.cache.max_tokens - state.cache.reserved
    room = min((limit - stepper.topology.num_nodes - 1 for limit in limits if limit is not None), default=_PROMPT)
    if room < 1:
        return
    tokens = [(1 + place % _SAID) % stepper.target.vocab_size for place in range(min(room, _PROMPT))]
    sample = Sample(tokens, depth + 1, 0, greedy, LogitsPipeline([]), lambda *_: False)
    stepper.add(state, sample, len(tokens))
    try:
        if sample.num_unprefilled:
            stepper.prefill(state, {sample.number: sample.num_unprefilled})
        stepper.step(state)
    finally:
        stepper.remove(state, sample)


__all__ = ["warm_up"]
