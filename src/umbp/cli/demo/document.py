"""The demo's reading matter: one long document and what is asked about it, and other texts that push it out.

All of it is package data, so that an installed wheel reads the same text as a checkout. Nothing here needs an
engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

SYSTEM = "Answer briefly."
QUESTION = "Which license is in this document?"
FILLER_QUESTION = "What is this text about?"
TITLE = "the Apache License, Version 2.0, followed by a text about KV caches."
FILLERS = 4
FILLER_CHARACTERS = 5_000
_LICENCE = "apache-2.0.txt"
_GUIDE = "kept-prefixes.txt"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message; two prompts share cached blocks only as far as their texts begin alike."""

    name: str
    text: str


def _read(name: str) -> str:
    return (resources.files(__package__) / "text" / name).read_text(encoding="utf-8")


def long_document(edition: int) -> Prompt:
    """The document with the question; every edition has a first line of its own, hence no block in common."""
    return Prompt(f"document {edition}", _document(f"Edition {edition}: {TITLE}"))


def changed_document(edition: int) -> Prompt:
    """The same edition with one early word changed: nothing of the original may be used for it."""
    return Prompt(f"document {edition}, one word changed", _document(f"Reprint {edition}: {TITLE}"))


def _document(first_line: str) -> str:
    return f"{first_line}\n\n{_read(_LICENCE)}\n\n{_read(_GUIDE)}\n\n{QUESTION}"


def fillers(edition: int) -> list[Prompt]:
    """Other prompts, no two with a common beginning, together longer than the engine's memory."""
    paragraphs = [
        part.strip() for name in (_GUIDE, _LICENCE) for part in _read(name).split("\n\n") if part.strip()
    ]
    prompts = []
    for number in range(FILLERS):
        start = number * len(paragraphs) // FILLERS
        body = f"Excerpt {number + 1} from edition {edition}."
        for paragraph in paragraphs[start:] + paragraphs[:start]:
            if len(body) >= FILLER_CHARACTERS:
                break
            body += f"\n\n{paragraph}"
        prompts.append(Prompt(f"filler {edition}.{number + 1}", f"{body}\n\n{FILLER_QUESTION}"))
    return prompts
