"""A dated page of Markdown about the speed of decoders, by kind of request, context, batch size and clients."""

from collections.abc import Mapping, Sequence
from typing import Any

from arbordraft.bench.decoding import DecodeRow, case_of, size_of

_PLAIN = 0.97  # least speed-up that counts as no slower than plain decoding


def page(
    rows: Sequence[DecodeRow],
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    left_out: Sequence[str] = (),
) -> str:
    """Returns a page with a table for every decoder but the reference, and the cases that are slower than it.

    Args:
        rows: measured cases; the first decoder is the reference.
        settings: model and dtype, as a report states them.
        provenance: see :func:`~arbordraft.bench.measure.provenance`.
        left_out: cases that were asked for and not measured, with the reasons.
    """
    reference = rows[0].decoder
    names = [name for name in dict.fromkeys(row.decoder for row in rows) if name != reference]
    sizes = list(dict.fromkeys(map(size_of, rows)))
    cases = list(dict.fromkeys(map(case_of, rows)))
    known = {(row.decoder, case_of(row), size_of(row)): row for row in rows}
    lines = [
        f"# Speed beside {reference} decoding",
        "",
        f"{str(provenance['date'])[:10]}, {provenance['cpu']}, {provenance['threads']} threads, commit "
        f"{provenance['commit']}, {settings.get('model')} in {settings.get('dtype')}.",
        "",
        "A cell is the speed-up in turns (median, half the spread of the rounds, tokens per forward).",
    ]
    if any(row.served for row in rows):
        lines[-1] += " Clients ask a server, each one request after the other; a batch is decoded by the library."
    if any(row.context for row in rows):
        lines[-1] += " Where prompts were lengthened, the time of prompts counts; the second speed-up leaves it out."
    for name in names:
        lines += ["", f"## {name}", "", "| request | " + " | ".join(sizes) + " |"]
        lines.append("|---" * (len(sizes) + 1) + "|")
        for case in cases:
            cells = [_cell(known.get((name, case, size))) for size in sizes]
            lines.append(f"| {case} | " + " | ".join(cells) + " |")
    lines += ["", "## Known limits", ""]
    lines += [
        f"- {row.decoder}, {case_of(row)}, {size_of(row)}: {' and '.join(slow)} x {reference}, spread {row.spread:.2f}"
        for row in rows
        if row.decoder != reference and (slow := _slow(row))
    ] or [f"No case is slower than {_PLAIN} x {reference}."]
    if left_out:
        lines += ["", "## Left out", "", *(f"- {reason}" for reason in left_out)]
    return "\n".join(lines) + "\n"


def _cell(row: DecodeRow | None) -> str:
    if row is None:
        return ""
    return f"{row.speed_up:.2f} ± {row.spread:.2f} ({row.tau:.1f})" + (f", {steps}" if (steps := _steps(row)) else "")


def _slow(row: DecodeRow) -> list[str]:
    """Returns the speed-ups below the limit."""
    parts = [f"{row.speed_up:.2f}"] if row.speed_up < _PLAIN else []
    return [*parts, f"{_steps(row)}"] if _steps(row) and (row.steps_speed_up or 0.0) < _PLAIN else parts


def _steps(row: DecodeRow) -> str:
    """Returns the speed-up of the steps alone if prompts were lengthened."""
    return f"steps {row.steps_speed_up:.2f}" if row.context and row.steps_speed_up is not None else ""


__all__ = ["page"]
