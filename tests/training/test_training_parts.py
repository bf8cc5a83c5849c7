"""Batches, expected block efficiency and the optimizer: the parts of a training that can be checked one by one."""

import math
import random
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch import nn
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from arbordraft import TreeTopology
from arbordraft.kernels import native
from arbordraft.training.batches import Batch, BatchLoader, Place
from arbordraft.training.features import Features
from arbordraft.training.optimizers import MuonAdamW
from arbordraft.training.schedule import progress, relative_rate
from arbordraft.training.shards import ANSWER, GIVEN, Conversation, Shard, pack
from arbordraft.training.targets import Target
from arbordraft.training.validation import chain_accepted, expectations, tree_accepted, walked_tau
from arbordraft.utils.choices import Kernels

BUDGET = 100


def shards_of(lengths: Sequence[Sequence[int]]) -> list[Shard]:
    """Packs sequences of these lengths; every token is the number of its sequence."""
    numbers = count()
    return [
        pack([Conversation([next(numbers)] * n, [GIVEN] + [ANSWER] * (n - 1), 0.0) for n in row], Path())
        for row in lengths
    ]


def loader(
    lengths: Sequence[Sequence[int]], seed: int | None = 0, part: int = 0, of: int = 1, tokens: int = BUDGET
) -> BatchLoader:
    def features(shard: Shard, sequences: Sequence[int]) -> list[Features]:
        spans = [shard.tokens[shard.offsets[s] : shard.offsets[s + 1] - 1, None].float() for s in sequences]
        return [Features(span.repeat(1, 3), span, span[:, 0]) for span in spans]

    places = [Place(shard, index, n) for shard, row in enumerate(lengths) for index, n in enumerate(row)]
    return BatchLoader(shards_of(lengths), places, features, tokens, seed, part, of)


def numbers(batches: BatchLoader) -> list[list[int]]:
    """Returns the numbers of the sequences in every batch of an epoch."""
    return [batch.tokens[:, 0].tolist() for batch in batches]


LENGTHS = [[random.Random(row).randint(2, 60) for _ in range(30)] for row in range(3)] + [[150, 3]]
ALL = list(range(92))


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
    # An epoch may lack a remainder of fewer sequences than parts.
    assert len(seen) > sum(map(len, lengths)) - of


def test_padding_stands_on_the_right_and_is_not_learned():
    (batch,) = loader([[3, 5]])
    short = batch.tokens[:, 0].tolist().index(0)
    assert batch.tokens[short].tolist() == [0] * 5
    assert batch.roles[short].tolist() == [GIVEN, ANSWER, ANSWER, GIVEN, GIVEN]
    assert batch.tokens[1 - short].tolist() == [1] * 5
    assert batch.learned([ANSWER]).sum() == 2 + 4


def test_order_depends_on_the_seed_alone():
    assert numbers(loader(LENGTHS, 3)) == numbers(loader(LENGTHS, 3))
    assert numbers(loader(LENGTHS, 3)) != numbers(loader(LENGTHS, 4))


def read_on(parts, most=None):
    """Returns the sequences in the next batches of every part; by default, in all remaining ones of the epoch."""
    batches = [list(islice(iter(part), most)) for part in parts]
    assert len({len(own) for own in batches}) == 1
    return [number for own in batches for batch in own for number in batch.tokens[:, 0].tolist()]


