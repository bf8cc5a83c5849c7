"""A dated page of Markdown about the speed of decoders, by kind of request and batch size."""

from collections.abc import Mapping, Sequence
from typing import Any

from arbordraft.bench.decoding import DecodeRow

_PLAIN = 0.97  # least speed-up that counts as no slower than plain decoding


def page(rows: Sequence[DecodeRow], settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Returns a page with a table for every decoder but the reference, and the cases that are slower than it.

    Args:
        rows: measured cases; the first decoder is the reference.
        settings: model and dtype, as a report states them.
        provenance: see :func:`~arbordraft.bench.measure.provenance`.
    """
    reference = rows[0].decoder
    names = [name for name in dict.fromkeys(row.decoder for row in rows) if name != reference]
    batches = list(dict.fromkeys(row.batch for row in rows))
    kinds = list(dict.fromkeys(_kind(row) for row in rows))
    known = {(row.decoder, _kind(row), row.batch): row for row in rows}
    lines = [
        f"# Speed beside {reference} decoding",
        "",
        f"{str(provenance['date'])[:10]}, {provenance['cpu']}, {provenance['threads']} threads, commit "
        f"{provenance['commit']}, {settings.get('model')} in {settings.get('dtype')}.",
        "",
        "A cell is the speed-up in turns (median, half the spread of the rounds, tokens per forward).",
    ]
    for name in names:
        lines += ["", f"## {name}", "", "| request | " + " | ".join(f"batch {batch}" for batch in batches) + " |"]
        lines.append("|---" * (len(batches) + 1) + "|")
        for kind in kinds:
            cells = [_cell(known.get((name, kind, batch))) for batch in batches]
            lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    slower = [row for row in rows if row.decoder != reference and row.speed_up < _PLAIN]
    lines += ["", "## Known limits", ""]
    lines += [
        f"- {row.decoder}, {_kind(row)}, batch {row.batch}: {row.speed_up:.2f} x {reference}, spread {row.spread:.2f}"
        for row in slower
    ] or [f"No case is slower than {_PLAIN} x {reference}."]
    return "\n".join(lines) + "\n"


def _kind(row: DecodeRow) -> str:
    return row.request or f"temperature {row.temperature:g}"


def _cell(row: DecodeRow | None) -> str:
    return "" if row is None else f"{row.speed_up:.2f} ± {row.spread:.2f} ({row.tau:.1f})"


__all__ = ["page"]
