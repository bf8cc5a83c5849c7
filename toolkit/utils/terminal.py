"""Console and progress bars for commands and benchmarks."""

from typing import TYPE_CHECKING, Any

from rich.console import Console

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn


def terminal(**options: Any) -> Console:
    """Returns a console that prints texts literally: brackets are no markup, colons no emoji."""
    return Console(markup=False, emoji=False, **options)


def bars(console: Console, *columns: "ProgressColumn", transient: bool = False) -> "Progress":
    """Makes a progress display that appears on a terminal only, never in a pipe."""
    from rich.progress import Progress

    place = console if console.is_terminal else terminal(stderr=True)
    return Progress(*columns, console=place, transient=transient, disable=not place.is_terminal)
