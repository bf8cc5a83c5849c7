"""Makes the checkpoints of tests/golden/published, and their drafts, with the library whose layout they have.

Run it in a separate environment: ``pip install speculators``, then ``python tests/heads/make_published.py``. Its
arguments are the names of the checkpoints to make anew, by default all.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle import core as peagle
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parents[1] / "golden" / "published"
HIDDEN, VOCAB, DRAFTED, LENGTH, STEPS, MASK = 16, 64, 40, 7, 3, 63
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LOSS = resolve_loss_config("kl_div", "eager")  # the forward computes a loss as well
EAGLE = (Eagle3DraftModel, Eagle3SpeculatorConfig)
DSPARK = (DSparkDraftModel, DSparkSpeculatorConfig)
KINDS = {  # models and configs, kinds of layers, settings of layers, settings of heads
    "eagle3": (EAGLE, LlamaConfig, {"num_hidden_layers": 1}, {}),
    "eagle3-two-layers": (EAGLE, LlamaConfig, {"num_hidden_layers": 2, "rope_parameters": LLAMA3}, {}),
    "eagle3-bias": (
        EAGLE,
        LlamaConfig,
        {"num_hidden_layers": 1, "attention_bias": True},
        {"norm_before_fc": True, "norm_before_residual": True},
    ),
    "eagle31-qwen3": (EAGLE, Qwen3Config, {"num_hidden_layers": 1}, {"fc_norm": True, "norm_output": True}),
    "peagle": (
        (PEagleDraftModel, PEagleSpeculatorConfig),
        LlamaConfig,
        {"num_hidden_layers": 2},
        {"mask_token_id": MASK, "norm_before_residual": True},
    ),
    "dflash": (
        (DFlashDraftModel, DFlashSpeculatorConfig),
        Qwen3Config,
        {"num_hidden_layers": 2},
        {"mask_token_id": MASK, "block_size": STEPS + 1, "draft_vocab_size": VOCAB},
    ),
    "dspark": (
        DSPARK,
        Qwen3Config,
        {"num_hidden_layers": 2},
        {"mask_token_id": MASK, "block_size": STEPS, "markov_rank": 8},
    ),
    "dspark-gated": (
        DSPARK,
        Qwen3Config,
        {"num_hidden_layers": 1, "attention_bias": True},
        {
            "mask_token_id": MASK,
            "block_size": STEPS + 1,
            "markov_rank": 8,
            "markov_head_type": "gated",
            "sample_from_anchor": False,
        },
    ),
    "dspark-rnn": (
        DSPARK,
        Qwen3Config,
        {"num_hidden_layers": 1},
        {"mask_token_id": MASK, "block_size": STEPS, "markov_rank": 8, "markov_head_type": "rnn"},
    ),
}


def make(name: str) -> None:
    """Writes a checkpoint, and beside it the inputs and the logits of every step and position."""
    (kind, settings), layers, layer, own = KINDS[name]
    torch.manual_seed(sorted(KINDS).index(name))
    states_of = (
        "eagle_aux_hidden_state_layer_ids" if issubclass(kind, Eagle3DraftModel) else "aux_hidden_state_layer_ids"
    )
    config = settings(
        transformer_layer_config=layers(**SIZES, **layer, attn_implementation="eager"),
        speculators_config=SpeculatorsConfig(
            algorithm=settings.model_fields["speculators_model_type"].default,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **{"draft_vocab_size": DRAFTED, states_of: [1, 2, 3]} | own,
    )
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
        if config.draft_vocab_size < VOCAB:
            tokens = torch.randperm(VOCAB)[:DRAFTED].sort().values
            model.d2t.copy_(tokens - torch.arange(DRAFTED))
            model.t2d.zero_()[tokens] = True
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "config.py").unlink(missing_ok=True)  # a copy of the library's own source
    states, ids = torch.randn(1, LENGTH, 3 * HIDDEN), torch.randint(VOCAB, (1, LENGTH))
    known = {"states": states[0], "ids": ids[0]}
    draft = chains if kind is Eagle3DraftModel else masked if kind is PEagleDraftModel else blocks
    with torch.no_grad():
        known |= draft(model, states, ids)
    save_file(known, FOLDER / name / "drafts.safetensors")
    print(name, sorted(load_file(FOLDER / name / "model.safetensors")), file=sys.stderr)


def chains(model, states, ids):
    """Returns the ``[STEPS, LENGTH, D]`` logits of EAGLE-3's unrolled steps."""
    found = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[0].clone()))
    model(states, ids, torch.zeros_like(ids), ttt_steps=STEPS)
    hook.remove()
    return {"logits": torch.stack(found)}


def masked(model, states, ids):
    """Returns all of P-EAGLE's places ``[n]``, their depths ``[n]`` and their ``[n, D]`` logits."""
    found, places, sample = [], [], peagle.generate_cod_sample_indices
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[0].clone()))
    peagle.generate_cod_sample_indices = lambda **given: places.append(sample(**given)) or places[0]
    every = {"num_depths": STEPS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0, "loss_config": LOSS}
    final = torch.randn(1, LENGTH, HIDDEN)
    model(states, ids, torch.zeros_like(ids), verifier_last_hidden_states=final, **every)
    hook.remove()
    return {"places": places[0][0], "depths": places[0][1], "logits": found[0]}


def blocks(model, states, ids):
    """Returns places ``[n]``, ``[n, block_size, D]`` logits of their blocks, and matrices that the checkpoint lacks."""
    size, found = model.block_size, []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits[0].clone()))
    if term := getattr(model, "markov_head", None):
        bias = term.block_bias

        def noted(**given):
            found.append(bias(**given))
            return found[-1]

        term.block_bias = noted
    every = {"max_anchors": LENGTH - size, "loss_config": LOSS}
    if isinstance(model, DSparkDraftModel):
        every["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    model(states, ids, torch.ones_like(ids), torch.randn(1, LENGTH, HIDDEN), torch.zeros_like(ids), **every)
    hook.remove()
    matrices = {"embeddings": model.embed_tokens.weight.clone()}
    if model.lm_head.out_features == VOCAB:
        matrices["head"] = model.lm_head.weight.clone()
    return {
        "places": torch.arange(LENGTH - size),
        "logits": sum(rows.reshape(-1, size, rows.shape[-1]) for rows in found),
    } | matrices


if __name__ == "__main__":
    for name in sys.argv[1:] or KINDS:
        make(name)
