"""Replayed into a set, the KV events are what can be loaded, whenever the engine is quiet."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import WatchedRuntime, plain
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.request import Request

from seeds import seeds
from umbp.connector.groups import CacheGroup
from umbp.connector.scheduler.block_book import BlockBook
from umbp.connector.scheduler.pool_view import PoolView
from umbp.errors import InvariantError
from umbp.options import parse_options
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

Blocks = set[tuple[int | None, int | bytes]]


def outside_name(block_hash: bytes) -> int | bytes:
    """A hash as events spell it."""
    return maybe_convert_block_hash(BlockHash(block_hash))


def outside(hashes: Sequence[bytes]) -> Blocks:
    """Blocks of group 0 as events name them."""
    return {(0, outside_name(block_hash)) for block_hash in hashes}


def handle_of(engine: ScriptedEngine) -> Any:
    (stage,) = engine.connector.scheduler_side._pool._stages
    return stage.handle


def loadable(engine: ScriptedEngine, hashes: Sequence[bytes]) -> Blocks:
    """Of these blocks, those that every rank has, by the runtime's own word."""
    there = handle_of(engine).present_raw(0, hashes)
    return outside([block for block, is_there in zip(hashes, there, strict=True) if is_there])


def told(engine: ScriptedEngine) -> Blocks:
    return set(engine.events.stored)


@pytest.fixture
def embedded_pool() -> Callable[[int], WatchedRuntime]:
    embedded = pytest.importorskip("umbp.runtime.embedded", reason="the native core isn't built")

    def make(objects: int) -> WatchedRuntime:
        options = parse_options({"capacity_bytes": objects * 4096, "num_workers": 1})
        return WatchedRuntime(embedded.EmbeddedRuntime(options))

    return make


def hashes_of(*requests: Request) -> list[bytes]:
    return list(dict.fromkeys(block for request in requests for block in request.block_hashes))


def silent(engine: ScriptedEngine) -> None:
    """One more step, which takes in what others have done meanwhile."""
    engine.step()


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_what_is_stored_is_told_with_its_tokens_behind_its_parent(
    make_pool: Any, make_engine: Any, ranks: int
) -> None:
    engine = make_engine(make_pool(), ranks=ranks, tells_events=True, max_batched_tokens=64)
    request = engine.run(tokens(100), 3)
    names = [maybe_convert_block_hash(block) for block in request.block_hashes]
    first, second = engine.events.events
    # The engine computes in chunks of 64 tokens.
    assert (first.block_hashes, first.parent_block_hash) == (names[:4], None)
    assert (second.block_hashes, second.parent_block_hash) == (names[4:6], names[3])
    assert first.token_ids == tokens(100)[:64]
    assert second.token_ids == tokens(100)[64:96]
    for event in (first, second):
        assert isinstance(event, BlockStored)
        assert (event.block_size, event.medium, event.group_idx) == (BLOCK, "CPU", 0)
        assert (event.lora_id, event.lora_name, event.extra_keys) == (None, None, None)
        assert (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window) == ("full_attention", None)
        assert event.locality == "LOCAL"


def test_what_else_a_hash_is_made_of_is_told_block_by_block(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), tells_events=True)
    engine.run(tokens(40), salt="pepper")
    (event,) = engine.events.events
    assert event.extra_keys == [("pepper",), None]


def test_an_adapters_blocks_are_told_with_its_number_and_name(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime(), tells_events=True)
    request = engine.make_request(tokens(40))
    request.lora_request = LoRARequest("tuned", 7, "/adapter")
    events = engine.connector.scheduler_side._events
    events.open(request)
    (place, *_) = events._book.find(request.block_hashes)
    event = events._stored(0, [(request.block_hashes[0], place)])
    assert (event.lora_id, event.lora_name, event.token_ids) == (7, "tuned", tokens(16))


