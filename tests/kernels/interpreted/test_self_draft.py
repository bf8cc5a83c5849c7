"""A target that drafts for itself, with all Triton kernels: its own texts, drafted and verified in one run."""

import pytest
import torch
from support.models import tiny

from arbordraft import NoDrafter, RaggedModel, SelfDrafter, SpeculativeDecoder, TreeTopology
from arbordraft.kernels import choice

SHARED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("request_", [{"do_sample": False}, SHARED], ids=["greedy", "shared noise"])
def test_texts_are_the_targets_own(request_):
    target = RaggedModel(tiny(), kernels="triton", self_test=False)
    drafter = SelfDrafter(target)
    given = {"input_ids": torch.tensor([[5, 9, 7, 5]]), "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    with choice.use("reference"):
        plain = SpeculativeDecoder(target, NoDrafter(), TreeTopology.chain(0), buckets=None)
        expected = plain.generate(**given, **request_)
    choice.ran.clear()
    with choice.use("triton"):
        decoder = SpeculativeDecoder(target, drafter, TreeTopology.chain(3), buckets=(4,))
        found = decoder.generate(**given, **request_, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert sum(found.stats.accepted.values()) > 0
    assert choice.ran["grouped_linear/triton"] > 20
    assert {name for name in choice.ran if "/" in name and not name.endswith("triton")} == set()
    assert choice.ran["static_step/triton"] > choice.ran["static_draft/triton"] == 0
