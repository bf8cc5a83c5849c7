"""Draft laws: how the children of one node are drawn.

Every law here draws some *tail* tokens at random and then adds some *top* tokens that are certain. Children
are listed and verified in the order of drawing, so the random ones come first.

Shapes: V vocabulary, k children. Draft rows hold probabilities, whose sum may differ from 1 by rounding.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from arbordraft.sampling.noise import draw
from arbordraft.utils.checks import check_float, check_int


class DraftLaw(nn.Module):
    """Draws ``tails`` tokens from a draft row without its tops, then lists the ``tops`` most probable tokens.

    Users pick one of the named laws: :class:`IID`, :class:`WithoutReplacement`, :class:`TopTail`,
    :class:`AdaptiveTopTail`, :class:`Fixed`, :class:`SharedNoise`.

    Tokens of draft probability 0 are never drafted, so a row with too small a support yields fewer children. Their
    number depends on the draft row alone, which keeps every verifier lossless.

    Args:
        tops: number of certain tokens. Among equally probable tokens the smaller id comes first.
        tails: number of random tokens.
        replacement: whether a token may be drawn more than once.

    Raises:
        TypeError: if a count is not a whole number.
        ValueError: if a count is negative or both are zero.
    """

    threshold = 0.0  # least draft probability of a top
    shared = False  # whether children are taken from rows that contain the target's noise

    def __init__(self, tops: int, tails: int, replacement: bool) -> None:
        super().__init__()
        self.tops = check_int("tops", tops, 0)
        self.tails = check_int("tails", tails, 0)
        if self.k < 1:
            raise ValueError("a draft law needs at least one child, got 0 tops and 0 tails")
        self.replacement = replacement

    @property
    def k(self) -> int:
        """Greatest number of children of one node."""
        return self.tops + self.tails

    @property
    def most_tops(self) -> int:
        """Greatest number of certain tokens of one node."""
        return self.tops

    @property
    def deterministic(self) -> bool:
        """Whether the draft row alone determines the children."""
        return self.tails == 0

    def narrow(self, children: int) -> "DraftLaw":
        """Returns the law for a node with fewer children: drops all tails but one first, then tops.

        Raises:
            ValueError: if ``children`` is below 1 or above ``k``.

        Examples:
            >>> TopTail(2, 2).narrow(3)
            DraftLaw(tops=2, tails=1, replacement=False)
        """
        if not 1 <= children <= self.k:
            raise ValueError(f"{self} draws 1 to {self.k} children, a node with {children} was planned")
        if children == self.k:
            return self
        tops = min(self.tops, children - min(self.tails, 1))
        return DraftLaw(tops, children - tops, self.replacement)

    def draw(self, draft: Tensor, uniforms: Sequence[float]) -> list[int]:
        """Draws children in the order in which they must be verified.

        Args:
            draft: ``[V]`` draft row, exactly as the verifier will receive it.
            uniforms: at least ``tails`` independent uniforms in [0, 1).

        Examples:
            >>> import torch
            >>> row = torch.tensor([0.5, 0.3, 0.2])
            >>> IID(2).draw(row, [0.4, 0.9]), TopTail(1, 1).draw(row, [0.9]), Fixed(2).draw(row, [])
            ([0, 2], [2, 0], [0, 1])
        """
        tops, row = self.split(draft)
        tails: list[int] = []
        for index in range(self._tails_of(row, len(tops))):
            tails.append(draw(row, uniforms[index]))
            if not self.replacement:
                row[tails[-1]] = 0
        return tails + tops

    def proposals(self, draft: Tensor | None, tokens: Sequence[int]) -> Iterator[Tensor | None]:
        """Yields the ``[V]`` law of every child given the children before it; ``None`` for a certain child.

        Args:
            draft: ``[V]`` draft row. If there is none, all children count as certain, which is right for a
                deterministic law. Under any other law, verification stays lossless but accepts less often.
            tokens: tokens that :meth:`draw` returned for that row, or the first of them.

        Examples:
            >>> import torch
            >>> drawn, top = TopTail(1, 1).proposals(torch.tensor([0.5, 0.25, 0.25]), [2, 0])
            >>> drawn, top
            (tensor([0.0000, 0.5000, 0.5000]), None)
        """
        if self.deterministic or draft is None:
            yield from (None for _ in tokens)
            return
        tops, row = self.split(draft)
        for token in tokens:
            if token in tops:
                yield None
                continue
            yield row / row.sum()
            if not self.replacement:
                row[token] = 0

    def enumerate(self, draft: Tensor) -> Iterator[tuple[float, list[int]]]:
        """Yields all outcomes of :meth:`draw` with their probabilities in float64; meant for small supports."""
        tops, row = self.split(draft)
        row = row.double()  # draws use float64, too

        def tails(row: Tensor, left: int) -> Iterator[tuple[float, list[int]]]:
            if left == 0:
                yield 1.0, []
                return
            mass = row.sum().item()
            for token in row.nonzero().flatten().tolist():
                rest = row.clone()
                if not self.replacement:
                    rest[token] = 0
                for probability, tokens in tails(rest, left - 1):
                    yield row[token].item() / mass * probability, [token, *tokens]

        for probability, tokens in tails(row, self._tails_of(row, len(tops))):
            yield probability, tokens + tops

    def tops_of(self, draft: Tensor) -> int:
        """Returns the number of certain tokens for a ``[V]`` draft row; it must depend on this row alone."""
        return min(int((draft >= self.threshold).sum()), self.most_tops) if self.threshold else self.most_tops

    @property
    def asks(self) -> bool:
        """Whether the class overrides :meth:`tops_of`, which must then be called for each row."""
        return type(self).tops_of is not DraftLaw.tops_of

    def tops_within(self, drafts: Tensor, row: int) -> int:
        """Returns the greatest number of tops of one of ``[R, V]`` draft rows, before :attr:`threshold` is applied."""
        return self.tops_of(drafts[row]) if self.asks else self.most_tops

    def top_tokens(self, draft: Tensor) -> list[int]:
        """Returns the certain tokens, the most probable one first."""
        count = min(self.tops_of(draft), len(draft))
        if count == 0:
            return []
        if count == 1:
            return [int(draft.argmax())]  # the first one if there are several
        # Not the indices of topk: among equal values these depend on the device.
        candidates = ((draft >= draft.topk(count).values[-1]) & (draft > 0)).nonzero().flatten()
        order = draft[candidates].argsort(descending=True, stable=True)
        return candidates[order[:count]].tolist()

    def split(self, draft: Tensor) -> tuple[list[int], Tensor]:
        """Returns the certain tokens of a ``[V]`` draft row, and a copy of the row without them."""
        tops, row = self.top_tokens(draft), draft.clone()
        row[tops] = 0
        return tops, row

    def _tails_of(self, row: Tensor, tops: int) -> int:
        """Returns how many tokens are drawn from a row whose tops were removed."""
        wanted = min(self.tails, self.k - tops)
        if wanted == 0:
            return 0
        support = int((row > 0).sum())
        return wanted if self.replacement and support > 0 else min(wanted, support)

    def extra_repr(self) -> str:
        return f"tops={self.tops}, tails={self.tails}, replacement={self.replacement}"


class IID(DraftLaw):
    """``k`` independent draws, at least 1; equal tokens may occur and stay separate children."""

    def __init__(self, k: int) -> None:
        super().__init__(tops=0, tails=check_int("k", k, 1), replacement=True)


class WithoutReplacement(DraftLaw):
    """``k`` different tokens, at least 1, drawn one after the other from the rest of the row."""

    def __init__(self, k: int) -> None:
        super().__init__(tops=0, tails=check_int("k", k, 1), replacement=False)


class TopTail(DraftLaw):
    """Draws ``tails`` tokens without replacement from outside the ``tops`` most probable ones, then adds these tops.

    ``TopTail(1, 1)`` is the law of the pair that SpecHub draws (Sun et al., EMNLP 2024).
    ``TopTail(k - 1, 1)`` is the greedy drafting of Hu et al. (ICLR 2025).
    """

    def __init__(self, tops: int, tails: int) -> None:
        super().__init__(tops, tails, replacement=False)


class AdaptiveTopTail(DraftLaw):
    """``TopTail(m, k - m)`` with m chosen per node: tokens of draft probability ``threshold`` or more are tops.

    A top is accepted with its mass in the target's residual, so tops suit rows of which the drafter is sure. On other
    rows, random draws cover more. The choice depends on the draft row alone, so verification stays lossless. At
    least one token is always drawn.

    Args:
        k: number of children, at least 1.
        threshold: least draft probability of a top, from 0 to 1. With 1 the law is :class:`WithoutReplacement`, with 0
            it is ``TopTail(k - 1, 1)``.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is out of range.

    Examples:
        >>> import torch
        >>> law, sure, unsure = AdaptiveTopTail(3, 0.4), torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.full((4,), 0.25)
        >>> law.tops_of(sure), law.tops_of(unsure)
        (2, 0)
    """

    def __init__(self, k: int, threshold: float = 0.2) -> None:
        super().__init__(tops=0, tails=check_int("k", k, 1), replacement=False)
        self.threshold = check_float("threshold", threshold, 0, 1)

    def narrow(self, children: int) -> "DraftLaw":
        super().narrow(children)  # checks
        return self if children == self.k else AdaptiveTopTail(children, self.threshold)

    @property
    def most_tops(self) -> int:
        return self.k - 1

    def extra_repr(self) -> str:
        return f"k={self.k}, threshold={self.threshold}"


class Fixed(DraftLaw):
    """The ``k`` most probable tokens, at least 1, or any chosen without noise, as by an n-gram lookup.

    A drafter that repeats a token among siblings wastes a row, with no other effect.
    """

    def __init__(self, k: int) -> None:
        super().__init__(tops=check_int("k", k, 1), tails=0, replacement=False)


class SharedNoise(DraftLaw):
    """The ``k`` tokens, at least 1, with the highest ``log q + g``, where g is the noise that the target draws with.

    A drafter that predicts the target's row correctly also predicts the token that the target draws. The law is valid
    only if a child is kept exactly when it *is* that token. Both depend on the same noise, so the law of the target's
    token given the child is not p.

    Source: Daliri, Musco and Suresh (2024, arXiv 2408.07978) for one draft. In Gumbel list sampling (Rowan, Phan and
    Khisti, NeurIPS 2025, arXiv 2506.05632) each of k drafts has its own noise. Here the k drafts share one noise.
    """

    shared = True

    def __init__(self, k: int) -> None:
        super().__init__(tops=check_int("k", k, 1), tails=0, replacement=False)

    def narrow(self, children: int) -> "DraftLaw":
        super().narrow(children)  # checks
        return SharedNoise(children)

    def extra_repr(self) -> str:
        return f"k={self.k}"


def given(draft: Tensor | None) -> Tensor:
    """Returns the draft row of a node for a rule that needs one; raises ValueError if there is none."""
    if draft is None:
        raise ValueError("this rule needs the draft row its children were drawn from; the drafter gave none")
    return draft
