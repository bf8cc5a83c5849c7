"""Plain decoding as a drafter."""

from typing import Any

from arbordraft.drafters.base import Drafter, Garden
from arbordraft.laws import Fixed
from arbordraft.types import DraftContext, DraftTree


class NoDrafter(Drafter):
    """Proposes nothing: every step emits one token, as plain decoding does."""

    def propose(self, state: Any, context: DraftContext) -> DraftTree:
        return Garden(context, Fixed(context.law.k)).tree()
