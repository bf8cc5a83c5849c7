"""Static steps with every Triton kernel there is, token for token those of the ordinary reference."""

import pytest
from models import PROMPTS, left_padded, new_tokens, ragged

from arbordraft import Coupling, EarlyExitDrafter, Lifted, RecursiveRejection, SpeculativeDecoder, TopTail, TreeTopology
from arbordraft.kernels import choice

COUPLING = Coupling(TopTail(1, 1), Lifted(RecursiveRejection()))


@pytest.mark.parametrize("sampled", [False, True])
def test_the_same_tokens(sampled):
    found = {}
    for path, buckets in (("reference", None), ("triton", (8,))):
        drafter = EarlyExitDrafter(ragged(), layers=1)
        topology = TreeTopology.from_k_config((2, 1))
        decoder = SpeculativeDecoder(ragged(), drafter, topology, COUPLING, buckets=buckets)
        choice.ran.clear()
        with choice.use(path):
            output = decoder.generate(
                **left_padded(PROMPTS[:2]),
                max_new_tokens=5,
                do_sample=sampled,
                seeds=[3, 4],
                return_dict_in_generate=True,
            )
        found[path] = new_tokens(output.sequences, PROMPTS[:2], output.stats.emitted)
    assert choice.ran["static_step/triton"]
    assert found["reference"] == found["triton"]
