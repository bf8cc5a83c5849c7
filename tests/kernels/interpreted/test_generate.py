"""Whole decodes with all Triton kernels, token for token those of the reference."""

import pytest
from support.models import PROMPTS, left_padded, new_tokens, ragged

from arbordraft import (
    Coupling,
    Fixed,
    LanguageModelDrafter,
    Lifted,
    Matching,
    NGramDrafter,
    RaggedModel,
    RecursiveRejection,
    SpeculativeDecoder,
    TopDown,
    TopTail,
    TreeTopology,
)
from arbordraft.kernels import choice

GREEDY, DRAWN = Coupling(Fixed(2), TopDown(Matching())), Coupling(TopTail(1, 1), Lifted(RecursiveRejection()))


@pytest.mark.parametrize("kind", ["greedy", "drawn", "lookup"])
def test_triton_gives_the_tokens_of_the_reference(kind):
    target = RaggedModel(ragged().model, kernels="triton")
    small = LanguageModelDrafter(RaggedModel(ragged(seed=3).model, kernels="torch"))
    drafter = NGramDrafter(longest=2, shortest=1) if kind == "lookup" else small
    decoder = SpeculativeDecoder(
        target, drafter, TreeTopology.from_k_config((2, 1, 1)), DRAWN if kind == "drawn" else GREEDY
    )
    found = {}
    for path in ("reference", "triton"):
        choice.ran.clear()
        with choice.use(path):
            output = decoder.generate(
                **left_padded(PROMPTS),
                max_new_tokens=2 if kind == "drawn" else 6,  # truncation is slow to interpret
                **({"do_sample": True, "top_k": 40, "top_p": 0.9} if kind == "drawn" else {"do_sample": False}),
                seeds=list(range(len(PROMPTS))),
                return_dict_in_generate=True,
            )
        found[path] = new_tokens(output.sequences, PROMPTS, output.stats.emitted)
        # Every operator ran, and only on this path.
        operators = {name.partition("/") for name in choice.ran}
        expected = {"ragged_tree_attention", "row_max"}
        expected |= {"rms_norm", "add_rms_norm", "gated_activation", "rotate_append"}
        expected |= {"verify_tree", "truncate"} if kind == "drawn" else set()
        expected |= {"tree_expand", "kv_append"} if kind != "lookup" else set()
        moving = "kv_compact" if path == "triton" else "move_rows"
        expected |= {moving} if kind == "greedy" else set()  # the others accept no node after a rejected one
        assert {name for name, _, _ in operators} >= expected
        assert {which for _, _, which in operators} == {path}
    assert found["reference"] == found["triton"]


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match="no kernels called 'cuda'"), choice.use("cuda"):
        pass
