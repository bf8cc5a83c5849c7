"""A drafter that runs the target over a copy of its weights in fewer bits, which is read faster.

Shapes: T packed rows, R rows whose logits are wanted, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from arbordraft.drafters.agreement import acceptance_at, agreement
from arbordraft.drafters.base import check_ragged
from arbordraft.drafters.model_drafter import TargetCacheDrafter
from arbordraft.drafters.native_models import native_model
from arbordraft.drafters.network import DraftNetwork, ModelNetwork, Outputs
from arbordraft.kernels.draft_tree import DraftRun
from arbordraft.sampling.laws import DraftLaw, SharedNoise
from arbordraft.target.attention import Attending, Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology

BITS = ("int4", "int8")
_LEVELS = 12
_ENOUGH_AGREEMENT = 0.93  # share of agreeing tokens from which 4-bit weights are taken without trying 8 bits


class SelfDrafter(TargetCacheDrafter):
    """Drafts with the target's own layers over weights of fewer bits; outputs stay the target's, bit for bit.

    It needs no training and no other model. It reads the keys and values that the target has computed, and writes those
    of its drafts where verification will overwrite them. It shares the target's embeddings and norms, and adds a packed
    copy of the layers' matrices and of the head. On a CPU, the copy of the head preselects tokens, which the head
    itself then scores. On a GPU, it scores them alone.

    Args:
        target: the model it drafts for, which native kernels or Triton's run.
        weights: ``int4`` or ``int8``, see :class:`~arbordraft.RaggedModel`; on a GPU ``int4``.

    Raises:
        TypeError: if the target is not a RaggedModel.
        ValueError: for other weights, or if torch's modules run the target.
        UnsupportedModel: if the target cannot be packed. On a GPU, these are models with experts, recurrent layers or
            other modules without a kernel; the error names them.
    """

    acceptance: tuple[float, ...] = (0.94, 0.03, 0.01)
    informative = False  # both are unsure at the same places: 84 % of SmolLM2's drafts with chances below 0.2 are right

    def __init__(self, target: RaggedModel, weights: str = "int4") -> None:
        super().__init__()
        check_ragged(target)
        if weights not in BITS:
            raise ValueError(f"a target drafts for itself with {' or '.join(BITS)} weights, got {weights!r}")
        if target.backend == "torch":
            raise ValueError(
                "a target drafts for itself by native kernels on a CPU, and by Triton's on a GPU; this one has "
                "kernels='torch': load it with kernels='native' or 'triton', or choose another drafter"
            )
        if target.backend == "triton" and weights != "int4":
            raise ValueError(f"on a GPU a target drafts for itself with int4 weights, got {weights!r}")
        self.target = target
        # On a CPU, the target's own head costs no memory here, and scores only a few tokens.
        own = target if target.weights is None else None
        self.model = RaggedModel(target.model, kernels=target.backend, weights=weights, head_of=own, self_test=False)
        self._network = _CopyNetwork(self.model, target)

    @classmethod
    def fitted(cls, target: RaggedModel) -> "SelfDrafter":
        """Builds the drafter with 4 bits if these agree with the target, otherwise with the bits that gain more.

        Drafter and target are compared on a short text, by their best next tokens in one forward each. The text has
        random tokens if the target has no tokenizer. The rate of agreement sets the drafter's ``acceptance``.
        """
        four = cls(target, "int4")._compared()
        if four.acceptance[0] >= _ENOUGH_AGREEMENT or target.backend == "triton":  # there without a choice
            return four
        return max(four, cls(target, "int8")._compared(), key=lambda drafter: drafter.gain(target))

    def _compared(self) -> "SelfDrafter":
        self.acceptance = acceptance_at(agreement(self.target, self.model), type(self).acceptance)
        return self

    @property
    def weights(self) -> str:
        """``int4`` or ``int8``."""
        assert self.model.weights is not None
        return self.model.weights

    def effort(self, target: RaggedModel) -> float:
        if self.model.copies:
            return self.nbytes / sum(copy.original_bytes for copy in self.model.copies)
        assert target.prepacking is not None
        return self.nbytes / max(1, target.prepacking.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes besides the target's."""
        if self.model.prepacking is None:
            return sum(copy.panels.nbytes for copy in self.model.copies)
        screen = None if (run := self._network.native) is None or run.weights.exact is None else run.weights.head
        parts = [] if screen is None else [screen.weight, screen.scale]
        return self.model.prepacking.nbytes + sum(part.nbytes for part in parts if part is not None)

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(_LEVELS)

    def fitted_topology(self, nodes: int, max_depth: int) -> TreeTopology:
        return self.default_topology()  # siblings of its drafts are hardly ever right

    def default_law(self, width: int) -> DraftLaw:
        # The laws of target and drafter are so close that shared noise accepts tokens nearly as often as block
        # verification. With shared noise, texts are also those of plain decoding.
        return SharedNoise(width)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if target is not self.target:
            raise ValueError("SelfDrafter must be built from the target that it drafts for")

    def __repr__(self) -> str:
        return f"SelfDrafter(weights={self.weights!r})"


class _CopyNetwork(ModelNetwork):
    """A target over a copy of its weights, which shares the target's cache and head.

    Args:
        model: the copy.
        target: the target.
    """

    def __init__(self, model: RaggedModel, target: RaggedModel) -> None:
        super().__init__(model)
        self._target = target

    def _source(self) -> object:
        return self.model.prepacking, self._target.prepacking

    def _convert(self) -> DraftRun | None:
        return native_model(self.model, screen=True)

    def refresh(self) -> None:
        self.model.begin(RaggedKVCache())  # packs changed weights again
        super().recorded()

    def recorded(self) -> DraftNetwork | None:
        # Weights are compared once per batch. The comparison takes a GPU's host milliseconds, too long for every step.
        return self._recorded if self._recorded.modules is not None else super().recorded()

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        assert isinstance(ragged, Forward)
        with _lent(ragged.cache):
            return super().run(tokens, hidden, positions, ragged, rows)


@contextmanager
def _lent(cache: RaggedKVCache) -> Iterator[None]:
    """Lets another copy of the weights run on a cache, which afterwards is tied to its own weights again."""
    own, cache.weights = cache.weights, None
    try:
        yield
    finally:
        cache.weights = own


__all__ = ["BITS", "SelfDrafter"]
