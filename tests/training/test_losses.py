"""Losses of distillation: values in closed form, gradients, and chunked sums against the plain loss."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arbordraft import IID, testing
from arbordraft.testing import ROW_KINDS, random_rows
from arbordraft.training.chunked_loss import DraftRows, distillation_loss
from arbordraft.training.losses import (
    LOSSES,
    TeacherRows,
    acceptance,
    cross_entropy,
    forward_kl,
    lk_hybrid,
    lk_nla,
    loss_named,
    position_decay,
    reverse_kl,
    topk_distillation,
    total_variation,
)
from arbordraft.verifiers import RecursiveRejection

LOG2 = math.log(2)
every_loss = pytest.mark.parametrize("loss", LOSSES)
every_kind = pytest.mark.parametrize("kind", ROW_KINDS)


def by_definition(name, log_p, logits):
    """Computes a loss from its definition, for autograd."""
    p, log_q = log_p.exp(), logits.log_softmax(dim=-1)
    kl, alpha = (p * (log_p - log_q)).sum(dim=-1), torch.minimum(p, log_q.exp()).sum(dim=-1)
    weight = (-3 * alpha.detach()).exp()
    return {
        "kl": lambda: kl,
        "reverse_kl": lambda: (log_q.exp() * (log_q - log_p)).sum(dim=-1),
        "ce": lambda: F.nll_loss(log_q, p.argmax(dim=-1), reduction="none"),
        "tv": lambda: 1 - alpha,
        "lk_nla": lambda: -torch.minimum(log_p, log_q).logsumexp(dim=-1),
        "lk_hybrid": lambda: weight * kl + (1 - weight) * (1 - alpha),
        "topk": lambda: -torch.where(p >= p.topk(min(10, p.shape[-1])).values[:, -1:], p * log_q, 0).sum(dim=-1),
    }[name]()


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_pairs(kind="random", mass=1.0, number=6, tokens=7):
    """Returns the logarithms of teacher rows that sum to ``mass``, and student logits."""
    target, draft = zip(*(random_rows(kind, tokens, seed) for seed in range(number)), strict=True)
    return (mass * torch.stack(target)).clamp_min(1e-30).log(), torch.stack(draft).clamp_min(1e-9).log()


def softcap(logits):
    return 3 * torch.tanh(logits / 3)


class Problem:
    """Drafter whose later steps share a head; it knows half the tokens of a target with capped logits."""

    def __init__(self, positions=7, tokens=10, width=4, dtype=torch.float64, steps=3):
        def random(*shape):
            return torch.randn(shape, dtype=dtype, requires_grad=True)

        self.hidden = [random(positions, width) for _ in range(steps)]
        self.heads = [random(tokens, width) for _ in range(min(steps, 2))]
        self.bias = random(tokens)
        self.weights = torch.rand(steps, positions, dtype=dtype)
        self.weights[:, 1::3] = 0
        self.teacher_hidden = torch.randn(positions, width + 1, dtype=dtype)
        self.teacher_head = torch.randn(2 * tokens, width + 1, dtype=dtype)
        self.asked = []

    @property
    def trained(self):
        return [*self.hidden, *self.heads, *([] if self.bias is None else [self.bias])]

    @property
    def steps(self):
        partial = len(self.hidden) > 1  # only the first step is partial
        return [
            DraftRows(rows, self.heads[g > 0], self.bias, partial=partial and g == 0)
            for g, rows in enumerate(self.hidden)
        ]

    def teacher(self, rows, cap=softcap):
        self.asked.append(rows)
        logits = cap(F.linear(self.teacher_hidden[rows], self.teacher_head))
        return logits[:, : len(logits.T) // 2] - logits.logsumexp(dim=-1, keepdim=True)

    def chunked(self, loss, chunk=3, teacher=None, **options):
        function = LOSSES[loss] if isinstance(loss, str) else loss
        return distillation_loss(self.steps, teacher or self.teacher, self.weights, function, chunk, **options)

    def rows(self):
        """Returns the teacher rows and the student's logits of every step, for all positions at once."""
        return self.teacher(slice(None)), [F.linear(*step[:3]) for step in self.steps]

    def plain(self, loss):
        log_p, logits = self.rows()
        losses = torch.stack([by_definition(loss, log_p, rows) for rows in logits])
        return (losses * self.weights).sum()

    def gradients(self, loss):
        return torch.autograd.grad(loss, self.trained)


