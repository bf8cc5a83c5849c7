"""``arbordraft bench``: every measurement as a command that prints a table and writes JSON."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from arbordraft.cli.options import LimitOption, ModelOption, PromptsOption, numbers, output_file
from arbordraft.loading import Dtype, Kernels, load_target

if TYPE_CHECKING:
    from arbordraft.drafters import Drafter
    from arbordraft.target.model import RaggedModel

app = typer.Typer(
    no_args_is_help=True,
    help="Measure forwards, verification and decoding; whatever is compared takes turns in one run.",
)
console = Console()


def whole(text: str) -> str:
    """Refuses at once what is no list of whole numbers from 1."""
    numbers(text, int)
    return text


def temperatures_of(text: str) -> str:
    """Refuses at once what is no list of temperatures."""
    numbers(text, float, 0)
    return text


DtypesOption = Annotated[list[Dtype] | None, typer.Option("--dtype", help="Precisions; bfloat16 and float32 if none.")]
OneDtype = Annotated[Dtype, typer.Option(help="Precision of the weights.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timings per case; medians are reported.")]
TokensOption = Annotated[int, typer.Option(min=1, help="Tokens per prompt when decoding.")]
JsonOption = Annotated[
    Path | None, typer.Option(callback=output_file, help="Write the figures and their provenance to this file.")
]
PngOption = Annotated[
    Path | None, typer.Option(callback=output_file, help="Draw the figures to this PNG file (needs matplotlib).")
]
BatchOption = Annotated[int, typer.Option("--batch", "--batches", min=1, help="Prompts at a time.")]
BatchesOption = Annotated[
    str,
    typer.Option("--batches", "--batch", callback=whole, help="Prompts at a time, one size or several, as in 1,4,8."),
]
SeedOption = Annotated[int, typer.Option(min=0, help="Of sampled tokens and of random inputs.")]
TemperaturesOption = Annotated[
    str, typer.Option(callback=temperatures_of, help="Temperatures, as in 0,1; 0 is greedy.")
]
DrafterHelp = "'ngram', 'early-exit:LAYERS', folder of a trained drafter, or a draft model's hub name."
DrafterOption = Annotated[str, typer.Option(help=DrafterHelp)]
DraftersOption = Annotated[list[str] | None, typer.Option("--drafter", help=f"{DrafterHelp} May be repeated.")]


@dataclass
class Run:
    """What has been measured so far; it is saved row by row, so that an interrupted run loses little.

    Args:
        json: file to write.
        png: picture to draw in the end.
        settings: to write beside the figures.
        seed: of sampled tokens and of random inputs.
    """

    json: Path | None
    png: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    rows: list[Any] = field(default_factory=list)

    @contextmanager
    def progress(self, first: str = "loading the model") -> Iterator[Progress]:
        """Shows what is going on with a bar, and the results behind.

        Args:
            first: what is done before there are any.
        """
        import torch

        from arbordraft.bench.plots import plot
        from arbordraft.bench.tables import rows_table

        torch.manual_seed(self.seed)
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            self._task = progress.add_task(first, total=None)
            self._progress = progress
            yield progress
        tables: dict[Any, list[Any]] = {}
        for row in self.rows:
            tables.setdefault((type(row), getattr(row, "table", None)), []).append(row)
        for rows in tables.values():
            console.print(rows_table(rows))
        if self.png is not None:
            plot(self.rows, self.png)
        for path in (self.json, self.png):
            if path is not None:
                console.print(f"wrote {path}")

    def take(self, found: Iterable[Any]) -> list[Any]:
        """Collects rows as they come, and returns them."""
        from arbordraft.bench.measure import save

        new = []
        for row in found:
            new.append(row)
            self.rows.append(row)
            self._progress.update(self._task, description=f"{len(self.rows)} measured")
            if self.json is not None:
                save(self.json, self.rows, seed=self.seed, **self.settings)
        return new

    def tell(self, what: str, done: int, of: int) -> None:
        """Moves the bar: so many rounds of what is being measured are done."""
        description = f"{len(self.rows)} measured, now {what}"
        self._progress.update(self._task, description=description, completed=done, total=of)


def texts(prompts: Path | None, limit: int | None) -> list[str]:
    """The prompts to decode.

    Raises:
        ValueError: if a file holds none.
    """
    from arbordraft.prompts import MIXED, VARIED, read_prompts

    found = read_prompts(prompts) if prompts else [*MIXED, *VARIED]
    if not found:
        raise ValueError(f"{prompts} holds no prompts")
    return found[:limit]


def named(drafters: Sequence[str] | None) -> Sequence[str]:
    """Refuses to measure nothing, before a model is loaded.

    Raises:
        typer.BadParameter: if no drafter is named.
    """
    if not drafters:
        raise typer.BadParameter("name at least one --drafter")
    return drafters


def drafters_of(names: Sequence[str], target: "RaggedModel") -> "dict[str, Drafter]":
    """Drafters by the names that tables give them."""
    from arbordraft.loading import drafter_named

    return {Path(name).name if Path(name).is_dir() else name: drafter_named(name, target) for name in names}


@app.command()
def forward(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = None,
    repeats: RepeatsOption = 7,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """One packed forward of the model's own modules against its own forward."""
    from arbordraft.bench.model import forward_cost

    run = Run(json, settings={"model": model, "repeats": repeats}, seed=seed)
    with run.progress():
        for each in dtype or [Dtype.bfloat16, Dtype.float32]:
            run.take(forward_cost(load_target(model, each)[0].model, repeats, run.tell))


