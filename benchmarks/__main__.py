"""`python -m benchmarks [--small] [name ...]`: the benchmarks, as ratios measured in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from benchmarks import contention, hybrid_hits, node_pool, short_hits, side_by_side

BENCHMARKS: dict[str, Callable[[bool], int]] = {
    "contention": contention.run,
    "copy": node_pool.copies,
    "hybrid_hits": hybrid_hits.run,
    "lookup": node_pool.lookups,
    "pool": node_pool.verbs,
    "side_by_side": side_by_side.run,
    "short_hits": short_hits.run,
    "store": node_pool.stores,
}
"""Name -> what runs it, small or not; it returns the exit code."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"which of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--small", action="store_true", help="short runs, which write no results")
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark is named {unknown[0]}; there are: {', '.join(BENCHMARKS)}")
    return max([BENCHMARKS[name](chosen.small) for name in chosen.names or BENCHMARKS])


if __name__ == "__main__":
    sys.exit(main())