def test_values_in_closed_form():
    # The drafter lacks tokens that hold an eighth of the target's mass.
    teacher, logits = TeacherRows.of(double([0.5, 0.25, 0.125]).log()), double([0.25, 0.25, 0.5]).log() + 5
    weight = math.exp(-3 * 0.625)
    assert acceptance(teacher, logits).tolist() == pytest.approx([0.625], abs=1e-12)
    for (found, _), expected in [
        (forward_kl(teacher, logits), LOG2 / 4),
        (reverse_kl(teacher, logits), LOG2 * 3 / 4),
        (cross_entropy(teacher, logits), 2 * LOG2),
        (total_variation(teacher, logits), 0.375),
        (lk_nla(teacher, logits), -math.log(0.625)),
        (lk_hybrid(teacher, logits), weight * LOG2 / 4 + (1 - weight) * 0.375),
        (lk_hybrid(teacher, logits, eta=0.0), LOG2 / 4),
        (topk_distillation(teacher, logits, k=1), LOG2),
        (topk_distillation(teacher, logits, k=2), LOG2 * 3 / 2),
        (topk_distillation(teacher, logits), LOG2 * 13 / 8),
    ]:
        assert found.tolist() == pytest.approx([expected], abs=1e-12)


@every_kind
@pytest.mark.parametrize("mass", [1.0, 0.8])
def test_acceptance_is_that_of_rejection_sampling(kind, mass):
    """The target draws the missing mass as one more token, which the drafter never proposes."""
    log_p, logits = random_pairs(kind, mass)
    found = acceptance(TeacherRows.of(log_p), logits)
    for target, draft, one in zip(log_p.exp(), logits.softmax(dim=-1), found, strict=True):
        full = torch.cat([target, double(1 - mass)]), torch.cat([draft, double(0)])
        assert testing.acceptance(RecursiveRejection(), IID(1), *full) == pytest.approx(one.item(), abs=1e-12)


@every_loss
@every_kind
@pytest.mark.parametrize("mass", [1.0, 0.7])
def test_losses_and_gradients_are_those_of_their_definitions(loss, kind, mass):
    log_p, logits = random_pairs(kind, mass)
    logits += 1e-3 * torch.randn_like(logits)  # some losses have no gradient where both rows are equal
    losses, slopes = LOSSES[loss](TeacherRows.of(log_p), logits)
    logits.requires_grad_()
    expected = by_definition(loss, log_p, logits)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(slopes, torch.autograd.grad(expected.sum(), logits)[0])
    assert slopes.sum(dim=-1).abs().max() < 1e-9, "a constant added to all logits changes nothing"


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "tv", "lk_nla", "lk_hybrid"])
def test_the_target_itself_is_the_best_drafter(loss):
    """`ce` and `topk` are left out: hard labels and a few tokens have another optimum."""
    logits, _ = random_pairs()
    teacher = TeacherRows.of(logits)
    losses, slopes = LOSSES[loss](teacher, logits)
    assert losses.abs().max() < 1e-12
    if loss in ("kl", "reverse_kl"):  # the others have a kink there
        assert slopes.abs().max() < 1e-12
    for _ in range(20):
        assert (LOSSES[loss](teacher, logits + 0.1 * torch.randn_like(logits))[0] > losses).all()


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rows_have_finite_gradients(loss, dtype):
    """Covers rows with one certain token, rows with hardly any mass, and logits whose exponentials vanish."""
    log_p = torch.tensor(
        [[0, -1e3, -1e4], [-200, 0, -90], [-1e3, -1e3, -1e4], [-LOG2, -LOG2, -99], [-92, -95, -99]], dtype=dtype
    )
    for spread in (0.0, 200.0, 1e4):
        logits = torch.tensor([[-spread, spread, 0.0]], dtype=dtype).repeat(len(log_p), 1)
        losses, slopes = LOSSES[loss](TeacherRows.of(log_p), logits)
        assert losses.isfinite().all()
        assert slopes.isfinite().all()


def test_lk_nla_has_a_gradient_where_total_variation_has_none():
    teacher, logits = TeacherRows.of(torch.tensor([[0.0, -1000.0]])), torch.tensor([[-200.0, 200.0]])
    for loss, alive in [(total_variation, False), (lk_nla, True)]:
        assert bool(loss(teacher, logits)[1][0, 0] < -0.5) == alive


def test_decay():
    torch.testing.assert_close(position_decay(4, 0.5), torch.tensor([1, 0.5, 0.25, 0.125]))
    assert position_decay(3, 1.0).tolist() == [1, 1, 1]
    for steps, decay in [(0, 0.5), (2, 0.0), (2, 1.5), (2, math.nan)]:
        with pytest.raises(ValueError, match="decay in"):
            position_decay(steps, decay)


def test_an_unknown_loss_is_refused():
    assert loss_named("tv") is total_variation
    with pytest.raises(ValueError, match=r"no loss 'tvd'.* kl, reverse_kl, ce, tv, lk_nla, lk_hybrid, topk"):
        loss_named("tvd")


