"""`write_policy: lazy`: what the engine evicts has been stored before, and nothing else has."""

from __future__ import annotations

import time
from random import Random
from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import PickyRuntime, plain, slowly

from seeds import seeds
from umbp.connector.scheduler.lazy import LAZY_REQUEST, LazyWriter
from umbp.connector.scheduler.write import ThroughWriter
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.testing.clock import TickClock
from umbp.testing.reference import ReferenceRuntime

LAZY = {"write_policy": "lazy"}
RANKS = pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])


def writer(engine: ScriptedEngine) -> LazyWriter:
    found = engine.connector.scheduler_side._writer
    assert isinstance(found, LazyWriter)
    return found


def computed_tokens(engine: ScriptedEngine, prompt: list[int]) -> int:
    """Serve a prompt for one token; how many of its own were computed for that."""
    request = engine.add(prompt)
    computed = 0
    while not request.is_finished():
        computed += engine.step().num_scheduled_tokens.get(request.request_id, 0)
    engine.drain()
    return computed


def waiting(engine: ScriptedEngine) -> list[Any]:
    """The hashes of the free blocks in the order in which the engine gives them away."""
    return [block.block_hash for block in engine.pool.free_block_queue.get_all_free_blocks()]


@RANKS
def test_nothing_is_stored_while_the_engine_has_blocks_to_spare(
    make_pool: Any, make_engine: Any, ranks: int
) -> None:
    engine = make_engine(make_pool(), LAZY, ranks=ranks)
    for seed in range(3):
        engine.run(tokens(100, seed), 4)
    assert engine.count("stored_tokens") == 0
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0, "what was in the engine alone went with it"
    engine.check_drained()


@RANKS
@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_a_prompt_that_the_engine_has_evicted_is_restored_whole(
    make_pool: Any, make_engine: Any, ranks: int, load_async: bool
) -> None:
    pool = make_pool()
    engine = make_engine(pool, LAZY | {"load_async": load_async}, ranks=ranks, blocks=28)
    first = engine.run(tokens(100), 4)
    for seed in range(1, 9):
        engine.run(tokens(100, seed), 4)
    again = engine.run(tokens(100), 4)
    assert engine.restored_tokens() == 96
    assert list(again.output_token_ids) == list(first.output_token_ids)
    engine.check_drained()
    pool.check_unpinned()


@pytest.mark.parametrize("seed", seeds(6))
def test_whatever_is_evicted_in_whatever_order_a_prompt_is_never_lost(
    make_pool: Any, make_engine: Any, seed: int
) -> None:
    """The engine evicts ends first: it may have a prompt's beginning and the pool the rest, or the pool all
    of it.
    """
    random = Random(seed)
    engine = make_engine(
        make_pool(),
        LAZY | {"load_async": random.random() < 0.5},
        blocks=random.choice([20, 28, 40]),
        ranks=random.choice([1, 2]),
        max_batched_tokens=random.choice([2 * BLOCK, 64]),
    )
    known: list[list[int]] = []
    mixed = 0
    for _ in range(60):
        if known and random.random() < 0.4:
            prompt = random.choice(known)
            before = engine.restored_tokens()
            computed = computed_tokens(engine, prompt)
            assert computed == len(prompt) - (len(prompt) - 1) // BLOCK * BLOCK
            mixed += 0 < engine.restored_tokens() - before < len(prompt) - computed
        else:
            shared = random.choice([0, 3 * BLOCK]) if known else 0
            prompt = known[-1][:shared] if shared and len(known[-1]) > shared else []
            prompt = prompt + tokens(random.randint(BLOCK, 150 - len(prompt)), random.randrange(900))
            known.append(prompt)
            engine.run(prompt, random.randint(1, 20))
    assert mixed, "the engine had a beginning and the pool the rest"
    engine.check_drained()


@pytest.mark.parametrize("seed", seeds(4))
def test_the_engines_own_order_of_eviction_stays_as_it_is(make_engine: Any, seed: int) -> None:
    def orders(options: dict[str, Any]) -> list[list[Any]]:
        random = Random(seed)
        engine = make_engine(ReferenceRuntime(), options | {"enable_lookup": False}, blocks=30)
        seen = []
        for _ in range(30):
            prompts = [
                tokens(random.choice([20, 70, 130]), random.randrange(4))
                for _ in range(random.choice([1, 2]))
            ]
            for prompt in prompts:
                engine.add(prompt, random.randint(1, 30))
            engine.drain()
            seen.append(waiting(engine))
        assert options == {} or engine.count("stored_tokens") > 0
        return seen

    assert orders(LAZY) == orders({})


