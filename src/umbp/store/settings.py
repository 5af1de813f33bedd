"""What a store reads from the option `store_options`: a frozen dataclass for each store, whose fields are its
settings.

As with `umbp.options`, a field's metadata is its row: kind, meaning, whether it must be given. The parser and
the tables of docs/stores.md are made from these rows, and the rules are as strict: an unknown name is an
error that gives the nearest right one, and `null` is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from umbp.errors import ConfigError
from umbp.kinds import Kind, Size, format_size, nearest, shown

Settings = TypeVar("Settings")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row; `default` is said in words where the field's own value doesn't tell."""

    kind: Kind
    meaning: str
    default: str = ""
    is_required: bool = False
    excludes: str | None = None


def setting(value: Any, kind: Kind, meaning: str, **row: Any) -> Any:
    """A field with its row."""
    return field(default=value, metadata={"setting": Setting(kind, meaning, **row)})


def rows_of(settings: type) -> dict[str, Setting]:
    """The rows of a store, by name, in order."""
    return {each.name: each.metadata["setting"] for each in fields(settings)}


def read_settings(settings: type[Settings], store: str, given: Mapping[str, object]) -> Settings:
    """Checks `store_options` for this store; `ConfigError` of one sentence says what to write instead."""
    rows = rows_of(settings)
    values: dict[str, object] = {}
    for name, value in given.items():
        if name not in rows:
            hint = nearest(name, rows) or f"; there are {', '.join(rows)}"
            raise ConfigError(f"store {store!r} has no option {shown(name)} in 'store_options'{hint}")
        try:
            values[name] = rows[name].kind.parse(value)
        except ValueError as error:
            raise ConfigError(f"option '{name}' in 'store_options' {error}") from None
    if missing := [name for name, row in rows.items() if row.is_required and name not in given]:
        wanted = ", ".join(f"'{name}' ({rows[name].kind.hint()})" for name in missing)
        raise ConfigError(f"store {store!r} needs {wanted} in 'store_options'")
    for name in given:
        rival = rows[name].excludes
        if rival in given:
            raise ConfigError(
                f"options '{name}' and '{rival}' in 'store_options' exclude each other; write one of them"
            )
    return settings(**values)


def markdown_table(settings: type) -> str:
    """The table of docs/stores.md."""
    lines = ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for each in fields(settings):
        row: Setting = each.metadata["setting"]
        default = row.default or _in_words(row.kind, each.default)
        meaning = row.meaning + (f"; not together with `{row.excludes}`" if row.excludes else "")
        meaning += "; must be given" if row.is_required else ""
        lines.append(f"| `{each.name}` | {row.kind.hint()} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _in_words(kind: Kind, value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(kind, Size) and isinstance(value, int):
        return format_size(value)
    return value if isinstance(value, str) else json.dumps(value)
