"""Optimal transport between drafts and target: the linear programs behind SpecHub, and the optimum of every law.

Shapes: V vocabulary, k children.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.sampling.laws import DraftLaw, given
from arbordraft.utils.checks import check_int
from arbordraft.verifiers.rules import NodeLaw, Rule

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
Outcomes = dict[tuple[int, ...], float]  # probability of every tuple of drawn tokens


class OptimalTransport(Rule):
    """The coupling of drafts and target that emits a drafted token as often as possible.

    It is found by linear programming, anew at every node. This gives an inspectable rule and an oracle for all other
    rules, for small vocabularies or for rows that top-k or top-p has truncated.

    The solver decides how often drafts are accepted, never the law. Its plan is cut down until it serves no outcome and
    no token beyond its mass. The remaining masses are coupled as a product, which makes both marginals exact for any
    plan. Rows are normalised and all steps computed in float64. So the laws of the rows are met to about 1e-15, even if
    float32 rows do not sum to 1.

    Args:
        formulation: ``"full"`` has a variable per outcome of the draft and emitted token; ``"compact"`` keeps
            only the variables whose token was drafted.
        max_variables: greatest size of a program, at least 1.

    Raises:
        TypeError: if ``max_variables`` is not a whole number.
        ValueError: if the formulation is unknown; in the forward pass, if a program would be too large.

    Source: SpecTr (Sun et al., 2023) for the full program, SpecHub (Sun et al., 2024) for the compact one. HiGHS
    solves both.
    """

    def __init__(self, formulation: Literal["compact", "full"] = "compact", max_variables: int = 200_000) -> None:
        super().__init__()
        if formulation not in ("compact", "full"):
            raise ValueError(f'formulation must be "compact" or "full", got {formulation!r}')
        self.formulation = formulation
        self.max_variables = check_int("max_variables", max_variables, 1)

    def supports(self, law: DraftLaw) -> bool:
        return True

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        outcomes = self._outcomes(law, draft, tuple(tokens))
        drawable = {token for drawn in outcomes for token in drawn}
        support = sorted(drawable | set(target.nonzero().flatten().tolist()))
        position = {token: index for index, token in enumerate(support)}
        p = as_array(target)[support]
        p = np.append(p * (weight / p.sum()), 1 - weight)  # the null token comes last
        self._check_size(len(outcomes) * (len(p) if self.formulation == "full" else law.k))
        plan = (_full_plan if self.formulation == "full" else _compact_plan)(
            {tuple(position[token] for token in drawn): mass for drawn, mass in outcomes.items()},
            tuple(position[token] for token in tokens),
            p,
        )
        stop = torch.zeros_like(target, dtype=torch.float64)
        stop[support] = torch.as_tensor(plan[:-1], device=target.device)
        return NodeLaw([0.0] * len(tokens), stop, float(plan[-1]))

    def _outcomes(self, law: DraftLaw, draft: Tensor | None, tokens: tuple[int, ...]) -> Outcomes:
        """Returns the law of the children's tokens, cut to the number of children that are present."""
        if law.deterministic:
            return {tokens: 1.0}
        draft = given(draft)
        self._check_size(int((draft > 0).sum()) ** law.tails)
        outcomes: Outcomes = {}
        for mass, drawn in law.enumerate(draft):
            key = tuple(drawn[: len(tokens)])
            outcomes[key] = outcomes.get(key, 0.0) + mass
        return outcomes

    def _check_size(self, variables: int) -> None:
        if variables > self.max_variables:
            raise ValueError(
                f"the program has {variables} variables, more than max_variables = {self.max_variables}; "
                "truncate with top_k or top_p, or use a closed form such as SpecHub"
            )

    def extra_repr(self) -> str:
        return f"formulation={self.formulation!r}"


