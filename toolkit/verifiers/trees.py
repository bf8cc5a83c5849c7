"""Tree verifiers: from target rows, a draft tree and noise to an accepted path and the token that follows it.

A verifier describes its decision as a process of yes/no questions, each with a probability. One runner
answers them from noise; another follows every answer and returns the law. So the sampled law is the
enumerated one.

Shapes: B samples, N topology nodes, T packed rows, V vocabulary.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from arbordraft.kernels import choice
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise, draw
from arbordraft.sampling.rows import Rows, SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Causality, Exactness, Verdict
from arbordraft.utils.checks import check_float, check_instance, check_positive
from arbordraft.verifiers.packed import verify_packed
from arbordraft.verifiers.rules import NodeLaw, Rule

# Yields (row, probability) and is sent the answer; returns the row of the last accepted node and [V] weights of the
# next token.
Decision = Generator[tuple[int, float], bool, tuple[int, Tensor]]


class TreeVerifier(nn.Module):
    """Decides which path of a draft tree is committed and which token follows.

    Rows of temperature 0 never reach a verifier that takes noise of its own: see
    :meth:`~arbordraft.verifiers.coupling.Coupling.forward`.
    """

    exactness = Exactness.EXACT
    growth = Causality.CAUSAL
    """The most that the growth of trees may depend on drafts, so that :attr:`exactness` holds."""
    shared = False  # whether it takes the noise that target and drafter share

    def supports(self, law: DraftLaw) -> bool:
        """Returns whether the verifier is valid for trees whose children were drawn by ``law``."""
        raise NotImplementedError

    def check(self, topology: TreeTopology) -> None:
        """Raises ValueError if trees of this shape cannot be judged; most verifiers judge all."""

    def decide(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        """Yields the questions of one sample's decision; ``target[row]`` is the ``[V]`` target row of a node.

        A question names a row, whose uniform answers it. Each row may be asked about once: answers about one row would
        depend on each other, but :meth:`law` takes all answers for independent.
        """
        raise NotImplementedError

    def _questions(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        """Yields the questions of a decision; raises RuntimeError at the second question about a row."""
        decision, asked = self.decide(tree, target), set[int]()
        try:
            row, probability = next(decision)
            while True:
                if row in asked:
                    raise RuntimeError(
                        f"{self} asks twice about row {row}, whose uniform answers only once: draw such a decision as "
                        "one question, or ask about different rows"
                    )
                asked.add(row)
                row, probability = decision.send((yield row, probability))
        except StopIteration as stopped:
            return stopped.value

    def forward(
        self,
        tree: DraftTree,
        target_probs: Rows[Tensor],
        noise: Noise | GumbelNoise,
        samples: Sequence[int] | None = None,
    ) -> Verdict:
        """Verifies a batch.

        Args:
            tree: the drafts.
            target_probs: ``[T, V]`` target probabilities.
            noise: the uniforms of this step, ``[B, N]``. Only :class:`SharedMatching` takes shared noise.
            samples: samples to decide about; by default all that take part.

        Raises:
            TypeError: if the verifier takes another kind of noise.
            ValueError: if there are not exactly T target rows, or the rows cannot be probabilities.
        """
        uniforms = check_instance("noise", noise, Noise)
        _check_rows(tree, target_probs)
        tree, target_probs = _on_host(tree, target_probs)
        accept, final = (_by_row(values, tree) for values in (uniforms.accept, uniforms.final))
        ends = {}
        for sample in tree.living if samples is None else samples:
            decision = self._questions(tree[sample], target_probs)
            try:
                row, probability = next(decision)
                while True:
                    row, probability = decision.send(accept[row] < probability)
            except StopIteration as stopped:
                row, weights = stopped.value
            ends[sample] = row, draw(weights, final[row])
        return Verdict.of(tree, ends)

    def law(self, tree: SampleTree, target: Rows[Tensor]) -> list[tuple[float, list[int], Tensor]]:
        """Enumerates the exact law of the verdict given the drafts.

        Returns:
            ``(probability, path of rows, [V] law of the next token)`` for every end of the decision; a path begins
            with the root and ends with the last accepted node.

        Examples:
            >>> from arbordraft.sampling.laws import IID
            >>> from arbordraft.trees.topology import TreeTopology
            >>> from arbordraft.verifiers import RecursiveRejection
            >>> target, draft = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
            >>> tree = DraftTree.of(TreeTopology.chain(1), IID(1), [{0: 7, 1: 1}], [{0: draft}])
            >>> ends = TopDown(RecursiveRejection()).law(tree[0], [target, target])
            >>> [(round(probability, 4), path, law.tolist()) for probability, path, law in ends]
            [(0.3333, [0], [1.0, 0.0]), (0.6667, [0, 1], [0.5, 0.5])]
        """
        ends: list[tuple[float, list[int], Tensor]] = []
        open_answers: list[tuple[float, list[bool]]] = [(1.0, [])]
        while open_answers:
            probability, answers = open_answers.pop()
            decision = self._questions(tree, target)
            try:
                _, chance = next(decision)
                for answer in answers:
                    _, chance = decision.send(answer)
            except StopIteration as stopped:
                row, weights = stopped.value
                ends.append((probability, tree.batch.path(row), weights / weights.sum()))
                continue
            for answer, share in ((True, chance), (False, 1 - chance)):
                if share > 0:
                    open_answers.append((probability * share, [*answers, answer]))
        return ends


class RuleVerifier(TreeVerifier):
    """Applies one rule at the nodes of a tree; on a device, recursive rejection may run for all trees at once.

    Args:
        rule: decides among the children of a node.

    Raises:
        TypeError: if ``rule`` is not a :class:`Rule`.
    """

    lifted: bool  # whether paths are judged from their ends to the root

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        check_instance("rule", rule, Rule)
        self.rule = rule
        self.exactness = rule.exactness

    def supports(self, law: DraftLaw) -> bool:
        return self.rule.supports(law)

    def forward(
        self,
        tree: DraftTree,
        target_probs: Rows[Tensor],
        noise: Noise | GumbelNoise,
        samples: Sequence[int] | None = None,
    ) -> Verdict:
        """Verifies a batch; see :meth:`TreeVerifier.forward`."""
        if not (
            self.rule.rejects_in_turn
            and isinstance(target_probs, SoftmaxRows)
            and choice.uses_triton("verify_tree", target_probs.logits)
        ):
            return super().forward(tree, target_probs, noise, samples)
        uniforms = check_instance("noise", noise, Noise)
        _check_rows(tree, target_probs)
        ends = verify_packed(tree, target_probs.scores, uniforms, lifted=self.lifted, samples=samples)
        return Verdict.of(tree, ends)


class TopDown(RuleVerifier):
    """Applies a rule at the root, then at the accepted child, until a rejection or a leaf."""

    lifted = False

    def decide(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        row = tree.root
        while children := tree.children(row):
            law = _node_law(self.rule, tree, row, children, target[row], 1.0)
            left = 1.0
            for child, accept in zip(children, law.accept, strict=True):
                if (yield child, _share(accept, left)):
                    row = child
                    break
                left -= accept
            else:
                return row, _or_target(law.stop, target[row])
        return row, target[row]


class Lifted(RuleVerifier):
    """Lifts a rule from one node to the whole tree: judges paths from their ends to the root.

    The tree is walked in post-order. Every prefix carries the share of its target mass that it still has to
    emit. A prefix whose subtree was rejected stops there, or hands the decision back to its parent.

    With recursive rejection, this is traversal verification (Weng et al., NeurIPS 2025). On a chain, that is block
    verification (Sun et al., ICLR 2025), the optimum for a single path. UniVer (Weng et al., 2026, arXiv 2605.04543)
    describes this construction for optimal transport at every node. It allocates mass from the root down and decides in
    post-order. Set-based rules gain from lifting; every valid rule stays exact.
    """

    lifted = True

    def decide(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        end = yield from self._visit(tree, target, tree.root, 1.0)
        return end or (tree.root, target[tree.root])

    def _visit(
        self, tree: SampleTree, target: Rows[Tensor], row: int, weight: float
    ) -> Generator[tuple[int, float], bool, tuple[int, Tensor] | None]:
        children = tree.children(row)
        if not children:
            return (row, target[row]) if (yield row, weight) else None
        law = _node_law(self.rule, tree, row, children, target[row], weight)
        left = 1.0
        for child, accept in zip(children, law.accept, strict=True):
            if accept > 0:
                end = yield from self._visit(tree, target, child, _share(accept, left))
                if end:
                    return end
            left -= accept
        stop = law.stop.sum(dtype=torch.float64).item()
        # At full weight nothing can be rejected: a question would only add rounding errors.
        if weight >= 1 or (yield row, _share(stop, left)):
            return row, _or_target(law.stop, target[row])
        return None


class TypicalAcceptance(TreeVerifier):
    """Accepts every drafted token that the target does not find surprising. Lossy.

    A node passes if its parent did and its target probability exceeds ``min(epsilon, delta * exp(-H))``, where
    ``H`` is the entropy of the target row. The deepest passing node wins; ties go to the likelier path.

    Args:
        epsilon: above 0, at most 1.
        delta: above 0.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is out of range.

    Source: Medusa (Cai et al., 2024), section 2.3.2, with its default thresholds.
    """

    exactness = Exactness.LOSSY

    def __init__(self, epsilon: float = 0.3, delta: float = 0.09) -> None:
        super().__init__()
        self.epsilon = check_positive("epsilon", check_float("epsilon", epsilon, 0, 1))
        self.delta = check_positive("delta", delta)

    def supports(self, law: DraftLaw) -> bool:
        return True

    def decide(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        score = {tree.root: (0, 0.0)}  # passing rows: depth, log-probability of the path
        for row in tree.rows:
            if row not in score or not (children := tree.children(row)):
                continue
            entropy = torch.special.entr(target[row]).sum()
            threshold = min(self.epsilon, self.delta * torch.exp(-entropy).item())
            for child in children:
                probability = target[row][tree.token(child)]
                if probability > threshold:
                    score[child] = (score[row][0] + 1, score[row][1] + probability.log().item())
        best = max(score, key=score.__getitem__)
        return best, target[best]
        yield  # makes this a generator, which asks no questions

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon}, delta={self.delta}"


def matching_verdict(
    tree: DraftTree,
    tokens_of: Callable[[Sequence[int], Sequence[tuple[int, int]]], Sequence[int]],
    samples: Sequence[int] | None = None,
    *,
    at_once: bool = False,
) -> Verdict:
    """Returns the verdict that follows the target's tokens as long as they were drafted.

    Args:
        tree: the drafts.
        tokens_of: given rows, and the sample and depth of each, returns the target's token after each row; -1 if
            there is none.
        samples: samples to decide about; by default all that take part.
        at_once: call ``tokens_of`` once for all rows, which suits devices; by default once per level, along the paths.

    Raises:
        ValueError: if there is no token after an accepted node.

    Examples:
        >>> from arbordraft.sampling.laws import Fixed
        >>> from arbordraft.trees.topology import TreeTopology
        >>> tree, best = DraftTree.of(TreeTopology.fork(2, 1), Fixed(2), [{0: 7, 1: 3, 2: 5}]), [5, 0, 9]
        >>> matching_verdict(tree, lambda rows, places: [best[row] for row in rows])
        Verdict(paths=[[0, 2]], tokens=[9], recovered=[False])
    """
    going = tree.living if samples is None else samples
    if at_once and going:
        rows = tree.rows_of(going)
        places = list(zip(tree.owner[rows].tolist(), tree.depth[rows].tolist(), strict=True))
        known = dict(zip(rows, tokens_of(rows, places), strict=True))
        tokens_of = lambda rows, _: [known[row] for row in rows]  # noqa: E731
    drafted, children = tree.token.tolist(), tree.children
    paths: list[list[int]] = [[] for _ in tree.proposals]
    tokens, recovered = [-1] * len(paths), [False] * len(paths)
    ends, depth = [tree[sample].root for sample in going], 0
    while ends:
        further, below = [], []
        drawn = tokens_of(ends, [(sample, depth) for sample in going])
        for sample, end, token in zip(going, ends, drawn, strict=True):
            if token < 0:
                raise ValueError("cannot draw from a row in which no token has any probability; check the processors")
            paths[sample].append(end)
            for child in children[end]:
                if drafted[child] == token:
                    further.append(sample)
                    below.append(child)
                    break
            else:
                tokens[sample], recovered[sample] = token, bool(children[end])
        going, ends, depth = further, below, depth + 1
    return Verdict(paths, tokens, recovered)


class SharedMatching(TreeVerifier):
    """Draws the target's token with noise that the drafter shares, and goes on if that token was drafted.

    The token after a node is the first maximum of ``log p + g``, where g is Gumbel noise of the sample's seed and the
    position. It has law p, independent of the drafts. So the text is that of plain decoding with the same seed, token
    for token. Drafts may depend on anything, such as the noise (:class:`~arbordraft.sampling.laws.SharedNoise`), tokens
    still to be verified, other samples, or the cost of rows.

    Source: Daliri, Musco and Suresh (2024, arXiv 2408.07978) for one draft. Gumbel list sampling (Rowan, Phan and
    Khisti, NeurIPS 2025, arXiv 2506.05632) first shared noise with several drafts. There the text depends on their
    number, here it does not.
    """

    exactness = Exactness.PATHWISE
    growth = Causality.ANTICIPATING
    shared = True

    def supports(self, law: DraftLaw) -> bool:
        return law.deterministic  # children of random laws seldom equal the target's draw

    def forward(
        self,
        tree: DraftTree,
        target_probs: Rows[Tensor],
        noise: Noise | GumbelNoise,
        samples: Sequence[int] | None = None,
    ) -> Verdict:
        """Verifies a batch; see :meth:`TreeVerifier.forward`.

        Raises:
            TypeError: if the noise is not shared by target and drafter.
        """
        shared = check_instance("noise", noise, GumbelNoise)
        _check_rows(tree, target_probs)
        scores = target_probs if isinstance(target_probs, SoftmaxRows) else _logarithms(target_probs)
        # On a CPU, noise costs more than a call; on a device, less.
        at_once = not scores.logits.is_cpu
        return matching_verdict(tree, lambda rows, places: scores.draw(rows, shared, places), samples, at_once=at_once)

    def decide(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        """Raises TypeError: drafts share the noise, so the verdict has no law of its own given the drafts."""
        raise TypeError(f"{self} has no law given the drafts: they share its noise; draw with a GumbelNoise instead")


def _logarithms(target_probs: Rows[Tensor]) -> SoftmaxRows:
    return SoftmaxRows(torch.stack([target_probs[row] for row in range(len(target_probs))]).log())


def _on_host(tree: DraftTree, target_probs: Rows[Tensor]) -> tuple[DraftTree, Rows[Tensor]]:
    """Moves trees and rows from a device to the host in two downloads, for decisions node by node."""
    if not isinstance(target_probs, SoftmaxRows) or target_probs.logits.is_cpu or not target_probs.alike:
        return tree, target_probs
    return replace(tree, draft_rows=tree.draft_rows.cpu()), target_probs.probabilities.cpu()


def _check_rows(tree: DraftTree, target_probs: Rows[Tensor]) -> None:
    if len(target_probs) != tree.rows:
        raise ValueError(f"the batch has {tree.rows} nodes, but {len(target_probs)} rows were given")


def _by_row(uniforms: Tensor, tree: DraftTree) -> list[float]:
    """Returns the ``[B, N]`` uniforms by packed row, ``[T]``."""
    found: list[float] = uniforms.cpu().numpy()[tree.owner, tree.node].tolist()
    return found


def _node_law(rule: Rule, tree: SampleTree, row: int, children: list[int], target: Tensor, weight: float) -> NodeLaw:
    tokens = [tree.token(child) for child in children]
    law: NodeLaw = rule(target, weight, tree.drawn_from(row), tokens, tree.law_of(row))
    return law


def _share(part: float, whole: float) -> float:
    """Returns ``part / whole`` as a probability; if rounding has used up the whole, any part of it is certain."""
    if whole <= part:
        return 1.0 if part > 0 else 0.0
    return part / whole


def _or_target(stop: Tensor, target: Tensor) -> Tensor:
    """Returns ``target`` if no stop mass is left, which only rounding causes where rejection has probability 0."""
    return stop if stop.sum() > 0 else target