@every_loss
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_add_up_to_the_plain_loss(loss, chunk):
    problem = Problem()
    found, wanted = problem.chunked(loss, chunk, measure=True), problem.plain(loss)
    torch.testing.assert_close(found.loss, wanted)
    torch.testing.assert_close(problem.gradients(3 * found.loss), problem.gradients(3 * wanted))
    log_p, logits = problem.rows()
    for step, rows in enumerate(logits):
        counts = (problem.weights[step] > 0) | (step > 0)  # the first step is partial
        expected = acceptance(TeacherRows.of(log_p), rows.detach()) * counts
        torch.testing.assert_close(found.acceptance[step], expected)
        assert torch.equal(found.agreement[step], (rows.argmax(dim=-1) == log_p.argmax(dim=-1)) & counts)
    assert not found.acceptance.requires_grad
    assert not found.agreement.requires_grad


def test_teacher_rows_are_computed_once_for_all_steps():
    problem = Problem(steps=4)
    problem.chunked("kl", chunk=3)
    assert problem.asked == [slice(0, 3), slice(3, 6), slice(6, 9)]


def test_acceptance_is_measured_only_on_request(monkeypatch):
    problem = Problem()
    assert problem.chunked("kl")[1:] == (None, None)


def test_a_forgotten_chunk_or_cap_is_caught():
    """Negative control: the comparison with the plain loss detects wrong sums."""
    problem = Problem()
    wanted = problem.plain("kl")
    uncapped = problem.chunked("kl", teacher=lambda rows: problem.teacher(rows, cap=lambda logits: logits))
    assert not torch.allclose(uncapped.loss, wanted)
    problem.bias = Problem().bias
    assert not torch.allclose(problem.chunked("kl").loss, wanted)
    problem = Problem()
    wanted = problem.plain("kl")
    problem.weights = problem.weights[:, :-1]
    assert not torch.allclose(problem.chunked("kl").loss, wanted)


@pytest.mark.parametrize("frozen", range(6), ids=["hidden", "second", "third", "head", "shared head", "bias"])
def test_frozen_parts_get_no_gradient(frozen):
    problem = Problem()
    wanted = problem.gradients(problem.plain("kl"))
    problem.trained[frozen].requires_grad_(False)
    problem.chunked("kl").loss.backward()
    for place, (tensor, grad) in enumerate(zip(problem.trained, wanted, strict=True)):
        torch.testing.assert_close(tensor.grad, None if place == frozen else grad)


def test_without_a_graph_there_is_no_backward_work():
    problem = Problem()
    with torch.no_grad(), Allocations() as plain:
        found = problem.chunked("kl")
    assert not found.loss.requires_grad
    with Allocations() as seen:
        problem.chunked("kl")
    assert seen.made > plain.made + sum(tensor.numel() for tensor in problem.trained)


def test_a_head_without_bias():
    problem = Problem()
    problem.bias = None
    wanted = problem.gradients(problem.plain("kl"))
    torch.testing.assert_close(problem.gradients(problem.chunked("kl").loss), wanted)


def test_without_positions_there_is_nothing_to_learn():
    found = (problem := Problem(positions=0)).chunked("kl", measure=True)
    assert found.loss == 0
    assert all(not grad.any() for grad in problem.gradients(found.loss))
    assert found.acceptance.shape == found.agreement.shape == (3, 0)


def test_zero_weights_give_no_loss_and_no_gradient():
    problem = Problem()
    problem.weights.zero_()
    found = problem.chunked("kl")
    assert found.loss == 0
    assert all(not grad.any() for grad in problem.gradients(found.loss))


@every_loss
def test_autocast_multiplies_in_bfloat16_and_takes_logarithms_in_float32(loss):
    problem = Problem(positions=40, tokens=50, width=16, dtype=torch.float32)
    seen = set()

    def watched(teacher, logits):
        seen.update({teacher.probs.dtype, logits.dtype, (teacher.probs @ logits.T).dtype})
        return LOSSES[loss](teacher, logits)

    exact = problem.chunked(watched)
    with torch.autocast("cpu", torch.bfloat16):
        rough = problem.chunked(watched)
    assert seen <= {torch.float32}
    assert rough.loss.dtype == torch.float32
    assert 0 < (rough.loss - exact.loss).abs() < 0.02 * exact.loss  # rounded, but by no more than bfloat16 rounds
    for found, wanted in zip(problem.gradients(rough.loss), problem.gradients(exact.loss), strict=True):
        assert found.dtype == torch.float32
        assert 0 < (found - wanted).norm() < 0.5 * wanted.norm()  # losses with a minimum have kinks, so gradients jump


