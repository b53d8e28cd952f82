"""Show runs and advice as tables: HTML in a notebook, aligned text in a terminal."""

import html
from collections.abc import Sequence
from typing import Any

from trainmem.records import Run
from trainmem.texts import bytes_text, number_text, seconds_text


class Table:
    """Show rows under a header, as HTML in a notebook and as aligned text in a terminal.

    Args:
        header: the title of each column.
        rows: rows of one value per column; a float is shown in four digits, None as "not measured", the rest by `str`.
        caption: shown above the table.
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = ""):
        self.header, self.caption = list(header), caption
        self.rows = [[number_text(v) if isinstance(v, float) or v is None else str(v) for v in row] for row in rows]

    def __repr__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [
            "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip()
            for row in [self.header, ["-" * width for width in widths], *self.rows]
        ]
        return "\n".join(([self.caption] if self.caption else []) + lines)

    def _repr_html_(self) -> str:
        def row(tag: str, values: list[str]) -> str:
            cell = f"<{tag} style='text-align:left;white-space:normal'>{{}}</{tag[:2]}>"
            return f"<tr>{''.join(cell.format(html.escape(value)) for value in values)}</tr>"

        caption = f"<caption style='text-align:left'>{html.escape(self.caption)}</caption>" if self.caption else ""
        head, body = row("th scope='col'", self.header), "".join(row("td", values) for values in self.rows)
        return f"<table>{caption}<thead>{head}</thead><tbody>{body}</tbody></table>"


def table(runs: Sequence[Run], caption: str = "") -> Table:
    """Return a table of runs: status, peak memory, the phase of the peak, step time, samples per second.

    `caption`: shown above the table.
    """
    rows = []
    for run in runs:
        phase, speed = (run.memory and run.memory.peak_phase) or "", number_text(run.samples_per_second, digits=3)
        rows.append([run.name, run.status, bytes_text(run.peak_bytes), phase, seconds_text(run.step_seconds), speed])
    kind = next((run.memory.kind for run in runs if run.memory), "counted")
    return Table(["run", "status", f"peak ({kind})", "peak phase", "step time", "samples/s"], rows, caption)
