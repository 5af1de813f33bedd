"""What Mooncake does when something dies, is silent or is full, and that it costs callers a bounded time."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from umbp.errors import InvariantError
from umbp.store import mooncake, mooncake_client, mooncake_codes
from umbp.store.base import Outcome, StoreError
from umbp.store.gate import StoreGate, StoreUnavailable
from umbp.store.mooncake import MooncakeStore
from umbp.store.mooncake_metadata import metadata_trouble
from umbp.store.mooncake_settings import MooncakeSettings
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.servers import MortalMooncake, start_master, start_node

T = TypeVar("T")

DONE, MISS, LATER, BROKEN = Outcome.DONE, Outcome.MISS, Outcome.LATER, Outcome.BROKEN
DAMAGED = Outcome.DAMAGED
MEMORY_BYTES = 48 << 20
SILENCE_S = MooncakeSettings(master="a:1").timeout_ms / 1000
ASK_S = 0.2


@pytest.fixture
def cluster(needs_mooncake: None, tmp_path: Path) -> Iterator[MortalMooncake]:
    cluster = MortalMooncake(tmp_path, segment_bytes=64 << 20)
    yield cluster
    cluster.end()


@pytest.fixture
def rig(cluster: MortalMooncake) -> Iterator[StoreRig]:
    rig = StoreRig(cluster.connect(), MEMORY_BYTES)
    yield rig
    cluster.master.go_on()
    rig.store.close()


def beside(call: Callable[[], T]) -> tuple[T, float, float]:
    """The call's result, how long it took, and for how long at most this thread stood still meanwhile."""
    with ThreadPoolExecutor(1) as pool:
        begun_s = last_s = time.monotonic()
        calling = pool.submit(call)
        still_s = 0.0
        while not calling.done():
            threading.Event().wait(0.002)
            now_s = time.monotonic()
            still_s, last_s = max(still_s, now_s - last_s), now_s
        return calling.result(), time.monotonic() - begun_s, still_s


def test_every_code_is_an_outcome_and_an_unknown_one_is_broken() -> None:
    assert mooncake_codes.outcome_of(-12345) is BROKEN
    assert mooncake_codes.outcome_of_put(-600) is LATER, "a put never misses"
    assert mooncake_codes.outcome_of_put(-705) is DONE
    assert mooncake_codes.outcome_of_get(100, 100) is DONE
    assert mooncake_codes.outcome_of_get(99, 100) is DAMAGED
    assert mooncake_codes.outcome_of_get(0, 100) is DAMAGED
    assert mooncake_codes.outcome_of_get(mooncake_codes.SPOILED, 100) is DAMAGED
    assert mooncake_codes.outcome_of_get(mooncake_codes.UNFIT, 100) is MISS, "it may be our own fault"
    assert mooncake_codes.outcome_of_unfit(101, 100) is DAMAGED
    assert mooncake_codes.outcome_of_unfit(100, 100) is MISS
    assert mooncake_codes.outcome_of_unfit(mooncake_codes.ABSENT, 100) is MISS
    assert mooncake_codes.outcome_of_get(-705, 100) is LATER, "only bytes are done"
    assert mooncake_codes.outcome_of_exists(-703) is MISS
    assert mooncake_codes.outcome_of_exists(-901) is BROKEN
    assert mooncake_codes.outcome_of_remove(-704) is DONE
    assert mooncake_codes.outcome_of_remove(-703) is LATER
    for code in mooncake_codes.OUTCOMES:
        assert DAMAGED not in (mooncake_codes.outcome_of_put(code), mooncake_codes.outcome_of_remove(code))
        assert mooncake_codes.outcome_of_exists(code) in (DONE, MISS, BROKEN)


