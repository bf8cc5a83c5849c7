"""Helpers for proofs outside the project."""

import subprocess
import sys

import pytest
import torch
from transformers import GPT2Config

from arbordraft import IID, Lifted, RecursiveRejection, TopDown, TreeTopology, WithoutReplacement
from arbordraft.testing import distance_to_target, greedy_reference, random_table, tiny_model

# A researcher's script, run without the checkout on its path.
PROOF = """
import arbordraft as ad
from arbordraft.testing import distance_to_target, random_table
rule = ad.TopDown(ad.RecursiveRejection())
print(distance_to_target(rule, ad.TreeTopology.chain(1), ad.IID(1), random_table("random", 3)) < 1e-12)
"""


def test_a_proof_runs_outside_of_the_checkout(tmp_path):
    ran = subprocess.run([sys.executable, "-c", PROOF], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.stdout == "True\n", ran.stderr


def test_the_oracle_distinguishes_exact_from_wrong_pairs():
    """Rows for draws without replacement are wrong for draws with replacement."""

    class Pretending(IID):
        def enumerate(self, draft):
            return WithoutReplacement(self.k).enumerate(draft)

    fork, table = TreeTopology.k_ary(2, 1), random_table("random", 3)
    for verifier in (TopDown(RecursiveRejection()), Lifted(RecursiveRejection())):
        assert distance_to_target(verifier, fork, IID(2), table) < 1e-12
        assert distance_to_target(verifier, fork, Pretending(2), table) > 1e-3


def test_a_tiny_model_of_any_kind():
    state = torch.random.get_rng_state()
    first, again, other = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    made = tiny_model(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2, eos_token_id=0, bos_token_id=0))
    assert [len(tokens) for tokens in greedy_reference(made, [[1, 2], [3]], max_new_tokens=2, eos_token_id=None)] == [
        2,
        2,
    ]
    assert tiny_model(vocab_size=7).config.vocab_size == 7
    with pytest.raises(TypeError, match="vocab_size"):
        tiny_model(GPT2Config(), vocab_size=7)
