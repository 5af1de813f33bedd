"""What `umbp doctor` looks at of a cluster store: whether it is there, what it is, and one small object on
its way there and back.

Each call has a thread of its own, so that a store which hangs holds nobody up.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import TypeVar

from umbp.cli.checks import Check
from umbp.cli.listening import listening
from umbp.errors import ConfigError
from umbp.kinds import format_size, parse_size
from umbp.options import Options
from umbp.store.base import ClusterStore, Outcome, StoreError
from umbp.store.factory import StoreMaker, create_store
from umbp.store.mooncake_master import METRICS_PORT, MasterFigures, master_figures
from umbp.store.mooncake_settings import require_room

T = TypeVar("T")

OPEN_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 5.0
LEAVE_S = 5.0
FIGURES_TIMEOUT_S = 2.0
OBJECT_BYTES = 64 << 10
KEY_PREFIX = "umbp-doctor:"
"""No engine's keys begin so."""

_KEPT: list[mmap.mmap] = []
"""Memory that stores were told of: one that hangs may write to it as long as this process lives."""

PROBES = 5
CLOCKS_APART_S = 1.0


def check_store(
    options: Options, metrics_port: int = METRICS_PORT, make_store: StoreMaker = create_store
) -> Iterator[Check]:
    """The store of mode distributed; nothing stays there. `metrics_port` is that of Mooncake's master,
    `make_store` makes one connection.
    """
    name = options.store or ""
    heard_before = listening()
    try:
        store = make_store(options, serves_memory=False)
        began_s = time.monotonic()
        _within(OPEN_TIMEOUT_S, store.open)
    except (StoreError, ConfigError) as error:
        yield Check("store", "bad", str(error))
        return
    except TimeoutError:
        text = (
            f"{name} was silent for {OPEN_TIMEOUT_S:.0f} s when it was opened; see whether its server is well"
        )
        yield Check("store", "bad", text)
        return
    try:
        took_s = time.monotonic() - began_s
        asked_at_s = time.time()
        told = _ask(store, lambda store: store.describe()) or {}
        clock_s = (asked_at_s + time.time()) / 2
        yield Check("store", "ok", f"{name}: {_in_words(told)}; connected in {_ms(took_s)}")
        yield from check_version(name, told)
        yield from check_clock(name, told, clock_s)
        yield from _check_round_trips(store)
        yield from _check_memory(options, told, metrics_port)
        yield from check_locked_memory(options)
        yield from _check_object(store)
        yield from _check_listening(name, sorted(listening() - heard_before))
    finally:
        with contextlib.suppress(TimeoutError):
            _within(LEAVE_S, store.close)
    yield from _check_seed()


