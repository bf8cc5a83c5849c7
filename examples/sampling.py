"""Samples with draft trees: shows that every exact verifier keeps the law, and which verifier accepts most.

A small random model stands in for the target and a noisy copy of it for the drafter, so this runs in seconds.
"""

import copy

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from arbordraft import (
    IID,
    Coupling,
    LanguageModelDrafter,
    Lifted,
    RaggedModel,
    RecursiveRejection,
    SpecHub,
    SpeculativeDecoder,
    TopDown,
    TopTail,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.verifiers import KSeq

SAMPLES, NEW_TOKENS = 512, 8


def main() -> None:
    """Prints tau and the frequency of the commonest first token for several couplings."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    noisy = copy.deepcopy(model)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight += 0.05 * torch.randn_like(weight)
    target, drafter = RaggedModel(model), LanguageModelDrafter(RaggedModel(noisy))

    prompt = torch.tensor([[3, 14, 15, 9]])
    exact = model(prompt).logits[0, -1].softmax(dim=-1)
    commonest = int(exact.argmax())
    error = (exact[commonest] * (1 - exact[commonest]) / SAMPLES) ** 0.5
    table = Table("coupling", "tau", f"P(first token = {commonest}): exact {exact[commonest]:.3f}, +-{error:.3f}")
    for name, coupling in {
        "IID, recursive rejection": Coupling(IID(2), TopDown(RecursiveRejection())),
        "IID, K-SEQ": Coupling(IID(2), TopDown(KSeq())),
        "without replacement": Coupling(WithoutReplacement(2), TopDown(RecursiveRejection())),
        "without replacement, lifted (traversal)": Coupling(WithoutReplacement(2), Lifted(RecursiveRejection())),
        "SpecHub, paper's order": Coupling(TopTail(1, 1), TopDown(SpecHub(order="paper"))),
        "SpecHub, lifted": Coupling(TopTail(1, 1), Lifted(SpecHub())),
    }.items():
        decoder = SpeculativeDecoder(target, drafter, TreeTopology.k_ary(2, 3), coupling)
        output = decoder.generate(
            prompt.expand(SAMPLES, -1), max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0,
            return_dict_in_generate=True,
        )  # fmt: skip
        share = (output.sequences[:, prompt.shape[1]] == commonest).float().mean()
        table.add_row(name, f"{output.stats.tau:.2f}", f"{share:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
