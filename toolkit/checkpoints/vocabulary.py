"""Compares the token ids of two models, and adapts logits and tokens if one has ids that the other lacks.

Shapes: R rows, D ids of the drafter, V ids of the target.
"""

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenizerMismatch(ValueError):
    """Two models mean different things by the same token ids."""


def tokenizer_hashes(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Returns SHA-256 hashes of a tokenizer's tokens, added ones included, and of its merges if it has any.

    Returns:
        ``tokenizer_sha256`` and, if the tokenizer merges, ``merges_sha256``.
    """
    hashes = {"tokenizer_sha256": _sha256(sorted(tokenizer.get_vocab().items()))}
    if merges := _merges(tokenizer):
        hashes["merges_sha256"] = _sha256(merges)
    return hashes


def check_tokenizers(drafter: "PreTrainedTokenizerBase", target: "PreTrainedTokenizerBase") -> None:
    """Raises TokenizerMismatch, with both names and an example, if two tokenizers differ."""
    if drafter is target:
        return
    ours, theirs = tokenizer_hashes(drafter), tokenizer_hashes(target)
    differ = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    if not differ:
        return
    example = "they merge other pairs"
    if "tokenizer_sha256" in differ:
        token, before, after = _difference(drafter.get_vocab(), target.get_vocab())
        example = f"{token!r} is {before} there and {after} here"
    raise TokenizerMismatch(
        f"the drafter's tokenizer gives other ids to some tokens than the target's: {_name(drafter)} and "
        f"{_name(target)} differ ({example}). Its drafts would rarely be right: use a drafter with the target's "
        "tokenizer, an IntersectionDrafter or a RetokenizedDrafter, which go between two, or pass same_tokenizer=True "
        "to LanguageModelDrafter if the ids agree where it matters"
    )


def fit_logits(logits: Tensor, size: int) -> Tensor:
    """Resizes ``[R, D]`` draft logits to ``[R, V]``: cuts ids the target lacks, fills ids the drafter lacks with -inf.

    The softmax of the result is the draft law: a law over the target's ids.
    """
    missing = size - logits.shape[-1]
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def fit_tokens(tokens: Tensor, size: int) -> Tensor:
    """Replaces token ids that a model of ``size`` ids lacks by 0; only padding has such ids."""
    return torch.where(tokens < size, tokens, 0)


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> tuple[str, Any, Any]:
    """Returns the token with the lowest differing id, and its id, or "no token", in each vocabulary."""
    token = min((ids, token) for token, ids in (ours | theirs).items() if ours.get(token) != theirs.get(token))[1]
    return token, ours.get(token, "no token"), theirs.get(token, "no token")


def _merges(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]  # both formats are in use


def _name(tokenizer: "PreTrainedTokenizerBase") -> str:
    return tokenizer.name_or_path or f"a {type(tokenizer).__name__}"


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


__all__ = ["TokenizerMismatch", "check_tokenizers", "fit_logits", "fit_tokens", "tokenizer_hashes"]
