"""What every decider is."""

from collections.abc import Sequence

from torch import nn

from arbordraft.types import StepView


class Decider(nn.Module):
    """Decides, sample by sample, whether the nodes of the frontier get children.

    A decider sees only what exists before these children are drawn, so whether a token is verified never depends on
    that token or a later one, and the output law is preserved. A decider that looks further declares itself
    ``anticipating`` and is refused where that would bias the law.
    """

    anticipating = False

    def forward(self, view: StepView) -> Sequence[bool]:
        """``[B]``: whether each sample goes on."""
        raise NotImplementedError