@pytest.mark.parametrize("stops", [(1,), (4,), (2, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize(
    "worlds",
    [
        [(2, BUDGET), (1, BUDGET), (3, BUDGET), (2, BUDGET)],
        [(1, BUDGET), (4, BUDGET), (2, 3 * BUDGET), (1, BUDGET)],
        [(1, BUDGET), (1, 4 * BUDGET), (1, BUDGET), (1, 2 * BUDGET)],
        [(3, 2 * BUDGET), (3, BUDGET), (5, 2 * BUDGET), (1, BUDGET)],
    ],
    ids=str,
)
def test_other_numbers_of_processes_and_batch_sizes_finish_an_epoch(worlds, stops):
    """Every sequence is read once per epoch despite interruptions; later epochs are complete."""
    read, state = [], None
    for (of, tokens), stop in zip(worlds, (*stops, None), strict=False):
        parts = [loader(LENGTHS, part=part, of=of, tokens=tokens) for part in range(of)]
        for part in parts if state else ():
            part.load_state_dict(state)
            part.load_state_dict(state)  # Lightning loads the state twice
        read += read_on(parts, stop)
        assert all(part.state_dict() == parts[0].state_dict() for part in parts)
        state = parts[0].state_dict()
    assert sorted(read) == ALL
    assert sorted(read_on(parts)) == ALL


SINGLES = [[60] * 20]


@pytest.mark.parametrize(
    ("before", "stop", "after", "message"),
    [
        ({"of": 2}, 3, {"of": 3}, "14 batches .* evenly by 3 processes: go on with 2 processes and .* 100"),
        ({}, 18, {"of": 3}, "2 batches that are left"),
        ({}, 3, {"seed": 1}, "middle of an epoch with seed 0, not 1"),
        ({}, 3, {"lengths": [[60] * 19]}, "middle of an epoch with sequences 20, not 19"),
    ],
)
def test_an_epoch_that_cannot_be_resumed_is_refused(before, stop, after, message):
    parts = [loader(**{"lengths": SINGLES, **before}, part=part) for part in range(before.get("of", 1))]
    read_on(parts, stop)
    other = loader(**{"lengths": SINGLES, **after})
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(parts[0].state_dict())
    read_on(parts)
    other.load_state_dict(parts[0].state_dict())  # between two epochs, every setting may change
    assert len(read_on([other])) == len(other)


def test_a_position_after_the_end_is_refused():
    """Checkpoints that do not record their settings may hold such a position."""
    with pytest.raises(ValueError, match=r"at batch 30 of an epoch that has 20: go on with .*data\.batch_tokens"):
        loader(SINGLES).load_state_dict({"epoch": 0, "position": 30})


def test_held_out_batches_always_come_from_the_beginning():
    batches = loader(LENGTHS, seed=None)
    first = numbers(batches)
    next(iter(batches))  # as Lightning's sanity check does
    assert numbers(batches) == first


@pytest.mark.parametrize(
    ("text", "predicted"),
    [("abcdabcd", [7]), ("abcdabce", []), ("aaaaa", [4]), ("abcdabceabce", [11]), ("abcdabceabcd", []), ("ab", [])],
    ids=["a repetition", "another end", "a run", "the latest match counts", "the first match does not", "too short"],
)
def test_predictions_of_a_lookup_of_three_tokens(text, predicted):
    tokens = torch.tensor([list(text.encode())])
    batch = Batch(tokens, *[torch.empty(0)] * 5)
    assert batch.looked_up().nonzero()[:, 1].tolist() == predicted
    assert batch.looked_up().shape == tokens.shape


@pytest.mark.parametrize("tree", [TreeTopology.from_k_config((3, 2, 1)), TreeTopology([-1, 0, 0, 1, 1, 3])])
@pytest.mark.parametrize("seed", range(5))
def test_expected_walks_are_those_of_every_outcome(seed, tree):
    """Weighs chains over every path of decoding through a text, and follows trees node by node."""
    generator = torch.Generator().manual_seed(seed)
    steps, count = 3, 9
    ranks = torch.randint(0, 4, (steps, count), generator=generator)
    chances = torch.rand(steps, count, generator=generator)
    for ahead in range(1, steps):
        chances[ahead, count - ahead :] = 0  # the text has ended

    def rounds(at: int) -> float:
        """Returns the expected number of rounds from ``at`` to the end."""
        if at >= count:
            return 0.0
        total, reach = 1.0, 1.0
        for step in range(steps + 1):
            passing = float(chances[step, at]) if step < steps else 0.0
            total += reach * (1 - passing) * rounds(at + step + 1)
            reach *= passing
        return total

    found = walked_tau(chain_accepted(chances), torch.zeros(count), 128)
    assert found == pytest.approx(count / rounds(0), rel=1e-5)
    for draft in range(count):
        node, depth = 0, 0
        while depth < steps and (rank := int(ranks[depth, draft])) < len(tree.child_list[node]):
            node, depth = tree.child_list[node][rank], depth + 1
        assert tree_accepted(ranks, tree)[draft].argmax() == depth


def test_expectations_by_temperature_and_step():
    """Covers greedy answers of three tokens and of one, an answer at temperature 1, and an ignored one at 0.7."""
    drafts = {
        "temperatures": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.7]),
        "answers": torch.tensor([0, 0, 0, 1, 2, 2, 3]),
        "valid": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 0, 1], [0] * 7], dtype=torch.bool),
        "passes": torch.tensor([[1.0, 0, 0, 0, 0.5, 0.5, 1], [1, 0, 0, 0, 0.5, 0, 1], [0] * 7]),
        "labels": torch.tensor([[1.0, 0, 0, 0, 0.4, 0.6, 1], [1, 0, 9, 9, 0.2, 9, 1], [9] * 7]),
        "ranks": torch.tensor([[0, 2, 2, 2, 0, 0, 0], [0, 1, 99, 99, 0, 99, 0], [99] * 7]),
    }
    metrics, acceptance = expectations(drafts, TreeTopology.chain(2), 128)
    assert acceptance == [0.25, 0, 0.75, 0, 0, 0, 0, 0]
    assert metrics == pytest.approx(
        {
            "val/tau_greedy_chain": 4 / 2,
            "val/acceptance_greedy_pos_1": 0.25,
            "val/acceptance_greedy_pos_2": 0.5,
            "val/tau_greedy_tree": 4 / 2,
            "val/tau_sampled_chain": 2 / 1.5,
            "val/acceptance_sampled_pos_1": 0.5,
            "val/acceptance_sampled_pos_2": 0.2,
        }
    )
    assert "val/tau_greedy_tree" not in expectations(drafts, TreeTopology.chain(3), 128)[0]
    assert expectations(drafts, TreeTopology.chain(2), 1)[0]["val/tau_greedy_chain"] == 1


