"""What values an option takes: a small class for each kind, sizes with units, how a user's value is shown."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from typing import Protocol

PAGE_BYTES = 4096

_UNITS = {"B": 1}
_UNITS |= {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", start=1)}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGTP", start=1)}


class Kind(Protocol):
    """One kind of value. `parse` raises `ValueError`: what to write instead, without the option's name."""

    def parse(self, value: object) -> object: ...

    def hint(self) -> str:
        """The values in a few words."""
        ...


@dataclass(frozen=True, slots=True)
class Flag:
    """`true` or `false`; with `auto`, also the text "auto", which parses to `None`."""

    auto: bool = False

    def parse(self, value: object) -> bool | None:
        if isinstance(value, bool):
            return value
        if self.auto and value == "auto":
            return None
        raise ValueError(f"must be {self.hint()}, not {shown(value)}")

    def hint(self) -> str:
        return 'true, false or "auto"' if self.auto else "true or false"


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number in `[low, high]`; where there is a `word`, also that text, which parses to `None`."""

    low: int
    high: int
    unit: str
    word: str | None = None

    def parse(self, value: object) -> int | None:
        if self.word is not None and value == self.word:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise ValueError(f"must be {self.hint()}, not {shown(value)}")
        return value

    def hint(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        word = f' or "{self.word}"' if self.word else ""
        return f"a whole number from {self.low} to {self.high}{unit}{word}"


@dataclass(frozen=True, slots=True)
class Share:
    """A number above 0 and up to 1."""

    def parse(self, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise ValueError(f"must be {self.hint()}, not {shown(value)}")
        return float(value)

    def hint(self) -> str:
        return "a number above 0 and up to 1"


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes, from one page to 1 PiB: a whole number, or text with a unit."""

    low: int = PAGE_BYTES
    high: int = 1024**5

    def parse(self, value: object) -> int:
        size = parse_size(value)
        if not self.low <= size <= self.high:
            bounds = f"{format_size(self.low)} to {format_size(self.high)}"
            raise ValueError(f"must be from {bounds}, not {shown(value)}")
        return size

    def hint(self) -> str:
        return 'bytes, or text such as "64GiB"'


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words."""

    words: tuple[str, ...]

    def parse(self, value: object) -> str:
        if isinstance(value, str) and value in self.words:
            return value
        raise ValueError(f"must be {self.hint()}, not {shown(value)}{nearest(value, self.words)}")

    def hint(self) -> str:
        return " or ".join([", ".join(self.words[:-1]), self.words[-1]])


@dataclass(frozen=True, slots=True)
class Text:
    """Printable text that isn't blank and matches the whole pattern; `word` parses to `None`.

    `most_bytes` bounds its UTF-8.
    """

    what: str
    pattern: str = r".*\S.*"
    word: str | None = None
    most_bytes: int = 4096

    def parse(self, value: object) -> str | None:
        if (
            not isinstance(value, str)
            or not value.isprintable()
            or not re.fullmatch(self.pattern, value)
            or len(value.encode()) > self.most_bytes
        ):
            length = f" of {len(value)} characters" if isinstance(value, str) and len(value) > 80 else ""
            raise ValueError(f"must be {self.what}, not {shown(value)}{length}")
        return None if value == self.word else value

    def hint(self) -> str:
        return self.what


@dataclass(frozen=True, slots=True)
class Table:
    """A JSON object, copied; what is in it belongs to someone else, who checks it."""

    def parse(self, value: object) -> dict[str, object]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"must be {self.hint()}, not {shown(value)}")
        return copy.deepcopy(dict(value))

    def hint(self) -> str:
        return "a JSON object"


def parse_size(value: object) -> int:
    """Bytes from a whole number or from text with a unit; `ValueError` says what to write instead."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = None
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]+)", value)
    if match is None and isinstance(value, str) and re.fullmatch(r"[0-9]{1,20}", value):
        raise ValueError(
            f'has no unit in {shown(value)}; drop the quotes for bytes, or add a unit such as "{value}MiB"'
        )
    if match is None:
        raise ValueError(f'must be a whole number of bytes or text such as "64GiB", not {shown(value)}')
    number, unit = match.groups()
    if unit not in _UNITS:
        meant = [known for known in _UNITS if known.lower() in (unit.lower(), f"{unit}ib".lower())]
        raise ValueError(f"has no unit {shown(unit)} in {shown(value)}; write {', '.join(meant or _UNITS)}")
    return int(Decimal(number) * _UNITS[unit])


def format_size(size_bytes: int) -> str:
    """A size for people; `parse_size` reads it back wherever two decimals suffice."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, 5)
    text = f"{size_bytes / 1024**power:.2f}".rstrip("0").rstrip(".")
    return f"{text} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[power]}"


def nearest(value: object, words: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing where nothing is near. Case doesn't count."""
    by_lower = {word.lower(): word for word in words}
    found = get_close_matches(value.lower(), by_lower, n=1) if isinstance(value, str) else []
    return f"; did you mean '{by_lower[found[0]]}'?" if found else ""


def shown(value: object) -> str:
    """A user's value on one short line, whatever it is, by the names that JSON has for things."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, str):
        return repr(value if len(value) <= 80 else value[:77] + "...")
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "an array"
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
