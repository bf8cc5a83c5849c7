"""Students: their rows and expected gains along a text equal those of their drafters."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.companions import (
    EXIT,
    LAYERS,
    STUDENTS,
    Dictated,
    Rounds,
    batch_for,
    drafter,
    frequent,
    target,
    texts,
    trained,
    widen,
    with_norms,
)
from support.models import PROMPTS, VOCAB, ragged, tiny
from torch.nn import functional
from torch.testing import assert_close

from arbordraft import Fixed, MedusaDrafter, RaggedModel, TreeTopology
from arbordraft.training.drafter_module import DrafterModule, Phase
from arbordraft.training.drafts import follow
from arbordraft.training.features import TeacherHead
from arbordraft.training.optimizers import MuonAdamW
from arbordraft.training.shards import ANSWER, GIVEN
from arbordraft.training.students import EagleStudent, EarlyExitStudent, LanguageModelStudent, MedusaStudent
from arbordraft.training.students.eagle import attend_unrolled
from arbordraft.training.validation import chain_accepted, tree_accepted, walked_tau

STEPS = 4
every_student = pytest.mark.parametrize("name", STUDENTS)


def drafted_rows(made, text, at):
    """Returns a real drafter's rows after it has committed ``text[:at]`` and drafts the rest of the text."""
    rounds = Rounds(made, target(), [text[:at]])
    tree = rounds.propose(TreeTopology.chain(STEPS), Dictated([*text[at:], *[0] * STEPS]))
    rows = map(tree.drawn_from, range(min(STEPS, len(text) - at, tree.rows)))
    return [row for row in rows if row is not None]


@torch.no_grad()
def unrolled(name):
    """Returns ``[B, S, V]`` probabilities of every step, the distance that it looks ahead, and its first slot."""
    student = trained(name)
    found = list(student.unroll(batch_for(student), target(), STEPS))
    found *= STEPS if student.steps_alike else 1
    rows = [widen(student, functional.linear(p.hidden, p.head, p.bias)).softmax(dim=-1) for p in found]
    assert {p.ahead for p in found} == {found[0].ahead}
    return rows, found[0].ahead, [p.first for p in found]


@every_student
def test_training_and_decoding_give_the_same_rows(name):
    """Slot j at step s gives the row of depth s + 1 in the draft that begins at slot j - s."""
    made, (rows, ahead, first) = drafter(name), unrolled(name)
    assert len(rows) == {"medusa": 3, "dflash": 3}.get(name, STEPS)
    compared = 0
    for sample, text in enumerate(texts()):
        for at in range(ahead, len(text)):
            drafted = drafted_rows(made, text, at)
            assert len(drafted) == min(len(rows), len(text) - at)
            for step, row in enumerate(drafted):
                slot = at - ahead + step
                assert slot >= first[step]
                assert_close(row, rows[step][sample, slot], rtol=0, atol=2e-5)
                compared += 1
    assert compared > 150


@every_student
def test_rows_of_another_slot_or_step_differ(name):
    rows, ahead, _ = unrolled(name)
    text, at = texts()[2], 16
    drafted = drafted_rows(drafter(name), text, at)
    for step, row in enumerate(drafted):
        assert (row - rows[step][2, at - ahead + step + 1]).abs().max() > 1e-3
    if name in ("eagle", "medusa"):
        assert (drafted[1] - rows[0][2, at - ahead + 1]).abs().max() > 1e-3


def alone(query, keys, values, slot):
    """Returns ``[B, Hq, C]`` of one slot, which sees the target's slots up to its draft and then one per step."""
    began, groups = slot - len(keys) + 1, query.shape[2] // keys[0].shape[2]
    key, value = (
        torch.cat([part[0][:, : began + 1], *(part[t][:, began + t, None] for t in range(1, len(part)))], dim=1)
        .repeat_interleave(groups, dim=2)
        for part in (keys, values)
    )  # fmt: skip
    shares = (torch.einsum("bhc,bshc->bhs", query[:, slot], key) * query.shape[-1] ** -0.5).softmax(dim=-1)
    return torch.einsum("bhs,bshc->bhc", shares, value)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_unrolled_attention_is_that_of_every_slot_alone(steps, groups):
    """Gradients agree, too."""
    shapes = [(2, 7, 2 * groups, 4), *[(2, 7, 2, 4)] * (2 * steps)]
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    query, keys, values = given[0], given[1 : steps + 1], given[steps + 1 :]
    found = attend_unrolled(query, keys, values)[:, steps - 1 :]
    expected = torch.stack([alone(query, keys, values, slot) for slot in range(steps - 1, 7)], dim=1)
    assert_close(found, expected, rtol=0, atol=1e-5)
    slope = torch.randn_like(found)
    gradients = [torch.autograd.grad(result, given, slope, retain_graph=True) for result in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, rtol=0, atol=1e-5)


