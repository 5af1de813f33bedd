"""A trace through a real pool: its own index, policy and verbs, objects of one page, time as recorded."""

from __future__ import annotations

from collections.abc import Callable

from umbp import _native
from umbp.pool import Outcome, Pool
from umbp.sim.trace import Trace

OBJECT_BYTES = 64
REPLAY_SEED = 1
"""Of the pool's hash, so that two replays of a trace are alike."""

PREFIX = "replay:"


def replay(trace: Trace, policy: str, pool_blocks: int, progress: Callable[[int], None] | None = None) -> int:
    """Full blocks found before the first miss, all requests together, in a pool of exactly so many blocks.

    Takes about 5 KiB of memory for each of the pool's blocks, `CapacityError` where there is less. A request
    is noted, looked up, stored and noted again at its own time; while room is made for it its own blocks
    stay. `progress` hears after each request how many are done.
    """
    keys = [number.to_bytes(8, "little") for number in range(trace.block_count)]
    slot = _native.slot_bytes(OBJECT_BYTES)
    hits = 0
    with Pool.create_memfd(
        pool_blocks * slot,
        slab_bytes=slot,
        min_object_bytes=OBJECT_BYTES,
        eviction_policy=policy,
        lock_patience_s=60.0,
        processes=1,
        hash_seed=REPLAY_SEED,
    ) as pool:
        space = pool.namespace("replay")
        for done, request in enumerate(trace.requests, start=1):
            chain = [keys[number] for number in request.blocks.tolist()]
            pool.set_time(request.time_s)
            hits += pool.match(PREFIX, chain)
            pool.note_raw(PREFIX, chain, "admit")
            if chain:
                tickets, outcomes = pool.reserve_raw(space, PREFIX, chain, OBJECT_BYTES, [None, *chain[:-1]])
                pool.publish(tickets[outcomes == Outcome.RESERVED])
            pool.note_raw(PREFIX, chain, "end", request.output_tokens, request.finish)
            if progress is not None:
                progress(done)
    return hits
