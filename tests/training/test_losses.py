"""Losses of distillation: values known in closed form, gradients, and the sum in chunks against the plain one."""

import math
import weakref

import oracles
import pytest
import torch
import torch.nn.functional as F
from oracles import ROW_KINDS, random_rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arbordraft import IID
from arbordraft.training.losses import (
    LOSSES,
    acceptance,
    cross_entropy,
    distillation_loss,
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


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def random_pairs(kind="random", mass=1.0, number=6, tokens=7):
    """Teacher rows of a given sum and student logits."""
    target, draft = zip(*(random_rows(kind, tokens, seed) for seed in range(number)), strict=True)
    return mass * torch.stack(target), torch.stack(draft).clamp_min(1e-9).log()


def softcap(logits):
    return 3 * torch.tanh(logits / 3)


class Problem:
    """A drafter that knows some tokens of a target whose logits are capped."""

    def __init__(self, positions=7, tokens=10, width=4, dtype=torch.float64):
        self.hidden = torch.randn(positions, width, dtype=dtype, requires_grad=True)
        self.head = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
        self.bias = torch.randn(tokens, dtype=dtype, requires_grad=True)
        self.teacher_hidden = torch.randn(positions, width + 1, dtype=dtype)
        self.teacher_head = torch.randn(tokens, width + 1, dtype=dtype)

    @property
    def trained(self):
        return self.hidden, self.head, self.bias

    def chunked(self, loss, chunk=3, cap=softcap):
        function = LOSSES[loss] if isinstance(loss, str) else loss
        return distillation_loss(*self.trained, self.teacher_hidden, self.teacher_head, cap, function, chunk)

    def pair(self):
        """Teacher and student rows of all positions at once."""
        logits = softcap(F.linear(self.teacher_hidden, self.teacher_head))
        return logits.softmax(-1), F.linear(self.hidden, self.head, self.bias).log_softmax(-1)

    def plain(self, loss):
        return LOSSES[loss](*self.pair()).mean()

    def gradients(self, loss):
        return torch.autograd.grad(loss, self.trained)


def test_values_in_closed_form():
    p, log_q = double([0.5, 0.25, 0.125]), double([0.25, 0.25, 0.5]).log()  # an eighth of the target is not drafted
    weight = math.exp(-3 * 0.625)
    for found, expected in [
        (acceptance(p, log_q), 0.625),
        (forward_kl(p, log_q), LOG2 / 4),
        (reverse_kl(p, log_q), LOG2 * 3 / 4),
        (cross_entropy(p, log_q), 2 * LOG2),
        (total_variation(p, log_q), 0.375),
        (lk_nla(p, log_q), -math.log(0.625)),
        (lk_hybrid(p, log_q), weight * LOG2 / 4 + (1 - weight) * 0.375),
        (lk_hybrid(p, log_q, eta=0.0), LOG2 / 4),
        (topk_distillation(p, log_q, k=1), LOG2),
        (topk_distillation(p, log_q, k=2), LOG2 * 3 / 2),
        (topk_distillation(p, log_q), LOG2 * 13 / 8),
    ]:
        assert found.tolist() == pytest.approx([expected], abs=1e-12)


@every_kind
@pytest.mark.parametrize("mass", [1.0, 0.8])
def test_acceptance_is_that_of_rejection_sampling(kind, mass):
    """The target draws the missing mass as one more token, which the drafter never proposes."""
    p, logits = random_pairs(kind, mass)
    log_q = logits.log_softmax(dim=-1)
    for target, draft, found in zip(p, log_q.exp(), acceptance(p, log_q), strict=True):
        full = torch.cat([target, double(1 - mass)]), torch.cat([draft, double(0)])
        assert oracles.acceptance(RecursiveRejection(), IID(1), *full) == pytest.approx(found.item(), abs=1e-12)


@every_kind
@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_identities_and_bounds(kind, mass):
    p, logits = random_pairs(kind, mass)
    log_q = logits.log_softmax(dim=-1)
    alpha, bound = acceptance(p, log_q), math.log(mass)
    torch.testing.assert_close(total_variation(p, log_q), 1 - alpha)
    torch.testing.assert_close(lk_nla(p, log_q), -alpha.log())
    missing = 1 - p.sum(dim=-1)
    torch.testing.assert_close(total_variation(p, log_q), ((p - log_q.exp()).abs().sum(dim=-1) + missing) / 2)
    for loss, least in [
        (forward_kl, mass * bound),
        (reverse_kl, -bound),
        (lk_nla, -bound),
        (total_variation, 1 - mass),
    ]:
        assert (loss(p, log_q) >= least - 1e-9).all()
    assert ((alpha >= 0) & (alpha <= mass + 1e-12)).all()


@pytest.mark.parametrize("loss", ["kl", "reverse_kl", "tv", "lk_nla", "lk_hybrid"])
def test_the_target_itself_is_the_best_drafter(loss):
    """Hard labels and a few tokens have another optimum, whence these two are missing."""
    p, _ = random_pairs()
    logits = p.log().requires_grad_()
    losses = LOSSES[loss](p, logits.log_softmax(dim=-1))
    assert losses.abs().max() < 1e-12
    if loss in ("kl", "reverse_kl"):  # the others have a kink there
        (slope,) = torch.autograd.grad(losses.sum(), logits)
        assert slope.abs().max() < 1e-12
    for _ in range(20):
        away = (logits + 0.1 * torch.randn_like(logits)).log_softmax(dim=-1)
        assert (LOSSES[loss](p, away) > losses).all()


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "lk_hybrid"])
@pytest.mark.parametrize("mass", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["random", "holes"])
def test_gradients(loss, mass, kind):
    p, logits = random_pairs(kind, mass, number=3)
    assert gradcheck(lambda x: LOSSES[loss](p, x.log_softmax(dim=-1)), logits.requires_grad_())


