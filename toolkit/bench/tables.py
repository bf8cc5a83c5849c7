"""Measurements as tables."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rich.table import Table

from arbordraft.bench.measure import Measurement


def measurement_table(measurements: Sequence[Measurement]) -> Table:
    """Measurements as a table; a missed reach is printed like any other."""
    table = Table()
    for column in ("case", "ours, ms", "reference, ms", "ratio", "to reach", "", "detail"):
        table.add_column(column, justify="right" if "ms" in column or column == "ratio" else "left")
    for measurement in measurements:
        mark = {True: "[green]yes", False: "[red]no", None: ""}[measurement.reached]
        table.add_row(
            measurement.case,
            f"{measurement.ours:.2f}",
            f"{measurement.reference:.2f}",
            f"{measurement.ratio:.2f}",
            measurement.reach,
            mark,
            measurement.detail,
        )
    return table


def rows_table(rows: Sequence[Any]) -> Table:
    """Measurements of one kind as a table; what is the same in all rows stands below."""
    if isinstance(rows[0], Measurement):
        return measurement_table(rows)
    columns = {name: [getattr(row, name) for row in rows] for name in (field.name for field in fields(rows[0]))}
    varied = {name: values for name, values in columns.items() if len(rows) == 1 or any(v != values[0] for v in values)}
    alike = {name: values[0] for name, values in columns.items() if name not in varied and values[0] not in (None, "")}
    same = ", ".join(f"{name} {_short(value)}" for name, value in alike.items())
    table = Table(caption=same, caption_justify="left")
    for name, values in varied.items():
        table.add_column(name.replace("_", " "), justify="left" if isinstance(values[0], str) else "right")
    for row in zip(*varied.values(), strict=True):
        table.add_row(*map(_short, row))
    return table


def _short(value: Any) -> str:
    match value:
        case None:
            return "-"
        case float():
            if 0 < abs(value) < 1e-3:
                return f"{value:.1e}"
            return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}"
        case list():
            return " ".join(f"{part:.2f}" for part in value) or "-"
        case dict():
            return " ".join(f"{name} {part:.0%}" for name, part in value.items()) or "-"
    return str(value)
