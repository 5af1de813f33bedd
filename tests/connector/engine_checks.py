"""What must hold in every life of an engine: after each act, and when it has been drained.

That every byte is right that a forward reads, and that nobody writes what nobody owns, the scripted engine
checks in each of its steps.
"""

from __future__ import annotations

from engine_life import EngineLife
from vllm.v1.request import Request, RequestStatus

from umbp.connector import compat
from umbp.testing.reference import ReferenceRuntime


def check_accounts(life: EngineLife) -> None:
    """At any time: the books of pool and connector are even, and no load has ended that wasn't begun."""
    life.pool.audit()
    life.engine.connector.scheduler_side.audit()
    for rank, reports in enumerate(life.engine.reports):
        assert reports <= life.engine.loads, f"rank {rank} reported {reports} of {life.engine.loads}"


def check_drained(life: EngineLife) -> None:
    """After the drain: what runtimes and engine have is what they should have."""
    life.engine.check_drained()
    may_leave = life.nature.is_faulty or life.nature.is_mortal
    life.pool.check_unpinned(is_reserved=may_leave)
    if life.shape.tells_events and not life.nature.is_mortal:
        _check_events(life)
    for request in life.engine.finished.values():
        _check_end(life, request)
    _check_counters(life)


def _check_counters(life: EngineLife) -> None:
    """Whatever was admitted has been loaded or has failed, once."""
    count = life.engine.count
    ended = count("loaded_tokens") + count("reloaded_tokens") + count("failed_load_tokens")
    assert ended == life.admitted_tokens
    assert count("hit_tokens") <= life.admitted_tokens


def _check_end(life: EngineLife, request: Request) -> None:
    if request.status == RequestStatus.FINISHED_ERROR:
        assert life.shape.policy == "fail"
    elif request.status != RequestStatus.FINISHED_ABORTED and request.request_id not in life.sessions:
        assert request.num_output_tokens == request.max_tokens


def _check_events(life: EngineLife) -> None:
    """Replayed, the events are what every rank has."""
    side = life.engine.connector.scheduler_side
    if side._events is None:
        return
    life.engine.step()
    told = {
        (group_id, block_hash) for group_id, hashes in side._events._told.items() for block_hash in hashes
    }
    assert len(told) == len(life.engine.events.stored)
    for group_id, block_hash in told:
        assert (group_id, compat.outside_hash(block_hash)) in life.engine.events.stored
        assert _is_loadable(life, group_id, block_hash), "it is told, and can't be loaded"
    if isinstance(inner := life.pool._inner, ReferenceRuntime):
        names = [key.rpartition(":") for key in inner.shelf.objects]
        kept = {(int(head.rpartition(":g")[2]), bytes.fromhex(digest)) for head, _, digest in names}
        assert told == {one for one in kept if _is_loadable(life, *one)}, "what can be loaded isn't told"


def _is_loadable(life: EngineLife, group_id: int, block_hash: bytes) -> bool:
    """By the pool's own word, which no fault stands before."""
    handles = [handle for handle in life.pool.handles if hasattr(handle, "present_raw")]
    stages = life.engine.connector.scheduler_side._pool._stages
    return all(
        handle.present_raw(group_id, [block_hash])[0]
        for handle, stage in zip(handles, stages, strict=True)
        if stage.keeps(group_id)
    )
