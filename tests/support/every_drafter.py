"""Targets with drafters of every kind that native kernels or torch run."""

import copy

import torch

import arbordraft as ad
from arbordraft.drafters.base import within_positions
from support.models import LETTERS, tiny, tiny_tokenizer
from support.native_drafters import KINDS, built

TRANSLATED = {"intersection": ad.IntersectionDrafter, "retokenized": ad.RetokenizedDrafter}
EVERY = [*(f"{kind}/{kernels}" for kind in [*KINDS, *TRANSLATED] for kernels in ("native", "torch"))]
EVERY += ["early exit/torch", "early exit/native", "self/native"]


def reversed_letters(model):
    """Returns a copy of a model whose token ids run the other way round."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for table in (copied.get_input_embeddings(), copied.get_output_embeddings()):
            table.weight.copy_(table.weight.flip(0))
    return copied


def translated(kind, kernels, positions=None):
    """Builds a drafter with the letters of the target in another order: the target itself, or one of few positions.

    With ``torch``, the latter has a table of positions, so that reading beyond its end raises an error.
    """
    target = ad.RaggedModel(tiny(head_dim=16, max_position_embeddings=2048), tiny_tokenizer(), kernels=kernels)
    small = reversed_letters(target.model)
    if positions and kernels == "torch":
        small = tiny("gpt2", seed=3, n_positions=positions)
    elif positions:
        small = tiny(seed=3, head_dim=16, max_position_embeddings=positions)
    model = ad.RaggedModel(small, tiny_tokenizer(LETTERS[::-1]), kernels=kernels)
    return target, TRANSLATED[kind](model, target)


def pair(name, positions=None):
    """Builds a target and a drafter, which may have few positions."""
    kind, kernels = name.split("/")
    if kind in TRANSLATED:
        return translated(kind, kernels, positions)
    target, drafter = built("model" if kind in ("early exit", "self") else kind, kernels)
    if kind == "early exit":
        drafter = ad.EarlyExitDrafter(target, 1)
    elif kind == "self":
        drafter = ad.SelfDrafter(target)
    if positions:
        depths, drafter.max_positions = drafter.depths, positions
        drafter.depths = lambda state, context: within_positions(depths(state, context), context, positions)
    return target, drafter
