"""What forked processes do to a pool."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from typing import Any

import numpy as np
from zygote import Lines

from umbp import _native
from umbp.pool import Outcome, Pool, inspect_pool

OBJECT_BYTES = 3000


def pattern(key: str, length: int = OBJECT_BYTES) -> bytes:
    """The bytes that belong to a key; any other key's differ."""
    unit = f"<{key}>".encode()
    return (unit * (length // len(unit) + 1))[:length]


def write_payloads(pool: Pool, keys: list[str], tickets: Any) -> None:
    addresses, lengths = pool.payload(tickets)
    for key, address, length in zip(keys, addresses.tolist(), lengths.tolist(), strict=True):
        ctypes.memmove(address, pattern(key, length), length)


def read_payload(pool: Pool, ticket: int) -> bytes:
    addresses, lengths = pool.payload([ticket])
    return ctypes.string_at(int(addresses[0]), int(lengths[0]))


def store(pool: Pool, ns: int, keys: list[str], parents: list[str | None] | None = None) -> list[int]:
    """Reserves, writes and publishes; the outcomes of the reservation."""
    tickets, outcomes = pool.reserve(ns, keys, OBJECT_BYTES, parents)
    mine = outcomes == Outcome.RESERVED
    write_payloads(pool, [k for k, m in zip(keys, mine, strict=True) if m], tickets[mine])
    pool.publish(tickets[mine])
    return list(outcomes.tolist())


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(v) for v in value] if isinstance(value, tuple) else value


def serve(lines: Lines, path: str) -> None:
    """Runs a pool's verbs on demand; `arm` sets the crash point, `store` and `read` move patterns."""
    pool = Pool.attach(path)
    for verb, *args in lines:
        try:
            if verb == "arm":
                value = _native.arm_crash_point(*args)
            elif verb == "store":
                value = store(pool, *args)
            elif verb == "read":
                value = read_payload(pool, *args).decode()
            elif verb == "close_a_duplicate":
                value = os.close(os.dup(pool.native.fd))
            elif verb == "fork_a_child":
                value = fork_a_child(lines)
            else:
                value = plain(getattr(pool, verb)(*args))
            lines.answer(value)
        except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it
            lines.answer(f"{type(error).__name__}: {error}", "error")


def fork_a_child(lines: Lines) -> int:
    """One that does nothing, and keeps every descriptor but the connection, until it is killed."""
    child = os.fork()
    if child == 0:
        os.close(lines.socket.fileno())
    while child == 0:
        signal.pause()
    return child


def create_with_file_limit(lines: Lines, path: str) -> None:
    """Makes a pool where the kernel refuses so large a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        Pool.create(path, 8 << 20, slab_bytes=1 << 20, min_object_bytes=OBJECT_BYTES)
        lines.answer("made")
    except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it
        lines.answer(f"{type(error).__name__}: {error}")


def script(lines: Lines, path: str, countdown: int, stop: bool = False) -> None:
    """A fixed walk through every verb, with the n-th crash point armed; answers once if it got to its end."""
    _native.arm_crash_point(countdown, stop)
    pool = Pool.attach(path)
    ns = pool.namespace("script")
    chain = [f"s{i}" for i in range(12)]
    parents: list[str | None] = [None, *chain[:-1]]
    store(pool, ns, chain, parents)
    tickets, _ = pool.acquire(chain[:6])
    pool.touch(chain)
    pool.remove(chain[4:8])
    pool.release(tickets[:3])
    held, _ = pool.reserve(ns, ["a1", "a2", "a3"], 9000)
    pool.abandon(held[:1])
    store(pool, ns, [f"more{i}" for i in range(40)])
    late, _ = pool.reserve(ns, ["late"], OBJECT_BYTES)
    pool.clear(ns)
    pool.publish(late)
    pool.publish(held[1:])
    store(pool, ns, ["again"])
    pool.close()
    _native.arm_crash_point(0)
    lines.answer("done")


def churn(lines: Lines, path: str, rounds: int) -> None:
    """Stores and removes so that index entries move all the time; answers when it is attached and when it
    is done."""
    pool = Pool.attach(path, lock_patience_s=5.0)
    ns = pool.namespace("churn")
    lines.answer("attached")
    for i in range(rounds):
        keys = [f"c{i}.{j}" for j in range(200)]
        tickets, outcomes = pool.reserve(ns, keys, OBJECT_BYTES)
        pool.publish(tickets[outcomes == Outcome.RESERVED])
        pool.remove(keys[::2])
    lines.answer("done")


def shift(lines: Lines, path: str, board: str, blockers: list[str], keys: list[str]) -> None:
    """Stores blockers, then keys that want the same places in the index; removes the blockers, so that each
    key moves again and again; begins anew. The board's number is odd from when all keys are stored until the
    first is to go. Runs until killed."""
    turn = np.memmap(board, dtype=np.uint64, mode="r+")
    pool = Pool.attach(path, lock_patience_s=5.0)
    ns = pool.namespace("shift")
    while True:
        for some in (blockers, keys):
            tickets, _ = pool.reserve(ns, some, OBJECT_BYTES)
            pool.publish(tickets)
        turn[0] += np.uint64(1)
        pool.remove(blockers)
        turn[0] += np.uint64(1)
        pool.remove(keys)


def seal_often(lines: Lines, path: str, keys: list[str], rounds: int) -> None:
    """Seals stored objects and checks them, over and over, from when it is told to; answers what it found."""
    pool = Pool.attach(path, lock_patience_s=5.0)
    pins, _ = pool.acquire(keys)
    lines.answer("ready")
    next(iter(lines))
    found: set[int] = set()
    for _ in range(rounds):
        found.update(pool.seal(pins, keys).tolist())
        found.update(pool.check_seal(pins, keys).tolist())
    lines.answer(sorted(found))


def hold_size(lines: Lines, path: str) -> None:
    """Keeps the pool's size as it is, until killed."""
    pool = Pool.attach(path)
    with pool.size_held():
        lines.answer("held")
        for _ in lines:
            pass


def destroy_path(lines: Lines, path: str, countdown: int) -> None:
    _native.arm_crash_point(countdown)
    _native.destroy(path)
    _native.arm_crash_point(0)
    lines.answer("done")


def as_user(lines: Lines, uid: int, gid: int, groups: list[int], path: str, verb: str, *args: Any) -> None:
    """One deed as another user: make a pool (for a group), store into it, or destroy it."""
    os.setgroups(groups)
    os.setgid(gid)
    os.setuid(uid)
    try:
        if verb == "create":
            group = args[0] if args else None
            Pool.create(path, 1 << 20, slab_bytes=1 << 16, min_object_bytes=OBJECT_BYTES, group=group).close()
        elif verb == "destroy":
            _native.destroy(path)
        elif verb == "inspect":
            lines.answer(inspect_pool(path).problem)
            return
        else:
            with Pool.attach(path) as pool:
                store(pool, pool.namespace("a"), [f"by {uid}"])
                pool.audit()
        lines.answer("ok")
    except Exception as error:  # noqa: BLE001 - whatever it is, the test reads it
        lines.answer(f"{type(error).__name__}: {error}")