@pytest.mark.parametrize("mass", [1.0, 0.7])
def test_the_weight_of_the_hybrid_is_a_constant_to_its_gradient(mass):
    """Hence no finite difference: it is compared with the blend at a weight that is fixed, and with one that is not."""
    p, logits = random_pairs("random", mass)
    logits.requires_grad_()
    log_q = logits.log_softmax(dim=-1)
    weight = (-3 * acceptance(p, log_q)).exp()
    fixed, moving = (w * forward_kl(p, log_q) + (1 - w) * total_variation(p, log_q) for w in (weight.detach(), weight))
    found, wanted, wrong = (
        torch.autograd.grad(losses.sum(), logits, retain_graph=True)[0]
        for losses in (lk_hybrid(p, log_q), fixed, moving)
    )
    torch.testing.assert_close(found, wanted)
    assert not torch.allclose(found, wrong)


def test_log_acceptance_amplifies_the_gradient_of_the_variation():
    p, logits = random_pairs("peaked")
    slopes = {}
    for loss in (total_variation, lk_nla):
        x = logits.clone().requires_grad_()
        slopes[loss] = torch.autograd.grad(loss(p, x.log_softmax(dim=-1)).sum(), x)[0]
    alpha = acceptance(p, logits.log_softmax(dim=-1))
    torch.testing.assert_close(slopes[lk_nla], slopes[total_variation] / alpha[:, None])


@every_loss
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rows_have_finite_gradients(loss, dtype):
    """Certain rows, rows without any mass, and logits so far apart that their exponentials vanish."""
    p = torch.tensor([[1, 0, 0], [0, 1, 0], [0, 0, 0], [0.5, 0.5, 0], [1e-40, 0, 0]], dtype=dtype)
    for spread in (0.0, 200.0, 1e4):
        logits = torch.tensor([[-spread, spread, 0.0]], dtype=dtype).repeat(len(p), 1).requires_grad_()
        losses = LOSSES[loss](p, logits.log_softmax(dim=-1))
        (slope,) = torch.autograd.grad(losses.sum(), logits)
        assert losses.isfinite().all()
        assert slope.isfinite().all()


