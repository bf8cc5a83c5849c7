"""Builds decoders from the options of the command line."""

from enum import StrEnum
from typing import Any

import arbordraft as ad
from arbordraft.loading import tokenizer_of
from arbordraft.sampling.laws import SharedNoise


class Law(StrEnum):
    """Draft laws by their short names."""

    iid = "iid"
    without_replacement = "without-replacement"
    top_tail = "top-tail"
    fixed = "fixed"
    shared = "shared"


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
) -> ad.SpeculativeDecoder:
    """Loads a decoder that has a tokenizer, with the draft law and the verifier of the options.

    Args:
        model: name of the target, or the target.
        drafter: name of the drafter.
        law: how children are drawn; by default as the drafter prefers.
        verifier: how recursive rejection is applied; by default the verifier that suits the law.
        **options: those of ``load``.

    Raises:
        ValueError: if there is no tokenizer, or something is wrong with the names or their combination.
    """
    decoder = ad.load(model, drafter, **options)
    tokenizer_of(decoder.target, model)
    if law is None and verifier is None:
        return decoder
    width = decoder.topology.width
    laws = {
        None: decoder.drafter.default_law,
        Law.iid: ad.IID,
        Law.without_replacement: ad.WithoutReplacement,
        Law.top_tail: lambda width: ad.TopTail(1, max(1, width - 1)),
        Law.fixed: ad.Fixed,
        Law.shared: SharedNoise,
    }
    drawn = laws[law](width)
    coupling = ad.Coupling.of(drawn)
    if verifier is not None:
        part = ad.Lifted if verifier == Verifier.lifted else ad.TopDown
        coupling = ad.Coupling(drawn, part(ad.RecursiveRejection()))
    parts = decoder.target, decoder.drafter, decoder.topology, coupling, decoder.decider
    return ad.SpeculativeDecoder(*parts, generation_config=decoder.generation_config)
