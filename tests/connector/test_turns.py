"""The turns of vLLM's scheduler, on engines with one cache group and with several.

`ScriptedEngine` checks every byte of every request in every step, on vLLM's own scheduler; a test here says
what must have been stored and restored after a turn.
"""

from __future__ import annotations

from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import PickyRuntime, WatchedRuntime, slowly
from vllm.v1.request import Request, RequestStatus

from umbp.testing.clock import TickClock
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

FULL = Layers("full", 1)
LAYERS = {
    "one group": (Layers(),),
    "windows": (FULL, Layers("sliding", 2, 40)),
    "states": (FULL, Layers("mamba", 2)),
    "wide blocks": (FULL, Layers("sliding", 2, 40, head_size=2)),
}
KINDS = pytest.mark.parametrize("kind", ["one group", "windows", "states"])
HYBRIDS = pytest.mark.parametrize("kind", ["windows", "states"])
ALL_KINDS = pytest.mark.parametrize("kind", LAYERS)


def reused_by(engine: ScriptedEngine, prompt: list[int], max_tokens: int = 1) -> int:
    """How many tokens of a prompt need not be computed, whoever has kept them."""
    before = engine.reused_tokens
    engine.run(prompt, max_tokens)
    return engine.reused_tokens - before


def own_and_restored(engine: ScriptedEngine, prompt: list[int]) -> tuple[int, int]:
    """What the engine's own hit has of a prompt that it has just served, and what is restored without it."""
    own = reused_by(engine, prompt)
    engine.forget_prefixes()
    before = engine.restored_tokens()
    assert reused_by(engine, prompt) == engine.restored_tokens() - before
    return own, engine.restored_tokens() - before


# Lengths, chunks, hashes


@ALL_KINDS
def test_around_the_edges_of_blocks_as_much_is_restored_as_the_engine_itself_would_find(
    make_engine: Any, kind: str
) -> None:
    engine = make_engine(ReferenceRuntime(), layers=LAYERS[kind], max_model_len=512)
    edges = [count * BLOCK + more for count in (1, 2, 4, 7) for more in (-1, 0, 1)]
    for seed, length in enumerate([1, 2, *edges, 5 * BLOCK + 7]):
        engine.run(tokens(length, seed))
        own, restored = own_and_restored(engine, tokens(length, seed))
        assert restored == own, f"of {length} tokens"
    assert engine.count("failed_load_tokens") == 0
    engine.check_drained()


@HYBRIDS
@pytest.mark.parametrize("chunk", [BLOCK + 3, 2 * BLOCK, 200])
def test_whatever_the_chunks_all_of_a_prompt_is_stored(make_engine: Any, kind: str, chunk: int) -> None:
    engine = make_engine(ReferenceRuntime(), layers=LAYERS[kind], max_batched_tokens=chunk)
    for length in (9 * BLOCK + 2, 12 * BLOCK + 9):
        engine.run(tokens(length, length))
        engine.forget_prefixes()
        assert reused_by(engine, tokens(length, length)) == length // BLOCK * BLOCK
    engine.check_drained()


@pytest.mark.parametrize("kind", ["one group", "windows"])
@pytest.mark.parametrize("drafter", ["mtp", "eagle"])
def test_chunks_with_look_ahead_leave_a_contiguous_prefix(make_engine: Any, kind: str, drafter: str) -> None:
    """The drafter reads ahead of a chunk's end, so the last tokens of every chunk may be computed anew."""
    pool = ReferenceRuntime()
    for chunk in (BLOCK, BLOCK + 1, 2 * BLOCK - 1, 40):
        shape = {"layers": LAYERS[kind], "drafts": 3, "drafter": drafter, "max_batched_tokens": chunk}
        engine = make_engine(pool, max_seqs=2, **shape)
        for seed, length in enumerate((chunk + 1, chunk + 2, 3 * BLOCK + 2, 6 * BLOCK + 1), 10 * chunk):
            engine.run(tokens(length, seed), 6)
            own, restored = own_and_restored(engine, tokens(length, seed))
            assert restored == own, f"of {length} tokens in chunks of {chunk}"
        engine.check_drained()


