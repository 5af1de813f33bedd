"""The hazard policy in the real pool: what it learns, and that it is one for all processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from zygote import Zygote

from umbp.errors import ConfigError
from umbp.pool import Outcome, Pool

MakePool = Callable[..., Pool]
TINY = 100


@pytest.fixture
def pool(make_pool: MakePool) -> Pool:
    return make_pool(slots=64, object_bytes=TINY, eviction_policy="hazard")


def serve(pool: Pool, ns: int, chain: list[str], output_tokens: int = 100, finish: str = "") -> int:
    """A request as an engine serves it: looked up and promised, noted, loaded, stored, noted. Blocks hit."""
    hits = next((i for i, hit in enumerate(pool.lookup(chain)) if not hit), len(chain))
    pins, _ = pool.acquire(chain[:hits])
    pool.note(chain, "admit")
    pool.release(pins)
    tickets, outcomes = pool.reserve(ns, chain, TINY, [None, *chain[:-1]])
    pool.publish(tickets[outcomes == Outcome.RESERVED])
    pool.note(chain, "end", output_tokens, finish)
    return hits


def test_blocks_of_conversations_that_go_on_outlive_prompts_that_never_come_back(pool: Pool) -> None:
    """Scenario: a few conversations return every 40 s, a flood of one-off prompts passes in between, more
    than the pool holds. By age alone nothing of a conversation would live to its next turn.
    """
    lru = Pool.create_memfd(64 * 4096, slab_bytes=4 * 4096, min_object_bytes=TINY)
    hits = {}
    for each in (lru, pool):
        ns = each.namespace("a")
        late_hits = 0
        for step in range(400):
            each.set_time(4.0 * step)
            if step % 2 == 0:
                talk, turn = step // 2 % 5, step // 10
                chain = [f"talk{talk}.{i}" for i in range(1 + turn // 6)] + [f"talk{talk}.t{turn % 6}"]
                found = serve(each, ns, chain, 30, "tool_calls")
                late_hits += found if step > 200 else 0
            serve(each, ns, [f"once{step}.{i}" for i in range(8)], 300)
        each.audit()
        hits[each.eviction_policy] = late_hits
    lru.close()
    assert hits["hazard"] > 1.5 * hits["lru"]


def test_a_pool_that_gets_no_notes_evicts_by_age(pool: Pool) -> None:
    ns = pool.namespace("a")
    for n in range(100):
        pool.set_time(10.0 * n)
        tickets, _ = pool.reserve(ns, [f"k{n}"], TINY)
        pool.publish(tickets)
        stored = pool.lookup([f"k{i}" for i in range(n + 1)]).tolist()
        assert stored == [i > n - 64 for i in range(n + 1)]


def test_the_policy_is_the_pools_own_whoever_attaches(make_pool: MakePool, pool: Pool) -> None:
    assert pool.eviction_policy == "hazard"
    assert Pool.attach(pool.handle.path).eviction_policy == "hazard"
    assert make_pool(slots=8).eviction_policy == "lru"


def test_a_policy_that_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="lru or hazard, not 'fifo'"):
        Pool.create_memfd(1 << 20, slab_bytes=4096, min_object_bytes=TINY, eviction_policy="fifo")


def test_a_phase_that_there_is_not_is_refused(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="admit or end"):
        pool.note(["a"], "begin")  # type: ignore[arg-type]


def test_notes_of_another_process_count_and_outlive_it(pool: Pool, zygote: Zygote) -> None:
    ns = pool.namespace("a")
    serve(pool, ns, ["a", "b"])
    actor = zygote.spawn("serve", pool.handle.path)
    for _ in range(70):
        actor.call("note", ["a", "b", "c"], "admit")
    actor.kill()
    actor.wait_until_dead()
    pool.reap()
    pool.audit()
    assert pool.stats()["noted"] == 71


def test_a_death_at_each_point_of_a_note_is_repaired(make_pool: MakePool, zygote: Zygote) -> None:
    """Counts and ghosts are kept where they can be true, orders and the living are counted again."""
    countdown, is_done = 0, False
    chain = [f"c{i}" for i in range(6)]
    while not is_done:
        countdown += 1
        pool = make_pool(slots=16, object_bytes=TINY, eviction_policy="hazard")
        ns = pool.namespace("a")
        serve(pool, ns, chain[:4])
        with zygote.episode():
            actor = zygote.spawn("serve", pool.handle.path)
            actor.call("arm", countdown)
            try:
                actor.call("note", chain, "admit")
                actor.call("note", chain, "end", 5)
                is_done = True
            except EOFError:
                actor.wait_until_dead()
            pool.audit()
            assert pool.lookup(chain).tolist() == [True] * 4 + [False] * 2
            assert serve(pool, ns, chain) == 4
            pool.audit()
            pool.close()
    assert countdown > 20
