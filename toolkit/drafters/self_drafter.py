"""The target itself as drafter, by a copy of its weights that has fewer bits and so is read faster.

Shapes: T packed rows, R rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from arbordraft.drafters.base import check_ragged
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.model_drafter import Missing, ModelState, Outputs, TargetCacheDrafter, feed
from arbordraft.drafters.native_models import native_model
from arbordraft.kernels.draft_tree import Drafted, DraftRun, Draws, Growth
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.sampling.laws import DraftLaw, SharedNoise
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology

BITS = ("int4", "int8")
_LEVELS = 8
_SURE = 1e9  # makes every draft certain, whatever its probability


class SelfDrafter(TargetCacheDrafter):
    """Drafts with the target's own layers over weights of fewer bits; what is said stays the target's, bit for bit.

    It needs no training and no other model. It reads the keys and values that the target has computed, writes those of
    its drafts where verification will overwrite them, and shares the target's embeddings and norms: all it adds is a
    packed copy of the matrices, the head's among them.

    Args:
        target: the model it drafts for, which native kernels run.
        weights: ``int4`` or ``int8``, see :class:`~arbordraft.RaggedModel`.

    Raises:
        TypeError: if the target is no RaggedModel.
        ValueError: for other weights, and for a target that native kernels do not run: on a GPU there are none of fewer
            bits.
        UnsupportedModel: if the target cannot be packed.
    """

    acceptance = (0.94, 0.03, 0.01)

    def __init__(self, target: RaggedModel, weights: str = "int4") -> None:
        super().__init__()
        check_ragged(target)
        if weights not in BITS:
            raise ValueError(f"a target drafts for itself with {' or '.join(BITS)} weights, got {weights!r}")
        if target.backend != "native":
            raise ValueError(
                f"a target drafts for itself by native kernels, which are there on a CPU alone; this one has "
                f"kernels={target.backend!r}: load it with kernels='native', or choose another drafter"
            )
        self.target = target
        self.model = RaggedModel(target.model, kernels="native", weights=weights, self_test=False)
        self._native: tuple[object, DraftRun | None] = None, None  # with what it was prepacked from

    def effort(self, target: RaggedModel) -> float:
        assert self.model.prepacking is not None
        assert target.prepacking is not None
        return self.model.prepacking.nbytes / max(1, target.prepacking.nbytes)

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(_LEVELS)

    def fitted_topology(self, nodes: int, max_depth: int) -> TreeTopology:
        return self.default_topology()  # siblings of its drafts are hardly ever right

    def default_law(self, width: int) -> DraftLaw:
        # Laws of target and drafter are so close that drawing with the same noise gives the same token nearly as often
        # as block verification keeps one, and then texts are those of plain decoding.
        return SharedNoise(width)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if target is not self.target:
            raise ValueError("SelfDrafter must be built from the target that it drafts for")

    def open(self, target_cache: RaggedKVCache) -> ModelState:
        self.model.begin(RaggedKVCache())  # packs anew what has changed since
        return super().open(target_cache)

    def missing(self, state: ModelState, context: DraftContext, sample: int) -> Missing:
        return context.tokens(sample)[-1:], None

    def run(
        self, state: ModelState, tokens: Tensor, hidden: Tensor | None, batch: RaggedBatch, rows: Tensor | None = None
    ) -> Outputs:
        with _lent(state.cache):
            return Outputs(self.model(tokens, batch, state.cache))

    def propose_trees(
        self, state: ModelState, context: DraftContext, samples: Sequence[int], growth: Growth, draws: Draws | None
    ) -> Drafted | None:
        if self._native[0] is not self.model.prepacking:
            self._native = self.model.prepacking, native_model(self.model)
        if (run := self._native[1]) is None:
            return None
        missing = {state.handles[sample]: self.missing(state, context, sample) for sample in samples}
        # Both models waver at the same places: of SmolLM2's drafts of a probability below 0.2, 84 % are right.
        agreed = growth._replace(trust=[_SURE] * len(growth.trust))
        drafted = feed(run, state.cache, missing, agreed, draws, commit=False)
        ranks = {node: rank for nodes in context.topology.child_list for rank, node in enumerate(nodes)}
        likely = [self.acceptance[min(ranks[node], len(self.acceptance) - 1)] for node in drafted.nodes]
        return drafted._replace(chances=likely)

    def extra_repr(self) -> str:
        return f"weights={self.model.weights!r}"


@contextmanager
def _lent(cache: RaggedKVCache) -> Iterator[None]:
    """Lets another copy of the weights run on a cache, which stays tied to its own."""
    own, cache.weights = cache.weights, None
    try:
        yield
    finally:
        cache.weights = own


__all__ = ["BITS", "SelfDrafter"]
