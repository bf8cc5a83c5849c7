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
from arbordraft.training.expected import chain_tau, tree_tau
from arbordraft.training.features import Features
from arbordraft.training.optimizers import MuonAdamW
from arbordraft.training.shards import ANSWER, GIVEN, Conversation, Shard, pack
from arbordraft.training.targets import Target

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


def chances(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)[:, None]


def test_chain_tau_of_known_cases():
    begins = torch.tensor([[True, True, True, True]])
    assert chain_tau(chances([0, 0, 0, 0], [0, 0, 0, 0]), begins) == 1
    # Both steps always right, but drafts from the last slot see the text end behind their first token.
    assert chain_tau(chances([1, 1, 1, 1], [0, 1, 1, 1]), begins) == pytest.approx((3 + 3 + 3 + 2) / 4)
    # A second step counts only behind a first one, one slot earlier.
    assert chain_tau(chances([0, 1, 0, 0], [1, 1, 1, 1]), begins) == pytest.approx((1 + 3 + 1 + 1) / 4)
    assert chain_tau(chances([0.5, 0, 0, 0], [0, 0.5, 0, 0]), begins[:, :1].repeat(1, 4)) == pytest.approx(
        (1.75 + 1 + 1 + 1) / 4
    )
    assert chain_tau(chances([0, 1, 0, 0], [0, 0, 1, 0]), torch.tensor([[False, True, False, False]])) == 3


def test_tree_tau_of_known_cases():
    tree = TreeTopology.from_k_config((2, 1))  # two first tokens, one behind each
    begins = torch.tensor([[True, False, False]])
    ranks = torch.tensor([[[1, 9, 9]], [[9, 0, 9]]])
    assert tree_tau(ranks, begins, tree) == 3
    assert tree_tau(torch.tensor([[[2, 9, 9]], [[9, 0, 9]]]), begins, tree) == 1
    assert tree_tau(torch.tensor([[[1, 9, 9]], [[9, 1, 9]]]), begins, tree) == 2
    lopsided = TreeTopology([-1, 0, 0, 1])  # only the first child has a child
    assert tree_tau(ranks, begins, lopsided) == 2
    assert tree_tau(torch.tensor([[[0, 9, 9]], [[9, 0, 9]]]), begins, lopsided) == 3


@pytest.mark.parametrize("seed", range(5))
def test_expected_tau_equals_walking_every_draft(seed):
    generator = torch.Generator().manual_seed(seed)
    steps, samples, slots = 3, 2, 7
    begins = torch.rand(samples, slots, generator=generator) < 0.7
    ranks = torch.randint(0, 4, (steps, samples, slots), generator=generator)
    factors = torch.rand(steps, samples, slots, generator=generator)
    tree = TreeTopology.from_k_config((3, 2, 1))

    def at(values, step, sample, slot, beyond):
        return values[step, sample, slot + step].item() if slot + step < slots else beyond

    walked, passed = [], []
    for sample, slot in product(range(samples), range(slots)):
        if not begins[sample, slot]:
            continue
        node, depth = 0, 0
        while depth < steps and (rank := at(ranks, depth, sample, slot, 99)) < len(tree.child_list[node]):
            node, depth = tree.child_list[node][rank], depth + 1
        walked.append(depth + 1)
        # Every pattern of what might pass, with its chance and the tokens that it yields.
        expected = 0.0
        for passes in product((True, False), repeat=steps):
            chance = 1.0
            for step, passing in enumerate(passes):
                factor = at(factors, step, sample, slot, 0.0)
                chance *= factor if passing else 1 - factor
            expected += chance * (1 + (*passes, False).index(False))
        passed.append(expected)
    assert tree_tau(ranks, begins, tree) == pytest.approx(sum(walked) / len(walked))
    assert chain_tau(factors, begins) == pytest.approx(sum(passed) / len(passed))


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
    optimizer = MuonAdamW(ours, 1e-2, weight_decay=0.1)
    matrices = [theirs["up"].weight, theirs["down"].weight]
    others = [p for p in theirs.parameters() if all(p is not matrix for matrix in matrices)]
    muon = Muon(matrices, lr=2e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW(others, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
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
