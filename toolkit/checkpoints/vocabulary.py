"""Whether two models mean the same by a token id, and what to do where one of them has ids that the other lacks.

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
    """SHA-256 of what decides about a tokenizer's ids: its tokens, added ones included, and, if it has any, its merges.

    Returns:
        ``tokenizer_sha256`` and, of a tokenizer that merges, ``merges_sha256``.
    """
    hashes = {"tokenizer_sha256": _sha256(sorted(tokenizer.get_vocab().items()))}
    if merges := _merges(tokenizer):
        hashes["merges_sha256"] = _sha256(merges)
    return hashes


def check_tokenizers(drafter: "PreTrainedTokenizerBase", target: "PreTrainedTokenizerBase") -> None:
    """Raises TokenizerMismatch, with the names of both and an example, if two tokenizers are not the same."""
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
    """``[R, D]`` draft logits as ``[R, V]``: an id that the target lacks is cut, one that the drafter lacks gets -inf.

    What is drawn from the softmax of these is a law over the target's ids, and no other law was ever meant.
    """
    missing = size - logits.shape[-1]
    return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits


def fit_tokens(tokens: Tensor, size: int) -> Tensor:
    """Token ids as a model of ``size`` ids can read them: one that it lacks, which only padding has, becomes 0."""
    return torch.where(tokens < size, tokens, 0)


def _difference(ours: dict[str, int], theirs: dict[str, int]) -> tuple[str, Any, Any]:
    """A token and its two ids, or none; the lowest that differs."""
    token = min((ids, token) for token, ids in (ours | theirs).items() if ours.get(token) != theirs.get(token))[1]
    return token, ours.get(token, "no token"), theirs.get(token, "no token")


def _merges(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return []
    merges = json.loads(backend.to_str())["model"].get("merges") or []
    return [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]  # both ways are in use


def _name(tokenizer: "PreTrainedTokenizerBase") -> str:
    return tokenizer.name_or_path or f"a {type(tokenizer).__name__}"


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


__all__ = ["TokenizerMismatch", "check_tokenizers", "fit_logits", "fit_tokens", "tokenizer_hashes"]
