"""Engines with a cluster store behind their pools: what one has stored another restores, and a store that
fails costs a computation.

The engines check every byte in every step; the store is in memory, and hangs, breaks and lies when told to.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nodes import Node
from scripted import BLOCK, ScriptedEngine, tokens
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from seeds import seeds
from umbp.pool import Pool
from umbp.testing.engine.shape import Layers
from umbp.testing.stores.memory import MemoryCluster, MemoryStore

PROMPT = 10 * BLOCK + 3
RANKS = pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
LONG_S = 20.0
WAYS = pytest.mark.parametrize("lookup_async", [True, False], ids=["beside", "within"])


Start = Callable[..., tuple[ScriptedEngine, Node]]


@WAYS
@RANKS
def test_what_one_engine_has_stored_another_restores(start: Start, ranks: int, lookup_async: bool) -> None:
    first, node = start(ranks=ranks)
    told = first.run(tokens(PROMPT), 2)
    node.flush()
    second, _ = start({"lookup_async": lookup_async}, ranks=ranks)
    again = second.run(tokens(PROMPT), 2)
    assert second.restored_tokens() == 10 * BLOCK
    assert list(again.output_token_ids) == list(told.output_token_ids)
    second.check_drained()


def test_what_is_near_is_not_asked_for_far(start: Start, cluster: MemoryCluster) -> None:
    engine, node = start()
    engine.run(tokens(PROMPT))
    node.flush()
    engine.forget_prefixes()
    asked = [store.calls.count("exists") for store in cluster.stores]
    engine.run(tokens(PROMPT))
    assert engine.restored_tokens() == 10 * BLOCK
    assert [store.calls.count("exists") for store in cluster.stores] == asked
    assert not any(store.calls.count("get") for store in cluster.stores)


def test_an_idle_engine_waits_a_moment_for_the_answer_and_one_that_computes_does_not(
    start: Start, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step less, of which an engine that has nothing to compute makes one in some milliseconds."""
    monkeypatch.setattr("umbp.connector.scheduler.match.IDLE_PATIENCE_S", LONG_S)
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start()
    second.run(tokens(1))
    request = second.add(tokens(PROMPT))
    second.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    second.drain()
    assert second.restored_tokens() == 10 * BLOCK
    third, _ = start({"lookup_timeout_ms": 500})
    third.add(tokens(1), 30)
    third.step()
    cluster.hang("exists")
    third.add(tokens(PROMPT))
    begun_s = time.monotonic()
    third.step()
    assert time.monotonic() - begun_s < LONG_S / 2
    cluster.go_on()
    third.drain()


def test_what_was_fetched_is_near_the_next_time(start: Start, cluster: MemoryCluster) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start()
    second.run(tokens(PROMPT))
    fetches = sum(store.calls.count("get") for store in cluster.stores)
    second.forget_prefixes()
    second.run(tokens(PROMPT))
    assert second.restored_tokens() == 20 * BLOCK
    assert sum(store.calls.count("get") for store in cluster.stores) == fetches


def test_a_prompt_that_is_partly_near_fetches_the_rest(start: Start, cluster: MemoryCluster) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start()
    second.run(tokens(4 * BLOCK + 1))
    second.forget_prefixes()
    second.run(tokens(PROMPT))
    assert second.restored_tokens() == 4 * BLOCK + 10 * BLOCK


def test_a_question_is_one_round_trip_a_batch(start: Start, cluster: MemoryCluster) -> None:
    first, node = start(ranks=2)
    first.run(tokens(PROMPT))
    node.flush()
    before = len(cluster.stores)
    second, _ = start(ranks=2)
    second.run(tokens(PROMPT))
    assert sum(store.calls.count("exists") for store in cluster.stores[before:]) == 1


