"""Measures a pool of finished texts on edits of the same files: functions are rewritten, tested and asked for again.

Requests come in a fixed order, every function several times. Every decoder answers all of them; those with a pool begin
with an empty one.
"""

import ast
import inspect
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import arbordraft
from arbordraft.bench.measure import precision
from arbordraft.cli.options import AutoDtypeOption, LimitOption, ModelOption, NewTokensOption, numbers
from arbordraft.cli.program import run_script
from arbordraft.decoding.measuring import cost_aware
from arbordraft.decoding.prompts import chat_batches
from arbordraft.drafters import Drafter, HybridDrafter, NGramDrafter, NoDrafter, SelfDrafter, TextPool
from arbordraft.loading import load_target
from arbordraft.target.model import RaggedModel
from arbordraft.utils.terminal import terminal

TASKS = (
    "Repeat this function, with a comment in front of every line:",
    "Rename the first argument of this function to `given` and write the whole function:",
    "Write a unit test for this function, and repeat the function before it:",
    "Repeat this function unchanged:",
    "Add a docstring to this function and write the whole function:",
)


def functions(folder: Path, most: int) -> list[str]:
    """Returns functions of 6 to 20 lines from a folder's modules, in their order."""
    found = []
    for file in sorted(folder.rglob("*.py")):
        source = file.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and 6 <= (node.end_lineno or 0) - node.lineno <= 20:
                found.append(inspect.cleandoc(ast.get_source_segment(source, node) or ""))
    step = max(1, len(found) // most)
    return found[::step][:most]


def requests(sources: list[str], count: int) -> list[str]:
    """Returns ``count`` requests: each task in turn for all functions, and then again from the start."""
    once = [f"{task}\n\n```python\n{source}\n```" for task in TASKS for source in sources]
    return [once[number % len(once)] for number in range(count)]


def drafters(target: RaggedModel) -> dict[str, Drafter]:
    """Builds the drafters to compare."""
    own: dict[str, Drafter] = {
        "plain": NoDrafter(),
        "lookups in the own text": NGramDrafter(longest=8, shortest=1),
        "lookups with a pool": NGramDrafter(longest=8, shortest=1, pool=TextPool()),
    }
    if target.backend == "native":
        lookups = NGramDrafter(longest=8, shortest=1, pool=TextPool())
        own["lookups with a pool, else itself"] = HybridDrafter(lookups, SelfDrafter.fitted(target))
    return own


def main(
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    limit: LimitOption = 200,
    new_tokens: NewTokensOption = 96,
    batches: Annotated[str, typer.Option(help="Requests at a time, as in 1,8.")] = "1,8",
    folder: Annotated[Path | None, typer.Option(help="Python sources; arbordraft's own by default.")] = None,
) -> None:
    """Measure lookups in a pool of finished texts on edits of the same files, against plain decoding."""
    console = terminal()
    target, tokenizer = load_target(model, dtype)
    place = folder or Path(arbordraft.__file__).parent
    texts = requests(functions(place, 20), limit or 200)
    table = Table(
        "batch", "decoder", "tokens/s", "against plain", "tokens per forward", caption=precision(target.model)
    )
    for batch in numbers(batches, int):
        plain, expected = 0.0, list[Any]()
        for name, drafter in drafters(target).items():
            decider = None if isinstance(drafter, NoDrafter) else cost_aware(target, drafter)
            decoder = arbordraft.SpeculativeDecoder(target, drafter, decider=decider).eval()
            if decider is not None:
                decider.settle()
            seconds, tokens, forwards, answers = 0.0, 0, 0, list[Any]()
            for inputs in chat_batches(tokenizer, texts, batch):
                begun = time.perf_counter()
                output: Any = decoder.generate(**inputs, max_new_tokens=new_tokens, return_dict_in_generate=True)
                seconds += time.perf_counter() - begun
                answers.append(output.sequences)
                tokens += sum(output.stats.emitted)
                forwards += sum(output.stats.forwards)
            plain = plain or tokens / seconds
            expected = expected or answers
            if not all(map(torch.equal, answers, expected)):
                raise AssertionError(f"the answers of {name} differ from those of plain decoding")
            rate = tokens / seconds
            table.add_row(str(batch), name, f"{rate:.0f}", f"{rate / plain:.2f} x", f"{tokens / forwards:.2f}")
    console.print(table)


if __name__ == "__main__":
    run_script(main)
