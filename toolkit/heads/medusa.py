"""Several heads that look ahead from one hidden state: Medusa (Cai et al., 2024).

Head h reads the output of the target's final norm at token j and predicts token j + 2 + h. The target's own head
predicts token j + 1.

Shapes: ... any leading sizes, H hidden size, D draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from arbordraft.heads.base import DraftHead, HeadConfig


class MedusaConfig(HeadConfig):
    """Settings of a :class:`MedusaHead`; see also :class:`~arbordraft.heads.base.HeadConfig`.

    Args:
        num_heads: tokens to look ahead.
        num_hidden_layers: residual layers of each head.
    """

    model_type = "arbordraft_medusa"

    num_heads: int = 4
    num_hidden_layers: int = 1


class _Block(nn.Module):
    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size = config.target_hidden_size
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return x


class MedusaHead(DraftHead):
    """The heads, with the tensor names that serving engines read."""

    config: MedusaConfig
    config_class = MedusaConfig
    base_model_prefix = "medusa"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        heads, size = range(config.num_heads), config.target_hidden_size
        self.blocks = nn.ModuleList(_Block(config) for _ in heads)
        self.lm_heads = nn.ModuleList(nn.Linear(size, config.draft_vocab_size, bias=False) for _ in heads)
        self.post_init()

    @classmethod
    def for_target(
        cls,
        model: PreTrainedModel,
        tokens: Sequence[int],
        *,
        num_heads: int = 4,
        num_hidden_layers: int = 1,
        name: str | None = None,
    ) -> "MedusaHead":
        """Creates heads with rows of the target's output matrix, after layers that do nothing yet.

        Args:
            model: the target.
            tokens: target ids that can be drafted.
            num_heads: tokens to look ahead.
            num_hidden_layers: residual layers of each head.
            name: name of the target.
        """
        settings = MedusaConfig.for_target(
            model,
            name,
            draft_vocab_size=len(set(tokens)),
            hidden_layers=[model.config.get_text_config().num_hidden_layers],
            num_heads=num_heads,
            num_hidden_layers=num_hidden_layers,
        )
        head = cls(settings)
        head.set_vocabulary(tokens)
        with torch.no_grad():
            for parameter in head.blocks.parameters():
                parameter.zero_()
            for matrix in head.lm_heads.parameters():
                matrix.copy_(model.get_output_embeddings().weight[head.tokens])
        return head

    def prepare(self, hidden: Tensor) -> Tensor:
        """Prepares the input of :meth:`logits` once per step for all heads; returns ``[..., H]`` unchanged."""
        return hidden

    def logits(self, hidden: Tensor, head: int) -> Tensor:
        """Returns ``[..., D]`` logits of one head for ``[..., H]`` outputs of the target's final norm."""
        return self.lm_heads[head](self.blocks[head](hidden))
