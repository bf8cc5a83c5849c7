"""What people see: answers as they stream, tables of results, trees."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from arbordraft.metrics import DecodeStats
from arbordraft.topology import TreeTopology
from arbordraft.types import SampleTree, SampleVerdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


def terminal(**options: Any) -> Console:
    """A console on which texts are texts: brackets in prompts and paths are no markup, colons no emoji."""
    return Console(markup=False, emoji=False, **options)


@contextmanager
def progress(console: Console, *, transient: bool = False) -> Iterator[Callable[[str], None]]:
    """A line that says what is going on, for as long as the block runs; gives the function that sets it."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=transient) as bar:
        task = bar.add_task("starting")
        yield lambda what: bar.update(task, description=what)


@contextmanager
def stream_panels(
    console: Console, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]
) -> "Iterator[list[BaseStreamer]]":
    """Shows every answer while it grows: gives one streamer per prompt, each with a panel of its own."""
    from transformers import TextStreamer

    titles = [Text(next(iter(prompt.splitlines()), "")[:70]) for prompt in prompts]  # plain: no prompt is markup
    answers = [Text() for _ in prompts]

    def render() -> Group:
        return Group(*(Panel(answer, title=title) for answer, title in zip(answers, titles, strict=True)))

    class PanelStreamer(TextStreamer):
        def __init__(self, answer: Text) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.answer = answer

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.answer.append(text)

    with Live(get_renderable=render, console=console, refresh_per_second=8, vertical_overflow="visible"):
        yield [PanelStreamer(answer) for answer in answers]
    console.line()


def stats_table(stats: DecodeStats, seconds: float, kernels: str) -> Table:
    """What a decoding run gained, and the kernels that it ran on, as a table."""
    table = Table(title=f"output law: {stats.exactness}", show_header=False)
    table.add_row("tokens", str(sum(stats.emitted)))
    table.add_row("tokens/s", f"{sum(stats.emitted) / seconds:.1f}")
    table.add_row("tau (tokens per target forward)", f"{stats.tau:.2f}")
    rates = " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_depth) or "-"
    table.add_row("acceptance by depth", rates)
    table.add_row("drafted tokens", str(stats.drafted))
    table.add_row("pad rows / pad keys", f"{stats.pad_rows} / {stats.pad_keys}")
    table.add_row("seconds by phase", "  ".join(f"{name} {spent:.2f}" for name, spent in stats.seconds.items()))
    table.add_row("kernels", kernels)
    return table


def tree_text(topology: TreeTopology) -> Tree:
    """A topology as an indented tree."""
    return _indented(topology, range(topology.num_nodes), lambda node: Text(str(node or "0 (last committed token)")))


def step_tree(tree: SampleTree, verdict: SampleVerdict, spell: Callable[[int], str]) -> Group:
    """What one step drafted for one sample: accepted nodes are marked, and the target's own token follows below.

    Args:
        tree: the drafts.
        verdict: what became of them.
        spell: the text of a token.
    """
    accepted = {0, *verdict.path}

    def label(node: int) -> Text:
        text = Text(repr(spell(tree.tokens[node])), style="bold green" if node in accepted else "dim")
        return text.append(" ✓") if node in verdict.path else text

    kind = "instead of what it rejected" if verdict.recovered else "as a bonus"
    own = Text.assemble("the target adds ", (repr(spell(verdict.token)), "bold cyan"), f" {kind}")
    drafted, accepted_drafts = len(tree.tokens) - 1, len(verdict.path)
    tokens = f"{accepted_drafts + 1} tokens" if accepted_drafts else "1 token"
    gain = Text(f"{drafted} drafted, {accepted_drafts} accepted: {tokens} by one forward")
    return Group(_indented(tree.topology, tree.tokens, label), own, gain)


def _indented(topology: TreeTopology, nodes: Iterable[int], label: Callable[[int], Text]) -> Tree:
    """Nodes in ascending order, each below its parent."""
    drawn: dict[int, Tree] = {}
    for node in nodes:
        parent = topology.parent_list[node]
        drawn[node] = Tree(label(node)) if parent < 0 else drawn[parent].add(label(node))
    return drawn[0]
