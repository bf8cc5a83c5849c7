"""Tree verifiers: from target rows, a draft tree and noise to an accepted path and the token that follows it.

A verifier describes its decision as a process of yes/no questions, each with a probability. One runner
answers them from noise, another one follows every answer and returns the law: what is sampled is what is
enumerated.

Shapes: n nodes of a sample, T rows of the batch, V vocabulary.
"""

from collections.abc import Callable, Generator, Mapping, Sequence

import torch
from torch import Tensor, nn

from arbordraft.kernels import choice
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise, draw
from arbordraft.sampling.rows import Rows, SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.verdict import Exactness, Verdict
from arbordraft.utils.checks import check_float, check_instance, check_positive
from arbordraft.verifiers.packed import verify_packed
from arbordraft.verifiers.rules import NodeLaw, Rule

# Yields (node, probability) and is sent the answer; returns the last accepted node and [V] weights of the
# next token.
Decision = Generator[tuple[int, float], bool, tuple[int, Tensor]]


class TreeVerifier(nn.Module):
    """Decides which path of a draft tree is committed and which token follows."""

    exactness = Exactness.EXACT
    shared = False  # whether it takes the noise that target and drafter share

    def supports(self, law: DraftLaw) -> bool:
        """Whether the verifier is valid for trees whose children were drawn by ``law``."""
        raise NotImplementedError

    def decide(self, tree: SampleTree, target: Mapping[int, Tensor]) -> Decision:
        """The decision process for one sample; ``target[node]`` is the ``[V]`` target row of a node."""
        raise NotImplementedError

    def forward(self, tree: DraftTree, target_probs: Rows[Tensor], noise: Noise | GumbelNoise) -> Verdict:
        """Verifies a batch.

        Args:
            tree: the drafts.
            target_probs: ``[T, V]`` target probabilities, rows in the order of ``tree.rows()``.
            noise: the uniforms of this step, ``[B, N]``; the shared noise for :class:`SharedMatching` alone.

        Raises:
            TypeError: if the noise is of the other kind.
            ValueError: if there are not exactly T target rows, or the rows cannot be probabilities.
        """
        uniforms = check_instance("noise", noise, Noise)
        verdicts: list[SampleVerdict | None] = []
        for index, (sample, target) in enumerate(tree.split(target_probs)):
            if sample is None:
                verdicts.append(None)
                continue
            accept, final = uniforms.accept[index].tolist(), uniforms.final[index]
            decision = self.decide(sample, target)
            try:
                node, probability = next(decision)
                while True:
                    node, probability = decision.send(accept[node] < probability)
            except StopIteration as stopped:
                node, weights = stopped.value
            token = draw(weights, final[node].item())
            verdicts.append(_verdict(sample, node, token))
        return Verdict(tuple(verdicts))

    def law(self, tree: SampleTree, target: Mapping[int, Tensor]) -> list[tuple[float, tuple[int, ...], Tensor]]:
        """The exact law of the verdict given the drafts.

        Returns:
            ``(probability, accepted path, [V] law of the next token)`` for every end of the decision.

        Examples:
            >>> from arbordraft.sampling.laws import IID
            >>> from arbordraft.trees.topology import TreeTopology
            >>> from arbordraft.verifiers import RecursiveRejection
            >>> target, draft = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
            >>> tree = SampleTree(TreeTopology.chain(1), IID(1), {0: 7, 1: 1}, {0: draft})
            >>> ends = TopDown(RecursiveRejection()).law(tree, {0: target, 1: target})
            >>> [(round(probability, 4), path, law.tolist()) for probability, path, law in ends]
            [(0.3333, (), [1.0, 0.0]), (0.6667, (1,), [0.5, 0.5])]
        """
        ends: list[tuple[float, tuple[int, ...], Tensor]] = []
        open_answers: list[tuple[float, list[bool]]] = [(1.0, [])]
        while open_answers:
            probability, answers = open_answers.pop()
            decision = self.decide(tree, target)
            try:
                _, chance = next(decision)
                for answer in answers:
                    _, chance = decision.send(answer)
            except StopIteration as stopped:
                node, weights = stopped.value
                ends.append((probability, _accepted(tree, node), weights / weights.sum()))
                continue
            for answer, share in ((True, chance), (False, 1 - chance)):
                if share > 0:
                    open_answers.append((probability * share, [*answers, answer]))
        return ends


