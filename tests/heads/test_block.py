"""The block head: shared weights of depths, effects of masks and of the Markov term, and its start."""

import pytest
import torch
from support.companions import block_row, eagle_row, target, trained
from support.models import PROMPTS, VOCAB
from torch.testing import assert_close

from arbordraft.heads.block import BlockConfig, BlockHead
from arbordraft.heads.eagle import EagleHead

TEXT = PROMPTS[2]


def made(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BlockHead.for_target(target().model, range(VOCAB), hidden_layers=[1, 2, 3], **options)


def row(head, drafted=(), text=TEXT):
    return block_row(head, target().model, text, list(drafted))


def test_it_starts_as_an_eagle_head():
    """Depth 0 is the first level of an EAGLE head with the same weights, and masks never change it."""
    head = made()
    eagle = EagleHead(head.config)
    eagle.load_state_dict(head.state_dict(), strict=False)
    assert_close(row(head), eagle_row(eagle, target().model, TEXT, []), rtol=0, atol=1e-5)
    torch.nn.init.normal_(head.masks.weight[1:])
    assert_close(row(head), eagle_row(eagle, target().model, TEXT, []), rtol=0, atol=1e-5)
    torch.nn.init.normal_(head.lm_head_markov.weight)
    assert not torch.allclose(row(head), eagle_row(eagle, target().model, TEXT, []), atol=1e-2)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_child_depends_on_its_parent_by_the_markov_term_alone(rank):
    head = made(markov_rank=rank)
    torch.nn.init.normal_(head.masks.weight[1:])
    if rank:
        torch.nn.init.normal_(head.lm_head_markov.weight)
    siblings = torch.stack([row(head, [token]) for token in range(12)])
    differences = siblings[1:] - siblings[:1]
    assert torch.linalg.matrix_rank(differences, atol=1e-3) == rank
    # Tokens above the parent have no effect.
    assert torch.equal(row(head, [5, 9]), row(head, [6, 9]))
    assert head.weight.shape == (VOCAB, 32 + rank)
    assert head.follow(torch.randn(3, 32)).shape == (3, rank)


def test_depths_differ_by_their_masks_and_places():
    head = trained("block").network
    rows = torch.stack([row(head, [7] * depth) for depth in range(4)])
    assert (torch.pdist(rows[:, head.tokens]) > 0.1).all()
    fresh = made(markov_rank=0)
    with torch.no_grad():
        fresh.masks.weight[2] = fresh.masks.weight[1]
    assert not torch.allclose(row(fresh, [7, 7]), row(fresh, [7]), atol=1e-3)  # the same mask one place further on
    with torch.no_grad():
        fresh.midlayer.self_attn.o_proj.weight.zero_()
    assert_close(row(fresh, [7, 7]), row(fresh, [7]), rtol=0, atol=1e-6)  # only attention sees the place


def test_the_scale_of_embeddings_has_no_effect():
    head = made()
    embeddings = torch.randn(3, 32)
    assert_close(head.follow(30 * embeddings), head.follow(embeddings), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"block_size": 0}, ValueError, "block_size must be a whole number from 1 to 32, got 0"),
        ({"block_size": 2.5}, TypeError, "block_size must be a whole number"),
        (
            {"markov_rank": 0, "mask_token_id": VOCAB},
            ValueError,
            f"mask_token_id must be a whole number from 0 to {VOCAB - 1}",
        ),
        ({"markov_rank": 4, "mask_token_id": 1}, ValueError, "set markov_rank to 0"),
        ({"markov_rank": -1}, ValueError, "markov_rank must be a whole number of at least 0, got -1"),
    ],
    ids=["no token", "half a token", "unknown mask", "a mask and a term", "negative rank"],
)
def test_settings_out_of_range_are_refused(settings, error, message):
    with pytest.raises(error, match=message):
        BlockHead(BlockConfig(vocab_size=VOCAB, target_hidden_size=32, hidden_size=32, draft_vocab_size=5, **settings))


def test_depth_0_has_no_mask():
    head = made()
    embeddings, hidden = torch.randn(2, 32), torch.randn(2, 32)
    with torch.no_grad():
        head.masks.weight.fill_(torch.nan)
    assert all(map(torch.equal, head.ask(embeddings, hidden, torch.zeros(2).long()), (embeddings, hidden)))
    assert all(part.isnan().all() for part in head.ask(embeddings, hidden, torch.ones(2).long()))