# Expected gain in validation


@pytest.fixture
def module(monkeypatch):
    """Returns a function that makes a student's module without a trainer."""

    def make(student, **options):
        made = DrafterModule(student, draft_steps=STEPS, decoded=0, **options)
        object.__setattr__(made, "_teacher", TeacherHead(target()))
        made.log = lambda *_, **__: None
        return made

    data = SimpleNamespace(target=target(), learned=(ANSWER,))
    monkeypatch.setattr(DrafterModule, "data", data)
    return make


def drafts_of(name):
    """Returns validation's drafts along the texts, and the sample and position at which each draft begins."""
    student = trained(name)
    batch = batch_for(student)
    drafts, ahead = follow(student, batch, target(), TeacherHead(target()), STEPS), unrolled(name)[1]
    begins = [
        (sample, at)
        for sample, (prompt, text) in enumerate(zip(PROMPTS, texts(), strict=True))
        for at in range(max(len(prompt), ahead), len(text))
    ]
    assert drafts.sequences.tolist() == [sample for sample, _ in begins]
    return drafts, begins


def accepted(made, text, at, topology):
    """Returns the length of the text's path in the tree that a real drafter proposes greedily after ``text[:at]``."""
    law = Fixed(max(len(children) for children in topology.child_list))
    tree = Rounds(made, target(), [text[:at]]).propose(topology, law, greedy=True)
    row, length = 0, 0
    for token in text[at:]:
        row = next((child for child in tree.children[row] if tree.token[child] == token), None)
        if row is None:
            break
        length += 1
    return length


TREE = TreeTopology.from_k_config((3, 2, 1))


def walked(made, texts_, begins, topology, most=128):
    """Decodes every text by hand from its first draft on, with new drafts, and returns tokens per round."""
    tokens = rounds = 0
    for sample, text in enumerate(texts_):
        at = start = min(at for of, at in begins if of == sample)
        end = min(len(text), start + most)
        tokens += end - start
        while at < end:
            at += 1 + accepted(made, text, at, topology)
            rounds += 1
    return tokens / rounds


@every_student
def test_the_expected_gain_equals_that_of_drafting(name):
    """Compares every position: at temperature 0, decoding emits the text itself from any position on."""
    made, (drafts, begins) = drafter(name), drafts_of(name)
    steps = int(drafts.valid.any(dim=1).sum())
    trees = {TreeTopology.chain(steps): chain_accepted(drafts.passes), TREE: tree_accepted(drafts.ranks, TREE)}
    for tree, found in trees.items():
        lengths = [accepted(made, texts()[sample], at, tree) for sample, at in begins]
        assert_close(found, functional.one_hot(torch.tensor(lengths), STEPS + 1).float())
        assert len(set(lengths)) >= 3  # neither always right nor always wrong
        for most in (128, 10):
            expected = walked(made, texts(), begins, tree, most)
            assert walked_tau(found, drafts.answers, most) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_steps_of_shifted_drafts_give_another_gain(name):
    """Negative control: reads step s from the draft that begins s positions earlier."""
    drafts, _ = drafts_of(name)
    wrong = torch.stack([passes.roll(step) for step, passes in enumerate(drafts.passes)])
    assert not torch.equal(chain_accepted(wrong), chain_accepted(drafts.passes))


def test_expected_passes_of_sampled_texts_give_the_acceptance_rate():
    """The text's own token passes at min(1, draft / target), which averages to the acceptance rate."""
    student = trained("exit")
    batch = batch_for(student)._replace(temperatures=torch.ones(len(texts())))
    drafts = follow(student, batch, target(), TeacherHead(target()), 1)
    with torch.no_grad():
        (found,) = student.unroll(batch, target(), 1)
        draft = functional.linear(found.hidden, found.head).softmax(dim=-1)
        real = TeacherHead(target())(batch.final).softmax(dim=-1)
    slots = batch.roles[:, 1:] == ANSWER
    tokens = batch.tokens[:, 1:]
    own = [rows.gather(2, tokens[..., None])[..., 0][slots] for rows in (draft, real)]
    assert_close(drafts.passes[0], (own[0] / own[1]).clamp(max=1), rtol=0, atol=1e-5)
    assert_close(drafts.labels[0], torch.minimum(draft, real).sum(-1)[slots], rtol=0, atol=1e-5)