def test_what_was_stored_is_not_stored_again(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), LAZY, blocks=28)
    for _ in range(4):
        for seed in range(6):
            engine.run(tokens(100, seed))
    assert engine.count("stored_tokens") <= 6 * 96
    assert engine.restored_tokens() > 0


def test_a_block_that_is_stored_goes_before_one_that_is_not(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), LAZY, blocks=40)
    for seed in range(12):
        engine.run(tokens(100, seed))
        settled = writer(engine)._settled
        flags = [name in settled for name in waiting(engine) if name is not None]
        assert flags == sorted(flags, reverse=True)
    assert 0 < engine.count("stored_tokens") < 12 * 96, "what the engine has left is not stored"


@pytest.mark.parametrize("with_output", [False, True])
def test_generated_tokens_are_stored_only_on_demand(
    make_pool: Any, make_engine: Any, with_output: bool
) -> None:
    engine = make_engine(make_pool(), LAZY | {"save_decode_cache": with_output}, blocks=28)
    first = engine.run(tokens(2 * BLOCK), 4 * BLOCK + 1)
    for seed in range(1, 9):
        engine.run(tokens(100, seed))
    again = tokens(2 * BLOCK) + list(first.output_token_ids)
    restored = engine.restored_tokens()
    engine.run(again)
    assert engine.restored_tokens() - restored == (6 if with_output else 2) * BLOCK


def test_an_answer_that_became_part_of_a_prompt_is_stored_with_it(make_pool: Any, make_engine: Any) -> None:
    """Scenario: a chat. The second turn's prompt has the first one's answer, which the engine still has."""
    engine = make_engine(make_pool(), LAZY, blocks=28)
    first = engine.run(tokens(2 * BLOCK), 3 * BLOCK + 1)
    turn = tokens(2 * BLOCK) + list(first.output_token_ids) + tokens(BLOCK, 5)
    engine.run(turn)
    for seed in range(1, 9):
        engine.run(tokens(100, seed))
    restored = engine.restored_tokens()
    engine.run(turn)
    assert engine.restored_tokens() - restored == (len(turn) - 1) // BLOCK * BLOCK


def test_a_step_stores_no_more_than_twice_what_it_took(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), LAZY, blocks=60, max_batched_tokens=2 * BLOCK)
    for seed in range(20):
        engine.add(tokens(100, seed), 3)
    while engine.scheduler.has_requests():
        meta = engine.step().kv_connector_metadata
        assert len(meta.store_requests.get(LAZY_REQUEST, ())) <= 2 * 2 * BLOCK // BLOCK + 2
    assert engine.count("stored_tokens") > 0


def test_parents_are_stored_before_their_children(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), LAZY, blocks=40, max_batched_tokens=200)
    for seed in range(12):
        engine.add(tokens(100, seed))
    pairs = 0
    while engine.scheduler.has_requests():
        batch = engine.step().kv_connector_metadata.store_requests.get(LAZY_REQUEST)
        if batch is not None:
            places = {block_hash: row for row, block_hash in enumerate(batch.block_hashes)}
            for row, parent in enumerate(batch.parent_block_hashes):
                assert places.get(parent, -1) < row
                pairs += parent in places
    assert pairs > 10


@pytest.mark.parametrize("depth", [1, 2])
def test_pins_that_outlast_their_step_leave_half_of_the_free_blocks(
    make_pool: Any, make_engine: Any, depth: int
) -> None:
    engine = make_engine(slowly(make_pool(), TickClock(), store=3.0), LAZY, blocks=40, depth=depth)
    for seed in range(12):
        engine.add(tokens(100, seed))
    stores = 0
    for _ in range(40):
        pinned = len(writer(engine)._pinned)
        engine.step()
        now = len(writer(engine)._pinned)
        if now > pinned > 0:
            stores += 1
            assert 2 * now <= engine.pool.get_num_free_blocks() + now
    assert stores, "some began while others were under way"


