"""The hits of leaf-first LRU in a pool of any size, exactly, from one pass over a trace.

The stack of Mattson, Gecsei, Slutz and Traiger ("Evaluation techniques for storage hierarchies", 1970): an
LRU pool of n blocks holds the n used last, so a block is a hit in just those pools that are at least as large
as its depth in the order of last use. Leaf-first LRU is plain LRU over chains touched from the leaf to the
root: an ancestor is always younger than its descendants, which so are evicted first.

The pass counts by requests, not by blocks. A block belongs to the request that had it last; of that request's
chain later ones have taken a part from the root on, so what still belongs to it is a tail of the chain, and
its blocks lie one behind the other in the stack.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from umbp.sim.segments import segments
from umbp.sim.trace import Trace


def lru_curve(trace: Trace) -> npt.NDArray[np.int64]:
    """Hits in a pool of n blocks, for n from 0 to the trace's number of different blocks."""
    size = trace.block_count
    more = np.zeros(
        size + 2, dtype=np.int64
    )  # changes, from n to n + 1, of how many references have a depth of n
    last = np.full(size, -1, dtype=np.int64)
    younger = _Sums(len(trace.requests))
    owned = 0
    for number, request in enumerate(trace.requests):
        for begin, end, owner in segments(last[request.blocks]):
            if owner < 0:
                continue
            # The chain up to here lay above too; this loop has just taken it away.
            above = begin + owned - younger.up_to(owner)
            more[above + 1] += 1
            more[above + 1 + end - begin] -= 1
            younger.add(owner, begin - end)
            owned -= end - begin
        last[request.blocks] = number
        younger.add(number, len(request.blocks))
        owned += len(request.blocks)
    return np.cumsum(np.cumsum(more))[: size + 1]


class _Sums:
    """How many blocks belong to the first n requests (a Fenwick tree)."""

    def __init__(self, size: int) -> None:
        self._tree = [0] * (size + 1)

    def add(self, at: int, count: int) -> None:
        at += 1
        while at < len(self._tree):
            self._tree[at] += count
            at += at & -at

    def up_to(self, at: int) -> int:
        """Including `at`."""
        total, at = 0, at + 1
        while at:
            total += self._tree[at]
            at -= at & -at
        return total
