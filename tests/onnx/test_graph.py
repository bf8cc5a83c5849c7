"""Graphs on ragged batches: a stub shows the tokens that every row sees and the places of keys and values."""

import pytest
import torch

from arbordraft import TreeTopology
from arbordraft.onnx.graph import RaggedGraph
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.masks import SlicedCausalMask, stack_words

TREE = TreeTopology.from_parents([-1, 0, 0, 1, 1])
SIZES = {"key": 3, "value": 5}  # per head


class Summing:
    """Graph stub that returns each row's position and the sum of the tokens it sees; values are the tokens."""

    def __init__(self):
        past = {f"past_key_values.0.{part}": ["b", 2, "p", size] for part, size in SIZES.items()}
        self.inputs = {"input_ids": ["b", "n"], "attention_mask": [], "position_ids": [], **past}
        self.shapes = []

    def run(self, feed):
        tokens = feed["input_ids"].float()
        self.shapes.append((*tokens.shape, feed["past_key_values.0.key"].shape[2]))
        present = {}
        for part, size in SIZES.items():
            new = tokens[:, None, :, None].expand(-1, 2, -1, size)
            present[f"present.0.{part}"] = torch.cat([feed[f"past_key_values.0.{part}"], new], dim=2)
        seen = (feed["attention_mask"][:, 0] == 0).float()
        sums = torch.einsum("bnk,bk->bn", seen, present["present.0.value"][:, 0, :, 0])
        return {"sums": sums, "positions": feed["position_ids"], **present}


def run(graph, cache, tokens, batch):
    return graph({"input_ids": torch.tensor(tokens)}, batch, cache)


@pytest.mark.parametrize("prompts", [[[3, 5, 7]], [[3, 5, 7], [11], [2, 4, 6, 8, 10]]], ids=["alone", "ragged"])
def test_every_row_sees_its_own_past_and_branch(prompts):
    stub, cache = Summing(), RaggedKVCache()
    graph = RaggedGraph(stub)
    handles = [cache.open(1) for _ in prompts]  # slabs will move as they grow
    batch = cache.lay_out(handles, [range(len(prompt)) for prompt in prompts])
    found = run(graph, cache, [token for prompt in prompts for token in prompt], batch)
    assert found["sums"].tolist() == [float(sum(p[: i + 1])) for p in prompts for i in range(len(p))]
    assert found["positions"].tolist() == [i for p in prompts for i in range(len(p))]
    cache.commit({handle: range(len(prompt)) for handle, prompt in zip(handles, prompts, strict=True)})

    # Two levels of a tree follow, each in its own run. The last sample takes no part in the second run.
    mask, fed = SlicedCausalMask(TREE), [0, 1, 2]
    first = run(
        graph,
        cache,
        [100, 200, 400] * len(handles),
        cache.lay_out(handles, [[0, 1, 1]] * len(handles), words(mask, fed, fed, handles)),
    )
    texts = [sum(prompt) for prompt in prompts]
    assert first["sums"].tolist() == [float(t + s) for t in texts for s in (100, 300, 500)]
    part = handles[: max(1, len(handles) - 1)]
    second = run(
        graph,
        cache,
        [1000, 2000] * len(part),
        cache.lay_out(part, [[2, 2]] * len(part), words(mask, [3, 4], [0, 1, 2, 3, 4], part)),
    )
    assert second["sums"].tolist() == [float(t + s) for t in texts[: len(part)] for s in (1300, 2300)]
    assert second["positions"].tolist() == [len(p) + 2 for p in prompts[: len(part)] for _ in range(2)]

    # Committed slots stay in place; the other slots are dropped.
    cache.commit({handle: [0, 1] for handle in part} | {handle: [] for handle in handles[len(part) :]})
    third = run(graph, cache, [1] * len(handles), cache.lay_out(handles, [[0]] * len(handles)))
    assert third["sums"].tolist() == [
        float(t + 1 + 300 * (handle in part)) for t, handle in zip(texts, handles, strict=True)
    ]
    assert cache.pools(0, (), torch.empty(0))[1].shape[1:] == (2, SIZES["value"])


def words(mask, rows, columns, handles):
    return stack_words([mask.select(rows, columns)] * len(handles))


def test_one_sample_is_not_padded():
    stub, cache = Summing(), RaggedKVCache()
    handle = cache.open(4)
    run(RaggedGraph(stub), cache, [3, 5], cache.lay_out([handle], [range(2)]))
    cache.commit({handle: range(2)})
    run(RaggedGraph(stub), cache, [7], cache.lay_out([handle], [range(1)]))
    assert stub.shapes == [(1, 2, 0), (1, 1, 2)]
