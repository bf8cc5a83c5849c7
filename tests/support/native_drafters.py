"""Drafters of every kind with tiny weights, run by the native kernels or torch's modules."""

import copy
from functools import cache

import torch

from arbordraft import BlockDrafter, DFlashDrafter, EagleDrafter, LanguageModelDrafter, MedusaDrafter, RaggedModel
from arbordraft.heads.block import BlockConfig, BlockHead
from arbordraft.heads.dflash import DFlashConfig, DFlashHead
from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.heads.medusa import MedusaConfig, MedusaHead
from support.models import VOCAB, tiny
from support.recurrent_models import FUSED, recurrent


def new_head(kind, vocab_size=VOCAB, trimmed=None, target_hidden_size=32):
    """Returns an untrained head over three hidden states (Medusa's: the last) of a target of two layers.

    Args:
        kind: ``eagle``, ``block``, ``masked block`` (P-EAGLE's form), ``dflash`` (no Markov term, and the target's own
            output matrix), ``dspark`` with a term, ``gated dspark``, ``recurrent dspark``, or ``medusa``.
        vocab_size: vocabulary size of the target.
        trimmed: size of the draft vocabulary, if that is smaller.
        target_hidden_size: hidden size of the target.
    """
    known = {"vocab_size": vocab_size, "target_hidden_size": target_hidden_size}
    known["draft_vocab_size"] = trimmed or vocab_size
    if kind == "medusa":
        return MedusaHead(MedusaConfig(**known, hidden_layers=[2], num_heads=3))
    known |= {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    known |= {"head_dim": 16, "hidden_layers": [0, 1, 2]}
    if kind == "eagle":
        return EagleHead(EagleConfig(**known))
    if "dspark" in kind or kind == "dflash":
        known |= {"hidden_size": target_hidden_size, "num_hidden_layers": 2, "mask_token_id": vocab_size - 1}
        if kind == "dflash":
            form = {"block_size": 4, "from_anchor": False, "markov_rank": 0, "own_head": trimmed is not None}
        else:
            term = {"dspark": "vanilla", "gated dspark": "gated", "recurrent dspark": "rnn"}[kind]
            form = {"block_size": 3, "markov_rank": 24, "markov": term}
        return DFlashHead(DFlashConfig(**known, **form))
    form = {"markov_rank": 24} if kind == "block" else {"markov_rank": 0, "mask_token_id": vocab_size - 1}
    return BlockHead(BlockConfig(**known, **form, block_size=3))


@cache
def weights(kind):
    """Returns a target and a draft network with weights so large that every token and position matters."""
    torch.manual_seed(7)
    target = tiny(head_dim=16, max_position_embeddings=2048)
    if kind == "model":
        return target, tiny(seed=3, head_dim=16, num_hidden_layers=1, max_position_embeddings=2048)
    if kind == "model, windows":  # with two rotary tables and scaled embeddings, too
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        sizes = {"head_dim": 16, "num_hidden_layers": 3, "layer_types": layers, "max_position_embeddings": 2048}
        return target, tiny("gemma3_text", seed=3, **sizes)
    if kind in RECURRENT:
        architecture = kind.removeprefix("model, ")
        return target, recurrent(architecture, **FUSED[architecture])
    name, _, trimmed = kind.partition(", ")
    head = new_head(name, trimmed=40 if trimmed else None)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.uniform_(0.5, 1.5)
        if "trimmed" in kind:
            head.tokens.copy_(torch.randperm(VOCAB)[:40].sort().values)
    return target, head


KINDS = ["eagle", "eagle, trimmed", "block", "block, trimmed", "masked block", "medusa", "medusa, trimmed", "model"]
KINDS += ["model, windows", "dflash", "dspark", "dspark, trimmed"]
# Short convolutions, gated delta nets, and Mamba-2: with attention and factors, alone, with MLPs alone, and beside
# attention.
RECURRENT = [
    f"model, {name}" for name in ("lfm2", "qwen3_5_text", "granitemoehybrid", "mamba2", "nemotron_h", "falcon_h1")
]
KINDS += RECURRENT
DRAFTERS = {"eagle": EagleDrafter, "block": BlockDrafter, "masked block": BlockDrafter, "medusa": MedusaDrafter}
DRAFTERS |= dict.fromkeys(("dflash", "dspark", "gated dspark", "recurrent dspark"), DFlashDrafter)


def built(kind, kernels="native", dtype=torch.float32, change=None, bits=None):
    """Returns a target and its drafter on copies of the weights; ``bits`` quantises a draft model."""
    model, network = (copy.deepcopy(part).to(dtype) for part in weights(kind))
    if change is not None:
        change(network)
    target = RaggedModel(model.eval(), kernels=kernels)
    if kind.startswith("model"):
        return target, LanguageModelDrafter(RaggedModel(network.eval(), kernels=kernels, weights=bits))
    return target, DRAFTERS[kind.partition(",")[0]](network, target)
