"""The block drafter: one pass per step, rows that depend on their parents, and a known law for verification."""

from functools import cache

import pytest
import torch
from support.companions import UNEVEN, Dictated, Rounds, check_rows, drafter, target, trained, walk
from support.models import PROMPTS, next_logits
from support.request_law import few_tokens as few

import arbordraft as ad
from arbordraft.drafters import block
from arbordraft.heads.block import BlockHead
from arbordraft.testing import distance_to_target, draft_trees, one_tree, tree_arguments
from arbordraft.verifiers import Matching, TopTailRule

CHAIN, SIBLINGS = ad.TreeTopology.chain(3), ad.TreeTopology([-1, 0, 0, 1, 2])


def made(few_tokens=False, **options):
    """Builds an untrained drafter whose masks and Markov term have an effect."""
    of = few(0) if few_tokens else target()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = BlockHead.for_target(of.model, range(of.vocab_size - 1), hidden_layers=[1, 2], **options)
        torch.nn.init.normal_(head.masks.weight[1:])
        for part in (head.markov, head.gate, head.lm_head_markov):
            if part is not None:
                torch.nn.init.normal_(part.weight, std=0.3)
    return ad.BlockDrafter(head, of)


class Counted(ad.BlockDrafter):
    """Records the number of rows in each call of its network."""

    def __init__(self, head, of):
        super().__init__(head, of)
        inner, self.asked = self._network, []

        class Network:
            fuse, store, condition, chunk = inner.fuse, inner.store, inner.condition, inner.chunk
            refresh, grows_trees = inner.refresh, inner.grows_trees

            def look_ahead(_, *arguments):
                self.asked.append(len(arguments[-1]))
                return inner.look_ahead(*arguments)

        self._network = Network()


# Cost


@pytest.mark.parametrize(
    ("topology", "max_depth", "rows"),
    [
        (ad.TreeTopology.k_ary(3, 3), 3, 3),
        (ad.TreeTopology.chain(4), 4, 4),
        (ad.TreeTopology.chain(9), 9, 4),
        (ad.TreeTopology.chain(4), 2, 2),
        (ad.TreeTopology.chain(0), 0, None),
    ],
    ids=["tree", "chain", "deeper than the block", "no room", "nothing"],
)
def test_a_tree_costs_one_pass_of_as_many_rows_as_it_has_levels(topology, max_depth, rows):
    counted = Counted(drafter("block").head, target())
    tree = Rounds(counted, target(), PROMPTS[:1]).propose(topology, ad.WithoutReplacement(3), max_depth=[max_depth])
    assert counted.asked == ([] if rows is None else [rows])
    assert tree.depth.max() == (rows or 0)


def test_a_batch_shares_the_pass():
    counted = Counted(drafter("block").head, target())
    rounds = Rounds(counted, target(), [PROMPTS[0], [3, 4], PROMPTS[2]])
    for _ in range(2):
        tree = rounds.propose(UNEVEN, ad.WithoutReplacement(2))
        check_rows("block", trained("block").network, target().model, tree, rounds.tokens)
        rounds.commit(tree, [1, 0, 3])
    assert counted.asked == [4 * 3] * 2


@pytest.mark.parametrize("together", [1, 2, 32])
def test_long_prompts_are_read_in_parts(monkeypatch, together):
    short = drafter("block")
    monkeypatch.setattr(block, "_MOST_SLOTS", together)
    monkeypatch.setattr(type(short._network), "chunk", 3)
    rounds = Rounds(short, target(), PROMPTS)
    tree = rounds.propose(UNEVEN, ad.WithoutReplacement(2))
    assert check_rows("block", trained("block").network, target().model, tree, PROMPTS) > 5


# The cache


class Late(ad.BlockDrafter):
    """Uses each token's states for the next token."""

    def take_hidden(self, state, hidden):
        super().take_hidden(state, {sample: states.roll(1, 0) for sample, states in hidden.items()})