@app.command()
def verify(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = None,
    repeats: RepeatsOption = 7,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Verification of a tree against the target's forward; rules against the vocabulary and against the LP."""
    from arbordraft.bench.model import rule_cost, spechub_cost, verify_cost

    run = Run(json, settings={"model": model, "repeats": repeats}, seed=seed)
    with run.progress():
        for each in dtype or [Dtype.bfloat16, Dtype.float32]:
            run.take(verify_cost(load_target(model, each)[0].model, repeats, run.tell))
        run.take(spechub_cost(repeats))
        run.take(rule_cost(repeats))


@app.command()
def lookup(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = None,
    repeats: RepeatsOption = 3,
    new_tokens: TokensOption = 128,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """The n-gram tree on the model's own modules against ``generate``, token for token, where it pays and where not."""
    from arbordraft.bench.model import decode_speed

    given = texts(prompts, None) if prompts else ()
    run = Run(json, settings={"model": model, "repeats": repeats, "new_tokens": new_tokens}, seed=seed)
    with run.progress():
        for each in dtype or [Dtype.bfloat16, Dtype.float32]:
            target, tokenizer = load_target(model, each)
            run.take(decode_speed(target.model, tokenizer, repeats, new_tokens, given, limit, run.tell))


@app.command()
def cpu(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = None,
    repeats: RepeatsOption = 7,
    new_tokens: TokensOption = 128,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    others: Annotated[bool, typer.Option(help="Also random models of other families, which need 5 GB.")] = True,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """The packed CPU kernels against transformers."""
    from arbordraft.bench import cpu as kernels

    found = texts(prompts, limit)
    run = Run(json, settings={"model": model, "repeats": repeats, "new_tokens": new_tokens}, seed=seed)
    with run.progress():
        for each in dtype or [Dtype.bfloat16, Dtype.float32]:
            target, tokenizer = load_target(model, each)
            run.take(kernels.forward_speed(target.model, repeats, run.tell))
            if each is Dtype.bfloat16:
                run.take(kernels.int8_speed(target.model, tokenizer, found, repeats, run.tell))
                rounds = max(3, repeats // 2)
                run.take(kernels.decode_speed(target.model, tokenizer, found, rounds, new_tokens, run.tell))
        if others:
            run.take(kernels.other_architectures(repeats, run.tell))


@app.command()
def equality(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = None,
    new_tokens: TokensOption = 128,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "1,8",
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Speculative against plain greedy tokens on the packed CPU kernels."""
    from arbordraft.bench.cpu import equality as compared

    found = texts(prompts, limit)
    run = Run(json, settings={"model": model, "new_tokens": new_tokens}, seed=seed)
    with run.progress():
        for each in dtype or [Dtype.bfloat16, Dtype.float32]:
            target, tokenizer = load_target(model, each)
            sizes = numbers(batches, int)
            run.take(compared(target.model, tokenizer, found, new_tokens, sizes, run.tell))


@app.command()
def decode(
    drafter: DraftersOption = None,
    model: ModelOption = "smollm2",
    dtype: OneDtype = Dtype.bfloat16,
    new_tokens: TokensOption = 128,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "8",
    temperatures: TemperaturesOption = "0,1",
    repeats: RepeatsOption = 1,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """What drafters gain over plain decoding: lookups, chains, trees, and lookups with trees behind them."""
    from arbordraft.bench.drafters import drafter_gain

    names, questions = named(drafter), texts(prompts, limit)
    sizes, heat = numbers(batches, int), numbers(temperatures, float, 0)
    run = Run(json, png, {"model": model, "new_tokens": new_tokens, "batches": batches}, seed)
    with run.progress():
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        found = drafters_of(names, target)
        for batch in sizes:
            run.take(
                drafter_gain(
                    target,
                    tokenizer,
                    questions,
                    found,
                    new_tokens=new_tokens,
                    batch=batch,
                    temperatures=heat,
                    repeats=repeats,
                    seed=seed,
                    tell=run.tell,
                )
            )


@app.command()
def verifiers(
    drafter: DraftersOption = None,
    model: ModelOption = "smollm2",
    dtype: OneDtype = Dtype.float32,
    new_tokens: Annotated[int, typer.Option(min=2, help="Positions per prompt.")] = 24,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batch: BatchOption = 8,
    temperatures: TemperaturesOption = "0.3,0.6,1",
    children: Annotated[str, typer.Option(callback=whole, help="Numbers of children of one node.")] = "2,3,4",
    depths: Annotated[
        str, typer.Option(callback=whole, help="Depths of binary trees; 1,2,3,4 have 3, 7, 15 and 31 nodes.")
    ] = "1,2,3,4",
    nodes: Annotated[
        str, typer.Option(callback=whole, help="Sizes of Sequoia trees, fitted to each law's acceptance.")
    ] = "4,8,16,32",
    trees: Annotated[bool, typer.Option(help="Trees as well as single nodes.")] = True,
    optima: Annotated[
        int,
        typer.Option(min=1, help="Positions for which the optima of 3 or more draws without replacement are solved."),
    ] = 100,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """What draft laws and verifiers accept on the model's own rows, as expectations with standard errors."""
    from arbordraft.bench.verifiers import node_acceptance, tree_tau

    names, questions, heat = named(drafter), texts(prompts, limit), numbers(temperatures, float, 0)
    run = Run(json, png, {"model": model, "new_tokens": new_tokens}, seed)
    with run.progress():
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        found = drafters_of(names, target)
        common: dict[str, Any] = {"temperatures": heat, "new_tokens": new_tokens, "batch": batch, "seed": seed}
        common["tell"] = run.tell
        singles = run.take(
            node_acceptance(
                target, tokenizer, questions, found, children=numbers(children, int), optima=optima, **common
            )
        )
        if trees:
            ranks = {(row.drafter, row.temperature, row.law): row.by_rank for row in singles if row.k == 2}
            shapes: dict[str, Any] = {"depths": numbers(depths, int), "nodes": numbers(nodes, int), "ranks": ranks}
            run.take(tree_tau(target, tokenizer, questions, found, **shapes, **common))


@app.command()
def batching(
    drafter: DrafterOption = "ngram",
    model: ModelOption = "smollm2",
    dtype: OneDtype = Dtype.bfloat16,
    new_tokens: TokensOption = 128,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "1,2,4,8,12,16,24",
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens per step.")] = 7,
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """EMS-SD's comparison: the same chains in a padded batch, half padded ones and an unpadded one."""
    from arbordraft.bench.batching import padding

    questions = texts(prompts, limit)
    run = Run(json, png, {"model": model, "new_tokens": new_tokens, "length": length, "repeats": repeats}, seed)
    with run.progress():
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        (found,) = drafters_of([drafter], target).values()
        options: dict[str, Any] = {"length": length, "new_tokens": new_tokens, "repeats": repeats, "seed": seed}
        options["tell"] = run.tell
        run.take(padding(target, tokenizer, questions, found, batches=numbers(batches, int), **options))


@app.command()
def product(
    drafter: DrafterOption,
    model: ModelOption = "smollm2",
    dtype: OneDtype = Dtype.bfloat16,
    new_tokens: TokensOption = 64,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "1,4,8,16",
    temperatures: TemperaturesOption = "0,1",
    nodes: Annotated[int, typer.Option(min=3, help="Most nodes of a tree, root included.")] = 16,
    repeats: RepeatsOption = 1,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Ragged batches of chains, static trees and trees of dynamic depth; and the lossy fork of improved MCSD."""
    from arbordraft.bench.batching import product as measured

    questions = texts(prompts, limit)
    run = Run(json, png, {"model": model, "new_tokens": new_tokens, "nodes": nodes, "repeats": repeats}, seed)
    with run.progress():
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        (found,) = drafters_of([drafter], target).values()
        run.take(
            measured(
                target,
                tokenizer,
                questions,
                found,
                batches=numbers(batches, int),
                temperatures=numbers(temperatures, float, 0),
                nodes=nodes,
                new_tokens=new_tokens,
                repeats=repeats,
                seed=seed,
                tell=run.tell,
            )
        )


@app.command()
def deciders(
    drafter: DrafterOption,
    model: ModelOption = "smollm2",
    dtype: OneDtype = Dtype.bfloat16,
    new_tokens: TokensOption = 128,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "1,8",
    temperatures: TemperaturesOption = "0",
    depth: Annotated[int, typer.Option(min=1, help="Longest chain.")] = 6,
    costs: Annotated[Path | None, typer.Option(help="Step costs that 'arbordraft tune --costs' has written.")] = None,
    learned: Annotated[Path | None, typer.Option(help="Folder of a trained decider for the drafter.")] = None,
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """When to stop drafting: every decider on the same chains, by tokens per second."""
    from arbordraft.bench.deciders import choices, stops
    from arbordraft.costs import StepCosts
    from arbordraft.deciders import LearnedDecider

    questions = texts(prompts, limit)
    run = Run(json, png, {"model": model, "new_tokens": new_tokens, "depth": depth, "repeats": repeats}, seed)
    with run.progress():
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        (found,) = drafters_of([drafter], target).values()
        table = StepCosts.load(costs) if costs else None
        trained = LearnedDecider.from_pretrained(learned) if learned else None
        for heat in numbers(temperatures, float, 0):
            for batch in numbers(batches, int):
                run.take(
                    stops(
                        target,
                        tokenizer,
                        questions,
                        found,
                        choices(depth, table, trained),
                        depth=depth,
                        batch=batch,
                        temperature=heat,
                        new_tokens=new_tokens,
                        repeats=repeats,
                        seed=seed,
                        tell=run.tell,
                    )
                )


@app.command()
def compare(
    drafter: DraftersOption = None,
    model: ModelOption = "smollm2",
    dtype: OneDtype = Dtype.bfloat16,
    new_tokens: TokensOption = 128,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "1",
    temperatures: TemperaturesOption = "0",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """arbordraft against transformers: ``generate``, prompt lookup and, with a draft model, assisted generation."""
    from arbordraft.bench.compare import against_transformers

    questions = texts(prompts, limit)
    run = Run(json, png, {"model": model, "new_tokens": new_tokens, "repeats": repeats}, seed)
    with run.progress():
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        found = drafters_of(drafter, target) if drafter else {}
        for heat in numbers(temperatures, float, 0):
            for batch in numbers(batches, int):
                run.take(
                    against_transformers(
                        target,
                        tokenizer,
                        questions,
                        found,
                        batch=batch,
                        temperature=heat,
                        new_tokens=new_tokens,
                        repeats=repeats,
                        seed=seed,
                        tell=run.tell,
                    )
                )


@app.command()
def tuned(
    file: Annotated[Path, typer.Argument(help="What 'arbordraft tune' has written.")],
    drafter: Annotated[str | None, typer.Option(help="By default the one it was tuned for.")] = None,
    model: ModelOption = "smollm2",
    dtype: OneDtype = Dtype.bfloat16,
    new_tokens: TokensOption = 96,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "1,8",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """The choice of ``arbordraft tune`` against its whole grid; give it prompts that were not tuned on."""
    from arbordraft.bench.tuned import against_grid
    from arbordraft.tuning import Tuned

    choice = Tuned.load(file)
    questions = texts(prompts, limit)
    run = Run(json, png, {"model": model, "new_tokens": new_tokens, "repeats": repeats}, seed)
    with run.progress():
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        (found,) = drafters_of([drafter or choice.drafter], target).values()
        options: dict[str, Any] = {"new_tokens": new_tokens, "repeats": repeats, "seed": seed}
        options["tell"] = run.tell
        for batch in numbers(batches, int):
            run.take(against_grid(target, tokenizer, questions, choice, found, batch=batch, **options))


@app.command()
def kernels(
    contexts: Annotated[
        str, typer.Option(callback=whole, help="Committed tokens of every sample.")
    ] = "512,2048,8192,32768",
    batches: BatchesOption = "1,8,32",
    trees: Annotated[str, typer.Option(callback=whole, help="Rows of every sample's tree.")] = "1,8,32,64",
    groups: Annotated[str, typer.Option(callback=whole, help="Query heads per key head.")] = "4,1,8",
    head_sizes: Annotated[str, typer.Option(callback=whole, help="Numbers of a head.")] = "128,64",
    vocabulary: Annotated[int, typer.Option(min=2, help="Tokens of the vocabulary.")] = 128256,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the cache.")] = 32,
    flex: Annotated[bool, typer.Option(help="Time FlexAttention too, which compiles for every shape.")] = True,
    milliseconds: Annotated[float, typer.Option(min=1, help="Spent on the timings of one call.")] = 50,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """The Triton kernels against float64, their bounds and their peers; without a GPU in Triton's interpreter.

    All contexts, batches and trees are taken with the first group and head size, the other ones with the last tree but
    one. FlexAttention is timed with that tree, the first group and the first head size.
    """
    import torch

    from arbordraft.bench.kernels import device

    here = device()  # before anything imports Triton
    from arbordraft.bench.kernels import Stopwatch, measured
    from arbordraft.bench.problems import chosen
    from arbordraft.bench.roofline import STEPPED, fitting, predictions, product

    lists = [numbers(each, int) for each in (contexts, batches, trees, groups, head_sizes)]
    shapes = product(*lists)
    stepped = STEPPED._replace(vocabulary=vocabulary, layers=layers)
    run = Run(json, settings={"dtype": "bfloat16", "device": here.type, "triton": version("triton")}, seed=seed)
    with run.progress("predicting"):
        run.take(predictions(shapes, stepped))
        watch = None
        if here.type == "cuda":
            watch = Stopwatch(milliseconds)
            run.settings |= watch.settings()
            shapes = fitting(shapes, torch.cuda.get_device_properties(here).total_memory, console.print)
        else:
            console.print(
                "[bold]There is no GPU: the kernels run in Triton's interpreter, on tiny problems. That shows whether "
                "they are right; it says nothing about time, and none is given."
            )
        base = (lists[2][-2:][0], lists[3][0], lists[4][0])
        alike = [shape for shape in shapes if (shape.tree, shape.group, shape.size) == base]
        problems = chosen(here, shapes, stepped, alike if flex else [])
        rows = run.take(measured(problems, watch, console.print))
    if wrong := [row for row in rows if not row.correct]:
        console.print(f"[red]{len(wrong)} of {len(rows)} results differ from float64 by more than rounding explains")
        raise typer.Exit(1)
    console.print(f"all {len(rows)} results agree with float64 as far as rounding allows")


@app.command("onnx")
def onnx_steps(
    graphs: Annotated[list[Path], typer.Argument(help="Folders that 'arbordraft export onnx' has written.")],
    drafter: DrafterOption,
    model: ModelOption = "smollm2",
    new_tokens: TokensOption = 64,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: BatchesOption = "1,8",
    depth: Annotated[int, typer.Option(min=1, help="Levels of the drafted chains.")] = 4,
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Milliseconds per draft step, in float32: torch's modules, the packed kernels, and exported graphs."""
    from arbordraft.bench.onnx import draft_steps
    from arbordraft.loading import drafter_named
    from arbordraft.target.model import RaggedModel

    questions = texts(prompts, limit)
    run = Run(json, None, {"model": model, "new_tokens": new_tokens, "depth": depth, "repeats": repeats}, seed)
    with run.progress():
        plain, tokenizer = load_target(model, Dtype.float32)
        packed = RaggedModel(plain.model, tokenizer, kernels="auto", self_test=False)
        found = {
            f"torch, {name}": (target, drafter_named(drafter, target))
            for name, target in (("own modules", plain), ("packed kernels", packed))
        }
        found |= {folder.name: (packed, drafter_named(str(folder), packed)) for folder in graphs}
        for batch in numbers(batches, int):
            run.take(
                draft_steps(
                    tokenizer,
                    questions,
                    found,
                    batch=batch,
                    depth=depth,
                    new_tokens=new_tokens,
                    repeats=repeats,
                    seed=seed,
                    tell=run.tell,
                )
            )
