"""What every drafter is, and the level-by-level growth that model-based ones share.

Shapes: R frontier nodes of all samples, V vocabulary.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.laws import IID, DraftLaw, SharedNoise
from arbordraft.masks import stack_words
from arbordraft.onnx_networks import OnnxNetwork
from arbordraft.sampling import GumbelNoise, SoftmaxRows
from arbordraft.stateful import Allowed
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.stand_ins import prepack_linears
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftContext, DraftTree, Draw, Origin, Plan, SampleTree, Situation, StepView, Verdict

if TYPE_CHECKING:
    from arbordraft.heads.base import Companion

Network = TypeVar("Network", bound="Companion")


class Drafter(nn.Module):
    """Proposes a draft tree per sample.

    Everything a drafter remembers about a batch (its caches, its indices) is in the state that :meth:`open` returns
    and that travels with the decoder's own, so one drafter serves many batches at once. Samples join a batch and leave
    it between two steps; all that is kept of them is kept by their number.
    """

    max_positions: int | None = None  # length of the longest text it can draft for, if there is a limit
    # How often the next token is its most probable one, its second, and so on: what trees are fitted to.
    acceptance: tuple[float, ...] = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01)
    hidden_layers: tuple[int, ...] = ()  # the target's hidden states that it wants, as transformers numbers them
    takes_candidates = False  # whether it goes on from first tokens that it did not choose itself
    free = False  # whether a level takes next to no time beside the target's forward

    def laws(self, law: DraftLaw) -> tuple[DraftLaw, ...]:
        """The laws of the trees that it proposes when the coupling's is ``law``."""
        return (law,)

    def default_topology(self) -> TreeTopology:
        """The largest tree that decoders draft with it unless they are told otherwise: fitted to its acceptance."""
        return TreeTopology.sequoia(self.acceptance[:4], 16, 6)

    def default_law(self, width: int) -> DraftLaw:
        """How it draws up to ``width`` children unless decoders are told otherwise.

        Trees with the noise of the target, under which they may take any shape; chains at random, for block
        verification is the best that a single draft can do.
        """
        return SharedNoise(width) if width > 1 else IID(1)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        """Raises ValueError if the drafter cannot propose to this target, or cannot draw by this law."""

    def open(self, target_cache: RaggedKVCache) -> Any:
        """State of a batch that nobody has joined yet.

        Args:
            target_cache: the target's.
        """

    def join(self, state: Any, sample: int, tokens: Sequence[int], handle: int) -> None:
        """Takes in a sample whose prompt nobody has read yet.

        Args:
            state: what :meth:`open` returned.
            sample: its number, which no other has until it leaves.
            tokens: its prompt.
            handle: the sample in the target's cache.
        """

    def share(self, state: Any, source: int, sample: int, tokens: int) -> None:
        """Takes over what is known of the first tokens of another sample, with which a prompt begins, too.

        The next token is the same in both texts as well, and the target reads at least one itself before the last.
        """

    def read(self, state: Any, tokens: Mapping[int, Sequence[int]]) -> None:
        """Learns what the target has just read of prompts; it never reads their last tokens beforehand."""

    def leave(self, state: Any, sample: int) -> None:
        """Forgets a sample."""

    def behind(self, state: Any, context: DraftContext) -> Sequence[int]:
        """Committed tokens of every sample that it would have to read before it drafts; none for all by default."""
        return ()

    def propose(self, state: Any, context: DraftContext) -> DraftTree:
        """Grows one tree per sample that takes part; a step may ask for some samples first and for others then."""
        raise NotImplementedError

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        """Learns what became of a tree and forgets the rest; without a verdict for a sample, nothing of it is kept."""

    def take_hidden(self, state: Any, hidden: Mapping[int, Tensor]) -> None:
        """Receives the target's hidden states of tokens that it has read, or that were committed: behind both.

        Never called for drafters that want none.

        Args:
            state: what :meth:`open` returned.
            hidden: ``[n, F]`` by sample: the states of ``hidden_layers`` side by side, of all tokens behind the last
                ones observed, except for the last committed one, which the target has not seen yet.
        """
        raise NotImplementedError


def check_ragged(target: Any) -> None:
    """Raises TypeError unless a drafter's target is a RaggedModel."""
    if not isinstance(target, RaggedModel):
        raise TypeError(
            f"target must be a RaggedModel, got {type(target).__name__}: wrap the model as RaggedModel(model), and "
            "build the decoder with the same one"
        )


