"""The base class of drafters, and helpers that drafters share.

Shapes: B samples, R nodes of a depth, F hidden states side by side, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor, nn

from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.network import DraftNetwork
from arbordraft.drafters.onnx_networks import OnnxNetwork
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.sampling.laws import IID, DraftLaw, Fixed, SharedNoise
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import prepack_linears
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict

if TYPE_CHECKING:
    from arbordraft.heads.base import Companion

Network = TypeVar("Network", bound="Companion")

_EFFORT_WITHOUT_PARAMETERS = 0.1  # target forwards per level, for drafters whose weights are not torch's
_VERIFICATION_FORWARDS = 1.1  # time of verifying a chain, in forwards of one row
_LONGEST_CHAIN = 12  # most drafts of a chain whose speed-up is estimated


class Predictions(NamedTuple):
    """A model's predictions for the nodes of a depth.

    Args:
        logits: ``[R, V]`` draft logits for the next token of each node.
        hidden: ``[R, H]`` states that the logits come from, for deciders; ``None`` if the drafter does not expose them.
    """

    logits: Tensor
    hidden: Tensor | None = None


Guesses = Sequence[tuple[Sequence[int], Sequence[float]]]
"""For each node of a depth: candidate next tokens, the likeliest first, and their draft probabilities."""


class Drafter(nn.Module):
    """Proposes tokens for draft trees, which :func:`~arbordraft.drafters.grow.grow` builds.

    A subclass needs only :meth:`scores`. The defaults of the other methods suit drafters without state.

    All that a drafter remembers about a batch (caches, indices) is in the state that :meth:`open` returns. Each batch
    keeps its own state, so one drafter serves many batches at once. Samples join and leave a batch between
    two steps; their data is stored by sample number.
    """

    certain = False  # whether it chooses tokens without noise, as lookups do; such drafts are never drawn
    reads_later = False  # whether it reads prompts itself once it drafts, if :meth:`prefill` was left out
    informative = True  # whether its probabilities predict acceptance; otherwise ranks do
    max_levels: int | None = None  # deepest level that it proposes; None for no limit
    takes_candidates = False  # whether it can continue from first tokens that it did not choose
    # Rates at which its most probable token, its second and so on is the next token. Trees are fitted to them.
    acceptance: tuple[float, ...] = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01)
    hidden_layers: tuple[int, ...] = ()  # the target's hidden states that it reads, as transformers numbers them

    # Proposing

    def scores(self, state: Any, frontier: Frontier) -> Predictions | Tensor | Guesses:
        """Predicts the next tokens of nodes that get children.

        Args:
            state: the state from :meth:`open`.
            frontier: R nodes of one depth.

        Returns:
            ``[R, V]`` draft logits, alone or as :class:`Predictions`. The sample's logits processors are applied to
            them, children are drawn by the law, and rows are kept for verification. A drafter that is ``certain``
            returns :data:`Guesses` instead.
        """
        raise NotImplementedError

    def grow_natively(self, state: Any, context: DraftContext, trees: TreesToGrow) -> int | None:
        """Grows whole trees in one call of the C++ kernels; returns ``None``, with nothing changed, if it cannot.

        Args:
            state: the state from :meth:`open`.
            context: the step.
            trees: the trees of the samples that draft, and how far they go on.

        Returns:
            The number of rows of scores with NaN or without a finite maximum; their nodes got no children.
        """
        return None

    def network(self, context: DraftContext) -> DraftNetwork | None:
        """Returns the network that drafts in steps of fixed shapes, if there is one."""
        return None

    def proposed(self, state: Any) -> None:
        """Runs after the trees of a step have been grown."""

    def depths(self, state: Any, context: DraftContext) -> list[int]:
        """Returns the greatest depth that it can propose for each of B samples; 0 if it can propose nothing."""
        found = [limit or 0 for limit in context.max_depth]
        if (levels := self.max_levels) is not None:
            found = [min(limit, levels) for limit in found]
        return found

    def lag(self, state: Any, context: DraftContext) -> Sequence[int]:
        """Counts the committed tokens of each sample that it must read before it drafts; empty if there are none."""
        return ()

    def stages(self, state: Any) -> Sequence[tuple["Drafter", Any]]:
        """Returns drafters with their states, in order; a later one drafts where it is expected to gain more tokens."""
        return ((self, state),)

    # State of a batch

    def open(self, target_cache: RaggedKVCache) -> Any:
        """Creates the state of an empty batch.

        Args:
            target_cache: the target's cache.
        """

    def add(self, state: Any, sample: int, tokens: Sequence[int], handle: int) -> None:
        """Adds a sample whose prompt has not been read yet.

        Args:
            state: the state from :meth:`open`.
            sample: number of the sample, unique in the batch until it leaves.
            tokens: prompt of the sample.
            handle: handle of the sample in the target's cache.
        """

    def share(self, state: Any, source: int, sample: int, tokens: int) -> None:
        """Copies the state of another sample's first ``tokens`` tokens, which both texts share.

        Both texts also share the next token. The target still reads at least one token before the prompt's last one.
        """

    def prefill(self, state: Any, tokens: Mapping[int, Sequence[int]]) -> None:
        """Receives the prompt tokens that the target has just read; a prompt's last token is never among them."""

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        """Keeps the accepted paths of a tree and drops the other drafts; a sample without a path keeps none.

        By default it drops all drafts.
        """
        self.rollback(state)

    def rollback(self, state: Any) -> None:
        """Drops all drafts of a step that failed."""

    def take_hidden(self, state: Any, hidden: Mapping[int, Tensor]) -> None:
        """Receives the target's hidden states, after prompt tokens are read and after drafts are committed.

        It is never called for drafters without ``hidden_layers``.

        Args:
            state: the state from :meth:`open`.
            hidden: ``[n, F]`` by sample: the states of ``hidden_layers`` side by side. They cover all tokens since the
                last call, except the last committed token, which the target has not read yet.
        """
        raise NotImplementedError

    def remove(self, state: Any, sample: int) -> None:
        """Forgets a sample."""

    # Defaults of decoders

    def laws(self, law: DraftLaw) -> tuple[DraftLaw, ...]:
        """Returns the laws of all trees that it proposes if the coupling's law is ``law``."""
        return (Fixed(law.k) if self.certain else law,)

    def effort(self, target: RaggedModel) -> float:
        """Estimates the time of a level in target forwards, by weights read; used until it is measured."""
        theirs = {id(parameter) for parameter in target.parameters()}
        size = sum(parameter.numel() for parameter in self.parameters() if id(parameter) not in theirs)
        return size / sum(parameter.numel() for parameter in target.parameters()) or _EFFORT_WITHOUT_PARAMETERS

    def gain(self, target: RaggedModel) -> float:
        """Estimates the speed-up of chains over plain decoding of one text, from ``acceptance`` and :meth:`effort`."""
        likely, level = self.acceptance[0], self.effort(target)
        chains = accumulate((likely**depth for depth in range(1, _LONGEST_CHAIN + 1)), initial=1.0)
        return max(tokens / (_VERIFICATION_FORWARDS + depth * level) for depth, tokens in enumerate(chains))

    def default_topology(self) -> TreeTopology:
        """Returns the largest tree that decoders draft by default, fitted to its acceptance."""
        return TreeTopology.sequoia(self.acceptance[:4], 16, 6)

    def fitted_topology(self, nodes: int, max_depth: int) -> TreeTopology:
        """Returns the tree of ``nodes`` nodes, at most ``max_depth`` deep, that suits its acceptance best."""
        return TreeTopology.sequoia(self.acceptance, nodes, max_depth)

    def default_law(self, width: int) -> DraftLaw:
        """Returns the default law for up to ``width`` children.

        Trees share the noise of the target, so that they may take any shape. Chains are drawn at random, because
        block verification is the optimum for a single path.
        """
        if self.certain:
            return Fixed(width)
        return SharedNoise(width) if width > 1 else IID(1)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        """Raises ValueError if the drafter cannot draft for this target, or cannot draw by this law."""
        if self.certain and not law.deterministic:
            raise ValueError(
                f"{type(self).__name__} chooses its tokens without noise, {law} does not draw them: couple them as "
                f"Fixed({law.k})"
            )


