"""What of a planned step, and of its requests, the connector reads."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def scheduled_requests(output: SchedulerOutput, among: Container[str]) -> Iterable[tuple[str, int]]:
    """Of each of these requests that computes in this step: its id and how many tokens are computed after
    it.
    """
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        if new.req_id in among:
            yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in among:
            yield request_id, computed + scheduled[request_id]


def prompt_tokens(output: SchedulerOutput) -> int:
    """How many tokens the step computes beyond those that each of its requests would generate in it."""
    generated = len(output.num_scheduled_tokens)
    generated += sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return max(output.total_num_scheduled_tokens - generated, 0)


def begun_within_loads(output: SchedulerOutput) -> Mapping[str, int]:
    """Of a step that waits for loads: the requests that begin in it, with their tokens that are cached or
    loaded.
    """
    if not output.has_sync_kv_loads:
        return {}
    begun = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    resumed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    begun.update((one, tokens) for one, tokens in resumed if one in cached.resumed_req_ids)
    return begun


def taken_blocks(output: SchedulerOutput, block_tokens: int) -> tuple[int, int]:
    """How many free blocks this step's requests took at most, and how many of those hold nothing computed or
    loaded yet: the others were hits of the engine's own cache, or a load's.
    """
    taken = fresh = 0
    for new in output.scheduled_new_reqs:
        taken += len(new.block_ids[0])
        fresh += len(new.block_ids[0]) - new.num_computed_tokens // block_tokens
    more = sum(len(ids[0]) for ids in output.scheduled_cached_reqs.new_block_ids if ids is not None)
    return taken + more, fresh + more


def preempted_requests(output: SchedulerOutput) -> Iterable[str]:
    """Ids of the requests that lost their blocks since the last step."""
    return output.preempted_req_ids or ()


def block_tables(output: SchedulerOutput, request_id: str) -> tuple[list[int], ...] | None:
    """A scheduled request's current block ids by cache group, exact also after a resume."""
    state = output.kv_connector_block_state
    return None if state is None else state.get_block_ids(request_id)


def straighten_copies(output: SchedulerOutput) -> None:
    """Make every block that this step copies come from where its content is before the step.

    A hit that ends inside a block gets a copy of it, and the copy may be the next request's hit in the same
    step. vLLM's workers copy all at once: the next would get what the first copy's block held before.
    """
    copies = output.kv_cache_block_copies
    if not copies:
        return
    origins: dict[int, int] = {}
    for place, copy in enumerate(copies):
        origin = origins.get(copy.src_block_id, copy.src_block_id)
        origins[copy.dst_block_id] = origin
        if origin != copy.src_block_id:
            copies[place] = copy._replace(src_block_id=origin)


def offered_states(output: SchedulerOutput, request_id: str) -> Sequence[tuple[int, int, int]]:
    """Blocks with a request's state at a block's end, as `(group, block id, tokens)`. They hold it once this
    step has run, and belong to others later: whoever wants one pins it now.
    """
    state = output.kv_connector_block_state
    return () if state is None else state.boundary_state_offloads.get(request_id, ())


def transfer_params(request: Request) -> object:
    """What a client has sent along for connectors; anything."""
    return getattr(request, "kv_transfer_params", None)


def is_running(request: Request) -> bool:
    """Whether it computes whenever there is room in a step; also one that begins in the step that is being
    planned.
    """
    return request.status is RequestStatus.RUNNING


def reads_prefix_cache(request: Request) -> bool:
    """Whether this request may be served from cached prefixes at all."""
    return not getattr(request, "skip_reading_prefix_cache", False)
