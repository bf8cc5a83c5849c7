"""Training of a DFlash or DSpark head.

Shapes: B sequences, L tokens, S slots, n drafts per sequence, b rows of a block, k depths, H hidden size, r rank, D
draft vocabulary.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from arbordraft import DFlashDrafter, RaggedModel
from arbordraft.heads.dflash import DFlashHead
from arbordraft.training.batches import Batch
from arbordraft.training.students.base import Prediction
from arbordraft.training.students.block import attend
from arbordraft.training.students.eagle import LayersStudent
from arbordraft.utils.checks import check_float


class DFlashStudent(LayersStudent):
    """Layers that predict a block of tokens in one pass, and a Markov term that reads the previous token.

    All depths learn from the first step on. Drafts begin at a share of the slots, drawn anew for every batch. The
    Markov term reads the text's own tokens. A phase with fewer drafting steps trains as many depths, in blocks of full
    length.

    Args:
        depths: k, tokens to look ahead: rows of a block.
        num_layers: number of layers.
        markov_rank: r, rank of the Markov term, 0 for none.
        markov: kind of the Markov term, see :class:`~arbordraft.heads.dflash.DFlashConfig`; ``rnn`` cannot be trained.
        mask_token_id: token whose embedding is the mask's, best one that texts do not contain.
        vocabulary: size of the draft vocabulary, ``None`` for the target's whole vocabulary.
        layers: the target's hidden states to read; by default a low, a middle and a high one.
        intermediate_size: of the MLP, by default the target's.
        begins: share of the slots, above 0, at which a draft begins.

    Raises:
        TypeError: if ``begins`` is not a number.
        ValueError: if ``begins`` is out of range, or the Markov term is recurrent.

    Source: blocks after sampled places as in DFlash (arXiv:2602.06036) and DSpark (Cheng et al., 2026).
    """

    network: DFlashHead
    head_class = DFlashHead
    drafter_class = DFlashDrafter

    def __init__(
        self,
        depths: int = 4,
        num_layers: int = 2,
        markov_rank: int = 64,
        markov: str = "vanilla",
        mask_token_id: int = 0,
        vocabulary: int | None = 8192,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        begins: float = 0.5,
    ) -> None:
        if markov == "rnn":
            raise ValueError("a recurrent Markov term is read, not trained: set markov to vanilla or gated")
        super().__init__(
            vocabulary,
            layers,
            intermediate_size,
            block_size=depths,
            num_hidden_layers=num_layers,
            mask_token_id=mask_token_id,
            markov_rank=markov_rank,
            markov=markov,
        )
        self.begins = check_float("begins", begins, 1e-3, 1)

    def unroll(self, batch: Batch, target: RaggedModel, steps: int) -> Iterator[Prediction]:
        head, device = self.network, batch.tokens.device
        slots = batch.tokens.shape[1] - 2  # the last slot with a prediction holds the second to last token
        # Slot j: the draft after token j + 1 reads the target's states of tokens 0 to j.
        begins = self._begins(slots, device)
        final = self._blocks(batch, target, begins)
        weight = self._head(target)
        for step in range(min(steps, head.config.depths)):
            places = begins + step
            fits = places < slots
            rows = final[:, fits, step]
            places = places[fits]
            if (term := head.markov_head) is not None:
                follow, _ = term.follow(rows, batch.tokens[:, places + 1])
                rows = torch.cat([rows, follow], dim=-1)
            found = rows.new_zeros(len(rows), slots, rows.shape[-1]).index_copy(1, places, rows)
            trained = torch.zeros(slots, dtype=torch.bool, device=device).index_fill(0, places, True)
            yield Prediction(found, weight, None, ahead=2, first=step, slots=trained)

    def _blocks(self, batch: Batch, target: RaggedModel, begins: Tensor) -> Tensor:
        """Returns the ``[B, n, k, H]`` final states of drafts that begin at slots ``[n]``."""
        head, config, device = self.network, self.network.config, batch.tokens.device
        slots, size, count = batch.tokens.shape[1] - 2, config.block_size, len(begins)
        at = torch.arange(slots, device=device)
        context = head.context(batch.inputs[:, :slots].to(head.dtype))
        tokens = batch.tokens.new_full((len(context), count, size), config.mask_token_id)
        tokens[:, :, 0] = batch.tokens[:, begins + 1]
        hidden = target.model.get_input_embeddings()(tokens).to(head.dtype).flatten(1, 2)
        places = (begins[:, None] + 1 + torch.arange(size, device=device)).flatten()
        block = torch.arange(count, device=device).repeat_interleave(size)
        seen = torch.cat([at <= begins.repeat_interleave(size)[:, None], block == block[:, None]], dim=1)
        known, own = head.rotary(at, head.dtype), head.rotary(places, head.dtype)
        for number in range(len(head.layers)):
            query, *rows = head.queries_keys_values(hidden, own, number)
            given = head.keys_values(context, known, number)
            keys, values = (torch.cat(parts, dim=1) for parts in zip(given, rows, strict=True))
            hidden = head.finish(hidden, attend(query, keys, values, seen).flatten(2), number)
        return head.norm(hidden).unflatten(1, (count, size))[:, :, size - config.depths :]

    def _head(self, target: RaggedModel) -> Tensor:
        """Returns the ``[D, H + r]`` weight of the head, with that of the Markov term."""
        head = self.network
        own = target.model.get_output_embeddings().weight if head.lm_head is None else head.lm_head.weight
        return own if head.markov_head is None else torch.cat([own, head.markov_head.markov_w2.weight], dim=1)

    def _begins(self, slots: int, device: torch.device) -> Tensor:
        """Draws ``[n]`` ascending slots at which drafts begin."""
        kept = max(1, round(slots * self.begins)) if self.training else slots
        return torch.randperm(slots, device=device)[:kept].sort().values


__all__ = ["DFlashStudent"]
