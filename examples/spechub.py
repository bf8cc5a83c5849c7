"""SpecHub and related rules: probability that a drafted child is accepted on real rows, against the optimum.

The probability is computed, not counted: it follows from the target's row, the draft row and the drawn tokens.
"""

import torch
from rich.console import Console

from arbordraft import EarlyExitDrafter, RaggedModel
from arbordraft.bench.tables import rows_table
from arbordraft.bench.workload import Workload
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.decoding.prompts import MIXED
from arbordraft.utils.checkout import laboratory

PROMPTS, NEW_TOKENS = MIXED[:4], 8


def main() -> None:
    """Prints acceptance by rank, its sum and the optimum, for two and three children."""
    model, tokenizer = load_smollm2(torch.float32)
    target = RaggedModel(model, tokenizer)
    drafters = {"first 20 layers": EarlyExitDrafter(target, 20)}
    workload = Workload(PROMPTS, new_tokens=NEW_TOKENS, temperature=1.0)
    node_acceptance = laboratory("verifiers", "spechub.py").node_acceptance
    rows = node_acceptance(target, drafters, workload, children=(2, 3), optima=4)
    Console().print(rows_table(list(rows)))


if __name__ == "__main__":
    main()
