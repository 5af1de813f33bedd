"""What a benchmark tells: a table for people, one JSON object for programs, both from the same rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

Row = Mapping[str, str | int | float]

_WIDEST = 1000


@dataclass(frozen=True, slots=True)
class Report:
    """Rows of plain values, one a case; a column is a key, and the unit is in its name."""

    title: str
    results: Sequence[Row]
    machine: Mapping[str, str]
    notes: Sequence[str] = ()

    def as_json(self) -> str:
        content = {
            "title": self.title,
            "results": [dict(row) for row in self.results],
            "machine": dict(self.machine),
            "notes": list(self.notes),
        }
        return json.dumps(content, indent=2)

    def as_markdown(self) -> str:
        columns = self.columns()
        lines = [
            f"# {self.title}",
            "",
            f"| {' | '.join(columns)} |",
            f"|{' --- |' * len(columns)}",
            *(f"| {' | '.join(_text(row.get(each)) for each in columns)} |" for row in self.results),
            "",
            *(f"- {note}" for note in self.notes),
            *([""] if self.notes else []),
            f"{self._machine()}.",
            "",
        ]
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """The table; it keeps its width where the terminal is narrower."""
        table = Table(title=self.title, title_justify="left", box=None, pad_edge=False)
        for number, column in enumerate(self.columns()):
            table.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in self.results:
            table.add_row(*(_text(row.get(each)) for each in self.columns()))
        wanted = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
        console.width = max(console.width, wanted)
        console.print(table, highlight=False)
        for note in self.notes:
            console.print(note, highlight=False, markup=False)
        console.print(self._machine(), style="dim", highlight=False, markup=False)

    def columns(self) -> list[str]:
        """Every key that a row has, in the order of their first use."""
        return list(dict.fromkeys(key for row in self.results for key in row))

    def _machine(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.machine.items())


def publish(report: Report, *, is_json: bool) -> None:
    """Prints the report on standard output."""
    if is_json:
        print(report.as_json())
    else:
        report.show(Console())


def rounded(value: float) -> float:
    """Three significant digits: more would be noise."""
    return float(f"{value:.3g}")


def _text(value: str | int | float | None) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)
