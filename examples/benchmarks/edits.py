"""Measures predictions and pools of texts on edits: functions are rewritten, tested and asked for again.

A prediction is the function before the edit, as clients of OpenAI's ``prediction`` send it. Pools hold finished texts
and are empty at first. A corpus is a pool that begins with all modules of the folder. Requests come in a fixed order,
every function several times. All decoders answer each batch in turns.
"""

import ast
import time
from functools import reduce
from operator import add
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

import arbordraft
from arbordraft.bench.measure import precision
from arbordraft.bench.suites import loaded
from arbordraft.cli.options import AutoDtypeOption, LimitOption, ModelOption, NewTokensOption, numbers
from arbordraft.cli.program import run_script
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.prompts import chat_batch
from arbordraft.drafters import Drafter, HybridDrafter, NGramDrafter, TextPool
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
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and 6 <= (node.end_lineno or 0) - node.lineno <= 20:
                found.append(dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])))
    step = max(1, len(found) // most)
    return found[::step][:most]


def requests(sources: list[str], count: int) -> list[tuple[str, str]]:
    """Returns ``count`` requests and the functions they edit: each task for all functions, then all again."""
    once = [(f"{task}\n\n```python\n{source}\n```", source) for task in TASKS for source in sources]
    return [once[number % len(once)] for number in range(count)]


def decoders(target: RaggedModel, corpus: list[list[int]]) -> dict[str, SpeculativeDecoder]:
    """Builds the decoders to compare; those whose names begin with "prediction" get the function before the edit."""

    def lookups(texts: list[list[int]] | None) -> NGramDrafter:
        pool = None
        if texts is not None:
            pool = TextPool()
            pool.extend(texts)
        return NGramDrafter(longest=8, shortest=1, pool=pool)

    known: dict[str, list[list[int]] | None] = {"lookups": None, "prediction, lookups": None}
    known |= {"lookups with a pool": [], "lookups with a corpus": corpus}
    drafters: dict[str, Drafter] = {name: lookups(texts) for name, texts in known.items()}
    chosen = arbordraft.load(target).drafter
    if isinstance(chosen, HybridDrafter):
        for name, texts in known.items():
            drafters[f"{name}, else a model"] = HybridDrafter(lookups(texts), chosen.otherwise)
    return {"plain": loaded(target, "none")} | {name: loaded(target, drafter) for name, drafter in drafters.items()}


def main(
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    limit: LimitOption = 200,
    new_tokens: NewTokensOption = 96,
    batches: Annotated[str, typer.Option(help="Requests at a time, as in 1,8.")] = "1,8",
    folder: Annotated[Path | None, typer.Option(help="Python sources; arbordraft's own by default.")] = None,
) -> None:
    """Measure predictions, pools of finished texts and a corpus on edits, against plain decoding."""
    console = terminal()
    target, tokenizer = load_target(model, dtype)
    count = limit or 200
    sources = folder or Path(arbordraft.__file__).parent
    asked = requests(functions(sources, max(1, count // (2 * len(TASKS)))), count)
    corpus = [tokenizer(file.read_text())["input_ids"] for file in sorted(sources.rglob("*.py"))]
    table = Table(
        *("batch", "decoder", "tokens/s", "against plain", "tokens per forward", "drafted per forward"),
        caption=precision(target.model),
    )
    for batch in numbers(batches, int):
        known = decoders(target, corpus)
        seconds, counts = dict.fromkeys(known, 0.0), {name: list[DecodeStats]() for name in known}
        for first in range(0, len(asked), batch):
            prompts, edited = zip(*asked[first : first + batch], strict=True)
            inputs, expected = chat_batch(tokenizer, prompts), None
            before = [tokenizer(source, add_special_tokens=False)["input_ids"] for source in edited]
            for name, decoder in known.items():
                more = {"predictions": before} if name.startswith("prediction") else {}
                begun = time.perf_counter()
                output: Any = decoder.generate(
                    **inputs, **more, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True
                )
                seconds[name] += time.perf_counter() - begun
                counts[name].append(output.stats)
                expected = output.sequences if expected is None else expected
                if not torch.equal(output.sequences, expected):
                    raise AssertionError(f"the answers of {name} differ from those of plain decoding")
        rates = dict[str, float]()
        for name, parts in counts.items():
            total = reduce(add, parts)
            rates[name] = sum(total.emitted) / seconds[name]
            figures = (total.tau, total.drafted / sum(total.forwards))
            ratio = f"{rates[name] / rates['plain']:.2f} x"
            table.add_row(str(batch), name, f"{rates[name]:.0f}", ratio, *(f"{figure:.2f}" for figure in figures))
    console.print(table)


if __name__ == "__main__":
    run_script(main)