def test_weights_in_bfloat16_get_gradients_in_bfloat16():
    problem = Problem(dtype=torch.float32)
    wanted = problem.gradients(problem.plain("kl"))

    def narrow(tensor):
        return tensor.detach().bfloat16().requires_grad_()

    problem.hidden, problem.heads = [*map(narrow, problem.hidden)], [*map(narrow, problem.heads)]
    problem.bias = narrow(problem.bias)
    found = problem.chunked("kl").loss
    assert found.dtype == torch.float32
    for grad, reference in zip(problem.gradients(found), wanted, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad - reference).norm() < 0.1 * reference.norm()


def test_small_weights_do_not_underflow_in_half_precision():
    problem = Problem(dtype=torch.float32)
    wanted = problem.gradients(problem.chunked("kl").loss)
    problem.weights *= 1e-7
    with torch.autocast("cpu", torch.float16):
        small = problem.chunked("kl").loss
    for grad, reference in zip(problem.gradients(small), wanted, strict=True):
        assert (1e7 * grad - reference).norm() < 0.02 * reference.norm()


class Allocations(TorchDispatchMode):
    """Counts elements: of the largest new tensor, of all new tensors alive at once, and of all new tensors."""

    def __init__(self):
        super().__init__()
        self.largest = self.peak = self.living = self.made = 0
        self.tensors = {}  # storage -> number of our tensors that view it

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes() // tensor.element_size()
            if key not in self.tensors:
                if key in given:
                    continue  # a view of an older tensor
                self.tensors[key] = 0
                self.living += size
                self.made += size
                self.largest, self.peak = max(self.largest, size), max(self.peak, self.living)
            self.tensors[key] += 1
            weakref.finalize(tensor, self.forget, key, size)
        return result

    def forget(self, key, size):
        self.tensors[key] -= 1
        if self.tensors[key] == 0:
            del self.tensors[key]
            self.living -= size


def allocations(loss, positions, tokens, width=2, steps=1):
    """Counts a loss's allocations with a teacher of the drafter's vocabulary, as larger rows are not the loss's."""
    problem = Problem(positions, tokens, width, dtype=torch.float32, steps=steps)
    problem.teacher_head = problem.teacher_head[:tokens].clone()
    normalisers = problem.teacher_hidden[:, 0].clone()

    def teacher(rows):
        return F.linear(problem.teacher_hidden[rows], problem.teacher_head) - normalisers[rows, None]

    problem.teacher = teacher
    with Allocations() as seen:
        loss(problem).backward()
    assert seen.largest > 0
    return seen


@every_loss
def test_memory_does_not_grow_with_the_positions(loss):
    tokens, chunk = 1000, 8
    small, large, deep = (
        allocations(lambda p: p.chunked(loss, chunk).loss, n, tokens, steps=steps)
        for n, steps in ((32, 1), (128, 1), (128, 4))
    )
    assert small.largest == large.largest == deep.largest == chunk * tokens
    assert large.peak <= 8 * chunk * tokens
    assert deep.peak <= 11 * chunk * tokens, "the rows of a partial step are copies"
    assert large.peak - small.peak < tokens  # the part that grows is smaller than one row
    with FakeTensorMode():
        assert allocations(lambda p: p.chunked(loss, chunk).loss, 128, tokens).peak == large.peak


def test_graphs_kept_until_the_backward_pass_are_caught():
    """Negative control: the peak counts the plain loss's large tensor and the many small ones of a sum in parts."""

    def in_parts(problem):
        (hidden,), (head,) = problem.hidden, problem.heads
        logits = [F.linear(part, head, problem.bias) for part in hidden.split(8)]
        teachers = [problem.teacher(slice(at, at + 8)) for at in range(0, len(hidden), 8)]
        return sum(by_definition("kl", *pair).sum() for pair in zip(teachers, logits, strict=True))

    for unbounded in (lambda problem: problem.plain("kl"), in_parts):
        assert allocations(unbounded, 128, 1000).peak > 2 * 128 * 1000


@pytest.mark.parametrize("autocast", [False, True])
def test_a_large_vocabulary_fits(autocast):
    """Checks the loss that needs most memory at full size; fake tensors give sizes without computing values."""
    positions, tokens, width, chunk = 2048, 150_000, 255, 64
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        seen = allocations(lambda problem: problem.chunked("lk_hybrid", chunk).loss, positions, tokens, width)
    assert seen.largest <= (width + 1) * tokens  # the size of a head, which exceeds a chunk here
    heads = 4 if autocast else 1  # one gradient; under autocast also a chunk's share of it and both heads in bfloat16
    assert seen.peak < (heads * (width + 1) + 10 * chunk) * tokens < positions * tokens