class Crowd(ad.BlockDrafter):
    """Lets the query rows attend to each other."""

    def _look_ahead(self, state, context, samples):
        plan = state.cache.lay_out
        state.cache.lay_out = lambda handles, depths, words=None: plan(handles, depths)
        super()._look_ahead(state, context, samples)
        del state.cache.lay_out


class Deaf(ad.BlockDrafter):
    """Leaves out the Markov term of a node's own token."""

    def __init__(self, head, of):
        super().__init__(head, of)
        self._network.condition = lambda rows, gates, tokens: rows


class Open(ad.BlockDrafter):
    """Leaves out the gates that weigh this term by depth."""

    def __init__(self, head, of):
        super().__init__(head, of)
        condition = self._network.condition
        self._network.condition = lambda rows, gates, tokens: condition(rows, torch.ones_like(gates), tokens)


@pytest.mark.parametrize("wrong", [Late, Crowd, Deaf, Open])
def test_a_wrong_state_would_be_seen(wrong):
    with pytest.raises(AssertionError, match="not close"):
        walk(wrong(drafter("block").head, target()), "block")


def test_nothing_is_kept_of_samples_that_ended():
    rounds = Rounds(drafter("block"), target(), PROMPTS)
    rounds.commit(rounds.propose(UNEVEN, ad.IID(2)), [0, None, None])
    assert list(rounds.state.handles) == [0]
    assert list(rounds.state.pending) == [0]
    rounds.commit(rounds.propose(UNEVEN, ad.IID(2)), [None, None, None])
    assert not rounds.state.pending


# The law, by enumeration


TEXT = [3, 1, 4]


@cache
def table(path):
    """Returns the rows after a drafted path: the target's, and the drafter's row from which it draws the children."""
    rounds = Rounds(made(few_tokens=True, markov_rank=2), few(0), [TEXT])
    tree = rounds.propose(ad.TreeTopology.chain(len(path) + 1), Dictated([*path, 0]))
    real = next_logits(few(0).model, [*TEXT, *path]).double().softmax(-1)
    row = tree.drawn_from(len(path)).double()
    return real, row / row.sum()


def marginal(path):
    """Returns the row of a depth with the term of another parent, as if the parent's own token did not count."""
    return table((*path[:-1], 0))[1] if path else table(path)[1]


def deaf_trees(topology, law, rows, prefix=()):
    """Negative control: yields trees that were drawn from parents' rows but declare the rows of their depth."""
    for chance, tree in draft_trees(topology, law, rows, prefix):
        tokens, rows_of = tree_arguments(tree)
        place = dict(zip(tokens, tree.rows, strict=True))
        others = {node: marginal(tuple(tree.path(place[node]))) for node in rows_of}
        yield chance, one_tree(topology, law, tokens, others)


COUPLINGS = {
    "chain, block": (CHAIN, ad.IID(1), ad.Lifted(ad.RecursiveRejection())),
    "iid": (SIBLINGS, ad.IID(2), ad.TopDown(ad.RecursiveRejection())),
    "without replacement, lifted": (SIBLINGS, ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection())),
    "top and tail": (SIBLINGS, ad.TopTail(1, 1), ad.TopDown(TopTailRule())),
    "spechub": (SIBLINGS, ad.TopTail(1, 1), ad.TopDown(ad.SpecHub())),
    "most probable": (SIBLINGS, ad.Fixed(2), ad.TopDown(Matching())),
}


@pytest.mark.parametrize("name", COUPLINGS)
def test_every_coupling_is_lossless_with_rows_that_depend_on_their_parents(name):
    topology, law, verifier = COUPLINGS[name]
    assert distance_to_target(verifier, topology, law, table) < 1e-12


def test_rows_that_ignore_their_parents_would_be_seen():
    assert not torch.allclose(table((0,))[1], table((5,))[1], atol=0.05), "the Markov term has no effect here"
    for name in ("chain, block", "without replacement, lifted"):
        topology, law, verifier = COUPLINGS[name]
        assert distance_to_target(verifier, topology, law, table, draft=deaf_trees) > 1e-3
