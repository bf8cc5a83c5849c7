"""Training of block heads: the slots that train each depth, and the gain of the Markov term."""

import pytest
import torch
from support.companions import STUDENTS, Rounds, batch_for, drafter, frequent, target, texts, trained
from support.models import VOCAB, greedy_reference
from support.tiny_training import data, save_config, save_world, stored
from torch.nn import functional
from torch.testing import assert_close

from arbordraft import IID, BlockDrafter, Coupling, SpeculativeDecoder, TreeTopology
from arbordraft.decoding.prompts import left_padded
from arbordraft.drafter_names import load_drafter
from arbordraft.training.drafter_module import DrafterModule
from arbordraft.training.drafts import follow
from arbordraft.training.features import FreshFeatures, TeacherHead
from arbordraft.training.fit import run
from arbordraft.training.optimizers import MuonAdamW
from arbordraft.training.shards import ANSWER
from arbordraft.training.students import BlockStudent, DFlashStudent

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory")


def built(**options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        student = BlockStudent(**{"markov_rank": 8, "vocabulary": 40, "layers": (1, 2, 3), **options})
        student.build(target(), frequent)
    return student


# Slots that train a depth


def test_deeper_steps_train_at_fewer_slots_drawn_anew():
    student = built(keep=0.5)
    batch = batch_for(student)
    slots = batch.tokens.shape[1] - 2
    first, second = (list(student.unroll(batch, target(), 9)) for _ in range(2))
    assert len(first) == 4
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        assert one.first == step
        assert int(one.slots.sum()) == round((slots - step) * 0.5**step)
        assert not one.slots[:step].any()
        assert not one.hidden[:, ~one.slots].any()
        assert step == 0 or not torch.equal(one.slots, other.slots)
    assert sum(int(found.slots.sum()) for found in first) < slots / (1 - 0.5)
    assert all(found.head is first[0].head for found in first)  # one shared tensor, in which the gradients add up


def test_trained_slots_get_the_states_of_a_full_pass():
    student = built(keep=0.5)
    batch = batch_for(student)
    some = list(student.unroll(batch, target(), 4))
    every = list(student.eval().unroll(batch, target(), 4))
    for step, (one, other) in enumerate(zip(some, every, strict=True)):
        assert int(other.slots.sum()) == len(other.slots) - step
        assert_close(one.hidden[:, one.slots], other.hidden[:, one.slots], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("length", "steps"), [(3, 1), (4, 2), (9, 4)])
def test_texts_shorter_than_a_block(length, steps):
    student, batch = built(keep=0.01), batch_for(built())
    short = batch._replace(tokens=batch.tokens[:, :length], inputs=batch.inputs[:, : length - 1])
    found = list(student.unroll(short, target(), 4))
    assert len(found) == steps
    assert all(prediction.slots.any() for prediction in found)


@pytest.mark.parametrize("keep", [0, -0.5, 1.01, float("nan")])
def test_keep_out_of_range_is_refused(keep):
    with pytest.raises(ValueError, match=r"keep must be a number from 0\.001 to 1"):
        BlockStudent(keep=keep)


def test_every_weight_has_a_gradient_and_the_right_optimizer():
    student = built(keep=0.7)
    muon, adam = (set(part.param_groups[0]["params"]) for part in MuonAdamW(student).parts)
    network = student.network
    assert {network.masks.weight, network.lm_head.weight, network.lm_head_markov.weight} <= adam
    assert {network.markov.weight, network.gate.weight, network.fc.weight} <= muon
    torch.nn.init.normal_(network.lm_head_markov.weight)
    found = list(student.unroll(batch_for(student), target(), 4))
    torch.stack([functional.linear(one.hidden, one.head).square().mean() for one in found]).sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
    assert not network.masks.weight.grad[0].any()


def test_deciders_see_the_same_states_in_training_and_decoding():
    """Neither state includes the Markov term of its token."""
    student, made = trained("block"), drafter("block")
    drafts = follow(student, batch_for(student), target(), TeacherHead(target()), 4, hidden_size=32)
    text, at = texts()[2], 16
    rounds = Rounds(made, target(), [text[:at]])
    rounds.propose(TreeTopology.chain(4), IID(1))
    shown = rounds.state.block[0][1]
    columns = (drafts.sequences == 2).nonzero()[:, 0]
    column = columns[at - 13]  # the first draft begins after the prompt's 13 tokens
    assert_close(drafts.hidden[:, column], shown, rtol=0, atol=1e-4)


# Learning


def chain_texts(count=6, length=40):
    """Builds texts in which one of two tokens, drawn at random, follows each token."""
    generator = torch.Generator().manual_seed(3)
    following = torch.randint(3, 40, (VOCAB, 2), generator=generator)
    tokens = torch.full((count, length), 5)
    for at in range(1, length):
        coins = torch.randint(2, (count,), generator=generator)
        tokens[:, at] = following[tokens[:, at - 1], coins]
    return tokens


def learned(rank, steps=120):
    """Trains on four of six texts and returns the mean loss at the second of two depths over all six."""
    tokens = chain_texts()
    student = built(markov_rank=rank, vocabulary=None, block_size=2, keep=1.0)
    features = FreshFeatures(target(), student.hidden_layers(target()))(tokens.tolist())
    inputs, final = (torch.stack([getattr(one, name) for one in features]) for name in ("inputs", "final"))
    batch = batch_for(student)._replace(tokens=tokens, inputs=inputs, final=final)
    optimizer, losses = torch.optim.Adam(student.parameters(), lr=5e-3), []
    for _ in range(steps):
        found = list(student.unroll(batch._replace(tokens=tokens[:4], inputs=inputs[:4]), target(), 2))
        loss = sum(loss_of(one, tokens[:4]) for one in found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with torch.no_grad():
        return loss_of(list(student.eval().unroll(batch, target(), 2))[1], tokens)


def loss_of(found, tokens):
    hidden, wanted = found.hidden[:, found.first :], tokens[:, found.ahead + found.first :]
    return functional.cross_entropy(functional.linear(hidden, found.head).flatten(0, 1), wanted.flatten())


def test_the_markov_term_lowers_the_loss_at_the_second_depth():
    """Two tokens may follow each token, so four are possible at the second depth; its parent leaves two of them."""
    with_term, without = learned(8), learned(0)
    assert with_term < without - 0.2


# From the command line to decoding


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return save_world(tmp_path_factory.mktemp("world"))


def greedy_prompts(folder):
    """Returns the prompts of the greedy answers in the data."""
    found = []
    for name, file in stored(folder).items():
        if name.startswith("tokens"):
            shard = file[1]
            for number in (shard["temperatures"] == 0).nonzero()[:, 0]:
                place = slice(*shard["offsets"][number : number + 2])
                given = int((shard["roles"][place] == ANSWER).nonzero()[0])
                found.append(shard["tokens"][place][:given].tolist())
    return found


@pytest.mark.parametrize("rank", [0, 8])
def test_fit_save_load_decode(world, tmp_path, rank):
    config = save_config(
        tmp_path / "config.yaml",
        world,
        trainer={"max_epochs": 12, "check_val_every_n_epoch": 6},
        model={
            "student": {
                "class_path": "arbordraft.training.students.BlockStudent",
                "init_args": {"vocabulary": 40, "layers": [0, 1, 2], "block_size": 3, "markov_rank": rank},
            },
            "phases": [{"until": 1.0, "steps": 3, "loss": "kl"}],
            "lr": 0.01,
        },
    )
    run(DrafterModule, ["fit", "--config", str(config)])
    of = data(world).target
    best = load_drafter(tmp_path / "results" / "best", of)
    assert isinstance(best, BlockDrafter)
    assert (best.head.config.block_size, best.head.config.markov_rank) == (3, rank)
    assert best.head.config.acceptance
    with torch.random.fork_rng():
        torch.manual_seed(1)
        blank = STUDENTS["block"]()
        blank.layers = (0, 1, 2)
        blank.build(of, frequent)
        for parameter in blank.network.parameters():
            torch.nn.init.normal_(parameter)
    prompts, taus = greedy_prompts(world / "data"), []
    for proposer in (best, blank.drafter(of)):
        decoder = SpeculativeDecoder(of, proposer, TreeTopology.from_k_config((2, 1, 1)), Coupling.matching(2))
        options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}
        output = decoder.generate(**left_padded(prompts), **options)
        expected = greedy_reference(of.model, prompts, max_new_tokens=16, eos_token_id=None)
        assert output.sequences[:, -16:].tolist() == expected
        taus.append(output.stats.tau)
    assert taus[0] > taus[1] + 0.3


def test_a_recurrent_term_is_not_trained():
    with pytest.raises(ValueError, match="is read, not trained: set markov to vanilla or gated"):
        DFlashStudent(markov="rnn")
    with pytest.raises(ValueError, match="begins must"):
        DFlashStudent(begins=0)


def test_drafts_begin_at_a_share_of_the_slots():
    """Training draws the slots anew for every batch; evaluation uses all of them."""
    student = STUDENTS["dspark"]()
    student.begins = 0.25
    student.build(target(), frequent)
    counts = []
    for training in (True, False):
        student.train(training)
        found = list(student.unroll(batch_for(student), target(), 4))
        counts.append([int(prediction.slots.sum()) for prediction in found])
    slots = max(map(len, texts())) - 2
    assert counts[1] == [slots - step for step in range(4)]
    assert counts[0][0] == round(slots * 0.25)
    assert all(few < many for few, many in zip(*counts, strict=True))
