"""In what pages and where a pool's memory lies: what the report says is so, and what can't be had costs
speed alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from actors import pattern, read_payload, store
from thp import mapped_bytes, touch, without_huge_pages

from umbp import _native
from umbp.errors import ConfigError
from umbp.pool import MemoryPolicy, MemoryReport, Outcome, Pool
from umbp.pool.memory import check_node, memory_nodes, node_share, own_node

MIB = 1 << 20
CAPACITY = 24 * MIB
POLICIES = [MemoryPolicy(hugepages=each) for each in (None, True, False)] + [MemoryPolicy(numa_node=0)]

Make = Callable[..., Pool]


@pytest.fixture(params=["memfd", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Pools of both kinds; closed at the end."""
    pools: list[Pool] = []

    def made(policy: MemoryPolicy, capacity: int = CAPACITY) -> Pool:
        settings = {"slab_bytes": MIB, "min_object_bytes": 3000, "memory": policy}
        if request.param == "memfd":
            pool = Pool.create_memfd(capacity, **settings)  # type: ignore[arg-type]
        else:
            pool = Pool.create(tmp_path / f"pool{len(pools)}", capacity, **settings)  # type: ignore[arg-type]
        pools.append(pool)
        return pool

    yield made
    for pool in pools:
        pool.close()


def report(pool: Pool) -> MemoryReport:
    assert pool.memory is not None
    return pool.memory


def works(pool: Pool) -> bool:
    keys = [f"k{i}" for i in range(50)]
    outcomes = store(pool, pool.namespace("a"), keys)
    tickets, _ = pool.acquire(keys)
    contents = [read_payload(pool, ticket) for ticket in tickets.tolist()]
    pool.release(tickets)
    pool.audit()
    return set(outcomes) == {Outcome.RESERVED} and contents == [pattern(key) for key in keys]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_whatever_is_wished_for_a_pool_works_and_takes_what_was_asked(
    make: Make, policy: MemoryPolicy
) -> None:
    pool = make(policy)
    assert works(pool)
    taken = os.fstat(pool.native.fd).st_blocks * 512
    metadata = _native.geometry(CAPACITY, MIB, 3000)["records_at"]
    assert CAPACITY <= taken <= 1.05 * (CAPACITY + metadata) + MIB


@pytest.mark.parametrize("hugepages", [None, True, False])
def test_the_report_counts_the_huge_pages_that_the_kernel_counts(make: Make, hugepages: bool | None) -> None:
    pool = make(MemoryPolicy(hugepages=hugepages))
    found = report(pool)
    address, size = pool.arena
    base = address - _native.geometry(CAPACITY, MIB, 3000)["arena_at"]
    assert base % (2 * MIB) == 0
    touch(base, _native.geometry(CAPACITY, MIB, 3000)["records_at"])
    touch(address, size)
    assert mapped_bytes("ShmemPmdMapped", address) == found.huge_bytes
    assert found.asked_bytes > CAPACITY - 4 * MIB
    if hugepages is False:
        assert found.huge_bytes == 0
    else:
        assert (found.huge_bytes == found.asked_bytes) == (found.huge_reason == "")


def test_a_pool_without_huge_pages_says_so_once_and_only_where_they_were_wanted(make: Make) -> None:
    """The kernel gives this process none: the pool is whole, and its small pages were taken in full."""
    with without_huge_pages():
        wanted, tried, refused = (make(MemoryPolicy(hugepages=each)) for each in (True, None, False))
    for pool in (wanted, tried, refused):
        assert report(pool).huge_bytes == 0
        assert os.fstat(pool.native.fd).st_blocks * 512 >= CAPACITY
        assert works(pool)
    (sentence,) = report(wanted).shortfalls()
    assert "huge pages back 0% of the pool" in sentence
    assert report(tried).shortfalls() == report(refused).shortfalls() == []


