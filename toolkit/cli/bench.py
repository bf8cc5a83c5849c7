"""``arbordraft bench``: every measurement as a command that prints a table and writes JSON."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from arbordraft.bench import cpu as cpu_bench
from arbordraft.bench import kernels as kernel_bench
from arbordraft.bench import model, problems, roofline, suites
from arbordraft.bench import verifiers as acceptance
from arbordraft.bench import weights as fewer_bits
from arbordraft.bench.decoding import in_turns
from arbordraft.bench.grammars import GrammarSuite
from arbordraft.bench.onnx import draft_steps
from arbordraft.bench.tuning import Tuned
from arbordraft.cli.measurement import (
    CASES,
    DECODING,
    WORKLOAD,
    BatchesOption,
    Run,
    app,
    console,
    measurement,
    whole,
)
from arbordraft.cli.options import DRAFTERS, DrafterOption, numbers
from arbordraft.deciders import LearnedDecider
from arbordraft.deciders.costs import StepCosts
from arbordraft.drafters import Drafter
from arbordraft.loading import Dtype, Kernels, drafter_named
from arbordraft.target.model import RaggedModel
from arbordraft.utils.files import read_text


def named(drafters: list[str] | None) -> list[str]:
    """Refuses to measure nothing, before a model is loaded."""
    if not drafters:
        raise typer.BadParameter("name at least one --drafter")
    return drafters


DraftersOption = Annotated[list[str] | None, typer.Option("--drafter", help=f"{DRAFTERS} May be repeated.")]


def drafters_of(names: Sequence[str] | None, target: RaggedModel) -> dict[str, Drafter]:
    """Drafters by the names that tables give them."""
    return {Path(name).name if Path(name).is_dir() else name: drafter_named(name, target) for name in names or ()}


@measurement(CASES, repeats=7)
def forward(run: Run) -> None:
    """One packed forward of the model's own modules against its own forward."""
    for target in run.targets(Kernels.torch):
        run.take(model.forward_cost(target, run.workload, run.tell), run.workload)


@measurement(CASES, repeats=7)
def verify(run: Run) -> None:
    """Verification of a tree against the target's forward; rules against the vocabulary and against the LP."""
    for target in run.targets(Kernels.torch):
        run.take(model.verify_cost(target, run.workload, run.tell), run.workload)
    run.take(model.rule_cost(run.workload), run.workload)


@measurement(CASES | {"prompts", "limit", "new_tokens"})
def lookup(run: Run) -> None:
    """The n-gram tree on the model's own modules against ``generate``, token for token, where it pays and where not."""
    kinds = {"given": (run.workload.prompts, "")} if run.shared["prompts"] else model.KINDS
    for target in run.targets(Kernels.torch):
        for kind, (prompts, reach) in kinds.items():
            workload = replace(run.workload, prompts=prompts[: run.shared["limit"]])
            run.take([model.lookup_speed(target, workload, kind, reach, run.tell)], workload)