@pytest.mark.parametrize("other", ["sliding", "mamba"])
def test_hashes_finer_than_blocks_restore_as_much_as_the_engine_itself_would_find(
    make_engine: Any, other: str
) -> None:
    """vLLM's own hit may end within a block then, if it has states; a longer one of the pool takes its
    place.
    """
    wide = 2 * BLOCK
    unit = BLOCK if other == "mamba" else wide
    layers = (Layers("full", 1, block_tokens=wide), Layers(other, 2, 40, block_tokens=wide))
    engine = make_engine(ReferenceRuntime(), layers=layers, match_tokens=BLOCK, max_model_len=512)
    assert engine.connector.scheduler_side._shape.hash_tokens == BLOCK
    for seed, length in enumerate([wide, wide + 1, wide + BLOCK + 1, 3 * wide + BLOCK, 5 * wide + 3]):
        engine.run(tokens(length, seed))
        own, restored = own_and_restored(engine, tokens(length, seed))
        assert restored == own == (length - 1) // unit * unit, f"of {length} tokens"
        engine.run(tokens(6 * wide, seed))
        engine.forget_prefixes()
        engine.run(tokens(length, seed))
        engine.run(tokens(6 * wide, seed))
    engine.check_drained()


@pytest.mark.parametrize("kind", ["windows", "wide blocks"])
def test_windows_restore_without_the_engines_own_prefix_cache(make_engine: Any, kind: str) -> None:
    engine = make_engine(ReferenceRuntime(), layers=LAYERS[kind], prefix_caching=False)
    engine.run(tokens(100), 3)
    engine.run(tokens(100), 3)
    assert engine.restored_tokens() == 96
    engine.check_drained()


# Output


@ALL_KINDS
def test_save_decode_cache_stores_what_was_generated(make_engine: Any, kind: str) -> None:
    engine = make_engine(ReferenceRuntime(), {"save_decode_cache": True}, layers=LAYERS[kind])
    request = engine.run(tokens(2 * BLOCK + 5), 5 * BLOCK)
    engine.forget_prefixes()
    # vLLM keeps no state of what was generated: such a model's hits end where the prompt did.
    blocks = {"states": 2, "wide blocks": 6}.get(kind, 7)
    assert reused_by(engine, [*request.all_token_ids]) == blocks * BLOCK
    engine.check_drained()


@KINDS
@pytest.mark.parametrize(("saves", "depth"), [(False, 1), (False, 2), (True, 1)])
def test_a_request_that_ends_in_the_step_that_fills_its_last_block_has_it_stored(
    make_engine: Any, kind: str, saves: bool, depth: int
) -> None:
    shape = {"layers": LAYERS[kind], "depth": depth}
    engine = make_engine(ReferenceRuntime(), {"save_decode_cache": saves}, **shape)
    if saves:
        request = engine.run(tokens(2 * BLOCK + 5), 2 * BLOCK - 4)
        assert request.num_tokens == 4 * BLOCK + 1, "the last token is sampled and not computed"
    else:
        request = engine.run(tokens(4 * BLOCK), 1)
    longer = [*request.all_token_ids, *tokens(20, 9)]
    engine.forget_prefixes()
    # A state stays where the engine's own hit of the prompt would end, and none of what was generated.
    blocks = 4 if kind != "states" else 2 if saves else 3
    assert reused_by(engine, longer) == blocks * BLOCK
    engine.check_drained()


# Preemption