# Training


def losses(module, student, phase, steps=15):
    made, found = module(student), []
    batch, optimizer = batch_for(student), torch.optim.Adam(student.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = made._loss(batch, phase)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@every_student
def test_students_learn(module, name):
    student = STUDENTS[name]()
    student.build(target(), frequent)
    found = losses(module, student, Phase(1.0, STEPS, "kl"))
    assert found[-1] < 0.7 * found[0]
    assert all(parameter.grad is not None for parameter in student.parameters())
    assert not any(parameter.requires_grad for parameter in target().parameters())
    assert {name.split(".")[0] for name in student.state_dict()} == {"network"}  # no weights of the target


@every_student
def test_the_acceptance_of_training_is_that_of_decoding(module, name):
    """Compares at temperature 1 with the target's whole row, of which the drafter may know only a part."""
    student = trained(name)
    batch, made, logged = batch_for(student)._replace(temperatures=torch.ones(len(texts()))), module(student), {}
    made.log = lambda key, value, **_: logged.update({key: value})
    made._loss(batch, Phase(1.0, STEPS, "kl"), measure=True)
    drafts = follow(student, batch, target(), TeacherHead(target()), 1)
    assert logged["train/acceptance_pos_1"] == pytest.approx(float(drafts.labels[0].mean()), abs=1e-5)
    logged.clear()
    made._loss(batch, Phase(1.0, STEPS, "kl"))
    assert logged.keys() == {"train/loss"}


@every_student
def test_looked_up_tokens_may_count_less_or_not_at_all(module, name):
    student = trained(name)
    batch, phase = batch_for(student), Phase(1.0, 1, "kl")
    batch.tokens[0, 8:] = batch.tokens[0, 4:8].repeat(9)[: batch.tokens.shape[1] - 8]  # a loop
    found = batch.looked_up() & (batch.roles == ANSWER)
    parts = [batch._replace(roles=torch.where(left_out, GIVEN, batch.roles)) for left_out in (found, ~found)]
    others, looked_up = (module(student)._loss(part, phase).item() for part in parts)
    ahead = next(student.unroll(batch, target(), 1)).ahead
    counts = [int(part.learned([ANSWER])[:, ahead:].sum()) for part in parts]
    assert min(counts) > 5
    for weight in (0.0, 0.25, 1.0):
        mean = (counts[0] * others + weight * counts[1] * looked_up) / (counts[0] + weight * counts[1])
        assert module(student, lookup_weight=weight)._loss(batch, phase).item() == pytest.approx(mean, rel=1e-4)
    assert others != pytest.approx(looked_up, rel=0.01)


@pytest.mark.parametrize("name", ["exit", "model"])
def test_more_steps_do_not_change_the_loss_of_equal_steps(module, name):
    student = STUDENTS[name]()
    student.build(target(), frequent)
    one, many = (losses(module, student, Phase(1.0, steps, "kl"), steps=1)[0] for steps in (1, STEPS))
    student.build(target(), frequent)
    assert one == losses(module, student, Phase(1.0, STEPS, "kl"), steps=1)[0]
    assert many < one


def test_medusa_heads_learn_separately(module):
    """A phase of one step trains only the first head; a phase of more steps than heads trains all heads."""
    student = MedusaStudent(num_heads=2, vocabulary=None)
    student.build(target(), frequent)
    assert len(student.tokens) == VOCAB
    first, second = student.network.lm_heads
    before = second.weight.detach().clone()
    losses(module, student, Phase(1.0, 1, "kl"), steps=2)
    assert torch.equal(second.weight, before)
    assert not torch.equal(first.weight, before)
    losses(module, student, Phase(1.0, STEPS, "kl"), steps=2)
    assert not torch.equal(second.weight, before)


def test_noise_reaches_only_training():
    student = STUDENTS["eagle"]()
    student.build(target(), frequent)
    student.noise, batch = 0.5, batch_for(student)
    rows = [next(student.unroll(batch, target(), 1)).hidden for _ in range(2)]
    assert not torch.equal(*rows)
    student.eval()
    rows = [next(student.unroll(batch, target(), 1)).hidden for _ in range(2)]
    assert torch.equal(*rows)


def test_a_drafter_is_a_copy():
    student = STUDENTS["medusa"]()
    student.build(target(), frequent)
    made = student.drafter(target())
    assert isinstance(made, MedusaDrafter)
    assert all(parameter.requires_grad for parameter in student.parameters())
    with torch.no_grad():
        student.network.lm_heads[0].weight.zero_()
    assert made.head.lm_heads[0].weight.abs().max() > 0


def test_token_matrices_are_left_to_adamw():
    student = LanguageModelStudent([0, 3])
    student.build(target(), frequent)
    muon, adam = MuonAdamW(student).parts
    by_token = {student.network.lm_head.weight, student.network.model.embed_tokens.weight}
    assert by_token <= set(adam.param_groups[0]["params"])
    assert {parameter.dim() for parameter in muon.param_groups[0]["params"]} == {2}


def test_impossible_students_are_refused_when_built():
    with pytest.raises(ValueError, match=r"layers must lie in 1\.\.3"):
        EarlyExitStudent(LAYERS).build(target(), frequent)
    with pytest.raises(ValueError, match="2 to 4 layers"):
        LanguageModelStudent(7).build(target(), frequent)
    capped = ragged("gemma2", num_hidden_layers=4, final_logit_softcapping=20.0)
    for student in (EarlyExitStudent(EXIT), LanguageModelStudent(2)):
        with pytest.raises(ValueError, match="Gemma2ForCausalLM caps its logits"):
            student.build(capped, frequent)
    MedusaStudent(vocabulary=10).build(capped, frequent)


@every_student
def test_training_may_begin_with_a_trained_network(name, tmp_path):
    """The student takes over weights and draft vocabulary, ignores the data's vocabulary, and stays trainable."""
    trained(name).save(tmp_path)
    student = STUDENTS[name]()
    student.build(target(), lambda count: list(range(count)))
    student.train()
    student.begin_with([tmp_path], target())
    rounded = deepcopy(trained(name).network).half().float().state_dict()
    for key, value in student.network.state_dict().items():
        assert_close(value, rounded[key], rtol=0, atol=0)
    assert student.training
    assert all(module.training for module in student.modules())
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in student.parameters())


