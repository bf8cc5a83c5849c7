"""Training of Medusa heads.

Shapes: B sequences, S slots, H hidden size.
"""

from collections.abc import Callable, Iterator

from arbordraft import MedusaDrafter, RaggedModel
from arbordraft.heads.medusa import MedusaHead
from arbordraft.training.batches import Batch
from arbordraft.training.students.base import Prediction, Student, shift


class MedusaStudent(Student):
    """Medusa heads, one per distance; they read outputs of the target's final norm, which every batch holds.

    Args:
        num_heads: tokens to look ahead; phases with more drafting steps train only these.
        num_hidden_layers: residual layers of each head.
        vocabulary: size of the draft vocabulary, ``None`` for the target's whole vocabulary.
    """

    network: MedusaHead
    drafter_class = MedusaDrafter

    def __init__(self, num_heads: int = 4, num_hidden_layers: int = 1, vocabulary: int | None = 8192) -> None:
        super().__init__()
        self.num_heads, self.num_hidden_layers, self.vocabulary = num_heads, num_hidden_layers, vocabulary

    def hidden_layers(self, target: RaggedModel) -> tuple[int, ...]:
        return ()

    def build(self, target: RaggedModel, frequent: Callable[[int], list[int]], name: str | None = None) -> None:
        self.network = MedusaHead.for_target(
            target.model,
            frequent(self.vocabulary or target.vocab_size),
            num_heads=self.num_heads,
            num_hidden_layers=self.num_hidden_layers,
            name=name,
        ).float()

    def unroll(self, batch: Batch, target: RaggedModel, steps: int) -> Iterator[Prediction]:
        head = self.network
        hidden = batch.final[:, :-1].to(head.dtype)
        for step in range(min(steps, head.config.num_heads)):
            (matrix,) = head.lm_heads[step].parameters()
            yield Prediction(head.blocks[step](hidden), matrix, None, ahead=2, first=step)
            hidden = shift(hidden)  # all heads of a draft read the slot where it began