def test_huge_pages_that_take_too_long_are_given_up() -> None:
    """No patience at all: the first portion's are kept, the rest is small, everything is taken."""
    native = _native.Pool.create_memfd(
        520 * MIB, MIB, 4096, 1.0, 0.95, "lru", 0.002, lambda left: None, _native.MemoryPolicy(True, -1, 0.0)
    )
    facts = native.memory
    assert facts["huge_bytes"] < facts["asked_bytes"]
    assert "too long" in facts["huge_reason"] or facts["huge_bytes"] == 0
    assert os.fstat(native.fd).st_blocks * 512 >= 520 * MIB
    native.close()


def test_a_pool_is_made_under_a_rain_of_signals() -> None:
    """On older kernels each signal undoes what the interrupted call had taken: calls that take longer than
    the signals' beat would begin again for ever. (Newer ones end a call for a deadly signal alone.)"""
    code = """
import signal
from umbp.pool import MemoryPolicy, Pool
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
pool = Pool.create_memfd(
    128 << 20, slab_bytes=1 << 20, min_object_bytes=3000, memory=MemoryPolicy(hugepages=False)
)
signal.setitimer(signal.ITIMER_REAL, 0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_who_hears_of_the_progress_may_give_up() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    heard: list[tuple[int, int]] = []

    def tired(done: int, whole: int) -> None:
        heard.append((done, whole))
        if len(heard) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pool.create_memfd(600 * MIB, slab_bytes=MIB, min_object_bytes=4096, progress=tired)
    assert heard[0] == (0, 600 * MIB)
    assert 0 < heard[1][0] < 600 * MIB
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_prefault_maps_every_page_and_tells_how_far_it_is(make: Make) -> None:
    pool = make(MemoryPolicy(hugepages=False))
    address, size = pool.arena
    heard: list[tuple[int, int]] = []
    before = mapped_bytes("Rss", address)
    assert pool.prefault(lambda done, whole: heard.append((done, whole))) == ""
    assert mapped_bytes("Rss", address) - before >= size - 2 * MIB
    assert heard == [(0, size)]


def test_memory_that_is_not_there_cannot_be_mapped_early() -> None:
    assert _native.populate(4096, 4096) != 0


# Memory nodes


def first_node() -> int:
    """A node that pools may be put on; skips where this host or container has no such choice."""
    nodes = memory_nodes()
    if not nodes:
        pytest.skip("this kernel tells of no memory nodes")
    node = min(nodes)
    policy = MemoryPolicy(numa_node=node)
    with Pool.create_memfd(MIB, slab_bytes=MIB, min_object_bytes=3000, memory=policy) as pool:
        if reason := report(pool).node_reason:
            pytest.skip(f"no choice of memory nodes here: {reason}")
    return node


def test_a_pool_lies_on_the_node_that_it_was_wished_on(make: Make) -> None:
    node = first_node()
    pool = make(MemoryPolicy(numa_node=node))
    address, size = pool.arena
    assert report(pool).node == node
    assert report(pool).node_share == node_share(address, size, node) == 1.0
    assert node_share(address, size, node + 1) == 0.0
    assert report(pool).shortfalls() == []


def test_the_node_holds_for_whoever_touches_the_pool_later() -> None:
    """Records get their memory when they are first needed, by any process: the policy is the file's."""
    node = first_node()
    with Pool.create_memfd(
        CAPACITY, slab_bytes=MIB, min_object_bytes=3000, memory=MemoryPolicy(numa_node=node)
    ) as pool:
        base = pool.arena[0] - _native.geometry(CAPACITY, MIB, 3000)["arena_at"]
        lines = Path("/proc/self/numa_maps").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(f"{base:x} "))
        assert f"prefer:{node}" in line or "prefer=" in line