class RuleVerifier(TreeVerifier):
    """Applies one rule at the nodes of a tree; on a device it may reject in turn for all trees at once.

    Args:
        rule: decides among the children of a node.

    Raises:
        TypeError: if ``rule`` is no :class:`Rule`.
    """

    lifted: bool  # whether a path is judged by its end before its beginning

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        check_instance("rule", rule, Rule)
        self.rule = rule
        self.exactness = rule.exactness

    def supports(self, law: DraftLaw) -> bool:
        return self.rule.supports(law)

    def forward(self, tree: DraftTree, target_probs: Rows[Tensor], noise: Noise | GumbelNoise) -> Verdict:
        """Verifies a batch; see :meth:`TreeVerifier.forward`."""
        uniforms = check_instance("noise", noise, Noise)
        scores = target_probs.scores if isinstance(target_probs, SoftmaxRows) and self.rule.rejects_in_turn else None
        if scores is None or not choice.wants_triton("verify_tree", scores):
            return super().forward(tree, target_probs, uniforms)
        ends = verify_packed(tree, scores, uniforms, lifted=self.lifted)
        return Verdict(
            tuple(
                None if sample is None or end is None else _verdict(sample, *end)
                for sample, end in zip(tree.samples, ends, strict=True)
            )
        )


class TopDown(RuleVerifier):
    """Applies a rule at the root, then at the accepted child, until a rejection or a leaf."""

    lifted = False

    def decide(self, tree: SampleTree, target: Mapping[int, Tensor]) -> Decision:
        node = 0
        while children := tree.children(node):
            law = _node_law(self.rule, tree, node, children, target[node], 1.0)
            left = 1.0
            for child, accept in zip(children, law.accept, strict=True):
                if (yield child, _share(accept, left)):
                    node = child
                    break
                left -= accept
            else:
                return node, _or_target(law.stop, target[node])
        return node, target[node]


class Lifted(RuleVerifier):
    """Lifts a rule from one node to the whole tree: a path is judged by its end before its beginning.

    The tree is walked in post-order. Every prefix carries the share of its target mass that it still has to
    emit; a prefix whose subtree was rejected stops where it is, or hands the decision back to its parent.
    With recursive rejection this is traversal verification (Weng et al., NeurIPS 2025), and on a chain block
    verification (Sun et al., ICLR 2025), the optimum for a single path. Set-based rules gain from it; every
    valid rule stays exact.
    """

    lifted = True

    def decide(self, tree: SampleTree, target: Mapping[int, Tensor]) -> Decision:
        end = yield from self._visit(tree, target, 0, 1.0)
        return end or (0, target[0])

    def _visit(
        self, tree: SampleTree, target: Mapping[int, Tensor], node: int, weight: float
    ) -> Generator[tuple[int, float], bool, tuple[int, Tensor] | None]:
        children = tree.children(node)
        if not children:
            return (node, target[node]) if (yield node, weight) else None
        law = _node_law(self.rule, tree, node, children, target[node], weight)
        left = 1.0
        for child, accept in zip(children, law.accept, strict=True):
            if accept > 0:
                end = yield from self._visit(tree, target, child, _share(accept, left))
                if end:
                    return end
            left -= accept
        stop = law.stop.sum(dtype=torch.float64).item()
        # At full weight nothing can be rejected: asking would only let rounding in.
        if weight >= 1 or (yield node, _share(stop, left)):
            return node, _or_target(law.stop, target[node])
        return None


class TypicalAcceptance(TreeVerifier):
    """Accepts every drafted token that the target does not find surprising. Lossy.

    A node passes if its parent did and its target probability exceeds ``min(epsilon, delta * exp(-H))``,
    ``H`` the entropy of the target row. The deepest passing node wins, ties go to the likelier path.

    Args:
        epsilon: above 0, at most 1.
        delta: above 0.

    Raises:
        TypeError: if an argument is no number.
        ValueError: if it is out of range.

    Source: Medusa (Cai et al., 2024), section 2.3.2, with its default thresholds.
    """

    exactness = Exactness.LOSSY

    def __init__(self, epsilon: float = 0.3, delta: float = 0.09) -> None:
        super().__init__()
        self.epsilon = check_positive("epsilon", check_float("epsilon", epsilon, 0, 1))
        self.delta = check_positive("delta", delta)

    def supports(self, law: DraftLaw) -> bool:
        return True

    def decide(self, tree: SampleTree, target: Mapping[int, Tensor]) -> Decision:
        score = {0: (0, 0.0)}  # passing nodes: depth, log-probability of the path
        for node in tree.tokens:
            if node not in score or not (children := tree.children(node)):
                continue
            entropy = torch.special.entr(target[node]).sum()
            threshold = min(self.epsilon, self.delta * torch.exp(-entropy).item())
            for child in children:
                probability = target[node][tree.tokens[child]]
                if probability > threshold:
                    score[child] = (score[node][0] + 1, score[node][1] + probability.log().item())
        best = max(score, key=score.__getitem__)
        return best, target[best]
        yield  # a decision without questions

    def extra_repr(self) -> str:
        return f"epsilon={self.epsilon}, delta={self.delta}"