class TestARuntimeThatTellsNonsense:
    """It costs events, never the engine."""

    @pytest.mark.parametrize("watched", [[], [True] * 1000, None])
    def test_of_what_is_watched(self, make_engine: Any, watched: Any) -> None:
        engine = make_engine(ReferenceRuntime(), tells_events=True)
        handle_of(engine).watch = lambda group_id, hashes: watched
        engine.run(tokens(100))
        assert not engine.events.events

    @pytest.mark.parametrize("lost", [[(9, b"x")], [(0, b"never told")], None])
    def test_of_what_is_lost(self, make_engine: Any, lost: Any) -> None:
        engine = make_engine(ReferenceRuntime(), tells_events=True)
        handle_of(engine).take_lost = lambda: lost
        request = engine.run(tokens(100))
        assert told(engine) == outside(request.block_hashes)


def test_nothing_is_told_twice_nor_again_when_it_is_restored(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), tells_events=True)
    request = engine.run(tokens(100))
    count = len(engine.events.events)
    for _ in range(2):
        engine.forget_prefixes()
        engine.run(tokens(100))
    assert engine.restored_tokens() == 2 * 96
    assert len(engine.events.events) == count
    assert told(engine) == outside(request.block_hashes)


def test_a_block_that_one_of_two_ranks_has_lost_is_told_as_removed_once(
    make_pool: Any, make_engine: Any
) -> None:
    engine = make_engine(make_pool(), ranks=2, tells_events=True)
    request = engine.run(tokens(100))
    hashes = list(request.block_hashes)
    codec = engine.connector.scheduler_side._pool.codec
    one_rank = codec.keys(hashes[2:4], rank=(1, 0, 0, 0))
    forget(engine, one_rank)
    silent(engine)
    (event,) = [event for event in engine.events.events if isinstance(event, BlockRemoved)]
    assert (event.medium, event.group_idx) == ("CPU", 0)
    assert outside(hashes[2:4]) == {(0, block_hash) for block_hash in event.block_hashes}
    forget(engine, codec.keys(hashes[2:4]))
    silent(engine)
    assert told(engine) == outside([*hashes[:2], *hashes[4:]]) == loadable(engine, hashes)
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert told(engine) == outside(hashes) == loadable(engine, hashes)


def forget(engine: ScriptedEngine, keys: Sequence[str]) -> None:
    """Somebody removes these objects."""
    handle = handle_of(engine)
    while hasattr(handle, "_inner"):
        handle = handle._inner
    if hasattr(handle, "_shelf"):
        for key in keys:
            handle._shelf.remove(key)
        return
    for pool in set(handle._binding.pools().values()):
        pool.remove(keys)


def test_a_clear_removes_all_of_it_and_nothing_of_the_engines_own(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), ranks=2, tells_events=True)
    engine.run(tokens(100))
    assert engine.change_weights()
    request = engine.run(tokens(60, 3))
    assert told(engine) == outside(request.block_hashes[:3])
    assert sum(len(e.block_hashes) for e in engine.events.events if isinstance(e, BlockRemoved)) == 6


def test_stores_under_way_at_a_clear_are_not_told_as_there(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), tells_events=True, depth=2)
    engine.add(tokens(200), 4)
    engine.step()
    engine.step()
    assert engine.connector.has_pending_push_work()
    assert engine.connector.reset_cache()
    engine.drain()
    silent(engine)
    everything = hashes_of(*engine.finished.values())
    assert told(engine) == loadable(engine, everything)


def test_what_a_request_stored_is_told_though_it_was_aborted(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), tells_events=True)
    request = engine.add(tokens(200), 4)
    engine.step()
    engine.abort(request.request_id)
    engine.drain()
    assert told(engine) == outside(request.block_hashes[:4]) == loadable(engine, request.block_hashes)
    assert next(iter(engine.events.stored.values())).token_ids == tokens(200)[:64]