@pytest.mark.parametrize("what", ["claimed", "damaged", "cut", "gone"])
def test_what_the_store_does_not_keep_as_it_said_is_computed(
    start: Start, cluster: MemoryCluster, what: str
) -> None:
    first, node = start()
    told = first.run(tokens(PROMPT), 2)
    node.flush()
    victim = list(cluster.objects)[3]
    if what == "damaged":
        cluster.damage(victim)
    elif what == "cut":
        cluster.cut(victim)
    else:
        del cluster.objects[victim]
        if what == "claimed":
            cluster.claimed.add(victim)
    second, _ = start()
    again = second.run(tokens(PROMPT), 2)
    assert second.restored_tokens() == (3 if what == "gone" else 9) * BLOCK
    assert list(again.output_token_ids) == list(told.output_token_ids)
    second.check_drained()


@pytest.mark.parametrize("what", ["damaged", "cut"])
def test_what_is_damaged_costs_one_engine_one_computation(
    start: Start, cluster: MemoryCluster, what: str
) -> None:
    """Scenario: an object of another length was promised to every engine, and failed it, for ever."""
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    spoil = cluster.damage if what == "damaged" else cluster.cut
    spoil(list(cluster.objects)[3])
    restored = []
    for _ in range(3):
        engine, node = start()
        engine.run(tokens(PROMPT))
        node.flush()
        engine.run(tokens(1))
        restored.append(engine.restored_tokens())
        damaged = engine.stats.series.get("failed_fetch_objects|memory|damaged", 0)
        assert damaged == (1 if len(restored) == 1 else 0)
    assert restored == [9 * BLOCK, 10 * BLOCK, 10 * BLOCK]


@pytest.mark.parametrize("verb", ["exists", "get", "put"])
def test_a_store_that_hangs_costs_a_computation_and_comes_back(
    start: Start, cluster: MemoryCluster, verb: str
) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start({"lookup_timeout_ms": 50, "timeout_ms": 200})
    cluster.hang(verb)
    second.run(tokens(PROMPT))
    assert second.restored_tokens() == (10 * BLOCK if verb == "put" else 0)
    second.check_drained()
    cluster.go_on()
    third, _ = start()
    third.run(tokens(PROMPT))
    assert third.restored_tokens() == 10 * BLOCK
    third.check_drained()


def test_with_a_store_that_is_down_the_pool_goes_on_alone(start: Start, cluster: MemoryCluster) -> None:
    engine, _ = start({"timeout_ms": 200})
    cluster.is_down = True
    engine.run(tokens(PROMPT))
    engine.forget_prefixes()
    engine.run(tokens(PROMPT))
    assert engine.restored_tokens() == 10 * BLOCK
    engine.check_drained()


def test_new_weights_clear_the_store(start: Start, cluster: MemoryCluster) -> None:
    engine, node = start()
    engine.run(tokens(PROMPT))
    node.flush()
    assert cluster.objects
    assert engine.change_weights()
    assert not cluster.objects
    second, _ = start()
    second.run(tokens(PROMPT))
    assert second.restored_tokens() == 0


def test_a_pool_smaller_than_a_prompt_still_restores_it_from_the_store(
    start: Start, cluster: MemoryCluster
) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start({"capacity_bytes": 4 * 4096})
    second.run(tokens(PROMPT))
    assert second.restored_tokens() > 0
    second.check_drained()


SMALL: dict[str, tuple[int, dict[str, Any]]] = {
    "one slot": (1, {}),
    "four slots": (4, {}),
    "of two groups": (6, {"layers": (Layers("full", 1), Layers("sliding", 2, 40))}),
    "of two sizes": (8, {"layers": (Layers("full", 1), Layers("mamba", 2))}),
    "two ranks": (3, {"ranks": 2}),
}