@pytest.mark.parametrize(
    ("step", "done", "rate"),
    [(0, 0.0, 1 / 4), (2, 0.1, 3 / 4), (3, 0.1, 1), (100, 0.8, 1), (100, 0.85, 0.5), (100, 1.0, 0), (0, 0.85, 1 / 8)],
)
def test_rates_of_known_cases(step, done, rate):
    assert relative_rate(step, done, warmup=4, cooldown=0.2) == pytest.approx(rate)
    assert relative_rate(100, done, warmup=0, cooldown=0.0) == 1


@pytest.mark.parametrize(
    ("step", "steps", "timers", "share"),
    [
        (3, 12, [], 0.25),
        (3, math.inf, [], 0),
        (3, math.inf, [(20, 60)], 0.25),
        (6, 12, [(20, 60)], 0.5),
        (3, 12, [(60, 20)], 0.75),
        (3, 12, [(85, -5)], 1),
        (3, 12, [(20, None)], 0.25),
    ],
    ids=["steps", "no end", "time", "steps end first", "time ends first", "overtime", "a timer without an end"],
)
def test_progress_of_known_cases(step, steps, timers, share):
    callbacks = [ModelCheckpoint()]
    for elapsed, left in timers:
        callbacks.append(timer := Timer(interval="step"))
        timer.time_elapsed, timer.time_remaining = (lambda one=elapsed: one), (lambda one=left: one)
    strategy = SimpleNamespace(broadcast=lambda value: value)
    trainer = SimpleNamespace(
        global_step=step, estimated_stepping_batches=steps, callbacks=callbacks, strategy=strategy
    )
    assert progress(trainer) == pytest.approx(share)


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


class Dtypes(TorchDispatchMode):
    """Records the dtypes of all results."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.add(getattr(result, "dtype", None))
        return result


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_muon_avoids_bfloat16_where_the_processor_is_slow_in_it(fast, shape, monkeypatch):
    """Updates equal torch's except for its rounding, over several steps with momentum."""
    monkeypatch.setattr(native, "fast_bfloat16", lambda: fast)
    source = torch.Generator().manual_seed(0)
    ours, theirs = nn.Linear(*shape, bias=False), nn.Linear(*shape, bias=False)
    theirs.load_state_dict(ours.state_dict())
    before = ours.weight.detach().clone()
    optimizer = MuonAdamW(ours, 1e-2)
    muon = Muon([theirs.weight], lr=2e-2, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        gradient = torch.randn(before.shape, generator=source)
        ours.weight.grad, theirs.weight.grad = gradient, gradient.clone()
        with Dtypes() as noted:
            optimizer.step()
        assert (torch.bfloat16 in noted.seen) == fast
        muon.step()
    moved, expected = ours.weight.detach() - before, theirs.weight.detach() - before
    assert (moved - expected).norm() <= (0 if fast else 0.02) * expected.norm()


def test_muon_adamw_equals_muon_and_adamw_run_separately(monkeypatch):
    monkeypatch.setattr(native, "fast_bfloat16", lambda: True)
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


def test_the_rates_of_muon_and_adamw_are_set_at_once():
    optimizer, other = MuonAdamW(network(), 1e-2), MuonAdamW(network(), 5e-2)
    optimizer.set_lr(5e-2)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in other.param_groups]
    optimizer.load_state_dict(MuonAdamW(network(), 1.0).state_dict())
    optimizer.set_lr(5e-2)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-1, 5e-2]


def test_states_of_other_networks_are_refused():
    with pytest.raises(ValueError, match="parameter group"):
        MuonAdamW(nn.Linear(2, 2, bias=False), 1e-2).load_state_dict(MuonAdamW(network(), 1e-2).state_dict())


def test_muon_adamw_trains_modules_with_one_kind_of_parameter():
    for model in (nn.Linear(3, 3, bias=False), nn.LayerNorm(3)):
        optimizer = MuonAdamW(model)
        model(torch.arange(3.0)[None]).square().sum().backward()
        before = [p.clone() for p in model.parameters()]
        optimizer.step()
        assert len(optimizer.param_groups) == 1
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_default_target_names_kernels_that_exist():
    assert Target().kernels in set(Kernels)
