"""Shows answers as they stream, tables of results and trees on the terminal."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from arbordraft.utils.terminal import bars

if TYPE_CHECKING:
    from torch import Tensor

    from arbordraft.decoding.detokenizing import IncrementalDetokenizer
    from arbordraft.decoding.metrics import DecodeStats
    from arbordraft.trees.draft_tree import SampleTree
    from arbordraft.trees.topology import TreeTopology
    from arbordraft.trees.verdict import SampleVerdict

_MIN_SECONDS = 0.1  # seconds that drafting must have lost to be reported


@contextmanager
def progress(console: Console, *, transient: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows a line of progress while the block runs; yields the function that sets its text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with bars(console, *columns, transient=transient) as bar:
        task = bar.add_task("starting")
        yield lambda what: bar.update(task, description=what)


class AnswerStreamer:
    """Collects one answer as it grows; later tokens only append to ``text``.

    Args:
        detokenizer: turns tokens into text.
        show: called with every new part of the text.
        begun: called before the first part.
    """

    def __init__(
        self,
        detokenizer: "IncrementalDetokenizer",
        show: Callable[[str], object] = lambda text: None,
        begun: Callable[[], object] = lambda: None,
    ) -> None:
        self.text, self.show, self.begun = "", show, begun
        self._detokenizer, self._prompted = detokenizer, False

    def put(self, tokens: "Tensor") -> None:
        """Adds committed tokens; ignores the first call, which brings the prompt."""
        if self._prompted:
            self._add(self._detokenizer.add(tokens.flatten().tolist()))
        self._prompted = True

    def end(self) -> None:
        """Adds the rest of the text, which was held back for further tokens."""
        self._add(self._detokenizer.end())

    def _add(self, text: str) -> None:
        if text:
            if not self.text:
                self.begun()
            self.text += text
            self.show(text)


@contextmanager
def show_answers(
    console: Console, prompts: Sequence[str], streamers: Sequence[AnswerStreamer], *, quiet: bool = False
) -> Iterator[None]:
    """Shows answers as they grow: each in its own panel, or one after the other as plain text in a pipe.

    Args:
        console: terminal or pipe.
        prompts: titles of the answers.
        streamers: answers, in the order of the prompts.
        quiet: show nothing.
    """
    if quiet:
        yield
    elif console.is_terminal:
        titles = [Text(next(iter(prompt.splitlines()), "")[:70]) for prompt in prompts]

        def render() -> Group:
            return Group(*(Panel(Text(s.text), title=title) for s, title in zip(streamers, titles, strict=True)))

        with Live(get_renderable=render, console=console, refresh_per_second=8, vertical_overflow="visible"):
            yield
        console.line()
    else:
        title, *others = [f"> {' '.join(prompt.split())}\n" if len(prompts) > 1 else "" for prompt in prompts]
        print(title, end="", file=console.file)
        streamers[0].show = lambda text: print(text, end="", file=console.file, flush=True)
        yield
        print(file=console.file)
        for title, streamer in zip(others, streamers[1:], strict=True):
            print(f"\n{title}{streamer.text}", file=console.file)
        print(file=console.file)


def show_stats(console: Console, stats: "DecodeStats", seconds: float, kernels: str) -> None:
    """Prints the figures of a decoding run and its kernels, as a table or, in a pipe, as plain lines."""
    figures = {
        "output law": stats.exactness,
        "tokens": str(sum(stats.emitted)),
        "tokens/s": f"{sum(stats.emitted) / seconds:.1f}",
        "tau (tokens per target forward)": f"{stats.tau:.2f}",
        "acceptance by depth": " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_depth) or "-",
        "drafted tokens": str(stats.drafted),
        "pad rows / pad keys": f"{stats.pad_rows} / {stats.pad_keys}",
        "seconds by phase": "  ".join(f"{name} {spent:.2f}" for name, spent in stats.seconds.items()),
        "kernels": kernels,
    }
    if console.is_terminal:
        table = Table(show_header=False)
        for row in figures.items():
            table.add_row(*row)
        console.print(table)
    else:
        for name, value in figures.items():
            print(f"{name}: {value}", file=console.file)
    if line := verdict(stats):
        console.print(line, soft_wrap=True)


def verdict(stats: "DecodeStats") -> str | None:
    """Returns a warning if drafting certainly cost more time than it saved, else ``None``.

    Plain decoding needs one forward per token of the longest answer. None of them takes longer than a forward with
    drafts, which bounds the time of plain decoding from above.
    """
    if not stats.drafted or "target" not in stats.seconds:
        return None
    plain = stats.seconds["target"] * max(stats.emitted) / max(stats.forwards)
    spent = sum(seconds for phase, seconds in stats.seconds.items() if phase != "prefill")
    if spent - plain < _MIN_SECONDS:
        return None
    return (
        f"Drafting cost more than it brought: after the prompts {spent:.2f} s instead of at most {plain:.2f} s. "
        "Try --drafter none, or let 'arbordraft tune' choose."
    )


def tree_text(topology: "TreeTopology") -> Tree:
    """Renders a topology as an indented tree."""
    return _indented(dict(enumerate(topology.parent_list)), lambda node: Text(str(node or "0 (last committed token)")))


def step_tree(tree: "SampleTree", verdict: "SampleVerdict", text_of: Callable[[int], str]) -> Group:
    """Draws the drafts of one sample's step: accepted nodes are marked, and the target's own token follows below.

    Args:
        tree: draft tree of the sample.
        verdict: accepted nodes, and the target's own token.
        text_of: returns the text of a token.
    """

    def label(row: int) -> Text:
        text = Text(repr(text_of(tree.token(row))), style="bold green" if row in verdict.path else "dim")
        return text.append(" ✓") if row in verdict.path[1:] else text

    kind = "instead of the rejected drafts" if verdict.recovered else "as a bonus"
    own = Text.assemble("the target adds ", (repr(text_of(verdict.token)), "bold cyan"), f" {kind}")
    drafted, accepted_drafts = len(tree.rows) - 1, len(verdict.path) - 1
    tokens = f"{accepted_drafts + 1} tokens" if accepted_drafts else "1 token"
    gain = Text(f"{drafted} drafted, {accepted_drafts} accepted: {tokens} by one forward")
    return Group(_indented(dict(zip(tree.rows, tree.parents, strict=True)), label), own, gain)


def _indented(parents: Mapping[int, int], label: Callable[[int], Text]) -> Tree:
    """Renders nodes, each below its parent; the first one is the root."""
    drawn: dict[int, Tree] = {}
    for node, parent in parents.items():
        drawn[node] = Tree(label(node)) if parent < 0 else drawn[parent].add(label(node))
    return drawn[next(iter(parents))]
