"""Improved MCSD: drafts of dynamic length, and the effect of several target-initialised candidates on the output.

No decider changes the answers of the target. More than one candidate does.
"""

import warnings

import torch
from rich.console import Console
from rich.table import Table

from arbordraft import ConfidenceThreshold, EarlyExitDrafter, RaggedModel, builders
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.deciders import AcceptedAverage, EntropyBound, FixedDepth, Heuristic, PathSurvival
from arbordraft.decoding.prompts import MIXED, chat_batch

NEW_TOKENS = 24


def main() -> None:
    """Prints drafted and accepted tokens, and whether the answers are those of plain decoding."""
    model, tokenizer = load_smollm2(torch.float32)
    target = RaggedModel(model, tokenizer)
    drafter = EarlyExitDrafter(target, 2 * target.num_layers // 3)
    request = {**chat_batch(tokenizer, MIXED[:2]), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = builders.plain(target).generate(**request).tolist()
    table = Table("candidates", "decider", "output law", "tau", "drafted per step", "answers of plain decoding")
    deciders = [
        FixedDepth(), Heuristic(), AcceptedAverage(), ConfidenceThreshold(0.4), EntropyBound(0.7, 0.15),
        PathSurvival(0.3),
    ]  # fmt: skip
    warnings.simplefilter("ignore")  # the third column already marks lossy output
    for width, decider in [*((1, decider) for decider in deciders), (2, FixedDepth()), (4, FixedDepth())]:
        decoder = builders.dynasd(target, drafter, width, depth=4, decider=decider)
        output = decoder.generate(**request, return_dict_in_generate=True)
        stats, same = output.stats, output.sequences.tolist() == expected
        drafted = stats.drafted / sum(stats.forwards)
        table.add_row(
            str(width), str(decider), stats.exactness, f"{stats.tau:.2f}", f"{drafted:.1f}", "yes" if same else "no"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
