"""The node pool's own figures, as `umbp bench` measures them, without an engine; beside Mooncake Store where
that is installed.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from umbp.cli.bench import copy, lookup, pool, store
from umbp.cli.bench.report import Report

RESULTS = Path(__file__).resolve().parent / "results"
ROUNDS = 15
SMALL_ROUNDS = 3


def copies(is_small: bool) -> int:
    """Blocks into the pool and out of it, against one memcpy."""
    rounds = SMALL_ROUNDS if is_small else ROUNDS
    objects = 16 if is_small else 256
    found = copy.measure(
        copy.SHAPES, objects=objects, threads=(1, 2), rounds=rounds, is_against_mooncake=not is_small
    )
    return _tell("copy", found, is_small)


def lookups(is_small: bool) -> int:
    """Stored keys looked up from another process, against a dict."""
    sizes = (10_000,) if is_small else (10_000, 1_000_000)
    found = lookup.measure(
        sizes,
        rounds=SMALL_ROUNDS if is_small else ROUNDS,
        others=2 if is_small else lookup.OTHERS,
        is_against_mooncake=not is_small,
    )
    return _tell("lookup", found, is_small)


def verbs(is_small: bool) -> int:
    """What storing and reading cost an object."""
    sizes = (5_000, 10_000) if is_small else (10_000, 1_000_000)
    return _tell("pool", pool.measure(sizes, rounds=SMALL_ROUNDS if is_small else ROUNDS), is_small)


def stores(is_small: bool) -> int:
    """Objects into a cluster store and back, against its own client; a sentence where there is none."""
    found = store.measure(
        store.SMALL_SHAPES if is_small else store.SHAPES,
        keys=store.SMALL_KEYS if is_small else store.KEYS,
        rounds=SMALL_ROUNDS if is_small else ROUNDS,
    )
    return _tell("store", found, is_small or not found.results)


def _tell(name: str, report: Report, is_small: bool) -> int:
    report.show(Console())
    if not is_small:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(report.as_markdown())
        (RESULTS / f"{name}.json").write_text(report.as_json() + "\n")
    return 0
