"""Batches, expected block efficiency and the optimizer: the parts of a training that can be checked one by one."""

import random
from collections.abc import Sequence
from itertools import count, product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR

from arbordraft import TreeTopology
from arbordraft.loading import Kernels
from arbordraft.training.batches import BatchLoader, Place
from arbordraft.training.features import Features
from arbordraft.training.optimizers import MuonAdamW
from arbordraft.training.shards import ANSWER, GIVEN, Conversation, Shard, pack
from arbordraft.training.targets import Target
from arbordraft.training.validation import chain_tau, expectations, tree_tau

BUDGET = 100


def shards_of(lengths: Sequence[Sequence[int]]) -> list[Shard]:
    """Sequences whose tokens all are their own number."""
    numbers = count()
    return [
        pack([Conversation([next(numbers)] * n, [GIVEN] + [ANSWER] * (n - 1), 0.0) for n in row], Path())
        for row in lengths
    ]


def loader(lengths: Sequence[Sequence[int]], seed: int | None = 0, part: int = 0, of: int = 1) -> BatchLoader:
    def features(shard: Shard, sequences: Sequence[int]) -> list[Features]:
        spans = [shard.tokens[shard.offsets[s] : shard.offsets[s + 1] - 1, None].float() for s in sequences]
        return [Features(span.repeat(1, 3), span) for span in spans]

    places = [Place(shard, index, n) for shard, row in enumerate(lengths) for index, n in enumerate(row)]
    return BatchLoader(shards_of(lengths), places, features, BUDGET, seed, part, of)


def numbers(batches: BatchLoader) -> list[list[int]]:
    """Which sequences every batch of an epoch holds."""
    return [batch.tokens[:, 0].tolist() for batch in batches]


LENGTHS = [[random.Random(row).randint(2, 60) for _ in range(30)] for row in range(3)] + [[150, 3]]
ALL = list(range(92))


@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_an_epoch_holds_every_sequence_once_and_parts_share_it(of):
    parts = [loader(LENGTHS, part=part, of=of) for part in range(of)]
    assert len({len(part) for part in parts}) == 1
    orders = []
    for _ in range(3):
        epoch = [numbers(part) for part in parts]
        assert {len(part) for part in epoch} == {len(parts[0])}
        assert sorted(number for part in epoch for batch in part for number in batch) == ALL
        orders.append(epoch)
    assert orders[0] != orders[1] != orders[2]


def test_neighbours_change_from_epoch_to_epoch():
    batches = loader(LENGTHS)
    first, second = ({frozenset(batch) for batch in numbers(batches) if len(batch) > 1} for _ in range(2))
    assert len(first & second) < len(first) / 2


@given(st.lists(st.lists(st.integers(2, 130), min_size=1, max_size=12), min_size=1, max_size=3), st.integers(1, 4))
def test_batches_are_bounded(lengths, of):
    if sum(map(len, lengths)) < of:
        with pytest.raises(ValueError, match="cannot be shared"):
            loader(lengths, of=of)
        return
    length_of = [n for row in lengths for n in row]
    seen = []
    for batches in [loader(lengths, part=part, of=of) for part in range(of)]:
        for batch in batches:
            rows, width = batch.tokens.shape
            found = batch.tokens[:, 0].tolist()
            assert rows * width <= BUDGET or rows == 1
            assert max(length_of[number] for number in found) == width
            assert batch.inputs.shape == (rows, width - 1, 3)
            seen += found
    assert len(seen) == len(set(seen))
    # Only where single sequences are left over can an epoch lack some.
    assert len(seen) > sum(map(len, lengths)) - of


def test_batches_pad_on_the_right_with_what_nobody_learns():
    (batch,) = loader([[3, 5]])
    short = batch.tokens[:, 0].tolist().index(0)
    assert batch.tokens[short].tolist() == [0] * 5
    assert batch.roles[short].tolist() == [GIVEN, ANSWER, ANSWER, GIVEN, GIVEN]
    assert batch.tokens[1 - short].tolist() == [1] * 5
    assert batch.learned([ANSWER]).sum() == 2 + 4


