"""Writes the table of options into README.md, between its markers; `make format` runs it.

With --check it changes nothing, and exits with 1 where the table isn't the current one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from umbp.options import markdown_table

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- options -->", "<!-- /options -->"


def updated(text: str) -> str:
    """The README with the current table; as it is where it lacks the markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{markdown_table()}{end}{after}" if end else text


if __name__ == "__main__":
    old = README.read_text() if README.exists() else ""
    new = updated(old)
    if "--check" in sys.argv[1:]:
        sys.exit(old != new and "README.md has an old table of options: run `make format`")
    if old != new:
        README.write_text(new)