@pytest.mark.parametrize(
    ("url", "said", "words"),
    [
        (
            "etcd://{closed};{closed}",
            "EtcdStoragePlugin: unable to set k in h: context deadline exceeded",
            "no metadata server answers",
        ),
        ("etcd://{open},{closed}", "EtcdStoragePlugin: unable to set k in h: who are you", "(who are you)"),
        ("http://{open}/m", "PUT http://h/m?key=k curl: Timeout err: SSL timeout", "(SSL timeout)"),
        ("http://{closed}/m", "PUT http://h/m?key=k http=503 body: ", "(HTTP status 503)"),
        ("http://[::1]:99999/m", "PUT http://h/m?key=k curl: Bad err: ", "no metadata server answers"),
    ],
)
def test_what_mooncake_says_of_its_metadata_server_is_one_sentence(url: str, said: str, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        hosts = {
            name: f"127.0.0.1:{each.getsockname()[1]}" for name, each in (("open", one), ("closed", other))
        }
        log = f"WARNING: of another kind\nE1130 11:40:22.5 216 transfer_metadata_plugin.cpp:340] {said}\nE1 x"
        text = metadata_trouble(url.format(**hosts), log, 1.0)
    assert text is not None
    assert words in text
    assert "\n" not in text


def test_of_what_is_not_its_metadata_servers_fault_mooncakes_first_error_is_told() -> None:
    asked = (
        "E1 11:40:22.5 216 transfer_metadata_plugin.cpp:292] GET http://h http=404 body: metadata not found"
    )
    log = f"{asked}\nE1 11:40:22.5 216 client_service.cpp:853] no such device\n"
    assert metadata_trouble("http://h/m", log, 1.0) is None
    assert mooncake_client.first_error(log) == "no such device"


def test_ranges_under_way_are_bounded_and_one_call_has_half_of_the_room() -> None:
    room = mooncake._Room(4, patience_s=0.01)
    assert room.take(9) == 2
    assert room.take(1) == 1, "the others may hang"
    assert room.take(2) == 0
    assert room.take(1) == 1
    assert room.take(1) == 0
    room.audit()
    room.give_back(4)
    room.audit()
    room.give_back(1)
    with pytest.raises(InvariantError):
        room.audit()
    assert mooncake._Room(1, patience_s=0.01).take(5) == 1


def test_the_room_is_given_to_those_who_came_first() -> None:
    """Scenario: small calls one after another kept a large one waiting until it gave up."""
    room = mooncake._Room(4, patience_s=30)
    order: list[int] = []

    def take(wanted: int) -> None:
        granted = room.take(wanted)
        order.append(wanted)
        room.give_back(granted)

    assert [room.take(2), room.take(1)] == [2, 1]
    with ThreadPoolExecutor(3) as threads:
        for place, wanted in enumerate((2, 1, 1)):
            threads.submit(take, wanted)
            while len(room._line) <= place:
                threading.Event().wait(0.001)
        assert order == []
        room.give_back(3)
    assert order[0] == 2
    room.audit()


def test_when_the_interpreter_ends_nobody_is_let_in_and_whoever_is_inside_is_waited_for() -> None:
    """Scenario: a thread came out of Mooncake when the interpreter was gone, which aborted the process."""
    inside = mooncake_client.Inside()
    with ThreadPoolExecutor(1) as pool:
        with inside.call() as is_let_in:
            assert is_let_in
            ending = pool.submit(inside.end)
            while not inside.is_over:
                threading.Event().wait(0.001)
            with inside.call() as is_let_in_late:
                assert not is_let_in_late
            assert not ending.done()
        ending.result(timeout=10)
    inside.audit()


def test_the_operators_limits_of_time_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "7")
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "")
    monkeypatch.delenv("MC_TCP_PROGRESS_TIMEOUT_SEC")
    mooncake_client.set_environment(1500)
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "7"
    assert os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "2"


