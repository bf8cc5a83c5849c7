"""An MLP that improves early exit by replacing the target's skipped layers.

Shapes: ... any leading sizes, H hidden size.
"""

from torch import Tensor, nn
from transformers import PreTrainedModel

from arbordraft.heads.base import Companion, CompanionConfig, GatedMLP, mlp_settings


class ExitAdapterConfig(CompanionConfig):
    """Settings of an :class:`ExitAdapter`; see also :class:`~arbordraft.heads.base.CompanionConfig`.

    ``hidden_layers`` holds one entry, the number of layers to run.

    Args:
        intermediate_size: inner size of the MLP.
        rms_norm_eps: epsilon of the norm.
    """

    model_type = "arbordraft_exit_adapter"

    intermediate_size: int = 11008
    rms_norm_eps: float = 1e-5


class ExitAdapter(Companion):
    """A residual gated MLP between the first layers of a target and its final norm.

    It works on every row by itself and predicts through the target's own head.
    """

    config: ExitAdapterConfig
    config_class = ExitAdapterConfig
    base_model_prefix = "exit_adapter"

    def __init__(self, config: ExitAdapterConfig) -> None:
        super().__init__(config)
        self.norm = nn.RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.target_hidden_size, config.intermediate_size)
        self.post_init()

    @classmethod
    def for_target(
        cls, model: PreTrainedModel, layers: int, *, intermediate_size: int | None = None, name: str | None = None
    ) -> "ExitAdapter":
        """Creates an adapter that changes nothing yet.

        Args:
            model: the target.
            layers: how many of its layers run.
            intermediate_size: inner size of the MLP, by default the target's.
            name: name of the target.
        """
        mlp = mlp_settings(model.config.get_text_config(), intermediate_size)
        adapter = cls(ExitAdapterConfig.for_target(model, name, hidden_layers=[layers], **mlp))
        nn.init.zeros_(adapter.mlp.down_proj.weight)
        return adapter

    @property
    def layers(self) -> int:
        """Number of the target's layers that run before it; 0 if its settings do not say."""
        return (self.config.hidden_layers or [0])[0]

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps ``[..., H]`` to ``[..., H]``."""
        return hidden + self.mlp(self.norm(hidden))
