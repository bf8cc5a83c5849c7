"""Measuring what a decoding step costs on this machine, drafting and deciding included."""

from collections.abc import Sequence
from copy import deepcopy

from arbordraft import CostTable, Coupling, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.costs import StepCosts
from arbordraft.deciders import Decider, FixedDepth, LearnedDecider
from arbordraft.drafters import Drafter
from arbordraft.measuring import measure_rows
from arbordraft.prompts import left_padded


def measure_step_costs(
    target: RaggedModel,
    drafter: Drafter,
    decider: LearnedDecider,
    prompts: Sequence[Sequence[int]],
    steps: int,
    tokens: int = 48,
) -> StepCosts:
    """Decodes greedily with and without the decider, which never stops here; of several prompts the best counts.

    Args:
        target: the target.
        drafter: made for it.
        decider: made for the drafter.
        prompts: decoded one at a time.
        steps: drafted tokens of every chain.
        tokens: length of the answers.
    """

    def decode(stop: Decider) -> tuple[float, float]:
        topology, coupling = TreeTopology.chain(steps), Coupling.matching()
        decoder = SpeculativeDecoder(target, drafter, topology, coupling, stop)
        found = []
        for prompt in prompts:
            output = decoder.generate(
                **left_padded([prompt]),  # with a mask, or an end of turn would count as padding
                max_new_tokens=tokens,
                do_sample=False,
                eos_token_id=None,
                return_dict_in_generate=True,
            )
            stats = output.stats  # type: ignore[union-attr]
            rest = (stats.seconds["verify"] + stats.seconds["commit"]) / stats.forwards[0]
            found.append((stats.seconds["draft"] / max(1, stats.drafted), rest))
        draft, rest = (min(times) for times in zip(*found, strict=True))
        return draft, rest

    tireless = deepcopy(decider)
    tireless.threshold = 0.0
    decode(tireless)  # warms up
    draft, rest = decode(FixedDepth())
    decide = max(0.0, decode(tireless)[0] - draft)
    return StepCosts(measure_rows(target, range(1, steps + 2)), CostTable((1,), (draft,)), decide, rest)


__all__ = ["measure_step_costs"]