@pytest.mark.parametrize(
    ("given", "queue"), [(None, 4096), ("100", 100), ("", 1024), ("0", 1024), ("many", 1024), ("70000", 1024)]
)
def test_the_operators_queue_for_a_peer_is_kept_to(
    monkeypatch: pytest.MonkeyPatch, given: str | None, queue: int
) -> None:
    """Mooncake takes its own where the variable is no number from 1 to 65,535."""
    monkeypatch.setenv(mooncake_client.QUEUED_RANGES, given or "")
    if given is None:
        monkeypatch.delenv(mooncake_client.QUEUED_RANGES)
    mooncake_client.set_environment(1500)
    assert mooncake_client.queue_of_ranges() == queue


@pytest.mark.parametrize("queue", [None, "64"], ids=["our queue", "the operator's queue"])
def test_no_object_fails_where_many_threads_move_as_many_as_one_call_takes(
    cluster: MortalMooncake, monkeypatch: pytest.MonkeyPatch, queue: str | None
) -> None:
    monkeypatch.setenv(mooncake_client.QUEUED_RANGES, queue or "")
    if queue is None:
        monkeypatch.delenv(mooncake_client.QUEUED_RANGES)
    threads, size = 4, 4096
    rig = StoreRig(cluster.connect(), threads * mooncake.MOST_RANGES * size)

    def move(thread: int) -> set[Outcome]:
        keys = [f"{thread}-{number}" for number in range(mooncake.MOST_RANGES)]
        first = rig.address + thread * len(keys) * size
        at, sizes = [first + row * size for row in range(len(keys))], [size] * len(keys)
        seen: set[Outcome] = set()
        for _ in range(3):
            for verb in (rig.store.put, rig.store.get):
                seen.update(verb(keys, at, sizes))
            rig.store.remove(keys)
        return seen

    with ThreadPoolExecutor(threads) as pool:
        assert set().union(*pool.map(move, range(threads))) == {DONE}
    rig.store.audit()
    rig.store.close()


@pytest.mark.slow
def test_gets_go_on_beside_a_put_that_hangs(needs_mooncake: None, tmp_path: Path) -> None:
    """Scenario: a node is silent while it is sent as much as one call takes."""
    with contextlib.ExitStack() as ending:
        master = start_master(tmp_path / "master.log")
        ending.callback(master.kill)
        ending.callback(start_node(master.address, 64 << 20, tmp_path / "node0.log").kill)
        size, count = 4096, mooncake.MOST_RANGES
        rig = StoreRig(MooncakeStore(MooncakeSettings(master=master.address)), 2 * count * size)
        ending.callback(rig.store.close)
        at, sizes = [rig.address + row * size for row in range(2 * count)], [size] * count
        kept = [f"kept-{number}" for number in range(count)]
        assert set(rig.store.put(kept, at[:count], sizes)) == {DONE}
        silent = start_node(master.address, 512 << 20, tmp_path / "node1.log")
        ending.callback(silent.kill)
        silent.stop()
        new = [f"new-{number}" for number in range(count)]
        with ThreadPoolExecutor(1) as thread:
            putting = thread.submit(rig.store.put, new, at[count:], sizes)
            with contextlib.suppress(TimeoutError):
                putting.result(timeout=0.5)
            for _ in range(20):
                assert set(rig.store.get(kept, at[:count], sizes)) == {DONE}
            assert not putting.done(), "it should have hung"
            silent.kill()
            assert BROKEN in putting.result() or LATER in putting.result()
        rig.store.audit()


@pytest.mark.slow
def test_a_dead_master_is_noticed_at_once_and_the_same_client_goes_on_with_its_successor(
    cluster: MortalMooncake, rig: StoreRig
) -> None:
    cluster.kill()
    for _ in range(3):
        is_well, took_s, _ = beside(rig.is_well)
        assert not is_well
        assert took_s < 1.0, "a probe that takes long would pass for one that hangs"
    cluster.revive()
    until_s = time.monotonic() + 60
    while rig.put({"a": b"value"}) != [DONE]:
        assert time.monotonic() < until_s
    assert rig.store.probe()
    assert rig.fetch({"a": b"value"}) == [DONE]


