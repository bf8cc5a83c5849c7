"""One decoder layer that predicts several tokens at once, and a low-rank term that distinguishes nodes of a depth.

The layer is EAGLE's, on the same slots: slot j holds the target's hidden states of token j together with token j + 1.
EAGLE runs it once per level. This head instead has k - 1 masks after the last slot: learned inputs in place of unknown
tokens and states. Masks attend to the slots but not to each other. In a single layer their keys and values would be
constants, so masks could pass on nothing that they read. The slots' keys and values therefore serve all depths, and no
depth is computed from another.

With ``mask_token_id`` the head has the form of P-EAGLE instead, which engines serve. All depths share one mask, and
each mask sees itself and the masks before it. There is no Markov term then, and there may be several layers.

The pass predicts the same for all nodes of a depth d. The Markov term adds the effect of a node's own token y, at low
rank and gated by depth: ``logits(d, y) = W h_d + C (g_d * M e_y)``. Here e_y is the token's embedding, and the gates
are ``g_d = 2 sigmoid(G h_d)``.

Shapes: ... any leading sizes, E embedding size, H hidden size, D draft vocabulary, r rank.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.utils.checks import check_int


class BlockConfig(EagleConfig):
    """Settings of a :class:`BlockHead`; see also :class:`~arbordraft.heads.eagle.EagleConfig`.

    Args:
        block_size: k, the depth of the deepest draft, 1 to 32.
        markov_rank: r; 0 for no Markov term, so that all nodes of a depth predict the same.
        mask_token_id: chooses P-EAGLE's form, which needs a ``markov_rank`` of 0. The mask is the embedding of this
            token with learned states. ``None`` gives every depth its own mask.
    """

    model_type = "arbordraft_block"

    block_size: int = 4
    markov_rank: int = 64
    mask_token_id: int | None = None


class BlockHead(EagleHead):
    """EAGLE's layer with a mask for every further depth, and the Markov term.

    Raises:
        TypeError: if a setting is no whole number.
        ValueError: if one is out of range, or P-EAGLE's form has a Markov term.

    Source: masks as in P-EAGLE (arXiv:2602.01469) and DFlash (arXiv:2602.06036). The term is the gated Markov head of
    DSpark (Cheng et al., 2026). It projects the target's embeddings, while DSpark learns a table. Rare tokens then
    learn from frequent ones, and a short training reaches more.
    """

    config: BlockConfig
    config_class = BlockConfig
    base_model_prefix = "block"

    def __init__(self, config: BlockConfig) -> None:
        depths, rank = (
            check_int("block_size", config.block_size, 1, 32),
            check_int("markov_rank", config.markov_rank, 0),
        )
        if config.mask_token_id is None:
            config.check_plain("a block head without mask_token_id")
        super().__init__(config)
        width = config.target_hidden_size
        if config.mask_token_id is None:
            # The first row stands for depth 0, the slot as it is, and is never read.
            self.masks = nn.Embedding(depths, width + config.hidden_size, padding_idx=0)
        else:
            check_int("mask_token_id", config.mask_token_id, 0, config.vocab_size - 1)
            if rank:
                raise ValueError(f"with mask_token_id there is no Markov term: set markov_rank to 0, not {rank}")
            self.mask_hidden = nn.Parameter(torch.randn(self.fc.in_features))
        self.markov = nn.Linear(width, rank, bias=False) if rank else None
        self.gate = nn.Linear(config.hidden_size, rank, bias=False) if rank else None
        self.lm_head_markov = nn.Linear(rank, config.draft_vocab_size, bias=False) if rank else None
        self.post_init()

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        tokens: Sequence[int],
        *,
        block_size: int = 4,
        markov_rank: int = 64,
        mask_token_id: int | None = None,
        **options: Any,
    ) -> Self:
        """Creates a head that starts like an EAGLE head, with a Markov term of 0 and gates of 1.

        Args:
            model: the target; a decoder like Llama gives its weights, another one only its sizes.
            tokens: target ids that can be drafted.
            block_size: k.
            markov_rank: r.
            mask_token_id: chooses P-EAGLE's form.
            **options: further options of :meth:`EagleHead.for_target <arbordraft.heads.eagle.EagleHead.for_target>`.
        """
        own: dict[str, Any] = {
            "block_size": block_size,
            "markov_rank": markov_rank,
            "mask_token_id": mask_token_id,
        }
        return super().for_target(model, tokens, **own, **options)

    def ask(self, embeddings: Tensor, hidden: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the inputs that predict the tokens of some depths: the last slot at depth 0, masks at others.

        Args:
            embeddings: ``[..., E]`` of the last slot's token; in P-EAGLE's form, of the mask token at depths above 0.
            hidden: ``[..., H]`` states of the last slot.
            depths: ``[...]`` int64.
        """
        here = depths[..., None] == 0
        if self.config.mask_token_id is not None:
            return embeddings, torch.where(here, hidden, self.fuse(self.mask_hidden))
        token, states = self.masks(depths).split([embeddings.shape[-1], hidden.shape[-1]], dim=-1)
        return torch.where(here, embeddings, token), torch.where(here, hidden, states)

    def follow(self, embeddings: Tensor) -> Tensor:
        """Returns ``[..., r]`` features ``M e_y`` of nodes whose tokens have the embeddings ``[..., E]``."""
        if self.markov is None:
            return embeddings[..., :0]
        # The layer's norm, because targets scale their embeddings in different ways.
        return self.markov(self.midlayer.input_layernorm(embeddings))

    def gates(self, final: Tensor) -> Tensor:
        """Returns ``[..., r]`` gates ``g_d`` of :meth:`follow` at depths with the states ``h_d``, ``[..., H]``."""
        return final[..., :0] if self.gate is None else 2 * self.gate(final).sigmoid()

    @property
    def weight(self) -> Tensor:
        """``[D, H + r]`` output matrix for ``h_d`` followed by the gated :meth:`follow`."""
        if self.lm_head_markov is None:
            return self.lm_head.weight
        return torch.cat([self.lm_head.weight, self.lm_head_markov.weight], dim=1)

    @torch.no_grad()
    def _begin(self, model: PreTrainedModel) -> None:
        super()._begin(model)
        if self.gate is not None and self.lm_head_markov is not None:
            self.gate.weight.zero_()
            self.lm_head_markov.weight.zero_()