def expect(kind: type[Network], network: Any) -> Network:
    """The network as it is; raises TypeError if it is of another kind."""
    if not isinstance(network, kind):
        raise TypeError(
            f"the network must be of the kind {kind.__name__}, got {type(network).__name__}: load a trained one with "
            "from_pretrained(folder, target)"
        )
    return network


def adopt(network: Network, target: RaggedModel, leave: str = "") -> Network:
    """Readies a trained network, in place, to run beside a target: its device, its dtype, its kind of linears.

    Args:
        network: the network.
        target: the model it drafts for.
        leave: name of a part whose linears stay as they are.

    Raises:
        TypeError: if the target is no RaggedModel.
        ValueError: if the network is damaged, or was made, or trained, for another target.
    """
    check_ragged(target)
    network.check()
    network.check_target(target.model)
    network.to(target.device, target.model.dtype).eval().requires_grad_(False)  # type: ignore[arg-type]
    if target.backend != "torch":
        prepack_linears(network, target.backend, leave)
    return network


class HeadDrafter(Drafter):
    """A drafter around a trained head.

    Args:
        head: the trained network, which is cast to the target's dtype, or an exported one in its place.
        target: the model it drafts for.
        leave: name of a part of the head that is not prepacked by itself.

    Raises:
        TypeError: if one of them is something else.
        ValueError: if the head is damaged, or it was made, or trained, for another target.
    """

    def __init__(self, head: Any, target: RaggedModel, leave: str = "") -> None:
        super().__init__()
        if isinstance(head, OnnxNetwork):
            check_ragged(target)
            head.check_target(target)
        self.head: Any = head if isinstance(head, OnnxNetwork) else adopt(head, target, leave)
        self.target = target
        if head.config.acceptance is not None:
            self.acceptance = tuple(head.config.acceptance)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if target is not self.target:
            raise ValueError(f"{type(self).__name__} must be built for the target that it drafts for")


def grow(context: DraftContext, drafter: Drafter, run: "Callable[[Garden, dict[int, list[int]]], Tensor]") -> DraftTree:
    """Grows trees level by level with a model.

    Args:
        context: the step.
        drafter: whose model it is.
        run: given the trees so far and the frontier nodes of every sample that goes on, the ``[R, V]`` draft logits
            of these nodes, sample by sample.
    """
    garden = Garden(context, context.law, drafter)
    certain = context.law.deterministic
    for depth in range(context.topology.max_depth):
        frontier = garden.frontier(depth)
        if not frontier:
            break
        places = [(sample, node) for sample, nodes in frontier.items() for node in nodes]

        def place_of(row: int, places: list[tuple[int, int]] = places) -> tuple[int, list[int]]:
            sample, node = places[row]
            return sample, garden.path(sample, node)

        scores = context.warp(run(garden, frontier), place_of)
        if isinstance(context.noise, GumbelNoise):
            scores = context.noise.perturb(scores, [(sample, depth) for sample, _ in places])
        rows = SoftmaxRows(scores)
        likeliest, chances = tree_expand(scores, min(garden.law.k if certain else 1, scores.shape[1]))
        tops, odds = likeliest.tolist(), chances.exp().tolist()
        sound = [math.isfinite(values[0]) for values in odds]
        if any(not good and garden.allowed(*place) is None for good, place in zip(sound, places, strict=True)):
            warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=2)
        for row, (sample, node) in enumerate(places):
            if not sound[row] or (node == 0 and context.candidates is not None):
                continue
            children = context.topology.child_list[node]
            if certain:
                possible = sum(chance > 0 for chance in odds[row])
                tokens, confidence = tops[row][:possible][: len(children)], odds[row]
            else:
                draft = rows[row]
                uniforms = context.noise.draft[sample, list(children)].tolist()  # type: ignore[union-attr]
                tokens = garden.law.narrow(len(children)).draw(draft, uniforms)
                confidence = draft[tokens].tolist()
                garden.rows[sample][node] = draft
            garden.plant(sample, node, tokens, confidence, partial(rows.__getitem__, row))
    return garden.tree()


def _same(row: Tensor) -> Tensor:
    return row


