"""Random trees of two samples as tables, for kernels that verify them."""

import torch


def forest(vocabulary, dtype, laws, seed):
    """Draws two samples, whose trees have nine and three nodes, between unused places and padding rows.

    Args:
        vocabulary: V.
        dtype: type of the scores.
        laws: ``"drawn"``, ``"tops"`` with one or two certain children before or after drawn ones, or ``"sparse"``: the
            first child is missing, and the target bans tokens.
        seed: seed of the numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(5, vocabulary, generator=generator).softmax(dim=-1)
    near = torch.randn(14, vocabulary, generator=generator)
    inner = torch.tensor([0, 9, -1, 1, 3, 10, -1, 4])
    draft_row = torch.tensor([2, 0, -1, 4, 1, -1, -1, 3])
    rows = [[1, 2, 3], [10, -1, -1], [-1] * 3, [4, 5, -1], [6, 7, -1], [11, -1, -1], [-1] * 3, [8, -1, -1]]
    tokens = torch.randint(vocabulary, (8, 3), generator=generator)
    children = torch.tensor(rows)
    if laws == "sparse":
        children[4, 0] = -1
        near[:, vocabulary // 2 :] = -torch.inf
        near[:, 0] = 3.0
    tokens = torch.where(children < 0, -1, tokens)
    for node, row in enumerate(draft_row.tolist()):  # scores near the draft law: some children are accepted
        if row >= 0:
            near[inner[node]] = near[inner[node]] * 0.5 + draft[row].log()
    tops = torch.full((5, 2), -1)
    if laws == "tops":
        for node, (row, first) in enumerate(zip(draft_row.tolist(), (2, 0, 0, 1, 0, 0, 0, 0), strict=True)):
            if row >= 0:
                tops[row] = torch.stack([tokens[node, first], tokens[node, -1]])
        draft.scatter_(1, tops.clamp(min=0), torch.where(tops < 0, draft.gather(1, tops.clamp(min=0)), 0.0))
    scores = near.to(dtype)
    uniforms = torch.rand(14, generator=generator, dtype=torch.float64)
    order = torch.tensor([8, 3, 4, 7, 1, 2, 5, 6, 0, 2, 1, 0, 0, 0])
    sample = torch.tensor([0] * 9 + [1] * 3 + [2] * 2)
    trees = inner, draft_row, children, tokens, tops, torch.tensor([0, 9, 12]), uniforms, order, sample
    return scores, scores.float().logsumexp(dim=-1), draft, *trees, [3, 4, 1]
