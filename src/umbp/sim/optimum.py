"""The most hits that any pool of a size could have had, knowing the future.

A block kept from one use to the next takes room in between and gives one hit: choosing which to keep is
interval scheduling on as many machines as the pool has blocks, for which it is optimal to give up the
interval that ends last whenever there are too many (Faigle and Nawijn, "Note on scheduling intervals
on-line", 1995; for caches the rule of Belady, with the right not to store). An ancestor is never used later
than its descendant, so with ties broken by depth the blocks that stay always make whole prefixes, and the
bound is reached by a pool that serves prefixes alone.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from umbp.sim.segments import segments
from umbp.sim.trace import Trace


def next_uses(trace: Trace) -> list[list[tuple[int, int]]]:
    """For each request, the runs of its chain that are used next by one and the same later request: its
    number and the run's length. What is never used again is left out.
    """
    coming = np.full(trace.block_count, -1, dtype=np.int64)
    found: list[list[tuple[int, int]]] = []
    for number in reversed(range(len(trace.requests))):
        blocks = trace.requests[number].blocks
        found.append([(user, end - begin) for begin, end, user in segments(coming[blocks]) if user >= 0])
        coming[blocks] = number
    found.reverse()
    return found


def optimal_hits(uses: list[list[tuple[int, int]]], pool_blocks: int) -> int:
    """Hits in a pool of so many blocks; `uses` as from `next_uses`."""
    kept = [0] * len(uses)  # blocks in the pool, by the request that will use them
    latest: list[int] = []  # heap of those requests, the last first, as negative numbers
    stored = hits = 0
    for number, runs in enumerate(uses):
        hits += kept[number]
        stored -= kept[number]
        kept[number] = 0
        for user, count in runs:
            if kept[user] == 0:
                heappush(latest, -user)
            kept[user] += count
            stored += count
        while stored > pool_blocks:
            user = -latest[0]
            given_up = min(kept[user], stored - pool_blocks)
            kept[user] -= given_up
            stored -= given_up
            if kept[user] == 0:
                heappop(latest)
    return hits