@pytest.mark.parametrize("capacity", [8, 1000], ids=["evicting", "roomy"])
def test_what_is_stored_lazily_is_told_with_its_tokens_after_its_request_has_gone(
    make_pool: Any, make_engine: Any, capacity: int
) -> None:
    engine = make_engine(make_pool(capacity), {"write_policy": "lazy"}, blocks=20, tells_events=True)
    requests = [engine.run(tokens(100, seed)) for seed in range(8)]
    hashes = hashes_of(*requests)
    silent(engine)
    assert told(engine) == loadable(engine, hashes)
    assert told(engine)
    by_name = {
        maybe_convert_block_hash(block): list(request.all_token_ids[i * BLOCK : (i + 1) * BLOCK])
        for request in requests
        for i, block in enumerate(request.block_hashes)
    }
    for event in engine.events.events:
        if isinstance(event, BlockStored):
            assert event.token_ids == [t for name in event.block_hashes for t in by_name[name]]


def test_what_another_engine_has_stored_is_told_when_it_is_found(shared_pool: Any, make_engine: Any) -> None:
    one = make_engine(shared_pool(100, "p"), tells_events=True)
    other = make_engine(shared_pool(100, "p"), tells_events=True)
    request = one.run(tokens(100))
    assert not told(other)
    other.run(tokens(100))
    assert other.restored_tokens() == 96
    (event,) = other.events.events
    assert event.token_ids == tokens(100)[:96]
    assert told(other) == told(one) == outside(request.block_hashes)
    silent(one)
    assert other.change_weights()
    silent(other)
    silent(one)
    assert not told(other)
    assert not told(one), "another engine's clear is told as well"


def test_a_pool_that_is_destroyed_takes_all_that_was_told_with_it(shared_pool: Any, make_engine: Any) -> None:
    engine = make_engine(shared_pool(100, "p"), ranks=2, tells_events=True)
    request = engine.run(tokens(100))
    assert told(engine) == outside(request.block_hashes)
    handle = handle_of(engine)
    while hasattr(handle, "_inner"):
        handle = handle._inner
    next(iter(handle._binding.pools().values())).destroy()
    silent(engine)
    assert not told(engine)


def test_a_runtime_that_cant_watch_its_pool_tells_nothing_of_it(make_engine: Any) -> None:
    runtime = plain(WatchedRuntime(ReferenceRuntime()), watch=False)
    engine = make_engine(runtime, tells_events=True)
    engine.run(tokens(100))
    assert engine.connector.scheduler_side._events is None
    assert not engine.events.events