def test_log_acceptance_is_alive_where_the_variation_is_dead():
    logits = torch.tensor([[-200.0, 200.0]], requires_grad=True)
    for loss, alive in [(total_variation, False), (lk_nla, True)]:
        (slope,) = torch.autograd.grad(loss(torch.tensor([[1.0, 0.0]]), logits.log_softmax(dim=-1)).sum(), logits)
        assert bool(slope[0, 0] < -0.5) == alive


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
    found, wanted = problem.chunked(loss, chunk), problem.plain(loss)
    torch.testing.assert_close(found.loss, wanted)
    torch.testing.assert_close(problem.gradients(3 * found.loss), problem.gradients(3 * wanted))
    p, log_q = problem.pair()
    torch.testing.assert_close(found.acceptance, acceptance(p, log_q).detach())
    assert found.agreement.tolist() == (log_q.argmax(dim=-1) == p.argmax(dim=-1)).tolist()
    assert not found.acceptance.requires_grad
    assert not found.agreement.requires_grad


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "lk_hybrid"])  # whose weight is detached
def test_gradients_of_chunks(loss):
    problem = Problem(positions=5, tokens=6, width=3)

    def function(hidden, head, bias):
        problem.hidden, problem.head, problem.bias = hidden, head, bias
        return problem.chunked(loss, chunk=2).loss

    assert gradcheck(function, problem.trained)


def test_a_forgotten_chunk_or_cap_is_caught():
    """What the comparison with the plain loss rests on: it tells wrong sums apart."""
    problem, other = Problem(), Problem()
    wanted = problem.plain("kl")
    assert not torch.allclose(problem.chunked("kl", cap=lambda logits: logits).loss, wanted)
    problem.bias = other.bias
    assert not torch.allclose(problem.chunked("kl").loss, wanted)
    problem = Problem()
    wanted = problem.plain("kl")
    problem.hidden, problem.teacher_hidden = problem.hidden[:-1], problem.teacher_hidden[:-1]
    assert not torch.allclose(problem.chunked("kl").loss, wanted)


@pytest.mark.parametrize("frozen", ["hidden", "head", "bias"])
def test_frozen_parts_get_no_gradient(frozen):
    problem = Problem()
    problem.plain("kl").backward()
    wanted = {name: getattr(problem, name).grad for name in ("hidden", "head", "bias")}
    for name in wanted:
        getattr(problem, name).grad = None
    getattr(problem, frozen).requires_grad_(False)
    problem.chunked("kl").loss.backward()
    for name, grad in wanted.items():
        torch.testing.assert_close(getattr(problem, name).grad, None if name == frozen else grad)


def test_without_a_graph_there_is_no_backward_work():
    problem = Problem()

    def watched(p, log_q):
        assert not log_q.requires_grad
        return forward_kl(p, log_q)

    with torch.no_grad():
        found = problem.chunked(watched)
    assert not found.loss.requires_grad
    with pytest.raises(AssertionError):
        problem.chunked(watched)


def test_a_head_without_bias():
    problem = Problem()
    with torch.no_grad():
        problem.bias.zero_()
    wanted = problem.gradients(problem.plain("kl"))
    problem.bias = None
    found = problem.chunked("kl").loss
    torch.testing.assert_close(torch.autograd.grad(found, problem.trained[:2]), wanted[:2])


def test_without_positions_there_is_nothing_to_learn():
    found = (problem := Problem(positions=0)).chunked("kl")
    assert found.loss == 0
    assert all(not grad.any() for grad in problem.gradients(found.loss))
    assert len(found.acceptance) == len(found.agreement) == 0


@every_loss
def test_autocast_multiplies_in_bfloat16_and_takes_logarithms_in_float32(loss):
    problem = Problem(positions=40, tokens=50, width=16, dtype=torch.float32)
    seen = set()

    def watched(p, log_q):
        seen.update({p.dtype, log_q.dtype, (p @ log_q.T).dtype})
        return LOSSES[loss](p, log_q)

    exact = problem.chunked(watched)
    with torch.autocast("cpu", torch.bfloat16):
        rough = problem.chunked(watched)
    assert seen <= {torch.float32}
    assert rough.loss.dtype == torch.float32
    assert 0 < (rough.loss - exact.loss).abs() < 0.02 * exact.loss  # rounded, but not by more than bfloat16 rounds
    for found, wanted in zip(problem.gradients(rough.loss), problem.gradients(exact.loss), strict=True):
        assert found.dtype == torch.float32
        assert 0 < (found - wanted).norm() < 0.25 * wanted.norm()  # those with a minimum have kinks, hence jumps