@pytest.mark.slow
def test_a_silent_master_costs_its_callers_a_bounded_time_and_nobody_else_any(
    cluster: MortalMooncake, rig: StoreRig
) -> None:
    objects = {"a": b"value" * 100}
    assert rig.put(objects) == [DONE]
    cluster.master.stop()
    calls: list[Callable[[], object]] = [
        lambda: rig.exists(["a"]),
        lambda: rig.fetch(objects),
        lambda: rig.put({"b": b"value"}),
        lambda: rig.remove(["a"]),
        lambda: [rig.store.remove_prefix("a")],
    ]
    for call in calls:
        outcomes, took_s, still_s = beside(call)
        assert outcomes == [BROKEN]
        assert SILENCE_S * 0.9 < took_s < SILENCE_S * 3
        assert still_s < SILENCE_S * 0.8, "all of Python stood still"
    assert not rig.is_well()
    cluster.master.go_on()
    assert rig.store.probe()
    assert rig.fetch(objects) == [MISS], "it does late what it was asked: the removal"
    assert rig.put(objects) == rig.fetch(objects) == [DONE]


@pytest.mark.slow
def test_nobody_stands_still_when_a_store_of_a_silent_master_is_opened_or_closed(
    cluster: MortalMooncake, rig: StoreRig
) -> None:
    offering = MooncakeStore(
        MooncakeSettings(master=cluster.master.address, segment_bytes=16 << 20), serves_memory=True
    )
    offering.open()
    cluster.master.stop()

    def fail_to_open() -> bool:
        with pytest.raises(StoreError, match="answer as a Mooncake master"):
            cluster.connect().open()
        return True

    _, _, still_s = beside(fail_to_open)
    assert still_s < SILENCE_S * 0.8
    _, took_s, still_s = beside(offering.close)
    assert took_s < SILENCE_S * 3
    assert still_s < SILENCE_S * 0.8
    assert offering.exists(["a"]) == [BROKEN]
    leaving = [thread for thread in threading.enumerate() if thread.name == "umbp-mooncake-close"]
    assert leaving, "a store that can't be left yet waits until it can"
    cluster.master.go_on()
    for thread in leaving:
        thread.join(60)
        assert not thread.is_alive()
    offering.audit()


@pytest.mark.slow
def test_closing_beside_a_call_that_hangs_in_a_silent_node_crashes_nothing(
    cluster: MortalMooncake, rig: StoreRig
) -> None:
    store = cluster.connect()
    mine = StoreRig(store, MEMORY_BYTES)
    objects = {"a": bytes(1 << 20)}
    assert mine.put(objects) == [DONE]
    cluster.node.stop()
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(mine.fetch, objects)
        while not store._inside:
            threading.Event().wait(0.001)
        store.close()
        store.audit()
        assert store._client is not None, "the call inside still uses it"
        assert hanging.result() == [BROKEN]
    assert store._client is None
    store.audit()
    cluster.node.go_on()


@pytest.mark.slow
def test_a_node_killed_while_it_is_read_costs_what_it_had_and_a_second_one_takes_its_place(
    cluster: MortalMooncake, rig: StoreRig, tmp_path: Path
) -> None:
    objects = {f"k{number}": bytes([number]) * (2 << 20) for number in range(16)}
    assert rig.put(objects) == [DONE] * 16
    killing = threading.Thread(target=cluster.node.kill)
    killing.start()
    outcomes: list[Outcome] = []
    while BROKEN not in outcomes:
        outcomes = rig.fetch(objects)
    killing.join()
    assert rig.store.probe(), "the master is well"
    second = start_node(cluster.master.address, 64 << 20, tmp_path / "second.log")
    try:
        until_s = time.monotonic() + 30
        number = 0
        while rig.put({f"new{number}": b"value" * 1000}) != [DONE]:
            number += 1
            assert time.monotonic() < until_s
        assert rig.fetch({f"new{number}": b"value" * 1000}) == [DONE]
    finally:
        second.kill()


