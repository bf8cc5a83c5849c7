"""Tables of measurements for people and for programs; no number is ever cut."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

HIDDEN = {"hidden": True}  # metadata of a field that appears in files only


def print_rows(console: Console, rows: Sequence[Any]) -> None:
    """Prints measurements of one kind: as a table, one by one if it is too wide, or as tab-separated values.

    Args:
        console: a terminal; any other output, such as a pipe, gets tab-separated values of all columns, to six digits.
        rows: dataclasses of one kind, at least one.
    """
    table = rows_table(rows)
    if not console.is_terminal:
        for line in _tab_separated(rows):
            print(line, file=console.file)  # a console would expand the tabs
        print(file=console.file)
    elif Measurement.get(console, console.options.update(width=10**4), table).maximum <= console.width:
        console.print(table)
    else:
        for part in _records(rows):
            console.print(part, soft_wrap=True)


def print_tables(console: Console, rows: Sequence[Any]) -> None:
    """Prints measurements of several kinds, one table for each kind and title."""
    tables: dict[Any, list[Any]] = {}
    for row in rows:
        tables.setdefault((type(row), getattr(row, "table", None)), []).append(row)
    for alike in tables.values():
        print_rows(console, alike)


def rows_table(rows: Sequence[Any]) -> Table:
    """Builds a table of measurements of one kind; values that are equal in all rows go into its caption."""
    varied, same = _varied(rows)
    table = Table(title=getattr(rows[0], "table", None), caption=same, caption_justify="left")
    for name, values in varied.items():
        table.add_column(_title(name), justify="left" if isinstance(values[0], str) else "right", no_wrap=True)
    for row in zip(*varied.values(), strict=True):
        table.add_row(*map(_short, row))
    return table


def _varied(rows: Sequence[Any]) -> tuple[dict[str, list[Any]], str]:
    """Returns the columns whose values differ, by name, and a text of values that are equal in all rows."""
    columns = {name: [getattr(row, name) for row in rows] for name in _shown(rows[0])}
    varied = {name: values for name, values in columns.items() if len(rows) == 1 or any(v != values[0] for v in values)}
    alike = {name: values[0] for name, values in columns.items() if name not in varied and values[0] not in (None, "")}
    return varied, ", ".join(f"{name} {_short(value)}" for name, value in alike.items())


def _records(rows: Sequence[Any]) -> Iterator[Text]:
    """Yields a paragraph for every row, with a line for every value."""
    varied, same = _varied(rows)
    if title := getattr(rows[0], "table", None):
        yield Text(title, style="italic")
    for row in zip(*varied.values(), strict=True):
        yield (
            Text("\n")
            .join(
                Text.assemble((f"{_title(name)}  ", "bold"), _short(value))
                for name, value in zip(varied, row, strict=True)
            )
            .append("\n")
        )
    if same:
        yield Text(same, style="dim")


def _tab_separated(rows: Sequence[Any]) -> Iterator[str]:
    names = _shown(rows[0])
    yield "\t".join(names)
    for row in rows:
        yield "\t".join(_plain(getattr(row, name)) for name in names)


def _shown(row: Any) -> list[str]:
    return [field.name for field in fields(row) if field.metadata != HIDDEN]


def _title(name: str) -> str:
    return name.replace("_", " ")


def _plain(value: Any) -> str:
    match value:
        case None:
            return ""
        case float():
            return f"{value:.6g}"
        case list() | tuple():
            return " ".join(map(_plain, value))
        case dict():
            return " ".join(f"{name}={_plain(part)}" for name, part in value.items())
    return " ".join(str(value).split())


def _short(value: Any) -> Text:
    match value:
        case bool():
            return Text("yes", style="green") if value else Text("no", style="red")
        case None:
            return Text("-")
        case float():
            if 0 < abs(value) < 1e-3:
                return Text(f"{value:.1e}")
            return Text(f"{value:.0f}" if abs(value) >= 100 else f"{value:.3f}")
        case list():
            return Text(" ".join(f"{part:.2f}" for part in value) or "-")
        case dict():
            return Text(" ".join(f"{name} {part:.0%}" for name, part in value.items()) or "-")
    return Text(str(value))