def unread(
    cache: RaggedKVCache, handles: Mapping[int, int], tokens: Sequence[Sequence[int]], last: int = 0
) -> list[int]:
    """Committed tokens of every sample that a drafter's cache lacks, the ``last`` ones aside; 0 for unknown ones."""
    return [
        max(0, len(text) - last - cache.length(handles[sample])) if sample in handles else 0
        for sample, text in enumerate(tokens)
    ]


def plan_level(
    garden: "Garden",
    frontier: dict[int, list[int]],
    cache: RaggedKVCache,
    handles: Mapping[int, int],
    fed: dict[int, list[int]],
) -> tuple[Tensor, RaggedBatch]:
    """Plans the packed forward of the frontier nodes, behind the nodes that were fed before.

    Args:
        garden: the trees.
        frontier: nodes to feed for every sample that goes on; added to ``fed``.
        cache: the drafter's cache.
        handles: the samples' handles in it.
        fed: nodes whose keys already lie behind the committed ones; without node 0 if the root is committed.

    Returns:
        ``[T]`` tokens and the batch.
    """
    topology = garden.context.topology
    tokens, depths, words = [], [], []
    for sample, nodes in frontier.items():
        columns = fed[sample] = fed[sample] + nodes
        root = topology.depth_list[columns[0]]
        tokens += [garden.tokens[sample][node] for node in nodes]
        depths.append([topology.depth_list[node] - root for node in nodes])
        words.append(garden.context.mask.select(nodes, columns))
    batch = cache.plan([handles[sample] for sample in frontier], depths, stack_words(words))
    return torch.tensor(tokens), batch


def groups_of(context: DraftContext) -> list[list[int]]:
    """The samples that decide together.

    What is drafted never changes a pathwise text: a batch decides together and spends its rows where it gains most. Any
    other depends on what is verified: there every sample decides alone, for a batch of its like.
    """
    alive = [sample for sample, room in enumerate(context.room) if room is not None]
    if context.pathwise:
        return [alive] if alive else []
    return [[sample] for sample in alive]


def situation_of(context: DraftContext, drafter: Drafter, group: Sequence[int]) -> Situation:
    """What is known of a group before a drafter drafts for it."""
    room = [min(context.room[sample] or 0, context.topology.max_depth) for sample in group]
    memory = [context.memory[sample] for sample in group]
    alike = 1 if context.pathwise else context.expected_batch
    behind = [context.behind[sample] for sample in group] if context.behind else []
    left = [(context.room[sample] or 0) + 1 for sample in group] if context.closed else []
    return Situation(room, memory, alike, type(drafter).__name__, drafter.acceptance, drafter.free, behind, left)


