"""Warm-up steps, which compile kernels and record steps before the first request."""

from contextlib import suppress

from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.decoding.step import Stepper
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.target.cache import CacheOverflow

_PROMPT = 128  # tokens of the prompt: so many rows use the largest attention tiles
_REPEATED_TOKENS = 8  # tokens that the prompt repeats, so that lookups find drafts
_DEPTHS = 4  # most trees have at most so many levels


def warm_up(stepper: Stepper, samples: int, max_tokens: int | None) -> None:
    """Takes greedy and sampled steps of one sample, with trees of every depth up to 4 and of the greatest depth.

    Args:
        stepper: takes the steps.
        samples: most samples of a batch at a time.
        max_tokens: most rows of each KV cache; ``None`` for no limit.
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
    cache = state.cache
    limits = (
        stepper.target.max_positions,
        cache.max_tokens and cache.max_tokens - cache.reserved - cache.state_tokens,
    )
    room = min((limit - stepper.topology.num_nodes - 1 for limit in limits if limit is not None), default=_PROMPT)
    if room < 1:
        return
    tokens = [(1 + place % _REPEATED_TOKENS) % stepper.target.vocab_size for place in range(min(room, _PROMPT))]
    sample = Sample(tokens, depth + 1, 0, LogitsPipeline([], greedy=greedy), lambda *_: False)
    stepper.add(state, sample, len(tokens))
    try:
        if sample.num_unprefilled:
            stepper.prefill(state, {sample.number: sample.num_unprefilled})
        stepper.step(state)
    finally:
        stepper.remove(state, sample)


__all__ = ["warm_up"]