@RANKS
@pytest.mark.parametrize("depth", [1, 2])
def test_pins_that_outlast_their_step_take_nobodys_blocks(
    make_pool: Any, make_engine: Any, ranks: int, depth: int
) -> None:
    """Scenario: a device stores slowly. The blocks under way are missing among the free ones, and the engine
    must not preempt a request for them.
    """

    def preemptions(options: dict[str, Any]) -> int:
        clock = TickClock()
        pool = make_pool()
        engine = make_engine(
            slowly(pool, clock, store=2.0), options, blocks=24, ranks=ranks, depth=depth, max_seqs=3
        )
        engine.between = lambda: clock.advance(1.0)
        requests = [engine.add(tokens(60, seed), 30) for seed in range(12)]
        pinned = 0
        while engine.scheduler.has_requests() or engine.is_in_flight:
            engine.step()
            if options == LAZY:
                pinned = max(pinned, len(writer(engine)._pinned))
                assert writer(engine)._pinned.keys() <= {
                    block.block_id for block in engine.pool.blocks if block.ref_cnt
                }
        assert all(request.is_finished() for request in requests)
        engine.check_drained()
        pool.check_unpinned()
        assert options == {} or pinned > 0
        return sum(request.num_preemptions for request in requests)

    assert preemptions(LAZY) <= preemptions({})


def test_an_allocation_waits_for_pins_instead_of_preempting(make_pool: Any, make_engine: Any) -> None:
    clock = TickClock()
    engine = make_engine(slowly(make_pool(), clock, store=2.0), LAZY, blocks=28)
    for seed in range(4):
        engine.add(tokens(100, seed))
        engine.step()
    while not writer(engine)._pinned:
        engine.add(tokens(100, engine.steps))
        engine.step()
    assert engine.connector.has_pending_block_frees()
    assert engine.connector.has_pending_push_work()
    engine.between = lambda: clock.advance(1.0)
    engine.drain()
    assert not engine.connector.has_pending_block_frees()
    engine.check_drained()


def test_a_hit_on_a_block_under_way_is_as_good_as_any(make_pool: Any, make_engine: Any) -> None:
    clock = TickClock()
    pool = make_pool()
    engine = make_engine(slowly(pool, clock, store=5.0), LAZY, blocks=28)
    seed = 0
    while not engine.connector.has_pending_block_frees():
        engine.add(tokens(100, seed))
        engine.step()
        engine.step()
        seed += 1
    names = set(writer(engine)._pinned.values())
    again = engine.add(tokens(100), 3)
    engine.step()
    held = {
        engine.pool.blocks[i].block_hash
        for i in engine.scheduler.kv_cache_manager.get_block_ids(again.request_id)[0]
    }
    assert names & held
    engine.between = lambda: clock.advance(1.0)
    engine.drain()
    engine.check_drained()
    pool.check_unpinned()


def test_a_store_that_fails_is_not_tried_until_the_block_is_gone(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(FaultyRuntime(make_pool(), FaultPlan(store_jobs=1.0)), LAZY, blocks=28)
    for seed in range(8):
        engine.run(tokens(100, seed))
    assert engine.count("stored_tokens") == 0
    assert 0 < engine.count("dropped_store_tokens") <= 8 * 96
    engine.check_drained()


def test_what_was_computed_before_a_clear_is_not_stored_after_it(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), LAZY, blocks=28)
    engine.run(tokens(100))
    assert engine.connector.reset_cache()
    for seed in range(1, 9):
        engine.run(tokens(100, seed))
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0


def test_a_block_that_the_engine_cached_and_did_not_compute_is_not_stored(
    make_pool: Any, make_engine: Any
) -> None:
    """Scenario: under vLLM's priority policy a request may be preempted by the plan that has just given it
    blocks, and cached them; nobody computes them, and they hold what was there before.
    """
    engine = make_engine(make_pool(), LAZY, blocks=28)
    request = engine.run(tokens(100))
    side_blocks = [block for block in engine.pool.blocks if block.block_hash is not None]
    assert len(side_blocks) == 6
    by_hash = {block.block_hash: block for block in side_blocks}
    ordered = [by_hash[h + (0).to_bytes(4, "big")] for h in request.block_hashes[:6]]
    engine.pool.evict_blocks({block.block_id for block in ordered})
    engine.pool.cache_full_blocks(request, ordered, 0, 6, BLOCK, 0)
    engine.ranks[0].memory.spoil([block.block_id for block in ordered])
    for seed in range(1, 9):
        engine.run(tokens(100, seed))
    assert engine.count("stored_tokens") > 0
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0