class Garden:
    """The trees of one step while they grow.

    Args:
        context: the step.
        law: how children are drawn.
        drafter: who grows them; says what is known of its drafts beforehand.
    """

    def __init__(self, context: DraftContext, law: DraftLaw, drafter: Drafter) -> None:
        self.context = context
        self.law = law
        self.source = type(drafter).__name__
        self.alive = [sample for sample, room in enumerate(context.room) if room is not None]
        self.tokens: dict[int, dict[int, int]] = {sample: {0: context.tokens[sample][-1]} for sample in self.alive}
        self.rows: dict[int, dict[int, Tensor]] = {sample: {} for sample in self.alive}
        self.chances: dict[int, dict[int, float]] = {sample: {} for sample in self.alive}
        self.certain: dict[int, set[int]] = {sample: set() for sample in self.alive}
        # What deciders may see: how every node's path came about, and what drafters that have it put into `hidden`.
        self.hidden: dict[tuple[int, int], Tensor] = {}
        self._paths: dict[int, dict[int, tuple[Draw, ...]]] = {sample: {0: ()} for sample in self.alive}
        self._acceptance = drafter.acceptance
        self.groups = groups_of(context)
        self._alike = 1 if context.pathwise else context.expected_batch
        self.plans = [context.plan(situation_of(context, drafter, group)) for group in self.groups]
        self._going = {
            sample
            for group, plan in zip(self.groups, self.plans, strict=True)
            for sample, levels in zip(group, plan.levels if plan else [1] * len(group), strict=True)
            if levels > 0
        }
        self._trust = {
            sample: trust
            for group, plan in zip(self.groups, self.plans, strict=True)
            for sample, trust in zip(group, plan.trust if plan else [(1.0,)] * len(group), strict=True)
        }
        # Chance that a node's path is accepted, times what the sample's tokens are worth.
        self._reach = {sample: {0: 1.0} for sample in self.alive}
        for group, plan in zip(self.groups, self.plans, strict=True):
            for sample, weight in zip(group, plan.weights if plan else (), strict=False):
                self._reach[sample][0] = weight
        for sample, given in enumerate(context.candidates or ()):
            if given is not None and sample in self.tokens:
                tokens, row = given
                self.plant(sample, 0, tokens, row[tokens].tolist(), partial(_same, row))

    def path(self, sample: int, node: int) -> list[int]:
        """Drafted tokens from below the root down to a node."""
        return [self.tokens[sample][passed] for passed in self.context.topology.path(node)[1:]]

    def allowed(self, sample: int, node: int) -> Allowed | None:
        """What may stand behind a node; ``None`` for everything, or where that is not known."""
        place = self.context.places[sample] if self.context.places else None
        return None if place is None else place.allowed(self.path(sample, node))

    def force(self) -> None:
        """Gives every root the tokens that have to follow it, as far as the topology's first path goes.

        They wait for no plan, and no plan gives them up: the target has to read them in any case.
        """
        for sample in self.alive:
            node, children = 0, self.context.topology.child_list[0]
            for _ in range(self.context.room[sample] or 0):
                allowed = self.allowed(sample, node)
                if not children or allowed is None or allowed.only is None:
                    break
                self.plant(sample, node, [allowed.only], [1.0])
                node, children = children[0], self.context.topology.child_list[children[0]]

    def frontier(self, depth: int) -> dict[int, list[int]]:
        """The nodes at ``depth`` that get children, for every sample that still goes on."""
        parents: dict[int, list[int]] = {}
        for group, plan in zip(self.groups, self.plans, strict=True):
            living = self._living(group, depth)
            chosen = self._planned(group, plan, living, depth) if plan else self._asked(group, living, depth)
            self._going -= living.keys() - chosen.keys()
            parents |= chosen
        return parents

    def _living(self, group: Sequence[int], depth: int) -> dict[int, list[int]]:
        """The nodes at ``depth``, for every sample of a group that goes on and has some."""
        level = self.context.topology.levels[depth]
        living = {
            sample: [node for node in level if node in self.tokens[sample]]
            for sample in group
            if sample in self._going and depth < (self.context.room[sample] or 0)
        }
        return {sample: nodes for sample, nodes in living.items() if nodes}

    def _fertile(self, nodes: Sequence[int]) -> list[int]:
        return [node for node in nodes if self.context.topology.child_list[node]]

    def _planned(
        self, group: Sequence[int], plan: Plan, living: Mapping[int, list[int]], depth: int
    ) -> dict[int, list[int]]:
        """Those of the living nodes that gain more than they take, if together they are worth a level."""
        prunes, floor = self.law.deterministic, 0.0
        if plan.budget is not None and prunes:
            # What is less likely than the last draft that fits so far has no descendants that fit either.
            reaches = sorted(self._chances(group), reverse=True)
            floor = reaches[plan.budget - 1] if 0 < plan.budget <= len(reaches) else 0.0
        chosen, worth = {}, 0.0
        for sample, levels, following in zip(group, plan.levels, plan.next, strict=True):
            if sample not in living or depth >= levels:
                continue
            following_here = following[min(depth, len(following) - 1)]
            reach = self._reach[sample]
            gains = {node: reach[node] * following_here - plan.row for node in self._fertile(living[sample])}
            if prunes:
                gains = {node: gain for node, gain in gains.items() if gain >= 0 and reach[node] >= floor}
            if gains and (gain := sum(gains.values())) >= 0:
                worth += gain
                chosen[sample] = list(gains)
        return chosen if worth * self._alike >= plan.level else {}

    def _asked(self, group: Sequence[int], living: Mapping[int, list[int]], depth: int) -> dict[int, list[int]]:
        """Those of the living nodes for whose samples the decider says so."""
        if not living:
            return {}
        view = StepView(
            depth,
            paths=[[self._paths[sample][node] for node in nodes] for sample, nodes in living.items()],
            memory=[self.context.memory[sample] for sample in living],
            pathwise=self.context.pathwise,
            batch=len(group) * self._alike,
            planned=sum(len(self.tokens[sample]) for sample in group) * self._alike,
            alike=self._alike,
            source=self.source,
            acceptance=self._acceptance,
        )
        answers = self.context.decide(view)
        if len(answers) != len(living):
            raise ValueError(f"{self.context.decide} must say of each of {len(living)} samples, said {len(answers)}")
        going = {sample: nodes for (sample, nodes), goes_on in zip(living.items(), answers, strict=True) if goes_on}
        return {sample: fertile for sample, nodes in going.items() if (fertile := self._fertile(nodes))}

    def plant(
        self,
        sample: int,
        node: int,
        tokens: Sequence[int],
        confidence: Sequence[float],
        read: Callable[[], Tensor] | None = None,
    ) -> None:
        """Gives a node its children, fewer than planned if there are fewer tokens; ``read`` gives its draft row.

        Of tokens that were not drawn at random those that constraints forbid are left out.
        """
        origin = Origin(read, self.hidden.get((sample, node)))
        if (allowed := self.allowed(sample, node)) is not None and self.law.deterministic:
            kept = [pair for pair in zip(tokens, confidence, strict=False) if pair[0] in allowed]
            tokens, confidence = [token for token, _ in kept], [chance for _, chance in kept]
            if allowed.only is not None and kept:
                self.certain[sample].add(self.context.topology.child_list[node][0])
        for child, token, probability in zip(self.context.topology.child_list[node], tokens, confidence, strict=False):
            self._paths[sample][child] = (*self._paths[sample][node], Draw(probability, origin))
            self.add(sample, node, child, token, probability)

    def add(self, sample: int, parent: int, node: int, token: int, chance: float) -> None:
        """Adds a node below one that is there; ``chance`` is its draft probability, given its parent."""
        trust = self._trust[sample]
        self.tokens[sample][node], self.chances[sample][node] = token, chance
        depth = min(self.context.topology.depth_list[parent], len(trust) - 1)
        likely = 1.0 if node in self.certain[sample] else min(1.0, trust[depth] * chance)
        self._reach[sample][node] = self._reach[sample][parent] * likely

    def _chances(self, group: Sequence[int]) -> list[float]:
        return [chance for sample in group for node, chance in self._reach[sample].items() if node]

    def _trim(self, group: Sequence[int], plan: Plan) -> None:
        """Gives up the drafts that are too unlikely to be worth their rows."""
        # Parents stand before their children: both the chance, which cannot rise, and the node agree on that.
        trunks = {sample: self._trunk(sample) for sample in group}
        ranked = sorted(
            (node not in trunks[sample], -reach, node, sample)
            for sample in group
            for node, reach in self._reach[sample].items()
            if node
        )
        kept = max(plan.keep([-reach for _, reach, _, _ in ranked]), sum(map(len, trunks.values())))
        for _, _, node, sample in ranked[kept:]:
            del self.tokens[sample][node], self.chances[sample][node]
            self.certain[sample].discard(node)

    def _trunk(self, sample: int) -> set[int]:
        """The nodes that are certain to be accepted."""
        trunk: set[int] = set()
        for node in sorted(self.certain[sample]):
            parent = self.context.topology.parent_list[node]
            if parent == 0 or parent in trunk:
                trunk.add(node)
        return trunk

    def tree(self) -> DraftTree:
        """The result; every sample that takes part has at least its root."""
        gains: dict[int, float] = {}
        for group, plan in zip(self.groups, self.plans, strict=True):
            if plan is not None and self.law.deterministic:  # of what was drawn at random nothing is given up
                self._trim(group, plan)
            price = plan.row if plan else 0.0
            for sample in group:
                reach = self._reach[sample]
                trunk = self._trunk(sample)  # its rows have to be computed sooner or later
                gains[sample] = sum(reach[node] - price * (node not in trunk) for node in self.tokens[sample] if node)
        # Children were planted parent by parent, which need not be the order of their numbers.
        grown = {
            sample: SampleTree(
                self.context.topology,
                self.law,
                dict(sorted(tokens.items())),
                self.rows[sample],
                self.chances[sample],
                self.source,
                gains[sample],
                frozenset(self.certain[sample]),
            )
            for sample, tokens in self.tokens.items()
        }
        return DraftTree(tuple(grown.get(sample) for sample in range(len(self.context.room))))