def test_training_cannot_begin_with_a_network_of_another_form_or_target(tmp_path):
    trained("eagle").save(tmp_path)
    for settings, message in (({"vocabulary": 39}, "lm_head.weight"), ({"layers": (0, 2, 3)}, "hidden_layers")):
        student = EagleStudent(**{"vocabulary": 40, "layers": (1, 2, 3), **settings})
        student.build(target(), frequent)
        new = student.network
        with pytest.raises(ValueError, match=f"another form than model.student asks for.*{message}"):
            student.begin_with([tmp_path], target())
        assert student.network is new
    other = RaggedModel(with_norms(tiny(num_hidden_layers=LAYERS), seed=2), kernels="torch")
    student = STUDENTS["eagle"]()
    student.build(other, frequent)
    with pytest.raises(ValueError, match="trained for another target"):
        student.begin_with([tmp_path], other)
    student = STUDENTS["block"]()
    student.build(target(), frequent)
    with pytest.raises(ValueError, match="holds a model of type"):
        student.begin_with([tmp_path], target())


@every_student
def test_training_may_begin_with_the_mean_of_networks(name, tmp_path):
    student, generator = STUDENTS[name](), torch.Generator().manual_seed(0)
    student.build(target(), frequent)
    folders = [tmp_path / str(number) for number in range(3)]
    for folder in folders:
        for parameter in student.network.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).half().float()
        student.save(folder)
    saved = [load_file(folder / "model.safetensors") for folder in folders]
    student.begin_with(folders, target())
    for key, parameter in student.network.named_parameters():
        assert_close(parameter, sum(one[key].double() for one in saved).div(3).float())
    for key, buffer in student.network.named_buffers():
        if key in saved[0]:
            assert torch.equal(buffer, saved[0][key])


def test_networks_with_other_draft_vocabularies_have_no_mean(tmp_path):
    student = EagleStudent(vocabulary=40, layers=(1, 2, 3))
    for first in (0, 1):
        student.build(target(), lambda count, first=first: list(range(first, first + count)))
        student.save(tmp_path / str(first))
    with pytest.raises(ValueError, match=r"1 has another draft vocabulary than .*0: name folders of one vocabulary"):
        student.begin_with([tmp_path / "0", tmp_path / "1"], target())
