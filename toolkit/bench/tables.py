"""Measurements as tables."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.table import Table


def rows_table(rows: Sequence[Any]) -> Table:
    """Measurements of one kind as a table; what is the same in all rows stands below."""
    columns = {name: [getattr(row, name) for row in rows] for name in (field.name for field in fields(rows[0]))}
    varied = {name: values for name, values in columns.items() if len(rows) == 1 or any(v != values[0] for v in values)}
    alike = {name: values[0] for name, values in columns.items() if name not in varied and values[0] not in (None, "")}
    same = ", ".join(f"{name} {_short(value)}" for name, value in alike.items())
    table = Table(title=getattr(rows[0], "table", None), caption=same, caption_justify="left")
    for name, values in varied.items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(values[0], str) else "right")
    for row in zip(*varied.values(), strict=True):
        table.add_row(*map(_short, row))
    return table


def _short(value: Any) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "[green]yes[/]" if value else "[red]no[/]"
        case float():
            if 0 < abs(value) < 1e-3:
                return f"{value:.1e}"
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"
        case list():
            return " ".join(f"{part:.2f}" for part in value) or "-"
        case dict():
            return " ".join(f"{name} {part:.0%}" for name, part in value.items()) or "-"
    return str(value)
