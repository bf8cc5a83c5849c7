"""Training of a block head.

Shapes: B sequences, L tokens, S slots, n of them at which a draft begins, H hidden size, r rank, D draft vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from arbordraft import BlockDrafter, RaggedModel
from arbordraft.heads.block import BlockHead
from arbordraft.training.batches import Batch
from arbordraft.training.students.base import Prediction
from arbordraft.training.students.eagle import EagleStudent
from arbordraft.utils.checks import check_float


class BlockStudent(EagleStudent):
    """A layer that looks several tokens ahead at once, with a Markov term that reads the previous token.

    No depth builds on another, so all depths learn from the first step on. Depth d learns from drafts that begin at a
    share ``keep ** d`` of the slots, drawn anew for every depth and batch. Time and memory of a block then stay below
    ``1 / (1 - keep)`` times those of one depth.

    Args:
        block_size: tokens to look ahead; phases with more drafting steps train only these.
        markov_rank: rank of the Markov term, 0 for none.
        mask_token_id: token whose embedding is the mask's, best one that texts do not contain. It gives the head
            P-EAGLE's form, which vLLM serves and which needs a ``markov_rank`` of 0.
        vocabulary: size of the draft vocabulary, ``None`` for the target's whole vocabulary.
        layers: the target's hidden states to read; by default a low, a middle and a high one.
        intermediate_size: of the MLP, by default the target's.
        keep: number of drafts at a depth relative to the depth before, above 0.

    Raises:
        TypeError: if ``keep`` is not a number.
        ValueError: if ``keep`` is out of range.

    Source: sampling of places in training after P-EAGLE (arXiv:2602.01469).
    """

    network: BlockHead
    head_class = BlockHead
    drafter_class = BlockDrafter

    def __init__(
        self,
        block_size: int = 4,
        markov_rank: int = 64,
        vocabulary: int | None = 8192,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        keep: float = 0.7,
        mask_token_id: int | None = None,
    ) -> None:
        super().__init__(vocabulary, layers, intermediate_size)
        self.block_size, self.mask_token_id = block_size, mask_token_id
        self.settings = {"block_size": block_size, "markov_rank": markov_rank, "mask_token_id": mask_token_id}
        self.keep = check_float("keep", keep, 1e-3, 1)

    def unroll(self, batch: Batch, target: RaggedModel, steps: int) -> Iterator[Prediction]:
        head, device = self.network, batch.tokens.device
        slots = batch.tokens.shape[1] - 2  # the last slot with a prediction holds the second to last token
        embed = target.model.get_input_embeddings()
        embeddings = embed(batch.tokens[:, 1:-1]).to(head.dtype)
        hidden = head.fuse(batch.inputs[:, :slots].to(head.dtype))
        at = torch.arange(slots, device=device)
        _, keys, values = head.queries_keys_values(embeddings, hidden, head.rotary(at, head.dtype))
        mask = None
        if self.mask_token_id is not None:  # masks differ only in their positions
            mask = embed(torch.tensor([self.mask_token_id], device=device)).to(head.dtype)
            masks = head.ask(mask.expand(1, slots, -1), hidden[:1], torch.ones_like(at))
            _, *masked = head.queries_keys_values(*masks, head.rotary(at, head.dtype))
            keys, values = (
                torch.cat([part, more.expand_as(part)], 1) for part, more in zip((keys, values), masked, strict=True)
            )
        # Slot j holds the parent of the token that it predicts, at every depth.
        follow, weight = head.follow(embeddings), head.weight
        for step in range(min(steps, self.block_size, slots)):
            begins = self._begins(slots - step, step, device)
            places, seen = begins + step, at <= begins[:, None]
            last = embeddings[:, begins]
            if mask is not None:
                last = last if step == 0 else mask.expand_as(last)
                seen = torch.cat([seen, (at > begins[:, None]) & (at <= places[:, None])], dim=1)
            inputs = head.ask(last, hidden[:, begins], torch.full_like(begins, step))
            query, _, _ = head.queries_keys_values(*inputs, head.rotary(places, head.dtype))
            final = head.norm(head.finish(inputs[1], attend(query, keys, values, seen).flatten(2)))
            found = torch.cat([final, head.gates(final) * follow[:, places]], dim=-1)
            rows = found.new_zeros(len(found), slots, found.shape[-1]).index_copy(1, places, found)
            trained = torch.zeros(slots, dtype=torch.bool, device=device).index_fill(0, places, True)
            yield Prediction(rows, weight, None, ahead=2, first=step, slots=trained)

    def _begins(self, count: int, step: int, device: torch.device) -> Tensor:
        """Draws ``[n]`` ascending slots: the beginnings of the drafts whose token of this depth is predicted."""
        kept = max(1, round(count * self.keep**step)) if self.training else count
        return torch.randperm(count, device=device)[:kept].sort().values


def attend(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """Returns ``[B, n, Hq, C]``: queries attend to the keys ``[B, K, Hkv, C]`` that are ``seen``, ``[n, K]``."""
    query, keys, values = (part.transpose(1, 2) for part in (query, keys, values))
    found = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen, enable_gqa=True)
    return found.transpose(1, 2)
