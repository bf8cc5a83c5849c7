"""Training of the adapter of an early exit.

Shapes: B sequences, S slots, H hidden size.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy

from arbordraft import EarlyExitDrafter, RaggedModel
from arbordraft.drafters import Drafter
from arbordraft.heads.exit_adapter import ExitAdapter
from arbordraft.training.batches import Batch
from arbordraft.training.students.base import Prediction, Student, check_plain_head


class EarlyExitStudent(Student):
    """The adapter after the target's first layers. It reads the target's own states, so all drafting steps are alike.

    Args:
        layers: number of layers to run.
        intermediate_size: of the adapter's MLP, by default the target's.
    """

    network: ExitAdapter
    steps_alike = True

    def __init__(self, layers: int, intermediate_size: int | None = None) -> None:
        super().__init__()
        self.layers, self.intermediate_size = layers, intermediate_size

    def hidden_layers(self, target: RaggedModel) -> tuple[int, ...]:
        return (self.layers,)

    def build(self, target: RaggedModel, frequent: Callable[[int], list[int]], name: str | None = None) -> None:
        check_plain_head(target)
        EarlyExitDrafter(target, self.layers)  # raises now, not after training, if these layers cannot be used
        self.network = ExitAdapter.for_target(
            target.model, self.layers, intermediate_size=self.intermediate_size, name=name
        ).float()

    def unroll(self, batch: Batch, target: RaggedModel, steps: int) -> Iterator[Prediction]:
        head = target.model.get_output_embeddings()
        hidden = self.network(batch.inputs.to(self.network.dtype)).to(head.weight.dtype)
        yield Prediction(target.final_norm(hidden), head.weight, head.bias, ahead=1, first=0)

    def drafter(self, target: RaggedModel) -> Drafter:
        return EarlyExitDrafter(target, self.layers, deepcopy(self.network))
