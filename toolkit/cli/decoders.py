"""The one place where the command line makes a decoder out of options."""

from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from arbordraft.decoder import SpeculativeDecoder
    from arbordraft.laws import DraftLaw


class Law(StrEnum):
    """Draft laws by their short names."""

    iid = "iid"
    without_replacement = "without-replacement"
    top_tail = "top-tail"
    fixed = "fixed"


class Verifier(StrEnum):
    """Tree verifiers by how they apply their rule."""

    top_down = "top-down"
    lifted = "lifted"


def load_decoder(
    model: Any,
    drafter: str,
    *,
    law: Law | None = None,
    verifier: Verifier | None = None,
    **options: Any,
) -> "SpeculativeDecoder":
    """What :func:`arbordraft.load` gives, which has a tokenizer and draws and verifies as asked.

    Args:
        model: name of the target, or the target.
        drafter: name of the drafter.
        law: how children are drawn; by default as the drafter prefers.
        verifier: how recursive rejection is applied; by default the verifier that suits the law.
        **options: those of ``load``.

    Raises:
        ValueError: if there is no tokenizer, or something is wrong with the names or their combination.
    """
    import arbordraft as ad

    decoder = ad.load(model, drafter, **options)
    if decoder.target.tokenizer is None:
        raise ValueError(
            f"{model} has no tokenizer, and prompts are texts: save it beside the model, "
            "tokenizer.save_pretrained(folder)"
        )
    if law is None and verifier is None:
        return decoder
    width = decoder.topology.width
    drawn = decoder.drafter.default_law(width) if law is None else _law(law, width)
    coupling = ad.Coupling.of(drawn)
    if verifier is not None:
        part = ad.Lifted if verifier == Verifier.lifted else ad.TopDown
        coupling = ad.Coupling(drawn, part(ad.RecursiveRejection()))
    parts = (decoder.target, decoder.drafter, decoder.topology, coupling, decoder.decider)
    return ad.SpeculativeDecoder(*parts, costs=decoder.costs)


def _law(law: Law, width: int) -> "DraftLaw":
    import arbordraft as ad

    match law:
        case Law.iid:
            return ad.IID(width)
        case Law.without_replacement:
            return ad.WithoutReplacement(width)
        case Law.fixed:
            return ad.Fixed(width)
    return ad.TopTail(1, max(1, width - 1))