def test_weights_in_bfloat16_get_gradients_in_bfloat16():
    problem = Problem(dtype=torch.float32)
    wanted = problem.gradients(problem.plain("kl"))
    for name in ("hidden", "head", "bias", "teacher_head"):
        tensor = getattr(problem, name)
        setattr(problem, name, tensor.detach().bfloat16().requires_grad_(tensor.requires_grad))
    found = problem.chunked("kl").loss
    assert found.dtype == torch.float32
    for grad, reference in zip(problem.gradients(found), wanted, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad - reference).norm() < 0.1 * reference.norm()


@every_loss
def test_a_step_along_the_gradient_lowers_the_loss(loss):
    problem = Problem(positions=12, tokens=30, width=8)
    before = problem.chunked(loss).loss
    grads = problem.gradients(before)
    for sign, lower in [(-1, True), (1, False)]:
        stepped = [t + sign * 1e-3 * g for t, g in zip(problem.trained, grads, strict=True)]
        moved = Problem.__new__(Problem)
        vars(moved).update(vars(problem) | dict(zip(("hidden", "head", "bias"), stepped, strict=True)))
        assert (moved.chunked(loss).loss < before) == lower


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that came to be, and of all that lived at the same time."""

    def __init__(self):
        super().__init__()
        self.largest = self.peak = self.living = 0
        self.tensors = {}  # storage -> how many tensors of ours show it

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
                    continue  # a view of what was there before
                self.tensors[key] = 0
                self.living += size
                self.largest, self.peak = max(self.largest, size), max(self.peak, self.living)
            self.tensors[key] += 1
            weakref.finalize(tensor, self.forget, key, size)
        return result

    def forget(self, key, size):
        self.tensors[key] -= 1
        if self.tensors[key] == 0:
            del self.tensors[key]
            self.living -= size


def allocations(loss, positions, tokens, width=2):
    problem = Problem(positions, tokens, width, dtype=torch.float32)
    with Allocations() as seen:
        loss(problem).backward()
    assert seen.largest > 0
    return seen


@every_loss
def test_memory_does_not_grow_with_the_positions(loss):
    tokens, chunk = 1000, 8
    small, large = (allocations(lambda p: p.chunked(loss, chunk).loss, n, tokens) for n in (32, 128))
    assert small.largest == large.largest == chunk * tokens
    assert large.peak <= 10 * chunk * tokens
    assert large.peak - small.peak < tokens  # what does grow is smaller than one row
    with FakeTensorMode():
        assert allocations(lambda p: p.chunked(loss, chunk).loss, 128, tokens).peak == large.peak


def test_graphs_kept_until_the_backward_pass_are_caught():
    """The check above sees both the large tensor of the plain loss and the many small ones of a sum in parts."""

    def in_parts(problem):
        p, hidden = problem.pair()[0], problem.hidden
        log_q = [F.linear(part, problem.head, problem.bias).log_softmax(dim=-1) for part in hidden.split(8)]
        return sum(forward_kl(*pair).sum() for pair in zip(p.split(8), log_q, strict=True))

    for unbounded in (lambda problem: problem.plain("kl"), in_parts):
        assert allocations(unbounded, 128, 1000).peak > 2 * 128 * 1000


@pytest.mark.parametrize("autocast", [False, True])
def test_a_large_vocabulary_fits(autocast):
    """The loss that needs most, at full size, but only the shapes are computed, from which the sizes follow."""
    positions, tokens, width, chunk = 2048, 150_000, 255, 64
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        seen = allocations(lambda problem: problem.chunked("lk_hybrid", chunk).loss, positions, tokens, width)
    assert seen.largest <= (width + 1) * tokens  # a head, which is more than a chunk here
    heads = 4 if autocast else 1  # a gradient; for autocast a chunk's share of it and both heads in bfloat16
    assert seen.peak < (heads * (width + 1) + 10 * chunk) * tokens < positions * tokens