def test_order_depends_on_the_seed_alone():
    assert numbers(loader(LENGTHS, 3)) == numbers(loader(LENGTHS, 3))
    assert numbers(loader(LENGTHS, 3)) != numbers(loader(LENGTHS, 4))


@pytest.mark.parametrize("taken", [1, 7, "all", 50])
def test_a_loader_resumes_where_another_stopped(taken):
    one, whole = loader(LENGTHS), loader(LENGTHS)
    taken = len(one) if taken == "all" else taken
    expected = [numbers(whole) for _ in range(4)]
    flat = [batch for epoch in expected for batch in epoch]
    source = (batch for _ in range(4) for batch in one)
    for _ in range(taken):
        next(source)
    # A consumer that knows the length never asks for a batch behind the last, and its state must do all the same.
    other = loader(LENGTHS)
    other.load_state_dict(one.state_dict())
    rest = len(one) - taken % len(one)
    assert numbers(other) == flat[taken : taken + rest]
    assert numbers(other) == flat[taken + rest : taken + rest + len(one)]


def test_held_out_batches_always_come_from_the_beginning():
    batches = loader(LENGTHS, seed=None)
    first = numbers(batches)
    next(iter(batches))  # as a sanity check does
    assert numbers(batches) == first


@pytest.mark.parametrize(
    ("passes", "tau"),
    [
        ([[0, 0], [0, 0]], 1),
        ([[1, 1], [1, 0]], (3 + 2) / 2),
        ([[0, 1], [1, 1]], (1 + 3) / 2),
        ([[0.5], [0.5]], 1.75),
    ],
    ids=["never", "a text that ends", "a second step counts only behind a first one", "chances"],
)
def test_chain_tau_of_known_cases(passes, tau):
    assert chain_tau(torch.tensor(passes, dtype=torch.float32)) == pytest.approx(tau)


TWO_BY_ONE, LOPSIDED = TreeTopology.from_k_config((2, 1)), TreeTopology([-1, 0, 0, 1])  # only the first child has one


@pytest.mark.parametrize(
    ("tree", "ranks", "tau"),
    [
        (TWO_BY_ONE, [1, 0], 3),
        (TWO_BY_ONE, [2, 0], 1),
        (TWO_BY_ONE, [1, 1], 2),
        (LOPSIDED, [1, 0], 2),
        (LOPSIDED, [0, 0], 3),
        (LOPSIDED, [0, 99], 2),
    ],
)
def test_tree_tau_of_known_cases(tree, ranks, tau):
    assert tree_tau(torch.tensor(ranks)[:, None], tree) == tau


@pytest.mark.parametrize("seed", range(5))
def test_expected_tau_equals_walking_every_draft(seed):
    generator = torch.Generator().manual_seed(seed)
    steps, count = 3, 9
    ranks = torch.randint(0, 4, (steps, count), generator=generator)
    chances = torch.rand(steps, count, generator=generator)
    tree = TreeTopology.from_k_config((3, 2, 1))
    walked, passed = [], []
    for draft in range(count):
        node, depth = 0, 0
        while depth < steps and (rank := int(ranks[depth, draft])) < len(tree.child_list[node]):
            node, depth = tree.child_list[node][rank], depth + 1
        walked.append(depth + 1)
        # Every pattern of what might pass, with its chance and the tokens that it yields.
        expected = 0.0
        for passes in product((True, False), repeat=steps):
            chance = 1.0
            for own, passing in zip(chances[:, draft].tolist(), passes, strict=True):
                chance *= own if passing else 1 - own
            expected += chance * (1 + (*passes, False).index(False))
        passed.append(expected)
    assert tree_tau(ranks, tree) == pytest.approx(sum(walked) / count)
    assert chain_tau(chances) == pytest.approx(sum(passed) / count)


