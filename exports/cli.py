"""``arbordraft export``: what was trained, in the formats that others serve."""

import typer
from rich.console import Console
from rich.table import Table

from arbordraft.exports.folder import Export

app = typer.Typer(no_args_is_help=True, help="Export drafters, deciders and targets for deployment.")
console = Console()


def show(export: Export) -> None:
    """Prints what was written and how near it is to the original."""
    table = Table(title=str(export.folder))
    for column, justify in (("file", "left"), ("size", "right"), ("sha256", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for file in export.files:
        table.add_row(file.name, f"{file.size / 2**20:.2f} MiB", file.sha256[:16])
    console.print(table)
    for check, value in export.parity.items():
        console.print(f"{check}: {value if isinstance(value, bool) else f'{value:.3g}'}")
