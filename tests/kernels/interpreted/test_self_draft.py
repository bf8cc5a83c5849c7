"""A target that drafts for itself, with all Triton kernels: its own texts, drafted and verified in one run."""

from collections import Counter

import pytest
import torch
from support.models import tiny

from arbordraft import NoDrafter, RaggedModel, SelfDrafter, SpeculativeDecoder, TreeTopology
from arbordraft.kernels import choice
from arbordraft.kernels.dispatch import Operator

SHARED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("compiler", [None, "aot_eager"])
@pytest.mark.parametrize("request_", [{"do_sample": False}, SHARED], ids=["greedy", "shared noise"])
def test_texts_are_the_targets_own(monkeypatch, request_, compiler):
    """A compiled run holds the draft and the step in one graph, too, with the same kernels."""
    launched, launch = Counter(), Operator._launch
    monkeypatch.setattr(
        Operator, "_launch", lambda self, *given: (launched.update([self.triton]), launch(self, *given))[1]
    )
    target = RaggedModel(tiny(), kernels="triton", self_test=False)
    drafter = SelfDrafter(target)
    given = {"input_ids": torch.tensor([[5, 9, 7, 5]]), "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    with choice.use("reference"):
        plain = SpeculativeDecoder(target, NoDrafter(), TreeTopology.chain(0), buckets=None)
        expected = plain.generate(**given, **request_)
    choice.ran.clear()
    with choice.use("triton"):
        decoder = SpeculativeDecoder(target, drafter, TreeTopology.chain(3), buckets=(4,), compile_backend=compiler)
        found = decoder.generate(**given, **request_, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected)
    assert sum(found.stats.accepted.values()) > 0
    assert launched["arbordraft.kernels.grouped_linear.triton:launch"] > 20
    assert {name for name in choice.ran if "/" in name and not name.endswith("triton")} == set()
    assert choice.ran["static_step/triton"] > choice.ran["static_draft/triton"] == 0
