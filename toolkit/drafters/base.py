"""What every drafter is.

Shapes: B samples, R nodes of a level, S samples of them, F hidden states side by side, H hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import Tensor, nn

from arbordraft.drafters.context import DraftContext, Level
from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.onnx.networks import OnnxNetwork
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

_EFFORT = 0.1  # of a level where the drafter's weights are not torch's
_VERIFIED, _LONGEST = 1.1, 12  # a forward that verifies a chain, in forwards of one row, and drafts of the longest one


class Predictions(NamedTuple):
    """What a drafter with a model says about the nodes of a level.

    Args:
        logits: ``[R, V]`` draft logits of what follows them.
        hidden: ``[R, H]`` what they were made from, for deciders; ``None`` if the drafter does not show it.
    """

    logits: Tensor
    hidden: Tensor | None = None


Guesses = Sequence[tuple[Sequence[int], Sequence[float]]]
"""By node of a level: tokens that may follow it, the likeliest first, and the draft probability of each."""


class Drafter(nn.Module):
    """Proposes draft trees; :func:`~arbordraft.drafters.grower.grow` grows them, whoever proposes.

    It needs :meth:`propose` and nothing else: the other methods have answers that fit who remembers nothing.

    Everything a drafter remembers about a batch (its caches, its indices) is in the state that :meth:`open` returns
    and that travels with the decoder's own, so one drafter serves many batches at once. Samples join a batch and leave
    it between two steps; all that is kept of them is kept by their number.
    """

    certain = False  # whether it chooses tokens itself, without noise, as lookups do: such drafts are never drawn
    max_positions: int | None = None  # length of the longest text, drafts included, that it can propose; None for any
    max_levels: int | None = None  # deepest level that it proposes; None for any
    # How often the next token is its most probable one, its second, and so on: what trees are fitted to.
    acceptance: tuple[float, ...] = (0.5, 0.15, 0.08, 0.05, 0.03, 0.02, 0.02, 0.01)
    hidden_layers: tuple[int, ...] = ()  # the target's hidden states that it wants, as transformers numbers them
    takes_candidates = False  # whether it goes on from first tokens that it did not choose itself
    informative = True  # whether its probabilities tell drafts that will be accepted from others; else their ranks do
    free = False  # whether a level takes next to no time beside the target's forward

    # Proposing

    def propose(self, state: Any, level: Level) -> Predictions | Tensor | Guesses:
        """Says what may follow the nodes of a level.

        Args:
            state: what :meth:`open` returned.
            level: R nodes.

        Returns:
            ``[R, V]`` draft logits, alone or as :class:`Predictions`: then the sample's logits processors are applied,
            children are drawn by the law, and rows are kept for verification. Or :data:`Guesses`, of a drafter that is
            ``certain``.
        """
        raise NotImplementedError

    def propose_trees(
        self, state: Any, context: DraftContext, samples: Sequence[int], growth: Growth, draws: Draws | None
    ) -> Drafted | None:
        """Grows whole trees in one call, as far as numbers say; ``None`` if it cannot, and nothing was done.

        Args:
            state: what :meth:`open` returned.
            context: the step.
            samples: S of them.
            growth: how far their trees go on.
            draws: how tokens are drawn; the most probable ones are drafted without.
        """
        return None

    def proposed(self, state: Any) -> None:
        """Is told that the trees of a step have been grown."""

    def depths(self, state: Any, context: DraftContext) -> list[int]:
        """Greatest depth of what it can propose for each of B samples; 0 for those for which it can propose nothing."""
        found = [limit or 0 for limit in context.max_depth]
        if (levels := self.max_levels) is not None:
            found = [min(limit, levels) for limit in found]
        if (positions := self.max_positions) is not None:
            for sample in context.alive:
                found[sample] = min(found[sample], max(0, positions - len(context.tokens(sample))))
        return found

    def lag(self, state: Any, context: DraftContext) -> Sequence[int]:
        """Committed tokens of every sample that it would have to read before it drafts; none for all by default."""
        return ()

    def stages(self, state: Any) -> Sequence[tuple["Drafter", Any]]:
        """The drafters that propose one after another, each with its state, the later ones where more is hoped for."""
        return ((self, state),)

    # What a batch is to it

    def open(self, target_cache: RaggedKVCache) -> Any:
        """State of a batch that nobody has joined yet.

        Args:
            target_cache: the target's.
        """

    def add(self, state: Any, sample: int, tokens: Sequence[int], handle: int) -> None:
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

    def prefill(self, state: Any, tokens: Mapping[int, Sequence[int]]) -> None:
        """Learns what the target has just read of prompts; it never reads their last tokens beforehand."""

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        """Learns what became of a tree and forgets the rest; of a sample without a path nothing is kept."""

    def take_hidden(self, state: Any, hidden: Mapping[int, Tensor]) -> None:
        """Receives the target's hidden states of tokens that it has read, or that were committed: behind both.

        Never called for drafters that want none.

        Args:
            state: what :meth:`open` returned.
            hidden: ``[n, F]`` by sample: the states of ``hidden_layers`` side by side, of all tokens behind the last
                ones observed, except for the last committed one, which the target has not seen yet.
        """
        raise NotImplementedError

    def remove(self, state: Any, sample: int) -> None:
        """Forgets a sample."""

    # What decoders are made of

    def laws(self, law: DraftLaw) -> tuple[DraftLaw, ...]:
        """The laws of all trees that it proposes when the coupling's is ``law``."""
        return (Fixed(law.k) if self.certain else law,)

    def effort(self, target: RaggedModel) -> float:
        """About how much of the target's forward a level takes, by the weights it reads: until it is measured."""
        if self.free:
            return 0.0
        theirs = {id(parameter) for parameter in target.parameters()}
        own = sum(parameter.numel() for parameter in self.parameters() if id(parameter) not in theirs)
        return own / sum(parameter.numel() for parameter in target.parameters()) or _EFFORT

    def gain(self, target: RaggedModel) -> float:
        """About how many times plain decoding of one text its chains bring, by ``acceptance`` and :meth:`effort`."""
        likely, level = self.acceptance[0], self.effort(target)
        chains = accumulate((likely**depth for depth in range(1, _LONGEST + 1)), initial=1.0)
        return max(tokens / (_VERIFIED + depth * level) for depth, tokens in enumerate(chains))

    def default_topology(self) -> TreeTopology:
        """The largest tree that decoders draft with it unless they are told otherwise: fitted to its acceptance."""
        return TreeTopology.sequoia(self.acceptance[:4], 16, 6)

    def fitted_topology(self, nodes: int, max_depth: int) -> TreeTopology:
        """The tree of so many nodes, and no deeper, that suits its acceptance best."""
        return TreeTopology.sequoia(self.acceptance, nodes, max_depth)

    def default_law(self, width: int) -> DraftLaw:
        """How it draws up to ``width`` children unless decoders are told otherwise.

        Trees with the noise of the target, under which they may take any shape; chains at random, for block
        verification is the best that a single draft can do.
        """
        if self.certain:
            return Fixed(width)
        return SharedNoise(width) if width > 1 else IID(1)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        """Raises ValueError if the drafter cannot propose to this target, or cannot draw by this law."""
        if self.certain and not law.deterministic:
            raise ValueError(
                f"{type(self).__name__} chooses its tokens, they are not drawn by {law}; couple them as Fixed({law.k})"
            )


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
    if target.backend == "native":
        prepack_linears(network, leave)
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


def num_unprefilled(
    cache: RaggedKVCache, handles: Mapping[int, int], context: DraftContext, last: int = 0
) -> list[int]:
    """Committed tokens of every sample that a drafter's cache lacks, the ``last`` ones aside; 0 for unknown ones."""
    lacking = [0] * len(context.samples)
    for sample, handle in handles.items():
        lacking[sample] = max(0, len(context.tokens(sample)) - last - cache.length(handle))
    return lacking