def optimal_acceptance(law: DraftLaw, target: Tensor, draft: Tensor) -> float:
    """Returns the greatest probability with which a lossless rule can emit one of the children that ``law`` draws.

    Args:
        law: the draft law.
        target: ``[V]`` target probabilities; normalised in float64, as the draft row is.
        draft: ``[V]`` draft row.

    By duality this is ``1 + min_H (p(H) - Q(H))`` over token sets ``H``, where ``Q(H)`` is the probability that all
    children lie in ``H``. The minimum is attained by the tops together with a prefix of the tokens sorted by ``p / q``
    (Hu et al., ICLR 2025). The cost is one sort. Only for three or more draws without replacement, ``Q`` is an
    integral over exponential clocks and costs a few microseconds per token.

    Examples:
        >>> import torch
        >>> from arbordraft.sampling.laws import IID, WithoutReplacement
        >>> target, draft = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.3, 0.2, 0.1])
        >>> [round(optimal_acceptance(law, target, draft), 4) for law in (IID(1), IID(2), WithoutReplacement(2))]
        [0.6, 0.79, 0.8345]
    """
    p, q = as_array(target), as_array(draft)
    p = p / p.sum()
    tops = law.top_tokens(draft)
    tail = q.copy()
    tail[tops] = 0
    (rest,) = tail.nonzero()
    p_tops = float(p[tops].sum())
    if law.k == len(tops) or len(rest) == 0:
        return p_tops
    rest = rest[np.argsort(p[rest] / tail[rest], kind="stable")]
    tails = min(law.tails, law.k - len(tops))
    draws = tails if law.replacement else min(tails, len(rest))
    covered = _all_inside(tail[rest] / tail.sum(), draws, law.replacement)
    return min(1.0, 1 + float((p_tops + p[rest].cumsum() - covered).min()))


def _all_inside(q: Array, draws: int, replacement: bool) -> Array:
    """Returns, for every prefix of the tokens, the probability that all draws lie in it."""
    mass = q.cumsum()
    if replacement or draws == 1:
        inside: Array = mass**draws
    elif draws == 2:
        # P(x first, both inside) = q(x) / (1 - q(x)) * (mass - q(x)). For a token with nearly all the mass, the mass
        # of the others must be summed up, not subtracted from 1.
        peak = int(q.argmax())
        besides = q.copy()
        besides[peak] = 0
        odds = besides / (1 - besides)
        inside = odds.cumsum() * mass - (odds * q).cumsum()
        inside[peak:] += q[peak] * besides.cumsum()[peak:] / besides.sum()
    else:
        inside = _first_rings_inside(q, draws)
    inside[-1] = 1.0
    return inside


def _first_rings_inside(q: Array, draws: int) -> Array:
    """Does the work of :func:`_all_inside` for draws without replacement: first rings of clocks of rates ``q``.

    All draws lie in a prefix iff at least ``draws`` of its exponential clocks ring before the first clock outside it.
    The latter rings at rate ``1 - mass``. The trapezoid rule over the logarithm of that time converges
    exponentially: the integrand falls off on both sides and is analytic in a strip around the real line.
    """
    step = 0.25
    times = np.exp(np.arange(-36, 46, step))
    outside = np.append(q[:0:-1].cumsum()[::-1], 0.0)
    inside = np.zeros_like(q)
    few = np.zeros((draws, len(times)))  # few[m]: probability that m clocks of the prefix rang by that time
    few[0] = 1.0
    for index, rate in enumerate(q):
        silent = np.exp(-rate * times)
        few[1:] = few[1:] * silent + few[:-1] * -np.expm1(-rate * times)
        few[0] *= silent
        if index + 1 >= draws:
            density = outside[index] * np.exp(-outside[index] * times)
            inside[index] = 1 - step * (times * density * few.sum(axis=0)).sum()
    return inside


