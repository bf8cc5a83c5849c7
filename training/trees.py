"""Fitting the shape of the draft tree to what a target accepts."""

from collections.abc import Iterable, Mapping
from typing import Any

from arbordraft import SpeculativeDecoder, TreeTopology


def fit_topology(
    decoder: SpeculativeDecoder,
    batches: Iterable[Mapping[str, Any]],
    nodes: int,
    max_depth: int | None = None,
    **generate_kwargs: Any,
) -> TreeTopology:
    """The Sequoia tree for the acceptance that a decoder shows on some prompts.

    Args:
        decoder: draws with the law the tree is meant for; its topology should give every node all the siblings that
            the tree may use, ``TreeTopology.k_ary(k, 1)`` for instance.
        batches: tokenized prompts, with ``input_ids`` and ``attention_mask`` as a tokenizer returns them.
        nodes: size of the wanted tree, root included.
        max_depth: bound on its depth.
        **generate_kwargs: passed on to ``decoder.generate``, for instance ``max_new_tokens`` and ``do_sample``.

    Raises:
        ValueError: if nothing was drafted on these prompts, so that there is no acceptance to fit to.
    """
    tried, accepted = 0, [0] * decoder.coupling.law.k
    for batch in batches:
        stats = decoder.generate(**batch, return_dict_in_generate=True, **generate_kwargs).stats  # type: ignore[union-attr]
        tried += stats.tried.total()
        for rank, count in stats.accepted_rank.items():
            accepted[rank] += count
    if tried == 0:
        raise ValueError("no drafts were tried on these prompts; give longer outputs or another drafter")
    return TreeTopology.sequoia([count / tried for count in accepted], nodes, max_depth)