@KINDS
@pytest.mark.parametrize(("runner", "depth"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_preempted_requests_resume_in_the_form_of_either_runner(
    make_engine: Any, kind: str, runner: int, depth: int
) -> None:
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(
        pool,
        {"save_decode_cache": True},
        layers=LAYERS[kind],
        blocks=20 if kind == "one group" else 30,
        max_model_len=128,
        runner=runner,
        depth=depth,
    )
    prompts = [tokens(60, seed) for seed in range(3)]
    alone = [list(engine.run(prompt, 60).output_token_ids) for prompt in prompts]
    engine.forget_prefixes()
    together = [engine.add(prompt, 60) for prompt in prompts]
    engine.drain(1000)
    assert sum(request.num_preemptions for request in together) > 0
    assert [list(request.output_token_ids) for request in together] == alone
    assert engine.restored_tokens() > 0
    engine.check_drained()
    pool.check_unpinned()


@pytest.mark.parametrize("runner", [1, 2])
def test_a_resumed_request_loads_within_its_step_in_either_runner(make_engine: Any, runner: int) -> None:
    engine = make_engine(
        ReferenceRuntime(), {"load_async": False, "save_decode_cache": True}, blocks=20, runner=runner
    )
    together = [engine.add(tokens(80, seed), 60) for seed in range(3)]
    engine.drain(1000)
    assert sum(request.num_preemptions for request in together) > 0
    assert engine.restored_tokens() > 0
    engine.check_drained()


@KINDS
def test_an_important_late_request_takes_blocks_from_one_whose_stores_are_under_way(
    make_engine: Any, kind: str
) -> None:
    clock = TickClock()
    engine = make_engine(
        slowly(ReferenceRuntime(), clock, store=1.0),
        layers=LAYERS[kind],
        order="priority",
        blocks=20 if kind == "one group" else 34,
    )
    humble = engine.add(tokens(150, 1), 90, priority=9)
    for _ in range(4):
        engine.step()
    assert engine.connector.has_pending_push_work()
    important = engine.add(tokens(100, 2), 120, priority=0)
    while not humble.num_preemptions:
        engine.step()
    assert engine.connector.has_pending_push_work(), "it lost its blocks while they are stored"
    engine.between = lambda: clock.advance(0.1)
    engine.drain(1000)
    assert engine.finished.keys() == {important.request_id, humble.request_id}
    engine.check_drained()


@KINDS
def test_an_important_late_request_overtakes_one_that_loads(make_engine: Any, kind: str) -> None:
    clock = TickClock()
    engine = make_engine(
        slowly(ReferenceRuntime(), clock, load=1.0), layers=LAYERS[kind], order="priority", blocks=80
    )
    engine.run(tokens(150))
    engine.forget_prefixes()
    humble = engine.add(tokens(150), 3, priority=9)
    engine.step()
    assert humble.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    important = engine.add(tokens(60, 2), 3, priority=0)
    for _ in range(5):
        engine.step()
    assert important.request_id in engine.finished
    assert humble.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    clock.advance(1.0)
    engine.drain()
    assert engine.restored_tokens() == 144
    engine.check_drained()


# Aborts

MOMENTS = ["before", "promised", "loading", "landing", "landed", "running", "in the step", "ending"]


def brought_to(engine: ScriptedEngine, clock: TickClock, moment: str) -> Request:
    """A request of two output tokens at that moment of its life."""
    if moment == "promised":
        engine.add(tokens(180, 3), 40)
        for _ in range(4):
            engine.step()
    request = engine.add(tokens(150), 2)
    if moment == "before":
        return request
    engine.step()
    if moment == "promised":
        assert request.status == RequestStatus.WAITING, "there are no blocks for it"
        return request
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    if moment == "loading":
        return request
    clock.advance(1.0)
    if moment == "landing":
        return request
    engine.step()
    if moment == "landed":
        return request
    engine.step()
    if moment != "running":
        while moment == "ending" and request.num_output_tokens < 1:
            engine.step()
        engine.between = lambda: engine.abort(request.request_id)
        engine.step()
        engine.between = lambda: None
    return request


@KINDS
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_abort_at_any_moment_leaves_nothing_behind(make_engine: Any, kind: str, moment: str) -> None:
    clock = TickClock()
    pool = WatchedRuntime(ReferenceRuntime())
    blocks = {"one group": 20, "windows": 34, "states": 24}[kind]
    engine = make_engine(slowly(pool, clock, load=1.0), layers=LAYERS[kind], blocks=blocks)
    engine.run(tokens(150))
    engine.forget_prefixes()
    request = brought_to(engine, clock, moment)
    engine.abort(request.request_id)
    engine.between = lambda: clock.advance(0.4)
    engine.drain()
    assert request.status == RequestStatus.FINISHED_ABORTED
    engine.check_drained()
    pool.check_unpinned()
    engine.forget_prefixes()
    assert reused_by(engine, tokens(150)) == 144
    engine.check_drained()


# Steps without tokens


@KINDS
def test_a_step_without_tokens_begins_and_ends_loads(make_engine: Any, kind: str) -> None:
    clock = TickClock()
    engine = make_engine(slowly(ReferenceRuntime(), clock, load=1.0), layers=LAYERS[kind])
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = engine.add(tokens(100))
    for _ in range(3):
        assert not engine.step().num_scheduled_tokens
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    clock.advance(1.0)
    assert not engine.step().num_scheduled_tokens
    assert engine.restored_tokens() == 96
    assert engine.step().num_scheduled_tokens == {request.request_id: 4}
    engine.drain()
    engine.check_drained()


@KINDS
def test_a_step_without_tokens_ends_stores(make_engine: Any, kind: str) -> None:
    clock = TickClock()
    engine = make_engine(slowly(ReferenceRuntime(), clock, store=1.0), layers=LAYERS[kind])
    request = engine.add(tokens(60))
    while not request.is_finished():
        engine.step()
    assert engine.count("stored_tokens") == 0
    clock.advance(1.0)
    assert not engine.step().num_scheduled_tokens
    assert engine.count("stored_tokens") == 48
    engine.drain()
    engine.check_drained()


# Loads that fail or last


@HYBRIDS
@pytest.mark.parametrize("place", [0, 7])
def test_a_block_that_one_rank_lost_costs_the_load_once_and_the_rest_goes_on(
    make_engine: Any, kind: str, place: int
) -> None:
    """In several groups the engine drops the whole load: of use to it is a hit or nothing."""
    pool = WatchedRuntime(ReferenceRuntime())
    runtime = PickyRuntime(pool, lambda rank, index, key: rank == 1 and index == place)
    engine = make_engine(runtime, layers=LAYERS[kind], ranks=2)
    cold = list(engine.run(tokens(150), 6).output_token_ids)
    engine.forget_prefixes()
    request, other = engine.add(tokens(150), 6), engine.add(tokens(50, 5), 6)
    assert engine.drain() < 30
    assert list(request.output_token_ids) == cold
    assert other.request_id in engine.finished
    assert len(runtime.loads) == 1, "a load that failed is not tried again for its request"
    assert engine.count("failed_load_requests") == 1
    assert (engine.count("failed_load_tokens"), engine.restored_tokens()) == (144, 0)
    engine.check_drained()
    pool.check_unpinned()


@HYBRIDS
def test_a_slow_load_serialises_nobody_with_the_same_prefix(make_engine: Any, kind: str) -> None:
    clock = TickClock()
    engine = make_engine(slowly(ReferenceRuntime(), clock, load=1.0), layers=LAYERS[kind], blocks=100)
    engine.run(tokens(100))
    engine.forget_prefixes()
    slow, same = engine.add(tokens(100), 2), engine.add(tokens(100), 2)
    unrelated = engine.add(tokens(50, 7))
    for _ in range(4):
        engine.step()
    assert unrelated.request_id in engine.finished
    for request in (slow, same):
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    clock.advance(1.0)
    engine.drain()
    assert engine.restored_tokens() == 2 * 96
    engine.check_drained()


@KINDS
def test_a_request_that_is_preempted_in_its_last_step_ends_all_the_same(make_engine: Any, kind: str) -> None:
    """Its blocks go while its last token is under way."""
    clock = TickClock()
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(slowly(pool, clock, store=1.0), layers=LAYERS[kind], depth=2)
    request = engine.add(tokens(100), 3)
    while request.num_output_tokens < 2:
        engine.step()

    def preempt() -> None:
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
        engine.between = lambda: None

    engine.between = preempt
    engine.step()
    assert request.is_finished()
    assert request.num_preemptions == 1
    engine.between = lambda: clock.advance(0.5)
    engine.drain()
    engine.check_drained()
    pool.check_unpinned()
    engine.forget_prefixes()
    assert reused_by(engine, tokens(100)) == 96