def test_a_host_that_forbids_a_choice_of_nodes_costs_one_sentence() -> None:
    code = """
from thp import refuse_memory_nodes
from umbp.pool import MemoryPolicy, Pool
refuse_memory_nodes()
for node in (0, -1):
    pool = Pool.create_memfd(
        4 << 20, slab_bytes=1 << 20, min_object_bytes=3000, memory=MemoryPolicy(numa_node=node)
    )
    print(len(pool.memory.shortfalls()), *pool.memory.shortfalls())
    pool.audit()
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    asked, own = result.stdout.splitlines()
    assert asked.startswith("1 the pool's memory can't be put on node 0 (Operation not permitted)")
    assert own == "0"


def host(root: Path, nodes: dict[int, str], allowed: str = "", having: str = "") -> Path:
    for node, processors in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    if having:
        (root / "sys/devices/system/node/has_memory").write_text(having + "\n")
    if allowed:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name:\tx\nMems_allowed_list:\t{allowed}\n")
    return root


def test_nodes_without_memory_are_no_choice(tmp_path: Path) -> None:
    root = host(tmp_path, {0: "0-3", 1: "4-7,12", 2: "", 10: "8"}, having="0-1,10")
    assert memory_nodes(root) == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7, 12}, 10: {8}}


@pytest.mark.parametrize(
    ("node", "sentence"),
    [
        (7, r"names memory node 7, which this host doesn't have; there is: 0, 1; -1 takes"),
        (2, r"names memory node 2, which this process may not use; there is: 0, 1; -1 takes"),
        (3, r"names memory node 3, which this host doesn't have"),
    ],
)
def test_a_node_that_is_not_there_is_refused_in_a_sentence(tmp_path: Path, node: int, sentence: str) -> None:
    root = host(tmp_path, {0: "0", 1: "1", 2: "2", 3: ""}, allowed="0-1", having="0-2")
    for fine in (-1, 0, 1):
        check_node(fine, root)
    with pytest.raises(ConfigError, match=sentence) as caught:
        check_node(node, root)
    assert "\n" not in str(caught.value)


def test_this_host_has_its_nodes_and_not_another() -> None:
    for node in memory_nodes():
        check_node(node)
    with pytest.raises(ConfigError, match="memory node 1023"):
        check_node(1023)


def test_a_host_that_tells_of_no_nodes_has_none_to_choose(tmp_path: Path) -> None:
    assert memory_nodes(tmp_path) == {}
    assert own_node(tmp_path) is None
    with pytest.raises(ConfigError, match="none that the kernel tells of"):
        check_node(0, tmp_path)


def test_the_worker_s_own_node_is_where_all_its_processors_are(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))
    listed = ",".join(map(str, mine))
    assert own_node(host(tmp_path / "one", {0: listed})) is None
    assert own_node(host(tmp_path / "own", {0: "900-903", 1: listed})) == 1
    assert own_node(host(tmp_path / "missing", {0: "900-903", 1: "904"})) is None
    if len(mine) > 1:
        split = {0: str(mine[0]), 1: ",".join(map(str, mine[1:]))}
        assert own_node(host(tmp_path / "split", split)) is None


@pytest.mark.parametrize(
    ("policy", "facts", "shortfalls"),
    [
        (MemoryPolicy(True), {"huge_bytes": 100}, 0),
        (MemoryPolicy(True), {"huge_bytes": 99, "huge_reason": "x"}, 1),
        (MemoryPolicy(True), {"asked_bytes": 0}, 0),
        (MemoryPolicy(None), {"huge_reason": "x"}, 0),
        (MemoryPolicy(False, 1), {"node": 1, "node_share": 1.0}, 0),
        (MemoryPolicy(False, 1), {"node": 1, "node_share": 0.5}, 1),
        (MemoryPolicy(False, 1), {"node": 1, "node_share": None}, 0),
        (MemoryPolicy(False, 1), {"node": 1, "node_reason": "x"}, 1),
        (MemoryPolicy(False, -1), {"node": 1, "node_reason": "x", "node_share": 0.0}, 0),
        (MemoryPolicy(True, 1), {"node": 1, "node_reason": "x", "huge_reason": "y"}, 2),
    ],
)
def test_only_what_was_asked_for_by_name_can_fall_short(
    policy: MemoryPolicy, facts: dict[str, object], shortfalls: int
) -> None:
    whole = {"asked_bytes": 100, "huge_bytes": 0, "taken_s": 0.1, "huge_reason": "", "node": None}
    whole |= {"node_share": None, "node_reason": ""}
    found = MemoryReport(policy=policy, **(whole | facts)).shortfalls()  # type: ignore[arg-type]
    assert len(found) == shortfalls
    assert all("\n" not in each for each in found)