@pytest.mark.parametrize("kind", SMALL)
def test_no_more_is_promised_of_the_store_than_the_pool_has_room_for(start: Start, kind: str) -> None:
    """Scenario: blocks that find no slot are lost, and a request that lost some fails by policy."""
    objects, shape = SMALL[kind]
    first, node = start(**shape)
    prompts = [tokens(PROMPT, seed) for seed in range(3)]
    for prompt in prompts:
        first.run(prompt)
    node.flush()
    second, _ = start({"capacity_bytes": objects * 4096}, policy="fail", **shape)
    requests = [second.add(prompt) for prompt in prompts]
    second.drain()
    requests += [second.run(prompt) for prompt in prompts]
    assert not any(name.startswith("failed_") for name in second.stats.series)
    assert all(request.get_finished_reason() is FinishReason.LENGTH for request in requests)
    assert second.restored_tokens() > 0 or len(shape.get("layers", ())) > 1
    second.check_drained()


def test_what_others_are_promised_is_fetched_once_and_needs_one_place(start: Start) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start({"capacity_bytes": 10 * 4096}, policy="fail")
    for _ in range(3):
        second.add(tokens(PROMPT))
    second.drain()
    assert second.restored_tokens() == 3 * 10 * BLOCK


def test_what_is_asked_fetched_and_sent_is_counted_where_it_lies(
    start: Start, cluster: MemoryCluster
) -> None:
    first, node = start(ranks=2)
    first.run(tokens(PROMPT))
    node.flush()
    first.run(tokens(1))
    assert first.count("sent_objects") == len(cluster.objects) == 20
    assert first.count("sent_bytes") == sum(map(len, cluster.objects.values()))
    second, _ = start(ranks=2)
    second.run(tokens(4 * BLOCK + 1))
    second.forget_prefixes()
    cluster.objects.pop(list(cluster.objects)[-1])
    second.run(tokens(PROMPT))
    second.run(tokens(1))
    series = second.stats.series
    assert series["hit_tokens|memory"] == (4 + 5) * BLOCK
    assert series["hit_tokens|dram"] == 4 * BLOCK
    assert series["loaded_tokens|memory"] == (4 + 5) * BLOCK
    assert series["loaded_tokens|dram"] == 4 * BLOCK
    assert series["fetched_objects|memory"] == 2 * (4 + 5)
    assert series["store_lookups|memory"] == 2
    assert series["store_lookup_batches|memory"] == 2
    assert series["store_lookup_objects|memory"] == 2 * (4 + 6)


def test_a_store_that_fails_is_counted_by_reason(start: Start, cluster: MemoryCluster) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    victim = list(cluster.objects)[3]
    del cluster.objects[victim]
    cluster.claimed.add(victim)
    second, _ = start()
    second.run(tokens(PROMPT))
    cluster.is_down = True
    second.run(tokens(PROMPT, seed=1))
    second.run(tokens(PROMPT, seed=2))
    second.run(tokens(1))
    series = second.stats.series
    assert series["failed_fetch_objects|memory|absent"] == 1
    assert series["failed_load_tokens|memory|absent"] == BLOCK
    assert series["store_failures|memory"] >= 1
    assert series["store_lookup_failures|memory"] >= 1


def test_a_shared_pool_that_is_made_anew_takes_the_place_of_the_old_one(
    start: Start, cluster: MemoryCluster, tmp_path: Path
) -> None:
    engine, node = start({"pool": "p", "pool_dir": str(tmp_path)})
    engine.run(tokens(PROMPT))
    node.flush()
    (old,) = (store.registered for store in cluster.stores if store.registered)
    (path,) = tmp_path.iterdir()
    with Pool.attach(path) as before:
        geometry = before.slab_bytes
        before.destroy()
    Pool.create(path, 64 * geometry, slab_bytes=geometry, min_object_bytes=4096).close()
    engine.forget_prefixes()
    engine.run(tokens(PROMPT))
    assert engine.restored_tokens() == 10 * BLOCK
    engine.run(tokens(PROMPT, seed=1))
    node.flush()
    engine.check_drained()
    (new,) = (store.registered for store in cluster.stores if store.registered)
    assert new
    assert not set(new) & set(old)


def in_pools(engine: ScriptedEngine, request: Request) -> list[bool]:
    """Which of a request's blocks every rank's pool has, whatever the store has."""
    (stage,) = engine.connector.scheduler_side._pool._stages
    handle: Any = stage.handle
    return list(handle._present_here(handle._binding.pools(), 0, request.block_hashes))


