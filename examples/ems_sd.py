"""EMS-SD: samples of a batch accept different numbers of tokens, and nothing is padded.

The unpadded batch decodes the same chains of lookups as the padded one: equal answers, fewer rows and columns.
"""

import time

from benchmarks.padded import PaddedDecoder
from rich.console import Console
from rich.table import Table

from arbordraft import Coupling, NGramDrafter, RaggedModel, TreeTopology, builders
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.decoding.prompts import REPEATING, chat_batch
from arbordraft.kernels.precision import fast_dtype

NEW_TOKENS = 48


def main() -> None:
    """Prints padding and speed of both batches."""
    model, tokenizer = load_smollm2(fast_dtype("cpu"))
    target = RaggedModel(model, tokenizer)
    inputs = chat_batch(tokenizer, REPEATING)
    coupling = Coupling.matching()
    table = Table("batch", "tokens/s", "tau", "padded rows", "padded cache columns read")
    answers = []
    for name, decoder in {
        "plain decoding": builders.plain(target),
        "padded": PaddedDecoder(target, NGramDrafter(), TreeTopology.chain(7), coupling),
        "unpadded": builders.ems_sd(target),
    }.items():
        start = time.perf_counter()
        output = decoder.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
        seconds, stats = time.perf_counter() - start, output.stats
        answers.append(output.sequences.tolist())
        table.add_row(
            name, f"{sum(stats.emitted) / seconds:.0f}", f"{stats.tau:.2f}", str(stats.pad_rows), str(stats.pad_keys)
        )
    Console().print(table)
    print("same answers:", answers[0] == answers[1] == answers[2])


if __name__ == "__main__":
    main()