class Lookup(Drafter):
    """Base class of drafters that look tokens up, which takes almost no time compared with the target's forward."""

    certain = True

    def effort(self, target: RaggedModel) -> float:
        return 0.0


def check_ragged(target: Any) -> None:
    """Raises TypeError unless a drafter's target is a RaggedModel."""
    if not isinstance(target, RaggedModel):
        raise TypeError(
            f"target must be a RaggedModel, got {type(target).__name__}: wrap the model as RaggedModel(model), and "
            "build the decoder with the same one"
        )


def expect(kind: type[Network], network: Any) -> Network:
    """Returns the network unchanged; raises TypeError if it is of another kind."""
    if not isinstance(network, kind):
        raise TypeError(
            f"the network must be of the kind {kind.__name__}, got {type(network).__name__}: load a trained one with "
            "from_pretrained(folder, target)"
        )
    return network


def adopt(network: Network, target: RaggedModel, leave: str = "") -> Network:
    """Prepares a trained network in place for a target: its device, its dtype and its kind of linear layers.

    Args:
        network: the network.
        target: the model it drafts for.
        leave: name of a part whose linear layers stay as they are.

    Raises:
        TypeError: if the target is not a RaggedModel.
        ValueError: if the network is damaged, or was made or trained for another target.
    """
    check_ragged(target)
    network.check()
    network.check_target(target.model)
    network.to(target.device, target.model.dtype).eval().requires_grad_(False)  # type: ignore[arg-type]
    if target.backend == "native":
        prepack_linears(network, leave)
    return network


class HeadDrafter(Drafter):
    """Base class of drafters with a trained head.

    Args:
        head: the trained network, which is cast to the target's dtype, or an exported one.
        target: the model it drafts for.
        leave: name of a part of the head whose linear layers are not prepacked here.

    Raises:
        TypeError: if the head or the target has another type.
        ValueError: if the head is damaged, or was made or trained for another target.
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


def within_positions(depths: list[int], context: DraftContext, positions: int | None) -> list[int]:
    """Shortens the depths that can be proposed for each sample to texts of ``positions`` tokens, drafts included."""
    if positions is not None:
        for sample in context.alive:
            depths[sample] = min(depths[sample], max(0, positions - len(context.tokens(sample))))
    return depths


def num_unprefilled(
    cache: RaggedKVCache, handles: Mapping[int, int], context: DraftContext, last: int = 0
) -> list[int]:
    """Counts, by sample, committed tokens that a cache lacks, except the ``last`` ones; 0 without a handle."""
    lacking = [0] * len(context.samples)
    for sample, handle in handles.items():
        lacking[sample] = max(0, len(context.tokens(sample)) - last - cache.length(handle))
    return lacking