def told(engine: ScriptedEngine, request: Request) -> list[bool]:
    """Which of them the events, replayed into a set, say are there."""
    events = engine.events.stored
    return [(0, maybe_convert_block_hash(block)) in events for block in request.block_hashes]


@RANKS
def test_what_was_fetched_is_told_as_stored_with_its_tokens_when_it_has_come(
    start: Start, cluster: MemoryCluster, ranks: int
) -> None:
    first, node = start(ranks=ranks, tells_events=True)
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start(ranks=ranks, tells_events=True)
    request = second.add(tokens(PROMPT), 1)
    while not cluster_gets(cluster):
        assert not any(told(second, request)), "what is in the store alone is not told"
        second.step()
    second.drain()
    second.step()
    assert second.restored_tokens() == 10 * BLOCK
    assert told(second, request) == in_pools(second, request) == [True] * 10
    (event,) = second.events.events
    assert isinstance(event, BlockStored)
    assert (event.medium, event.locality) == ("CPU", "LOCAL"), "of this host's pool, not of the store"
    assert event.token_ids == tokens(PROMPT)[: 10 * BLOCK]


def cluster_gets(cluster: MemoryCluster) -> int:
    return sum(store.calls.count("get") for store in cluster.stores)


def test_what_was_fetched_and_evicted_again_is_told_as_removed(start: Start, cluster: MemoryCluster) -> None:
    first, node = start()
    for seed in range(4):
        first.run(tokens(PROMPT, seed=seed))
    node.flush()
    second, _ = start({"capacity_bytes": 14 * 4096}, tells_events=True)
    requests = []
    for seed in (0, 1, 2, 3, 0, 2):
        requests.append(second.run(tokens(PROMPT, seed=seed)))
        second.drain()
        second.step()
        for request in requests:
            assert told(second, request) == in_pools(second, request)
        second.forget_prefixes()
    assert cluster_gets(cluster)
    assert any(isinstance(event, BlockRemoved) for event in second.events.events)
    assert second.change_weights()
    second.step()
    assert not any(any(told(second, request)) for request in requests)


def test_an_object_that_one_rank_cannot_fetch_is_not_told(start: Start, cluster: MemoryCluster) -> None:
    first, node = start(ranks=2)
    first.run(tokens(PROMPT))
    node.flush()
    cluster.damage(list(cluster.objects)[-1])
    second, _ = start(ranks=2, tells_events=True)
    request = second.add(tokens(PROMPT), 1)
    second.drain()
    second.step()
    assert told(second, request) == in_pools(second, request)


def test_what_was_fetched_for_a_request_that_has_gone_is_told(start: Start, cluster: MemoryCluster) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    second, _ = start(tells_events=True)
    cluster.hang("get")
    request = second.add(tokens(PROMPT), 1)
    while not cluster_gets(cluster):
        second.step()
    cluster.wait_hanging(1)
    second.abort(request.request_id)
    cluster.go_on()
    second.drain()
    second.step()
    assert told(second, request) == in_pools(second, request) == [True] * 10