def matching_verdict(
    tree: DraftTree, tokens_of: Callable[[Sequence[int], Sequence[tuple[int, int]]], Sequence[int]]
) -> Verdict:
    """The verdict where the target's own tokens are kept as far as they were drafted.

    Args:
        tree: the drafts.
        tokens_of: the target's own token behind each of some of the T rows of ``tree.rows()``, given their numbers, and
            sample and depth of each; asked only along the paths.

    Examples:
        >>> from arbordraft.sampling.laws import Fixed
        >>> from arbordraft.trees.topology import TreeTopology
        >>> tree, best = SampleTree(TreeTopology.fork(2, 1), Fixed(2), {0: 7, 1: 3, 2: 5}), [5, 0, 9]
        >>> matching_verdict(DraftTree((tree,)), lambda rows, places: [best[row] for row in rows]).samples
        (SampleVerdict(path=(2,), token=9, recovered=False),)
    """
    rows = {(sample, node): row for row, (sample, node, _) in enumerate(tree.rows())}
    verdicts: list[SampleVerdict | None] = [None] * len(tree.samples)
    ends = {sample: 0 for sample, drafted in enumerate(tree.samples) if drafted}
    depth = 0
    while ends:
        tokens = tokens_of([rows[place] for place in ends.items()], [(sample, depth) for sample in ends])
        going: dict[int, int] = {}
        for (sample, end), token in zip(ends.items(), tokens, strict=True):
            drafted: SampleTree = tree.samples[sample]  # type: ignore[assignment]
            child = next((child for child in drafted.children(end) if drafted.tokens[child] == token), None)
            if child is None:
                verdicts[sample] = _verdict(drafted, end, int(token))
            else:
                going[sample] = child
        ends, depth = going, depth + 1
    return Verdict(tuple(verdicts))


class SharedMatching(TreeVerifier):
    """Draws the target's token with noise that the drafter shares, and goes on where it was drafted.

    The token behind a node is the first highest of ``log p + g``, g being Gumbel noise of the sample's seed and the
    position: of law p, whatever was drafted. So the text is that of plain decoding with the same seed, token for token,
    and drafts may depend on anything: on the noise (:class:`~arbordraft.sampling.laws.SharedNoise`), on tokens still to
    be verified, on the other samples, on what rows cost.

    Source: Daliri, Musco and Suresh (2024, arXiv 2408.07978) for one draft.
    """

    exactness = Exactness.PATHWISE
    shared = True

    def supports(self, law: DraftLaw) -> bool:
        return law.deterministic  # others draw with noise of their own, for nothing

    def forward(self, tree: DraftTree, target_probs: Rows[Tensor], noise: Noise | GumbelNoise) -> Verdict:
        """Verifies a batch; see :meth:`TreeVerifier.forward`.

        Raises:
            TypeError: if the noise is none that target and drafter share.
        """
        shared = check_instance("noise", noise, GumbelNoise)
        if len(target_probs) != sum(tree.lengths):
            raise ValueError(f"the batch has {sum(tree.lengths)} nodes, but {len(target_probs)} rows were given")
        scores = target_probs if isinstance(target_probs, SoftmaxRows) else _logarithms(target_probs)
        return matching_verdict(tree, lambda rows, places: scores.draw(rows, shared, places))

    def decide(self, tree: SampleTree, target: Mapping[int, Tensor]) -> Decision:
        """Raises TypeError: given the drafts, which know of its noise, the verdict has no law of its own."""
        raise TypeError(f"{self} has no law given the drafts: they share its noise; draw with a GumbelNoise instead")


def _logarithms(target_probs: Rows[Tensor]) -> SoftmaxRows:
    return SoftmaxRows(torch.stack([target_probs[row] for row in range(len(target_probs))]).log())


def _node_law(rule: Rule, tree: SampleTree, node: int, children: list[int], target: Tensor, weight: float) -> NodeLaw:
    tokens = [tree.tokens[child] for child in children]
    law: NodeLaw = rule(target, weight, tree.draft_probs.get(node), tokens, tree.law_of(node))
    return law


def _accepted(tree: SampleTree, end: int) -> tuple[int, ...]:
    return tuple(tree.topology.path(end)[1:])


def _verdict(tree: SampleTree, end: int, token: int) -> SampleVerdict:
    return SampleVerdict(_accepted(tree, end), token, recovered=bool(tree.children(end)))


def _share(part: float, whole: float) -> float:
    """``part / whole`` as a probability; where rounding has used the whole up, any part of it was certain."""
    if whole <= part:
        return 1.0 if part > 0 else 0.0
    return part / whole


def _or_target(stop: Tensor, target: Tensor) -> Tensor:
    """Stopping with no mass left happens only by rounding, when rejection had probability 0."""
    return stop if stop.sum() > 0 else target
