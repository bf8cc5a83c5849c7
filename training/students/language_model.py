"""Training of a small causal LM.

Shapes: B sequences, L tokens, S slots, H hidden size.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

from arbordraft import LanguageModelDrafter, RaggedModel
from arbordraft.drafters import Drafter
from arbordraft.drafters.language_model import shrink
from arbordraft.training.batches import Batch
from arbordraft.training.students.base import Prediction, Student, check_plain_head


class LanguageModelStudent(Student):
    """Some of the target's layers as a model of their own. It reads only tokens, so all drafting steps are alike.

    Args:
        layers: the layers to take, or their number: then evenly spread, from the first to the last.
    """

    steps_alike = True

    def __init__(self, layers: int | list[int] = 4) -> None:
        super().__init__()
        self.layers = layers

    def hidden_layers(self, target: RaggedModel) -> tuple[int, ...]:
        return ()

    def build(self, target: RaggedModel, frequent: Callable[[int], list[int]], name: str | None = None) -> None:
        check_plain_head(target)
        self.network = shrink(target.model, self.layers).float()
        self._tokenizer = target.tokenizer

    def unroll(self, batch: Batch, target: RaggedModel, steps: int) -> Iterator[Prediction]:
        head = self.network.get_output_embeddings()
        hidden = self.network.base_model(batch.tokens[:, :-1], use_cache=False).last_hidden_state
        yield Prediction(hidden, head.weight, head.bias, ahead=1, first=0)

    def drafter(self, target: RaggedModel) -> Drafter:
        model = deepcopy(self.network).to(target.device, target.model.dtype).eval()  # type: ignore[arg-type]
        return LanguageModelDrafter(RaggedModel(model, target.tokenizer, kernels=target.backend))

    def save(self, folder: Path) -> None:
        """Writes the network and its tokenizer, by which a target checks that both share their token ids."""
        super().save(folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
