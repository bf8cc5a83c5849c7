"""Builds decoders from the options of the command line."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import arbordraft as ad
from arbordraft.cli.corpus import fill
from arbordraft.drafters.text_pool import TextPool
from arbordraft.loading import tokenizer_of
from arbordraft.sampling.laws import SharedNoise
from arbordraft.utils.choices import Law, Verifier


def load_decoder(
    model: Any,
    drafter: str,
    *,
    law: Law | None = None,
    verifier: Verifier | None = None,
    corpus: Sequence[Path] | None = None,
    **options: Any,
) -> ad.SpeculativeDecoder:
    """Loads a decoder that has a tokenizer, with the draft law and the verifier of the options.

    Args:
        model: name of the target, or the target.
        drafter: name of the drafter.
        law: draft law; by default the drafter's own.
        verifier: how recursive rejection is applied; by default the verifier that suits the law.
        corpus: files and folders whose texts lookups search, too.
        **options: other arguments of ``load``.

    Raises:
        ValueError: if there is no tokenizer, or if the names or their combination are invalid.
    """
    pool = TextPool() if corpus else None
    decoder = ad.load(model, drafter, pool=pool, **options)
    tokenizer = tokenizer_of(decoder.target, model)
    if corpus and pool is not None:
        fill(pool, corpus, tokenizer)
    if law is None and verifier is None:
        return decoder
    width = decoder.topology.width
    laws = {
        None: decoder.drafter.default_law,
        "iid": ad.IID,
        "without-replacement": ad.WithoutReplacement,
        "top-tail": lambda width: ad.TopTail(1, max(1, width - 1)),
        "fixed": ad.Fixed,
        "shared": SharedNoise,
    }
    drawn = laws[law](width)
    coupling = ad.Coupling.of(drawn)
    if verifier is not None:
        part = ad.Lifted if verifier == "lifted" else ad.TopDown
        coupling = ad.Coupling(drawn, part(ad.RecursiveRejection()))
    parts = decoder.target, decoder.drafter, decoder.topology, coupling, decoder.decider
    return ad.SpeculativeDecoder(*parts, generation_config=decoder.generation_config)
