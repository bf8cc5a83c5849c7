"""The law of two steps of a target with recurrent layers, by enumeration of every tree and every accepted path."""

from collections import defaultdict
from functools import cache

import pytest
import torch
from support.models import next_logits, tiny
from support.recurrent_models import recurrent

import arbordraft as ad
from arbordraft.target import states
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.states import RecurrentStates
from arbordraft.testing import draft_trees, total_variation
from arbordraft.testing.oracles import complete
from arbordraft.trees.topology import ancestor_words
from arbordraft.verifiers import KSeq

FEW = 3
PROMPT = (1, 2, 0, 1, 1, 2)
BUSH, CHAIN = ad.TreeTopology([-1, 0, 0, 1]), ad.TreeTopology.chain(1)  # of the two steps
LENGTH = len(PROMPT) + BUSH.max_depth + CHAIN.max_depth + 2
COUPLINGS = {
    "lifted": (ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection())),
    "k-seq": (ad.IID(2), ad.TopDown(KSeq())),
}
ROUNDING, WRONG = 1e-5, 1e-3  # states and logits are float32
KINDS = ("lfm2", "qwen3_next", "mamba2", "granitemoehybrid")


@cache
def target(architecture):
    model = recurrent(architecture, vocab_size=FEW, bos_token_id=None, eos_token_id=None)
    return ad.RaggedModel(model, kernels="torch")


@cache
def table_of(architecture):
    """Returns the rows of the model alone, without a cache, and those of a draft model."""
    models = target(architecture).model, tiny(vocab_size=FEW, seed=3, bos_token_id=None, eos_token_id=None)

    @cache
    def table(text):
        return tuple(next_logits(model, text).double().softmax(-1) for model in models)

    return table


def run(target, cache, samples, trees):
    """Runs a tree behind each sample in one forward; returns the ``[V]`` target rows of every tree by row."""
    topology = trees[0].batch.topology
    places = [tree.batch.node[tree.root : tree.rows.stop].tolist() for tree in trees]
    words = torch.cat([ancestor_words(topology.visible[nodes][:, nodes]) for nodes in places])
    batch = cache.lay_out(samples, [[topology.depth_list[node] for node in nodes] for nodes in places], words)
    packed = target(torch.tensor([token for tree in trees for token in tree.tokens]), batch, cache)
    rows = iter(packed.double().softmax(-1))
    return [{row: next(rows) for row in tree.rows} for tree in trees]


def emitted(architecture, coupling="lifted"):
    """Returns the law of the prompt and the tokens of two steps.

    Every tree runs once for each of its nodes, and each of these runs commits the path to its node. Trees of the first
    step follow a copy of the state that another sample has one token before the end of the prompt. Trees of the second
    step follow copies of the states after these commits.
    """
    own, table, (law, verifier) = target(architecture), table_of(architecture), COUPLINGS[coupling]
    cache = RaggedKVCache()

    def copied(source, tokens):
        copy = cache.open(tokens + BUSH.num_nodes)
        cache.share(source, copy, tokens)
        return copy

    def step(topology, starts):
        """Yields texts, with a sample that has committed all of their tokens but the last, and their probability."""
        runs = [
            (text, chance * share, tree, row, copied(source, len(text) - 1))
            for text, source, chance in starts
            for share, tree in draft_trees(topology, law, table, text)
            for row in tree.rows
        ]
        rows = run(own, cache, [copy for *_, copy in runs], [tree for _, _, tree, *_ in runs])
        cache.commit({copy: [above - tree.root for above in tree.batch.path(row)] for _, _, tree, row, copy in runs})
        for (text, chance, tree, row, copy), targets in zip(runs, rows, strict=True):
            for share, path, following in verifier.law(tree, targets):
                if path[-1] == row:
                    for token, probability in enumerate(following.tolist()):
                        yield (*text, *tree.path(row), token), copy, chance * share * probability

    read = cache.open(len(PROMPT))
    own.prefill({read: PROMPT}, cache)
    found = defaultdict(float)
    for text, _, chance in step(CHAIN, step(BUSH, [(PROMPT, read, 1.0)])):
        found[text] += chance
    return found


def distance(architecture, coupling="lifted"):
    """Returns the total variation between the law of two steps and that of the model alone."""
    table = table_of(architecture)
    expected = complete({PROMPT: 1.0}, table, LENGTH)
    return total_variation(complete(emitted(architecture, coupling), table, LENGTH), expected)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("architecture", KINDS)
def test_two_steps_emit_the_target(architecture, coupling):
    assert distance(architecture, coupling) < ROUNDING


def reads_another_parent(patch):
    parent, lay_out = states._parent, RecurrentStates.lay_out

    def wrong(self, handles, *arguments):
        planned = lay_out(self, handles, *arguments)
        for sample in (self._samples[handle] for handle in handles):
            if len(sample.parents) == BUSH.num_nodes:
                sample.parents[3] = 1  # else the commit would refuse the path
        return planned

    patch.setattr(states, "_parent", lambda words, place: 2 if place == 3 else parent(words, place))
    patch.setattr(RecurrentStates, "lay_out", wrong)


def commits_another_node(patch):
    commit = RecurrentStates.commit

    def wrong(self, kept, lengths):
        commit(self, {handle: [0, 1] if rows == [0, 2] else rows for handle, rows in kept.items()}, lengths)

    patch.setattr(RecurrentStates, "commit", wrong)


def copies_a_state_one_token_late(patch):
    restore = RecurrentStates._restore
    patch.setattr(RecurrentStates, "_restore", lambda self, sample, slot, n, _: restore(self, sample, slot, n, n))


@pytest.mark.parametrize("spoil", [reads_another_parent, commits_another_node, copies_a_state_one_token_late])
@pytest.mark.parametrize("architecture", KINDS)
def test_wrong_states_are_caught(monkeypatch, architecture, spoil):
    """Negative control."""
    spoil(monkeypatch)
    assert distance(architecture) > WRONG