def _within(timeout_s: float, verb: Callable[[], T]) -> T:
    """What the verb gives or raises, or `TimeoutError`: then its thread stays behind."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(verb())
        except BaseException as error:  # noqa: BLE001 # top of a thread
            done.set_exception(error)

    threading.Thread(target=run, name="umbp-doctor", daemon=True).start()
    return done.result(timeout_s)


def _ask(store: ClusterStore, verb: Callable[[ClusterStore], T]) -> T | None:
    """The verb's result; `None` where it doesn't come in time."""
    try:
        return _within(CALL_TIMEOUT_S, lambda: verb(store))
    except TimeoutError:
        return None


def _in_words(told: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in told.items() if name not in ("clock", "tried with"))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.1f} s"


def check_version(name: str, told: Mapping[str, str]) -> Iterator[Check]:
    version, tried = told.get("version"), told.get("tried with")
    if version is None or tried is None:
        yield Check("store version", "note", f"{name} tells none")
    elif f"{version}.".startswith(f"{tried}."):
        yield Check("store version", "ok", f"{version}, with which the adapter is tested ({tried})")
    else:
        text = f"{version}; the adapter is tested with {tried}, so this one is new to it"
        yield Check("store version", "note", text)


def check_clock(name: str, told: Mapping[str, str], here_s: float) -> Iterator[Check]:
    if "clock" not in told:
        text = f"{name} tells no time, so it isn't checked; no host's time is compared with another's"
        yield Check("clocks", "note", text)
        return
    apart_s = float(told["clock"]) - here_s
    if abs(apart_s) < CLOCKS_APART_S:
        yield Check("clocks", "ok", f"the store's and this host's are {_ms(abs(apart_s))} apart")
    else:
        text = (
            f"the store's is {abs(apart_s):.0f} s {'ahead' if apart_s > 0 else 'behind'}; objects don't "
            "depend on it, but logs and certificates do: set both by NTP"
        )
        yield Check("clocks", "note", text)


def _check_round_trips(store: ClusterStore) -> Iterator[Check]:
    times_s = []
    for _ in range(PROBES):
        began_s = time.perf_counter()
        why_not = "the store has stopped answering; see its log"
        try:
            is_well = _ask(store, lambda store: store.probe())
        except StoreError as error:
            is_well, why_not = False, str(error)
        if not is_well:
            yield Check("round trip", "bad", why_not)
            return
        times_s.append(time.perf_counter() - began_s)
    text = f"{_ms(sorted(times_s)[PROBES // 2])} a question, {_ms(max(times_s))} at most of {PROBES}"
    yield Check("round trip", "ok", text)


def _check_memory(options: Options, told: Mapping[str, str], metrics_port: int) -> Iterator[Check]:
    """What the cluster offers, as far as it can be learned."""
    if options.store == "redis":
        yield from _check_redis_memory(told)
    elif options.store == "mooncake":
        yield from check_segment(options)
        host, _, _ = told.get("master", "").rpartition(":")
        figures = master_figures(host.strip("[]"), metrics_port, FIGURES_TIMEOUT_S)
        if figures is None:
            text = (
                f"{host}:{metrics_port} tells nothing (mooncake_master --metrics_port, here --metrics-port): "
                "how much memory is on offer isn't checked"
            )
            yield Check("store memory", "note", text)
        else:
            yield mooncake_memory(figures, _segment_bytes(options), options)


def check_segment(options: Options) -> Iterator[Check]:
    """Whether a worker has the memory that it is to offer beside its pool."""
    segment_bytes = _segment_bytes(options)
    if segment_bytes:
        try:
            require_room(segment_bytes, _near_bytes(options))
        except ConfigError as error:
            yield Check("segment", "bad", str(error))


def _check_redis_memory(told: Mapping[str, str]) -> Iterator[Check]:
    policy, most = told.get("when full", ""), told.get("memory at most", "")
    if policy == "noeviction":
        text = (
            "a full server refuses all puts (noeviction): redis-cli config set maxmemory-policy allkeys-lru"
        )
        yield Check("store memory", "note", text)
    elif most in ("", "0B"):
        text = "the server takes all of its host's memory: redis-cli config set maxmemory 64gb"
        yield Check("store memory", "note", text)
    else:
        yield Check("store memory", "ok", f"{told.get('memory used')} of {most} in use; {policy} when full")


def mooncake_memory(figures: MasterFigures, segment_bytes: int, options: Options) -> Check:
    nodes, total = len(figures.segments), figures.total_bytes
    text = (
        f"{format_size(total)} on offer in {nodes} segment{'' if nodes == 1 else 's'}, "
        f"{format_size(max(total - figures.used_bytes, 0))} free"
    )
    if total == 0 and segment_bytes == 0:
        return Check(
            "store memory",
            "bad",
            "no node offers memory, so every put is refused: start `umbp store node --master ... --segment "
            "64GiB` on some hosts, or set 'segment_bytes'",
        )
    if segment_bytes:
        return Check("store memory", "ok", f"{text}; each worker will add {format_size(segment_bytes)}")
    near_bytes = _near_bytes(options)
    if total < near_bytes:
        text += f"; that is less than this engine's own pool ({format_size(near_bytes)}): it will keep little"
        return Check("store memory", "note", text)
    return Check("store memory", "ok", text)


def _near_bytes(options: Options) -> int:
    """Of one worker, as far as it was asked for."""
    if options.given.isdisjoint(("capacity_bytes", "total_capacity_bytes")):
        return 0
    return options.worker_capacity(1 << 60, 1)


def _segment_bytes(options: Options) -> int:
    given = options.store_options.get("segment_bytes", 0)
    return parse_size(given) if isinstance(given, int | str) else 0


def check_locked_memory(options: Options) -> Iterator[Check]:
    """RDMA pins what is registered."""
    if options.store_options.get("protocol") != "rdma":
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    wanted = _near_bytes(options) + _segment_bytes(options)
    if soft == resource.RLIM_INFINITY:
        yield Check("locked memory", "ok", "unlimited")
    elif soft < max(wanted, 1 << 30):
        text = (
            f"{format_size(soft)} may be locked, and RDMA locks pool and segment: ulimit -l unlimited "
            "(systemd: LimitMEMLOCK=infinity, containers: --ulimit memlock=-1)"
        )
        yield Check("locked memory", "bad", text)
    else:
        yield Check("locked memory", "ok", f"{format_size(soft)} may be locked")


def _check_object(store: ClusterStore) -> Iterator[Check]:
    """Put, find, fetch, compare and remove one object of a name of its own."""
    memory = mmap.mmap(-1, 2 * OBJECT_BYTES)
    _KEPT.append(memory)
    payload = os.urandom(OBJECT_BYTES)
    memory[:OBJECT_BYTES] = payload
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    try:
        _within(CALL_TIMEOUT_S, lambda: store.register(start, 2 * OBJECT_BYTES))
    except (StoreError, TimeoutError) as error:
        yield Check("object", "bad", str(error) or "the store doesn't answer when it is told of memory")
        return
    key = f"{KEY_PREFIX}{uuid.uuid4().hex}"
    steps: list[tuple[str, Outcome, Callable[[ClusterStore], Outcome]]] = [
        ("put", Outcome.DONE, lambda store: store.put([key], [start], [OBJECT_BYTES])[0]),
        ("found", Outcome.DONE, lambda store: store.exists([key])[0]),
        ("fetched", Outcome.DONE, lambda store: store.get([key], [start + OBJECT_BYTES], [OBJECT_BYTES])[0]),
        ("removed", Outcome.DONE, lambda store: store.remove([key])[0]),
        ("gone", Outcome.MISS, lambda store: store.exists([key])[0]),
    ]
    times = []
    for step, expected, verb in steps:
        began_s = time.perf_counter()
        outcome = _ask(store, verb) or Outcome.BROKEN
        times.append(f"{step} {_ms(time.perf_counter() - began_s)}")
        if outcome is not expected:
            yield Check("object", "bad", _why_not(step, outcome))
            _ask(store, lambda store: store.remove([key]))
            return
    if memory[OBJECT_BYTES:] != payload:
        yield Check(
            "object", "bad", f"{format_size(OBJECT_BYTES)} came back as other bytes; trust nothing here"
        )
        return
    yield Check(
        "object", "ok", f"{format_size(OBJECT_BYTES)} there and back, the same bytes: {', '.join(times)}"
    )


def _why_not(step: str, outcome: Outcome) -> str:
    size = format_size(OBJECT_BYTES)
    if outcome is Outcome.BROKEN:
        return f"{size} couldn't be {step}: the store doesn't answer, or a node behind it; see their logs"
    if step == "put":
        return f"the store has no room for {size} at this moment: it is full, or no node offers memory"
    return f"{size} couldn't be {step}: the store answers {outcome.value!r}"


def _check_listening(name: str, ports: list[str]) -> Iterator[Check]:
    """Where this process's client listens, as every engine's does."""
    if not ports:
        yield Check("listening", "ok", f"clients of {name} listen nowhere")
        return
    text = (
        f"this client listened on {', '.join(ports)}, as each scheduler and worker does, on other ports: "
        "whoever reaches them reads and writes, so fence them off (docs/distributed.md)"
    )
    yield Check("listening", "note", text)


def _check_seed() -> Iterator[Check]:
    seed = os.environ.get("PYTHONHASHSEED")
    text = (
        "engines with --prefix-caching-hash-algo sha256 or sha256_cbor agree; others need the same "
        f"PYTHONHASHSEED on all hosts, which is {'not set' if seed is None else seed} here"
    )
    yield Check("hash seed of all hosts", "ok", text)