@pytest.mark.parametrize("place", [0, 3])
def test_what_a_failed_load_left_unfilled_is_never_stored(
    make_pool: Any, make_engine: Any, place: int
) -> None:
    pool = make_pool()
    picky = PickyRuntime(pool, lambda rank, index, key: False)
    engine = make_engine(picky, LAZY | {"load_async": False}, blocks=28)
    for seed in range(9):
        engine.run(tokens(100, seed))
    picky.loses = lambda rank, index, key: index == place
    request = engine.add(tokens(100), 3)
    engine.step()
    assert engine.invalid_blocks
    engine.abort(request.request_id)
    picky.loses = lambda rank, index, key: False
    for seed in range(1, 9):
        engine.run(tokens(100, seed))
    engine.run(tokens(100), 3)
    engine.check_drained()


def test_the_cushion_grows_with_the_loads_that_eat_it(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), LAZY, blocks=60, max_batched_tokens=2 * BLOCK)
    small = writer(engine)._wanted
    for _ in range(3):
        for seed in range(6):
            engine.run(tokens(15 * BLOCK + 1, seed))
    assert engine.restored_tokens() >= 15 * BLOCK
    assert writer(engine)._wanted > 2 * small
    assert writer(engine)._wanted <= 30, "half of the engine's blocks at most"


@pytest.mark.parametrize(
    "bare", [{"presence": False}, {"presence": False, "lookup_raw": False, "hold": False}]
)
@RANKS
def test_a_runtime_that_only_knows_keys_serves_as_well(
    make_pool: Any, make_engine: Any, ranks: int, bare: dict[str, bool]
) -> None:
    engine = make_engine(
        plain(PickyRuntime(make_pool(), lambda *_: False), **bare), LAZY, blocks=28, ranks=ranks
    )
    for _ in range(2):
        for seed in range(6):
            engine.run(tokens(100, seed))
    assert engine.restored_tokens() > 0
    assert engine.count("stored_tokens") <= 6 * 96
    engine.check_drained()


def test_a_runtime_that_lies_about_what_it_has_costs_stores_alone(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(FaultyRuntime(make_pool(), FaultPlan(lookups=0.3)), LAZY, blocks=28)
    for _ in range(3):
        for seed in range(6):
            engine.run(tokens(100, seed), 3)
    engine.check_drained()


@pytest.mark.parametrize(
    ("shape", "reason"),
    [({"role": "kv_producer"}, "kv_role"), ({"prefix_caching": False}, "prefix caching")],
    ids=["producer", "no prefix cache"],
)
def test_where_lazy_can_not_work_all_is_stored_at_once_and_one_line_says_so(
    make_pool: Any, make_engine: Any, caplog: pytest.LogCaptureFixture, shape: dict[str, Any], reason: str
) -> None:
    engine = make_engine(make_pool(), LAZY, **shape)
    assert isinstance(engine.connector.scheduler_side._writer, ThroughWriter)
    engine.run(tokens(100))
    assert engine.count("stored_tokens") == 96
    lines = [record.getMessage() for record in caplog.records if "lazy" in record.getMessage()]
    assert len(lines) == 1
    assert reason in lines[0]


def test_a_step_that_takes_nothing_costs_next_to_nothing(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime(), LAZY, blocks=400, max_seqs=64, max_batched_tokens=256)
    for seed in range(32):
        engine.add(tokens(40, seed), 100)
    for _ in range(40):
        engine.step()
    output = engine.scheduler.schedule()
    side = engine.connector.scheduler_side
    best_s = 1.0
    for _ in range(50):
        begun = time.perf_counter()
        side.plan_step(output)
        best_s = min(best_s, time.perf_counter() - begun)
    assert best_s < 200e-6