@pytest.mark.parametrize("seed", seeds(3))
@pytest.mark.parametrize("objects", [14, 500], ids=["evicting", "roomy"])
@RANKS
def test_at_any_quiet_point_the_events_are_what_the_pools_have(
    start: Start, cluster: MemoryCluster, ranks: int, objects: int, seed: int
) -> None:
    rng = random.Random(seed)
    nodes = [
        start({"capacity_bytes": objects * 4096}, ranks=ranks, blocks=40, tells_events=True) for _ in range(2)
    ]
    requests: list[Request] = []
    for engine, node in nodes:
        requests.append(engine.run(tokens(64), 1))
        node.flush()
    for _ in range(15):
        engine, node = rng.choice(nodes)
        what = rng.choices(["run", "abort", "forget", "lose", "clear"], [6, 3, 3, 2, 1])[0]
        if what in ("run", "abort"):
            made = [
                engine.add(tokens(rng.choice([64, 100, 150]), rng.randint(0, 3)), rng.choice([1, 20]))
                for _ in range(rng.randint(1, 3))
            ]
            requests += made
            if what == "abort":
                for _ in range(rng.randint(0, 3)):
                    engine.step()
                engine.abort(rng.choice(made).request_id)
        elif what == "forget":
            engine.forget_prefixes()
        elif what == "lose":
            for key in rng.sample(list(cluster.objects), min(3, len(cluster.objects))):
                rng.choice([cluster.damage, cluster.cut, cluster.objects.pop])(key)
        else:
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.drain()
        node.flush()
        engine.step()
        for request in requests:
            assert told(engine, request) == in_pools(engine, request)
    assert cluster_gets(cluster)


def test_what_the_store_had_promised_and_lost_is_stored_near_when_it_has_been_computed(
    start: Start, cluster: MemoryCluster
) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    cluster.claimed |= set(cluster.objects)
    cluster.objects.clear()
    second, _ = start()
    second.run(tokens(PROMPT))
    assert second.restored_tokens() == 0
    second.forget_prefixes()
    second.run(tokens(PROMPT))
    assert second.restored_tokens() == 10 * BLOCK


def test_a_clear_in_the_middle_of_a_step_waits_for_no_store(start: Start, cluster: MemoryCluster) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    cluster.hang("remove_prefix")
    (handle,) = node.schedulers
    handle.clear_soon()
    first.forget_prefixes()
    first.run(tokens(PROMPT), 2)
    assert first.restored_tokens() == 0
    node.flush()
    assert cluster.objects
    cluster.go_on()
    handle.gate.open(30)
    assert not cluster.objects


def test_what_was_being_sent_when_all_was_cleared_is_never_restored(
    start: Start, cluster: MemoryCluster
) -> None:
    first, node = start()
    cluster.hang("put")
    first.run(tokens(PROMPT))
    cluster.wait_hanging(1)
    assert first.change_weights()
    cluster.go_on()
    node.flush()
    (handle,) = node.schedulers
    handle.gate.open(30)
    # It has the old weights, and so must store nothing.
    second, _ = start(role="kv_consumer")
    second.run(tokens(PROMPT))
    assert second.restored_tokens() == 0
    first.run(tokens(PROMPT), 2)
    node.flush()
    third, _ = start()
    third._chains.change_weights()
    third.run(tokens(PROMPT))
    assert third.restored_tokens() > 0


def test_what_a_store_misses_while_it_is_away_it_gets_when_it_is_back(
    start: Start, cluster: MemoryCluster
) -> None:
    first, node = start({"timeout_ms": 200})
    first.run(tokens(1))
    cluster.is_down = True
    first.run(tokens(PROMPT))
    first.run(tokens(PROMPT, seed=1))
    assert not cluster.objects
    cluster.is_down = False
    node.flush()
    second, _ = start()
    second.run(tokens(PROMPT))
    second.run(tokens(PROMPT, seed=1))
    assert second.restored_tokens() == 20 * BLOCK


@pytest.mark.parametrize("verb", ["exists", "get", "put"])
def test_a_store_that_answers_for_too_few_objects_is_not_believed(
    start: Start, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    first, node = start()
    first.run(tokens(PROMPT))
    node.flush()
    answer = getattr(MemoryStore, verb)
    monkeypatch.setattr(MemoryStore, verb, lambda store, *objects: answer(store, *objects)[1:])
    second, other = start({"timeout_ms": 500})
    second.run(tokens(PROMPT))
    second.run(tokens(PROMPT, seed=1))
    assert second.restored_tokens() == (10 * BLOCK if verb == "put" else 0)
    second.check_drained()
    monkeypatch.setattr(MemoryStore, verb, answer)
    other.flush()
    assert not other.workers[0].usage()["pool_pinned_objects"]