def test_where_events_are_off_nothing_of_them_is_made(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    engine.run(tokens(100))
    assert engine.connector.scheduler_side._events is None
    assert list(engine.connector.take_events()) == []


# The model: at any quiet point


def act(engine: ScriptedEngine, rng: random.Random) -> list[Request]:
    """Something that happens to engines; the requests that were made."""
    what = rng.choices(["run", "several", "abort", "forget", "clear", "lose"], [6, 3, 2, 3, 1, 2])[0]
    made = []
    if what in ("run", "several", "abort"):
        for _ in range(1 if what == "run" else rng.randint(2, 4)):
            prompt = tokens(rng.choice([20, 64, 100, 150]), rng.randint(0, 3))
            made.append(engine.add(prompt, rng.choice([1, 5, 20])))
        if what == "abort":
            for _ in range(rng.randint(0, 3)):
                engine.step()
            engine.abort(rng.choice(made).request_id)
    elif what == "forget":
        engine.forget_prefixes()
    elif what == "clear":
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    else:
        stored = sorted(told(engine), key=str)
        side = engine.connector.scheduler_side
        chosen = [h for h in KNOWN if outside([h]) <= set(stored)]
        if chosen:
            rank = rng.choice(range(len(engine.ranks)))
            lost = rng.sample(chosen, min(2, len(chosen)))
            present = [
                key
                for key in side._pool.codec.keys(lost, rank=(rank, 0, 0, 0))
                if handle_of(engine).lookup([key])[0]
            ]
            forget(engine, present)
    return made


KNOWN: list[bytes] = []


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
@pytest.mark.parametrize("objects", [14, 500], ids=["evicting", "roomy"])
def test_at_any_quiet_point_the_events_are_what_can_be_loaded(
    make_pool: Any, make_engine: Any, objects: int, ranks: int, seed: int
) -> None:
    rng = random.Random(seed)
    plan = FaultPlan(seed=seed, store_keys=0.15, load_keys=0.1)
    engine = make_engine(FaultyRuntime(make_pool(objects), plan), ranks=ranks, blocks=40, tells_events=True)
    KNOWN.clear()
    for _ in range(25):
        requests = act(engine, rng)
        engine.drain()
        silent(engine)
        KNOWN.extend(block for block in hashes_of(*requests) if block not in KNOWN)
        assert told(engine) == loadable(engine, KNOWN)
    assert any(isinstance(event, BlockRemoved) for event in engine.events.events)


@pytest.mark.parametrize("seed", seeds(3))
def test_two_engines_on_one_pool_tell_what_each_has_met_and_can_be_loaded(
    shared_pool: Any, make_engine: Any, seed: int
) -> None:
    rng = random.Random(seed)
    engines = [make_engine(shared_pool(24, f"s{seed}"), blocks=40, tells_events=True) for _ in range(2)]
    KNOWN.clear()
    for _ in range(40):
        engine = rng.choice(engines)
        requests = act(engine, rng)
        engine.drain()
        KNOWN.extend(block for block in hashes_of(*requests) if block not in KNOWN)
        for one in engines:
            silent(one)
            assert told(one) <= loadable(one, KNOWN)
        finished = [r for r in requests if r.request_id in engine.finished]
        if len(finished) == 1:
            met = hashes_of(*finished)
            assert loadable(engine, met) <= told(engine)


FULL = Layers("full", 1)
SHAPES: dict[str, dict[str, Any]] = {
    "sliding": {"layers": (FULL, Layers("sliding", 2, 40))},
    "sliding alone": {"layers": (Layers("sliding", 2, 40),)},
    "wide blocks": {"layers": (FULL, Layers("sliding", 2, 40, head_size=2))},
    "chunked": {"layers": (FULL, Layers("chunked", 2, 64))},
    "state": {"layers": (FULL, Layers("mamba", 2))},
    "state in wide blocks": {"layers": (FULL, Layers("mamba", 2, block_tokens=32))},
    "mla on ranks": {"layers": (Layers("mla", 2),), "ranks": 2},
    "stages": {"layers": (Layers("full", 2), Layers("sliding", 4, 40)), "ranks": 2, "stages": 2},
    "dealt tokens": {"ranks": 2, "kv_heads": 1, "dcp": 2},
    "guessed": {"drafts": 2, "drafter": "eagle"},
    "in flight": {"depth": 2, "layers": (FULL, Layers("sliding", 2, 40))},
}


@pytest.mark.parametrize("objects", [30, 2000], ids=["evicting", "roomy"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_of_every_cache_group_the_events_are_what_can_be_loaded_with_its_tokens(
    embedded_pool: Any, make_engine: Any, shape: dict[str, Any], objects: int
) -> None:
    rng = random.Random(7)
    engine = make_engine(embedded_pool(objects), blocks=80, tells_events=True, **shape)
    side = engine.connector.scheduler_side
    groups = side._shape.groups
    requests: list[Request] = []
    for _ in range(12):
        prompt = tokens(rng.choice([64, 100, 150]), rng.randint(0, 2))
        requests.append(engine.run(prompt, rng.choice([1, 20])))
        if rng.random() < 0.5:
            engine.forget_prefixes()
        if rng.random() < 0.1:
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        silent(engine)
        there: Blocks = set()
        for group in groups:
            names = hashes_of_any(requests)
            # Not by the listened-to question, which would tell what it finds.
            stored = PoolView.stored(side._pool, group.group_id, names)
            there |= {
                (group.group_id, outside_name(name))
                for name, is_there in zip(names, stored, strict=True)
                if is_there
            }
        assert told(engine) == there
    assert {place[0] for event in engine.events.events for place in places(event)} == {
        group.group_id for group in groups
    }
    contents = {
        (group.group_id, outside_name(name)): tokens_told(
            group, request, (number + 1) * side._shape.hash_tokens
        )
        for request in requests
        for group in groups
        for number, name in enumerate(request.block_hashes)
    }
    for event in engine.events.events:
        if isinstance(event, BlockStored):
            assert event.token_ids == [token for place in places(event) for token in contents[place]]
            assert len(event.token_ids) == event.block_size * len(event.block_hashes)


def hashes_of_any(requests: Sequence[Request]) -> list[bytes]:
    return list(dict.fromkeys(name for request in requests for name in request.block_hashes))


def tokens_told(group: CacheGroup, request: Request, end: int) -> list[int]:
    """What is told of a block that ends there: its tokens if it is whole, else those of its last hash."""
    count = group.hash_tokens if end % group.block_tokens else group.block_tokens
    return list(request.all_token_ids[end - count : end])


@pytest.mark.parametrize("how", [{"match_tokens": BLOCK}, {"ranks": 2, "kv_heads": 1, "dcp": 2}])
def test_a_block_that_a_prompt_ends_inside_of_is_told_as_the_engine_tells_its_own(
    embedded_pool: Any, make_engine: Any, how: dict[str, Any]
) -> None:
    wide = BLOCK if "dcp" in how else 2 * BLOCK
    layers = (Layers("full", 1, block_tokens=wide), Layers("mamba", 2, block_tokens=wide))
    engine = make_engine(embedded_pool(200), tells_events=True, layers=layers, **how)
    request = engine.run(tokens(7 * BLOCK + 1), 1, salt="salt")
    group = engine.connector.scheduler_side._shape.counted
    tail = group.group_id, outside_name(request.block_hashes[6])
    (its,) = (event for event in engine.events.own_events if tail in places(event))
    (ours,) = (event for event in engine.events.events if tail in places(event))
    told_fields = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "group_idx", "lora_id")
    assert [getattr(ours, name) for name in told_fields] == [getattr(its, name) for name in told_fields]
    assert ours.block_size == BLOCK


def places(event: BlockStored | BlockRemoved) -> list[tuple[int | None, int | bytes]]:
    return [(event.group_idx, block_hash) for block_hash in event.block_hashes]


# The book


def test_the_book_forgets_what_nobody_has_and_finds_what_another_request_has_too(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime())
    book = BlockBook(BLOCK)
    one, other = engine.make_request(tokens(64)), engine.make_request(tokens(80))
    book.open(one)
    book.open(other)
    assert [place and place[1] for place in book.find(other.block_hashes)] == [0, 1, 2, 3, 4]
    book.close(other.request_id)
    book.audit()
    assert [place and place[1] for place in book.find(other.block_hashes)] == [0, 1, 2, 3, None]
    book.close(one.request_id)
    book.close("never opened")
    assert not book._places


def test_the_book_keeps_the_latest_requests_as_far_as_it_was_told(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime())
    book = BlockBook(BLOCK)
    book.keep(8)
    requests = [engine.make_request(tokens(64, seed)) for seed in range(4)]
    for request in requests:
        book.open(request)
        book.close(request.request_id)
        book.audit()
    found = [any(book.find(request.block_hashes)) for request in requests]
    assert found == [False, False, True, True]


def test_hashes_that_were_taken_back_are_not_found_in_place_of_others(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime())
    book = BlockBook(BLOCK)
    request = engine.make_request(tokens(64))
    book.open(request)
    old = list(request.block_hashes)
    assert all(book.find(old))
    del request.block_hashes[2:]
    assert book.find(old)[2:] == [None, None]
    request.block_hashes += [b"new", b"newer"]
    assert [place and place[1] for place in book.find([b"newer", *old])] == [3, 0, 1, None, None]
    book.close(request.request_id)
    assert not book._places


def test_an_audit_finds_a_place_in_a_request_that_has_gone(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime())
    book = BlockBook(BLOCK)
    request = engine.make_request(tokens(64))
    book.open(request)
    book.find(request.block_hashes)
    book._open.clear()
    with pytest.raises(InvariantError, match="gone"):
        book.audit()