@measurement(CASES | {"prompts", "limit", "new_tokens"}, repeats=7)
def cpu(
    run: Run,
    others: Annotated[bool, typer.Option(help="Also random models of other families, which need 5 GB.")] = True,
) -> None:
    """The native CPU kernels against transformers."""
    for target in run.targets():
        run.take(cpu_bench.forward_speed(target, run.workload, run.tell), run.workload)
        if target.model.dtype == torch.bfloat16:
            longer = replace(run.workload, repeats=max(3, run.workload.repeats // 2))
            run.take(cpu_bench.decode_speed(target, longer, run.tell), longer)
    if others:
        run.take(cpu_bench.other_architectures(run.workload, run.tell), run.workload)


@measurement(DECODING - {"temperatures", "png"}, batches="1,8", new_tokens=64)
def weights(
    run: Run,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text to predict; else Python's own help.")
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Most chunks of 256 tokens that are read of it.")] = 8,
) -> None:
    """Weights of 4 and 8 bits against the model's own: predictions on a text, memory and tokens per second."""
    told = fewer_bits.help_text() if text is None else read_text(text)
    target = run.target()
    workloads = list(run.workloads())
    run.take(fewer_bits.compared(target, told, workloads, chunks, run.tell), workloads[0])


@measurement({"model", "dtypes", *WORKLOAD, "json"} - {"repeats"}, batches="1,8")
def equality(
    run: Run,
    drafter: DraftersOption = None,
) -> None:
    """Speculative against plain tokens of the same seeds on the native CPU kernels."""
    for target in run.targets():
        drafters = drafters_of(drafter, target)
        for temperature in run.temperatures:
            alike = [workload for workload in run.workloads() if workload.temperature == temperature]
            run.take(cpu_bench.equality(target, drafters, alike, run.tell), alike[0])


@measurement(DECODING, temperatures="0,1", repeats=1)
def decode(run: Run, drafter: DraftersOption = None) -> None:
    """What drafters gain over plain decoding: lookups, chains, trees, and lookups with trees behind them."""
    names = named(drafter)
    target = run.target()
    drafters = drafters_of(names, target)
    for workload in run.workloads():
        run.decode(target, suites.drafter_gain(target, drafters, workload), workload)


@measurement(DECODING, batches="1,2,4,8,16", temperatures="0,1", repeats=5)
def policy(run: Run, drafter: DraftersOption = None) -> None:
    """Drafting as far as it pays against plain decoding: the default, and nothing of it should be slower."""
    names = named(drafter)
    target = run.target()
    drafters = drafters_of(names, target)
    for workload in map(suites.whole_batches, run.workloads()):
        run.decode(target, suites.policy(target, drafters), workload)


@measurement(DECODING - {"repeats"}, dtype=Dtype.float32, new_tokens=24, temperatures="0.3,0.6,1")
def verifiers(
    run: Run,
    drafter: DraftersOption = None,
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
) -> None:
    """What draft laws and verifiers accept on the model's own rows, as expectations with standard errors."""
    names = named(drafter)
    target = run.target()
    drafters = drafters_of(names, target)
    counts = numbers(children, int)
    sizes: dict[str, Any] = {"depths": numbers(depths, int), "nodes": numbers(nodes, int)}
    for workload in run.workloads():
        single = acceptance.node_acceptance(target, drafters, workload, children=counts, optima=optima, tell=run.tell)
        ranks = {(row.drafter, row.law): row.by_rank for row in run.take(single, workload) if row.k == 2}
        if trees:
            run.take(acceptance.tree_tau(target, drafters, workload, ranks=ranks, tell=run.tell, **sizes), workload)


@measurement(DECODING - {"temperatures"}, batches="1,2,4,8,12,16,24")
def batching(
    run: Run,
    drafter: DrafterOption = "ngram",
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens per step.")] = 7,
) -> None:
    """EMS-SD's comparison: the same chains in a padded batch, half padded ones and an unpadded one."""
    target = run.target()
    decoders = suites.padding(target, drafter_named(drafter, target), length)
    for workload in map(suites.whole_batches, run.workloads()):
        run.decode(target, decoders, workload)


@measurement(DECODING, new_tokens=64, batches="1,4,8,16", temperatures="0,1", repeats=1)
def product(
    run: Run,
    drafter: DrafterOption,
    nodes: Annotated[int, typer.Option(min=3, help="Most nodes of a tree, root included.")] = 16,
) -> None:
    """Ragged batches of chains, static trees and trees of dynamic depth; and the lossy fork of improved MCSD."""
    target = run.target()
    decoders = suites.product(target, drafter_named(drafter, target), nodes)
    for workload in run.workloads():
        run.decode(target, decoders, workload)


@measurement(DECODING, batches="1,8")
def deciders(
    run: Run,
    drafter: DrafterOption,
    depth: Annotated[int, typer.Option(min=1, help="Longest chain.")] = 6,
    costs: Annotated[Path | None, typer.Option(help="Step costs that 'arbordraft tune --costs' has written.")] = None,
    learned: Annotated[Path | None, typer.Option(help="Folder of a trained decider for the drafter.")] = None,
) -> None:
    """When to stop drafting: every decider on the same chains, by tokens per second."""
    target = run.target()
    proposer = drafter_named(drafter, target)
    table = StepCosts.load(costs) if costs else None
    trained = LearnedDecider.from_pretrained(learned) if learned else None
    for workload in run.workloads():
        stopping = suites.deciders(depth, table, trained)
        run.decode(target, suites.stops(target, proposer, stopping, workload, depth), workload)


@measurement(DECODING, batches="1")
def compare(
    run: Run,
    drafter: DraftersOption = None,
) -> None:
    """arbordraft against transformers: ``generate``, prompt lookup and, with a draft model, assisted generation."""
    target = run.target()
    drafters = drafters_of(drafter, target)
    for workload in run.workloads():
        run.decode(target, suites.against_transformers(target, drafters, workload), workload)


@measurement(DECODING - {"prompts"}, new_tokens=160, batches="1,8")
def grammars(run: Run) -> None:
    """Texts turned into JSON by schemas: masked plain decoding, forced tokens with lookups, and transformers."""
    suite = GrammarSuite(run.target(), run.shared["limit"])
    for workload in run.workloads():
        workload = replace(workload, prompts=suite.prompts)
        rows = run.take(in_turns(suite.target, suite.decoders(workload), workload, run.tell), workload)
        run.take([suite.masks(workload, rows[0])], workload)


@measurement(DECODING - {"temperatures"}, new_tokens=96, batches="1,8")
def tuned(
    run: Run,
    file: Annotated[Path, typer.Argument(help="What 'arbordraft tune' has written.")],
    drafter: Annotated[str | None, typer.Option(help="By default the one it was tuned for.")] = None,
) -> None:
    """The choice of ``arbordraft tune`` against its whole grid; give it prompts that were not tuned on."""
    choice = Tuned.load(file)
    target = run.target()
    proposer = drafter_named(drafter or choice.drafter, target)
    run.temperatures = [choice.temperature]
    for workload in run.workloads():
        run.decode(target, suites.against_grid(target, proposer, choice, workload.batch), workload)


@measurement({"seed", "json"})
def kernels(
    run: Run,
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
) -> None:
    """The Triton kernels against float64, their bounds and their peers; without a GPU in Triton's interpreter.

    All contexts, batches and trees are taken with the first group and head size, the other ones with the last tree but
    one. FlexAttention is timed with that tree, the first group and the first head size.
    """
    here = kernel_bench.device()  # before anything imports Triton

    run.settings |= {"dtype": "bfloat16", "device": here.type, "triton": version("triton")}
    lists = [numbers(each, int) for each in (contexts, batches, trees, groups, head_sizes)]
    shapes = roofline.product(*lists)
    stepped = roofline.STEPPED._replace(vocabulary=vocabulary, layers=layers)
    run.take(roofline.predictions(shapes, stepped), run.workload)
    watch = None
    if here.type == "cuda":
        watch = kernel_bench.Stopwatch(milliseconds)
        run.settings |= watch.settings()
        shapes = roofline.fitting_shapes(shapes, torch.cuda.get_device_properties(here).total_memory, console.print)
    else:
        console.print(
            "There is no GPU: the kernels run in Triton's interpreter, on tiny problems. That shows whether "
            "they are right; it says nothing about time, and none is given.",
            style="bold",
        )
    base = (lists[2][-2:][0], lists[3][0], lists[4][0])
    alike = [shape for shape in shapes if (shape.tree, shape.group, shape.size) == base]
    chosen = problems.chosen(here, shapes, stepped, alike if flex else [])
    rows = run.take(kernel_bench.measured(chosen, watch, console.print), run.workload)
    if wrong := [row for row in rows if not row.correct]:
        told = f"{len(wrong)} of {len(rows)} results differ from float64 by more than rounding explains"
        console.print(told, style="red")
        raise typer.Exit(1)
    console.print(f"all {len(rows)} results agree with float64 as far as rounding allows")


@measurement(DECODING - {"dtype", "temperatures", "png"}, "onnx", new_tokens=64, batches="1,8")
def onnx_steps(
    run: Run,
    graphs: Annotated[list[Path], typer.Argument(help="Folders that 'arbordraft export onnx' has written.")],
    drafter: DrafterOption,
    depth: Annotated[int, typer.Option(min=1, help="Levels of the drafted chains.")] = 4,
) -> None:
    """Milliseconds per draft step, in float32: torch's modules, the native kernels, and exported graphs."""
    own = run.target(Kernels.torch, Dtype.float32)
    native = RaggedModel(own.model, own.tokenizer, kernels="auto", self_test=False)
    drafters = {
        f"torch, {name}": (target, drafter_named(drafter, target))
        for name, target in (("own modules", own), ("native kernels", native))
    }
    drafters |= {folder.name: (native, drafter_named(str(folder), native)) for folder in graphs}
    for workload in run.workloads():
        run.take(draft_steps(drafters, workload, depth, run.tell), workload)


__all__ = ["Run", "app"]
