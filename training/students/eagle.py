"""Training of an EAGLE-3 layer.

Shapes: B sequences, L tokens, S slots, F hidden states side by side, H hidden size, Hq/Hkv heads, C head size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from arbordraft import EagleDrafter, RaggedModel
from arbordraft.heads.eagle import EagleHead, default_layers
from arbordraft.training.batches import Batch
from arbordraft.training.students.base import Prediction, Student, shift


class LayersStudent(Student):
    """A head of layers that read the target's hidden states.

    Args:
        vocabulary: size of the draft vocabulary, ``None`` for the target's whole vocabulary.
        layers: the target's hidden states to read; by default a low, a middle and a high one.
        intermediate_size: of the MLP, by default the target's.
        **settings: further settings of the kind of head.
    """

    head_class: type[Any]

    def __init__(
        self, vocabulary: int | None, layers: Sequence[int] | None, intermediate_size: int | None, **settings: Any
    ) -> None:
        super().__init__()
        self.vocabulary, self.layers, self.intermediate_size = vocabulary, layers, intermediate_size
        self.settings = settings

    def hidden_layers(self, target: RaggedModel) -> tuple[int, ...]:
        return tuple(self.layers or default_layers(target.num_layers))

    def build(self, target: RaggedModel, frequent: Callable[[int], list[int]], name: str | None = None) -> None:
        self.network = self.head_class.for_target(
            target.model,
            frequent(self.vocabulary or target.vocab_size),
            hidden_layers=self.hidden_layers(target),
            intermediate_size=self.intermediate_size,
            name=name,
            **self.settings,
        ).float()


class EagleStudent(LayersStudent):
    """One EAGLE-3 layer, unrolled as in decoding: its own output replaces the target's states of unverified tokens.

    All steps read the text's own tokens ("training-time test" of EAGLE-3).

    Args:
        vocabulary: size of the draft vocabulary, ``None`` for the target's whole vocabulary.
        layers: the target's hidden states to read; by default a low, a middle and a high one.
        intermediate_size: of the MLP, by default the target's.
        noise: standard deviation of noise on the target's states, relative to that of the states.
    """

    network: EagleHead
    head_class: type[EagleHead] = EagleHead
    drafter_class: type[Any] = EagleDrafter

    def __init__(
        self,
        vocabulary: int | None = 8192,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        noise: float = 0.0,
    ) -> None:
        super().__init__(vocabulary, layers, intermediate_size)
        self.noise = noise

    def unroll(self, batch: Batch, target: RaggedModel, steps: int) -> Iterator[Prediction]:
        head = self.network
        slots = batch.tokens.shape[1] - 2  # the last slot with a prediction holds the second to last token
        embeddings = target.model.get_input_embeddings()(batch.tokens[:, 1:-1]).to(head.dtype)
        rotary = head.rotary(torch.arange(slots, device=batch.tokens.device), head.dtype)
        states = batch.inputs[:, :slots].to(head.dtype)
        if self.noise and self.training:
            states = states + torch.randn_like(states) * self.noise * states.std()
        hidden = head.fuse(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            query, key, value = head.queries_keys_values(embeddings, hidden, rotary)
            keys.append(key)
            values.append(value)
            hidden = head.finish(hidden, attend_unrolled(query, keys, values).flatten(2))
            yield Prediction(head.norm(hidden), head.lm_head.weight, None, ahead=2, first=step)
            hidden = shift(hidden)  # slot j goes on from the output of slot j - 1


def attend_unrolled(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """Computes the attention of all slots in drafting step s = ``len(keys) - 1``.

    When slot j drafts its s-th step, the target has seen the tokens up to slot j - s. Slot j attends to these slots as
    they were at step 0. For t = 1..s, it also attends to slot j - s + t as it was at step t.

    Args:
        query: ``[B, S, Hq, C]``.
        keys: ``[B, S, Hkv, C]`` of every step so far.
        values: ``[B, S, Hkv, C]`` of every step so far.

    Returns:
        ``[B, S, Hq, C]``.
    """
    step, slots = len(keys) - 1, query.shape[1]
    groups = query.shape[2] // keys[0].shape[2]
    if step == 0:
        output = functional.scaled_dot_product_attention(
            query.transpose(1, 2), keys[0].transpose(1, 2), values[0].transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return output.transpose(1, 2)
    query = query.unflatten(2, (-1, groups)) * query.shape[-1] ** -0.5
    at = torch.arange(slots, device=query.device)
    seen = at[None, :] <= at[:, None] - step
    scores = torch.einsum("bikgc,bjkc->bkgij", query, keys[0]).float().masked_fill(~seen, -torch.inf)
    own = [
        torch.einsum("bikgc,bikc->bkgi", query, shift(key, step - t)).float()[..., None]
        for t, key in enumerate(keys[1:], 1)
    ]
    # A slot before the first full draft would see nothing at all; its prediction is not used.
    shares = torch.cat([scores, *own], dim=-1).softmax(dim=-1).to(values[0].dtype)
    output = torch.einsum("bkgij,bjkc->bikgc", shares[..., :slots], values[0])
    for t, value in enumerate(values[1:], 1):
        share = shares[..., slots + t - 1].permute(0, 3, 1, 2)[..., None]
        output = output + share * shift(value, step - t)[:, :, :, None]
    return output.flatten(2, 3)
