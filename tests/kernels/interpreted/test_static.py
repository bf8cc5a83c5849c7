"""Static steps with all Triton kernels give the tokens of ordinary steps in the reference."""

import pytest
from support.models import PROMPTS, left_padded, new_tokens, ragged

from arbordraft import Coupling, EarlyExitDrafter, Lifted, RecursiveRejection, SpeculativeDecoder, TopTail, TreeTopology
from arbordraft.kernels import choice

TOP_TAIL, SHARED = Coupling(TopTail(1, 1), Lifted(RecursiveRejection())), Coupling.shared(2)


@pytest.mark.parametrize(
    ("coupling", "settings"),
    [
        (TOP_TAIL, {"do_sample": False}),
        (TOP_TAIL, {"do_sample": True}),
        (SHARED, {"do_sample": True, "temperature": 0.8, "top_k": 0}),
        (SHARED, {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}),
    ],
    ids=["greedy", "rejection", "shared noise", "shared noise, truncated"],
)
def test_static_steps_in_triton_give_the_tokens_of_the_reference(coupling, settings):
    found = {}
    for path, buckets in (("reference", None), ("triton", (8,))):
        drafter = EarlyExitDrafter(ragged(), layers=1)
        topology = TreeTopology.from_k_config((2, 1))
        decoder = SpeculativeDecoder(ragged(), drafter, topology, coupling, buckets=buckets)
        choice.ran.clear()
        with choice.use(path):
            output = decoder.generate(
                **left_padded(PROMPTS[:2]), max_new_tokens=3, **settings, seeds=[3, 4], return_dict_in_generate=True
            )
        found[path] = new_tokens(output.sequences, PROMPTS[:2], output.stats.emitted)
        assert bool(choice.ran["static_step/triton"]) == (path == "triton")
    assert found["reference"] == found["triton"]