def test_expectations_by_temperature_and_step():
    """Greedy drafts of two passed tokens and of none, one at temperature 1, and one of a text that counts nowhere."""
    drafts = {
        "temperatures": torch.tensor([0.0, 0.0, 1.0, 0.7]),
        "valid": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool),
        "passes": torch.tensor([[1.0, 0, 0.5, 1], [1, 0, 0.5, 1], [0, 0, 0, 0]]),
        "labels": torch.tensor([[1.0, 0, 0.4, 1], [1, 9, 0.2, 1], [9, 9, 9, 9]]),
        "ranks": torch.tensor([[0, 2, 0, 0], [0, 99, 0, 0], [99, 99, 99, 99]]),
    }
    metrics, acceptance = expectations(drafts, TreeTopology.chain(2))
    assert acceptance == [0.5, 0, 0.5, 0, 0, 0, 0, 0]
    assert metrics == pytest.approx(
        {
            "val/tau_greedy_chain": 2,
            "val/acceptance_greedy_pos_1": 0.5,
            "val/acceptance_greedy_pos_2": 1,
            "val/tau_greedy_tree": 2,
            "val/tau_sampled_chain": 1.75,
            "val/acceptance_sampled_pos_1": 0.4,
            "val/acceptance_sampled_pos_2": 0.2,
        }
    )
    assert "val/tau_greedy_tree" not in expectations(drafts, TreeTopology.chain(3))[0]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = {"up": nn.Linear(6, 8), "norm": nn.LayerNorm(8), "down": nn.Linear(8, 6), "lm_head": nn.Linear(6, 10)}
    return nn.ModuleDict(layers)


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return model["lm_head"](model["down"](model["norm"](model["up"](x)))).square().mean()


def train(model, optimizers, schedules, steps):
    for _ in range(steps):
        loss_of(model).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def falling(optimizer):
    return LambdaLR(optimizer, lambda step: 0.8**step)


def test_muon_adamw_equals_both_run_apart():
    ours, theirs = network(), network()
    optimizer = MuonAdamW(ours, 1e-2)
    matrices = [theirs["up"].weight, theirs["down"].weight]
    others = [p for p in theirs.parameters() if all(p is not matrix for matrix in matrices)]
    muon = Muon(matrices, lr=2e-2, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    train(ours, [optimizer], [falling(optimizer)], 5)
    train(theirs, [muon, adamw], [falling(muon), falling(adamw)], 5)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2e-2 * 0.8**5, 1e-2 * 0.8**5])


def test_muon_adamw_resumes_exactly(tmp_path):
    whole, first, second = network(), network(), network()
    train(whole, [optimizer := MuonAdamW(whole, 1e-2)], [falling(optimizer)], 6)

    half = MuonAdamW(first, 1e-2)
    train(first, [half], [schedule := falling(half)], 3)
    torch.save([first.state_dict(), half.state_dict(), schedule.state_dict()], tmp_path / "state")

    weights, state, rate = torch.load(tmp_path / "state", weights_only=True)
    second.load_state_dict(weights)
    rest = MuonAdamW(second, 1e-2)
    following = falling(rest)
    rest.load_state_dict(state)
    following.load_state_dict(rate)
    train(second, [rest], [following], 3)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
    with pytest.raises(ValueError, match="parameter group"):
        MuonAdamW(nn.Linear(2, 2, bias=False), 1e-2).load_state_dict(state)


def test_muon_adamw_trains_what_has_only_one_kind_of_parameter():
    for model in (nn.Linear(3, 3, bias=False), nn.LayerNorm(3)):
        optimizer = MuonAdamW(model)
        model(torch.arange(3.0)[None]).square().sum().backward()
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        assert len(optimizer.param_groups) == 1
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_default_target_names_kernels_that_exist():
    assert Target().kernels in set(Kernels)
    assert hasattr(torch, Target().dtype)
