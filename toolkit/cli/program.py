"""Runs commands as programs: the command line itself, and scripts of one command."""

import sys
from collections.abc import Callable
from pathlib import Path

import typer

from arbordraft.cli.failures import ending
from arbordraft.utils.allocator import keep_freed_memory


def run(app: typer.Typer, name: str) -> None:
    """Runs an app with the arguments of this process; it ends as in :func:`~arbordraft.cli.failures.ending`."""
    keep_freed_memory()
    with ending():
        command = typer.main.get_command(app)
        with command.make_context(name, sys.argv[1:]) as context:  # main() would print errors as panels
            command.invoke(context)


def run_script(function: Callable[..., None]) -> None:
    """Runs a script whose options are the parameters of a function, as typer reads them."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    run(app, Path(sys.argv[0]).name)
