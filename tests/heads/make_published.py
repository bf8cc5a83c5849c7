"""Makes the checkpoints of tests/golden/published with the library whose layout they have, and what it drafts.

Run it in an environment of its own: ``pip install speculators``, then ``python tests/heads/make_published.py``.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, Qwen3Config

FOLDER = Path(__file__).parents[1] / "golden" / "published"
HIDDEN, VOCAB, DRAFTED, LENGTH, STEPS = 16, 64, 40, 7, 3
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
KINDS = {
    "eagle3": (LlamaConfig, {"num_hidden_layers": 1}, {}),
    "eagle3-two-layers": (LlamaConfig, {"num_hidden_layers": 2, "rope_parameters": LLAMA3}, {}),
    "eagle3-bias": (
        LlamaConfig,
        {"num_hidden_layers": 1, "attention_bias": True},
        {"norm_before_fc": True, "norm_before_residual": True},
    ),
    "eagle31-qwen3": (Qwen3Config, {"num_hidden_layers": 1}, {"fc_norm": True, "norm_output": True}),
}


def make(name: str) -> None:
    """Writes a checkpoint, and beside it the inputs and the logits of every step and position."""
    kind, layer, own = KINDS[name]
    torch.manual_seed(sorted(KINDS).index(name))
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=kind(**SIZES, **layer, attn_implementation="eager"),
        draft_vocab_size=DRAFTED,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **own,
    )
    model = Eagle3DraftModel(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
        tokens = torch.randperm(VOCAB)[:DRAFTED].sort().values
        model.d2t.copy_(tokens - torch.arange(DRAFTED))
        model.t2d.zero_()[tokens] = True
    model.save_pretrained(FOLDER / name)
    (FOLDER / name / "config.py").unlink(missing_ok=True)  # a copy of the library's own source
    states, ids = torch.randn(1, LENGTH, 3 * HIDDEN), torch.randint(VOCAB, (1, LENGTH))
    found: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, __, logits: found.append(logits.detach()[0]))
    with torch.no_grad():
        model(states, ids, torch.zeros_like(ids), ttt_steps=STEPS)
    hook.remove()
    save_file({"states": states[0], "ids": ids[0], "logits": torch.stack(found)}, FOLDER / name / "drafts.safetensors")
    print(name, sorted(load_file(FOLDER / name / "model.safetensors")), file=sys.stderr)


if __name__ == "__main__":
    for name in KINDS:
        make(name)