@pytest.mark.slow
def test_a_full_cluster_takes_nothing_now_while_all_is_leased(cluster: MortalMooncake, rig: StoreRig) -> None:
    outcomes: list[Outcome] = []
    for number in range(24):
        outcomes += rig.put({f"k{number}": bytes(4 << 20)})
        rig.exists([f"k{number}"])
    assert {DONE, LATER} == set(outcomes)
    assert rig.put({"too large": bytes(40 << 20)}) == [LATER]
    assert rig.store.probe()


@pytest.mark.slow
def test_what_is_being_put_is_neither_read_nor_removed_and_comes(
    cluster: MortalMooncake, rig: StoreRig
) -> None:
    other = StoreRig(cluster.connect(), MEMORY_BYTES)
    old, new = {"ns:old": b"value" * 100}, {"ns:new": bytes(16 << 20)}
    assert rig.put(old) == [DONE]
    cluster.node.stop()
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(rig.put, new)
        until_s = time.monotonic() + 10
        # The only sign that it is under way: it can't be removed.
        while other.remove(["ns:new"]) != [LATER]:
            assert time.monotonic() < until_s
        assert other.exists(["ns:new"]) == [MISS]
        assert other.store.get(["ns:new"], [other.address], [16 << 20]) == [LATER]
        assert other.store.remove_prefix("ns:") is DONE
        assert other.exists(["ns:old", "ns:new"]) == [MISS, MISS]
        cluster.node.go_on()
        put = putting.result()
    if put == [DONE]:
        assert other.fetch(new) == [DONE]
    assert rig.put(new) == [DONE]
    other.store.close()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("fault", ["silent", "dead"])
def test_behind_a_gate_a_master_that_fails_costs_one_timeout_and_its_return_nothing(
    cluster: MortalMooncake, fault: str
) -> None:
    gate = StoreGate("mooncake", cluster.connect)
    gate.open(30.0)
    memory = mmap.mmap(-1, 1 << 20)
    held = (ctypes.c_ubyte * len(memory)).from_buffer(memory)
    gate.register(ctypes.addressof(held), len(memory), 10.0)

    def ask() -> Sequence[Outcome]:
        return gate.call(lambda store: store.exists(["a"]), ASK_S)

    def fail_and_return() -> None:
        assert ask() == [MISS]
        cluster.master.stop() if fault == "silent" else cluster.kill()
        begun_s = time.monotonic()
        while gate.is_well:
            with contextlib.suppress(StoreUnavailable):
                ask()
        assert time.monotonic() - begun_s < 1.0
        refused_s = []
        while time.monotonic() - begun_s < 4.0:
            asked_s = time.monotonic()
            with pytest.raises(StoreUnavailable):
                ask()
            refused_s.append(time.monotonic() - asked_s)
            threading.Event().wait(0.05)
        # Nobody waits the timeout once more, whatever else the machine does; most are told in microseconds.
        assert max(refused_s) < ASK_S
        assert statistics.median(refused_s) < 0.001
        cluster.master.go_on() if fault == "silent" else cluster.revive()
        while not gate.is_well:
            threading.Event().wait(0.01)
            assert time.monotonic() - begun_s < 60.0

    _, _, still_s = beside(fail_and_return)
    assert still_s < 0.5, "all of Python stood still"
    assert gate.call(lambda store: store.exists(["a"]), 10.0) == [MISS]
    assert gate.counts().replaced == 0
    gate.audit()
    assert gate.close(30.0)


def test_a_client_that_is_well_tells_nothing_of_it(cluster: MortalMooncake) -> None:
    code = (
        "import os; from umbp.options import parse_options; from umbp.store.factory import create_store\n"
        f"settings = {{'master': {cluster.master.address!r}}}\n"
        "options = parse_options({'mode': 'distributed', 'store': 'mooncake', 'store_options': settings})\n"
        "store = create_store(options, serves_memory=False)\n"
        "store.open(); assert store.probe(); os._exit(0)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MC_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert not [line for line in done.stderr.splitlines() if line.startswith("I")]
