"""The verdict at one node as a graph, compared with the rules in torch node by node."""

import pytest
import torch

from arbordraft import IID, RecursiveRejection, SpecHub, TopDown, TopTail, TreeTopology
from arbordraft.exports.onnx.networks import NodeVerification
from arbordraft.onnx.graph import Graph
from arbordraft.sampling.laws import AdaptiveTopTail
from arbordraft.sampling.noise import Noise
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.verifiers import TopTailRule

NODES, VOCAB = 400, 29


def cases(tops, tails, *, sharpness=3.0, seed=0):
    """Returns target logits, draft rows, the tokens drawn from them, and all uniforms."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(NODES, VOCAB, generator=generator)
    draft = (logits + sharpness / 2 * torch.randn(logits.shape, generator=generator)).softmax(dim=-1)
    law, k = TopTail(tops, tails), tops + tails
    uniforms = torch.rand(NODES, k, generator=generator).tolist()
    tokens = [law.draw(row, numbers) for row, numbers in zip(draft, uniforms, strict=True)]
    return logits, draft, tokens, torch.rand(NODES, k + 1, generator=generator, dtype=torch.float64)


def by_rule(rule, law, logits, draft, tokens, uniforms):
    """Returns every node's accepted child, or -1, and its token, as a rule decides on a tree of one level."""
    topology = TreeTopology.k_ary(law.k, 1)
    accepted, emitted = [], []
    for target, row, drawn, numbers in zip(logits.softmax(-1), draft, tokens, uniforms, strict=True):
        tree = DraftTree.of(topology, law, [{0: 0} | dict(enumerate(drawn, 1))], [{0: row}])
        final = torch.zeros(1, topology.num_nodes, dtype=torch.float64)
        final[0, 0] = numbers[-1]
        accept = torch.cat([torch.zeros(1, dtype=torch.float64), numbers[:-1]])[None]
        rows = target.expand(tree.rows, -1)
        verdict = TopDown(rule)(tree, rows, Noise(final, accept, final))
        _, *path = verdict.paths[0]
        accepted.append(path[0] - 1 if path else -1)
        emitted.append(verdict.emitted(tree, 0)[0])
    return accepted, emitted


def padded(tokens, k):
    return torch.tensor([row + [-1] * (k - len(row)) for row in tokens])


@pytest.mark.parametrize(("tops", "tails"), [(1, 1), (2, 2)])
def test_the_graph_decides_as_the_rule(graphs, tops, tails):
    graph = Graph(graphs(f"verification-{tops}-{tails}").folder / "verification.onnx")
    given = cases(tops, tails)
    logits, draft, tokens, uniforms = given
    inputs = {"logits": logits, "draft_probs": draft, "draft_tokens": torch.tensor(tokens), "uniforms": uniforms}
    found = graph.run(inputs)
    accepted, emitted = by_rule(TopTailRule(), TopTail(tops, tails), *given)
    assert found["accepted"].tolist() == accepted
    assert found["token"].tolist() == emitted
    assert {-1, *range(tops + tails)} == set(accepted), "every outcome must have occurred"
    # Negative control: a graph that tried the children in another order would not pass.
    other = by_rule(RecursiveRejection(), IID(tops + tails), *given)
    assert other != (accepted, emitted)


def test_one_top_and_one_tail_are_spechub(graphs):
    given = cases(1, 1, seed=1)
    logits, draft, tokens, uniforms = given
    graph = Graph(graphs("verification-1-1").folder / "verification.onnx")
    inputs = {"logits": logits, "draft_probs": draft, "draft_tokens": torch.tensor(tokens), "uniforms": uniforms}
    found = graph.run(inputs)
    assert (found["accepted"].tolist(), found["token"].tolist()) == by_rule(SpecHub(), TopTail(1, 1), *given)


def test_another_vocabulary_and_a_single_node(graphs):
    """The graph fixes no size."""
    graph = Graph(graphs("verification-1-1").folder / "verification.onnx")
    generator = torch.Generator().manual_seed(0)
    for vocabulary in (3, 500):
        logits = torch.randn(1, vocabulary, generator=generator)
        draft = logits.softmax(-1)
        tokens = torch.tensor([[1, int(draft.argmax())]] if draft.argmax() != 1 else [[0, 1]])
        inputs = {"draft_probs": draft, "draft_tokens": tokens, "uniforms": torch.tensor([[0.9, 0.9, 0.5]]).double()}
        assert 0 <= graph.run({"logits": logits, **inputs})["token"].item() < vocabulary


def test_rows_with_few_tokens_have_fewer_children():
    """In sharp rows, the draft row's support and the residual run out."""
    network = NodeVerification(2, 2)
    logits, draft, _, uniforms = cases(2, 2, sharpness=30.0)
    draft[draft < 1e-3] = 0
    law = TopTail(2, 2)
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(NODES, 4, generator=generator).tolist()
    tokens = [law.draw(row, numbers) for row, numbers in zip(draft, draws, strict=True)]
    assert {1, 2, 3} <= {len(row) for row in tokens}
    # Tails come first. If one is missing, tops must stay in their places.
    tails = [[t for t in row if t not in law.top_tokens(d)] for row, d in zip(tokens, draft, strict=True)]
    tops = [[t for t in row if t in law.top_tokens(d)] for row, d in zip(tokens, draft, strict=True)]
    shown = torch.cat([padded(tails, 2), padded(tops, 2)], dim=1)
    places = [[i for i, token in enumerate(row) if token >= 0] for row in shown.tolist()]
    accepted, emitted = [], []
    for row, place in enumerate(places):
        numbers = torch.ones(1, 5, dtype=torch.float64)
        numbers[0, : len(place)] = uniforms[row, place]
        numbers[0, -1] = uniforms[row, -1]
        one = by_rule(TopTailRule(), law, logits[row : row + 1], draft[row : row + 1], tokens[row : row + 1], numbers)
        accepted.append(place[one[0][0]] if one[0][0] >= 0 else -1)
        emitted += one[1]
    found = network(logits, draft, shown, uniforms)
    assert found[0].tolist() == accepted
    assert found[1].tolist() == emitted


def test_a_node_that_cannot_be_rejected():
    """Target and draft rows are equal, so the residual after a rejection has no mass."""
    row = torch.tensor([[0.0, 0.5, 0.5]]).log()
    network = NodeVerification(0, 1)
    uniforms = torch.tensor([[1 - 1e-12, 0.5]], dtype=torch.float64)
    accepted, token = network(row, row.softmax(-1), torch.tensor([[2]]), uniforms)
    assert (accepted.item(), token.item()) == (0, 2)


def test_laws_without_a_tail_are_refused():
    with pytest.raises(ValueError, match="at least one tail"):
        NodeVerification(2, 0)
    assert not TopTailRule().supports(IID(2))
    assert TopTailRule().supports(TopTail(1, 1))
    assert not SpecHub().supports(AdaptiveTopTail(3))