def _full_plan(outcomes: Outcomes, drawn: tuple[int, ...], p: Array) -> Array:
    """Returns the law of the emitted token given the drawn tuple, from the program over all (tuple, token) pairs."""
    keys, masses = list(outcomes), np.array(list(outcomes.values()))
    rows, tokens = np.divmod(np.arange(len(keys) * len(p)), len(p))
    # Every pair is worth 1, one with a drafted token 2, so that the plan moves all mass. With equality constraints
    # instead, a plan would exist only if the sums of both sides agreed to the last bit.
    worth = np.ones((len(keys), len(p)))
    for row, key in enumerate(keys):
        worth[row, list(key)] = 2
    plan = _solve(worth.ravel(), rows, tokens, masses, p)
    hit = worth.ravel() == 2
    return _completed(rows[hit], tokens[hit], plan[hit], masses, p, keys.index(drawn))


def _compact_plan(outcomes: Outcomes, drawn: tuple[int, ...], p: Array) -> Array:
    """Returns the law of :func:`_full_plan` from the program over drafted tokens only."""
    sets: Outcomes = {}
    for key, mass in outcomes.items():  # only the set of drafted tokens matters
        members = tuple(sorted(set(key)))
        sets[members] = sets.get(members, 0.0) + mass
    keys, masses = list(sets), np.array(list(sets.values()))
    rows = np.array([row for row, members in enumerate(keys) for _ in members])
    tokens = np.array([token for members in keys for token in members])
    plan = _solve(np.ones(len(rows)), rows, tokens, masses, p)
    return _completed(rows, tokens, plan, masses, p, keys.index(tuple(sorted(set(drawn)))))


def _solve(worth: Array, rows: Indices, tokens: Indices, masses: Array, p: Array) -> Array:
    """Returns the plan of greatest worth that serves no row and no token beyond its mass, up to HiGHS' tolerance."""
    from scipy.optimize import linprog  # slow to import: a fifth of the time for this package
    from scipy.sparse import csr_array

    columns = np.arange(len(rows))
    entries = (np.ones(2 * len(rows)), (np.append(rows, len(masses) + tokens), np.append(columns, columns)))
    sums = csr_array(entries, shape=(len(masses) + len(p), len(rows)))  # constraints of rows, then those of tokens
    tight: Any = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}
    limits: Any = {"A_ub": sums, "b_ub": np.append(masses, p)}  # Any: scipy's stubs do not know sparse constraints
    solution: Any = linprog(-worth, method="highs", options=tight, **limits)
    if solution.x is None:
        raise RuntimeError(f"HiGHS did not solve the transport program: {solution.message}")
    return np.maximum(solution.x, 0)


def _completed(rows: Indices, tokens: Indices, served: Array, masses: Array, p: Array, row: int) -> Array:
    """Returns the law of the emitted token given outcome ``row``: the plan, completed by a product of the residuals.

    A solver meets its constraints up to a tolerance. The served mass is cut down to them by tokens, then by rows, which
    only lowers it further. The remaining masses of both sides are then coupled as a product. Every row and every token
    gets its mass, since ``masses`` and ``p`` have the same sum: the law is exact for any plan.
    """
    served = served * _at_most_one(p, _sums(served, tokens, len(p)))[tokens]
    served = served * _at_most_one(masses, _sums(served, rows, len(masses)))[rows]
    left = np.maximum(p - _sums(served, tokens, len(p)), 0)
    plan = _sums(served[rows == row], tokens[rows == row], len(p))
    if left.sum() > 0:
        plan += left * (max(masses[row] - plan.sum(), 0.0) / left.sum())
    return plan / plan.sum() if plan.sum() > 0 else p  # an outcome without mass does not occur


def _sums(values: Array, groups: Indices, count: int) -> Array:
    sums: Array = np.zeros(count)
    np.add.at(sums, groups, values)
    return sums


def _at_most_one(limit: Array, used: Array) -> Array:
    return np.divide(limit, used, out=np.ones_like(limit), where=used > limit)


def as_array(row: Tensor) -> Array:
    """Returns a row in float64 on the host."""
    return row.detach().double().cpu().numpy()
