"""Kills and stops processes that share a pool and looks whether anything is wrong or left behind.

`python tests/pool/soak.py --kills 10000 [--seed N]`, or `make soak-pool KILLS=10000 SEED=N`. A run is a row
of eras. Each makes a pool of another shape, keeps a crowd of processes at work in it (some in a pid namespace
of their own), kills and stops them from outside at any moment and from inside at crash points, and ends with
everybody dead and the pool empty. The seed decides shapes, roles, crash points and the order of blows; when a
blow lands is up to the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from soak_actors import (
    CHAINS,
    COLUMNS,
    MIN_OBJECT_BYTES,
    ROLES,
    SPACES,
    STEPS,
    chain,
    check_object,
    is_lock_stopped,
    size_of,
)
from zygote import CAN_UNSHARE, Actor, Zygote

from umbp import _native
from umbp.errors import SegmentError
from umbp.pool import Outcome, Pool

PROGRESS_S = 30.0
"""A living process that isn't stopped must end a step within this."""
COUNTED = ("takeovers", "rebuilds", "reaped", "evicted", "slab_moves", "cleared", "published", "full")
SLOT_BYTES = _native.slot_bytes(MIN_OBJECT_BYTES)
ALL_KEYS = [key for number in range(CHAINS) for key in chain(number)]
NATIVE = Path(__file__).resolve().parents[2] / "native"


class SoakError(AssertionError):
    """Something is wrong with the pool; the message says what, and how to run the same again."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What is different from era to era."""

    slots: int
    slab_slots: int
    policy: str
    is_file: bool
    high_watermark: float
    crowd: int
    own_pids: bool

    @classmethod
    def drawn(cls, rng: random.Random) -> Shape:
        slab_slots = rng.choice([6, 8, 16])
        return cls(
            slots=rng.randrange(64, 320) // slab_slots * slab_slots,
            slab_slots=slab_slots,
            policy=rng.choice(["lru", "hazard"]),
            is_file=rng.random() < 0.5,
            high_watermark=rng.choice([1.0, 1.0, 0.9]),
            crowd=rng.randrange(6, 9),
            own_pids=rng.random() < 0.5,
        )

    def make(self, folder: Path) -> Pool:
        options: dict[str, Any] = {
            "slab_bytes": self.slab_slots * SLOT_BYTES,
            "min_object_bytes": MIN_OBJECT_BYTES,
            "high_watermark": self.high_watermark,
            "low_watermark": 0.8,
            "eviction_policy": self.policy,
        }
        size = self.slots * SLOT_BYTES
        if not self.is_file:
            return Pool.create_memfd(size, **options)
        return Pool.create(folder / "pool", size, max_bytes=2 * size, **options)


@dataclass(slots=True)
class Member:
    """One process of the crowd."""

    actor: Actor
    role: str
    row: int
    will_stop: bool  # its crash point stops it instead of killing it
    steps: int = -1
    progress_at: float = 0.0
    resume_at: float | None = None  # while it is stopped
    place: str = ""  # the crash point that it has come to


@dataclass(slots=True)
class Report:
    kills: Counter[tuple[str, str]] = field(default_factory=Counter)  # by role and manner
    places: Counter[str] = field(default_factory=Counter)  # crash points that killed or stopped somebody
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        return sum(self.kills.values())

    def line(self) -> str:
        c = self.counts
        return (
            f"{self.total} kills, {c['stops']} stops, {c['takeovers']} takeovers, {c['rebuilds']} rebuilds,"
            f" {c['reaped']} reaped, {c['read']} reads checked, {c['audits']} audits"
        )

    def text(self) -> str:
        manners = sorted({manner for _, manner in self.kills})
        lines = [self.line(), "", "kills     " + "".join(f"{m:>17}" for m in manners)]
        lines += [f"{role:<10}" + "".join(f"{self.kills[role, m]:>17}" for m in manners) for role in ROLES]
        points = crash_points()
        missed = sorted(points - set(self.places))
        lines += ["", f"crash points that struck: {len(points) - len(missed)} of {len(points)}"]
        struck = [f"{place:<24}{number:>6}" for place, number in self.places.most_common()]
        lines += ["  " + "   ".join(struck[i : i + 3]) for i in range(0, len(struck), 3)]
        if missed:
            lines.append("  never: " + ", ".join(missed))
        lines += ["", ", ".join(f"{name} {number}" for name, number in sorted(self.counts.items()))]
        return "\n".join(lines)


def crash_points() -> set[str]:
    """Where the core has crash points, as it reports them."""
    return {
        f"{path.name}:{number}"
        for path in NATIVE.rglob("*.[ch]pp")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"^\s*crash_point\(\);", line)
    }


class Era:
    """One pool, its crowd, and this process, which never dies: it audits, reads and stores among them."""

    def __init__(
        self, shape: Shape, rng: random.Random, zygotes: list[Zygote], folder: Path, report: Report
    ) -> None:
        self.shape = shape
        self.rng = rng
        self.zygotes = zygotes
        self.report = report
        self.pool = shape.make(folder)
        self.spaces = [self.pool.namespace(name) for name in SPACES]
        self.path = str(folder / "pool") if shape.is_file else self.pool.handle.path
        self.board_path = folder / "board"
        self.board_path.write_bytes(bytes(64 * len(COLUMNS) * 8))
        self.board = np.memmap(self.board_path, dtype=np.uint64, mode="r+").reshape(-1, len(COLUMNS))
        self.free_rows = list(range(len(self.board)))
        self.members: list[Member] = []
        self.dead: list[Member] = []

    # The crowd

    def spawn(self) -> None:
        role = self.rng.choice([role for role in ROLES if role != "destroyer"])
        is_armed, will_stop = self.rng.random() < 0.6, self.rng.random() < 0.3
        countdown = int(self.rng.expovariate(1 / 1500)) + 1 if is_armed else 0
        self.spawn_as(role, countdown, will_stop)

    def spawn_as(self, role: str, countdown: int, will_stop: bool) -> Member:
        row = self.free_rows.pop()
        self.board[row] = 0
        spec = {
            "path": self.path,
            "role": role,
            "seed": self.rng.randrange(1 << 30),
            "countdown": countdown,
            "stop": will_stop,
            "board": os.fspath(self.board_path),
            "row": row,
        }
        actor = self.rng.choice(self.zygotes).spawn("soak", spec)
        member = Member(actor, role, row, will_stop, progress_at=time.monotonic())
        self.members.append(member)
        return member

    def blow(self) -> None:
        """Kills or stops one of the crowd, or nobody."""
        running = [m for m in self.members if m.resume_at is None]
        if not running:
            return
        member = self.rng.choice(running)
        match self.rng.randrange(7):
            case 0 | 1:
                os.kill(member.actor.pid, signal.SIGKILL)
                self.bury(member, "while running")
            case 2:
                os.kill(member.actor.pid, signal.SIGSTOP)
                self.mark_stopped(member)

    def mark_stopped(self, member: Member) -> None:
        member.resume_at = time.monotonic() + self.rng.choice([0.001, 0.005, 0.02, 0.1])
        self.report.counts["stops"] += 1

    def end_stop(self, member: Member) -> None:
        if self.rng.random() < 0.5:
            member.resume_at = None
            member.progress_at = time.monotonic()
            os.kill(member.actor.pid, signal.SIGCONT)
            return
        os.kill(member.actor.pid, signal.SIGKILL)
        self.bury(member, "at a point" if member.place else "while stopped")

    def bury(self, member: Member, manner: str) -> None:
        member.actor.wait_until_dead()
        self.hear(member)
        self.report.kills[member.role, manner] += 1
        self.members.remove(member)
        self.dead.append(member)
        self.free_rows.append(member.row)
        for column, name in enumerate(COLUMNS):
            if column != STEPS:
                self.report.counts[name] += int(self.board[member.row, column])
        if len(self.dead) > 24:  # the others stay zombies for a while: they count as dead all the same
            self.dead.pop(0).actor.bury()

    def hear(self, member: Member) -> None:
        """What the process has written to its line: its crash point, or what it found wrong."""
        while member.actor.has_answer(0):
            data = member.actor.connection.recv(65536).decode()
            if not data:
                return
            for line in data.splitlines():
                if line.startswith("["):
                    raise SoakError(json.loads(line)[1])
                member.place = line
                self.report.places[line] += 1

    def look_after(self) -> None:
        """Sees who has died or stopped at a point of its own, who must go on, and who hangs."""
        now = time.monotonic()
        for member in list(self.members):
            state = member.actor.state()
            if state in "ZX":
                self.hear(member)
                if not member.place:
                    raise SoakError(f"a {member.role} ended by itself, status {member.actor.bury()}")
                self.bury(member, "at a point")
                continue
            if member.resume_at is not None:
                if now >= member.resume_at:
                    self.end_stop(member)
                continue
            self.hear(member)
            if state == "T" and member.place:  # at its point, perhaps after a stop from here
                self.mark_stopped(member)
                continue
            steps = int(self.board[member.row, STEPS])
            if steps != member.steps:
                member.steps, member.progress_at = steps, now
            elif now - member.progress_at > PROGRESS_S:
                raise SoakError(f"a {member.role} made no progress for {PROGRESS_S:.0f} s (state {state})")

    # This process among them

    def work(self) -> None:
        """One piece of a survivor's life."""
        number = self.rng.randrange(CHAINS)
        keys = chain(number)
        # What waits for the lock for long waits in vain while its holder is stopped: we are to let him go on.
        nobody_is_stopped = all(member.actor.state() != "T" for member in self.members)
        match self.rng.randrange(5):
            case 0 if nobody_is_stopped:
                self.audit()
            case 1 if nobody_is_stopped:
                self.pool.reap()
            case 0 | 1:
                self.pool.lookup(ALL_KEYS)
            case 2:
                self.store(self.spaces[number % len(SPACES)], keys)
            case _:
                self.read(keys)

    def audit(self) -> None:
        until = time.monotonic() + PROGRESS_S
        while all(member.actor.state() != "T" for member in self.members):
            try:
                self.pool.audit()
                self.report.counts["audits"] += 1
                return
            except SegmentError as error:
                if not is_lock_stopped(error) or time.monotonic() > until:
                    raise

    def store(self, ns: int, keys: list[str]) -> None:
        sizes = np.array([size_of(key) for key in keys], dtype=np.uint64)
        tickets, outcomes = self.pool.reserve(ns, keys, sizes, [None, *keys[:-1]])
        self.pool.abandon(tickets[outcomes == Outcome.RESERVED])

    def read(self, keys: list[str]) -> int:
        tickets, outcomes = self.pool.acquire(keys)
        hits = outcomes == Outcome.HIT
        for key, ticket in zip(np.array(keys)[hits].tolist(), tickets[hits].tolist(), strict=True):
            check_object(self.pool, key, ticket)
        self.pool.release(tickets[hits])
        self.report.counts["read"] += int(hits.sum())
        return int(hits.sum())

    # Its course

    def run(self, kills: int) -> None:
        goal = self.report.total + kills
        while self.report.total < goal:
            while len(self.members) < self.shape.crowd:
                self.spawn()
            lines = [m.actor.connection for m in self.members if m.resume_at is None]
            select.select(lines, [], [], self.rng.choice([0, 0.001, 0.004]))
            self.look_after()
            self.blow()
            self.work()
        if self.shape.is_file and self.rng.random() < 0.5:
            self.destroy()
            self.kill_all()
            self.pool.close()
        else:
            self.kill_all()
            self.check_nothing_is_left()

    def destroy(self) -> None:
        """The pool is destroyed under the crowd: it misses and refuses from then on, and everybody goes on.
        Some destroyers die of it; the next does what they left undone."""
        while os.path.exists(self.path):
            destroyer = self.spawn_as("destroyer", 0, will_stop=False)
            while destroyer in self.members and os.path.exists(self.path):
                self.look_after()
                os.sched_yield()
        self.report.counts["destroyed"] += 1
        self.require(self.pool.is_replaced(0), "nobody hears that the pool is gone")
        before = {member.row: int(self.board[member.row, STEPS]) for member in self.members}
        while any(
            member.resume_at is not None or int(self.board[member.row, STEPS]) < before[member.row] + 3
            for member in self.members
        ):
            self.look_after()
            os.sched_yield()
        if self.pool.is_destroyed:  # else its destroyer died before he could say so
            self.require(not self.pool.lookup(ALL_KEYS).any(), "a destroyed pool has something")
            self.require(self.read(ALL_KEYS) == 0, "a destroyed pool hands something out")

    def kill_all(self) -> None:
        for member in self.members:
            os.kill(member.actor.pid, signal.SIGKILL)
        for member in list(self.members):
            self.bury(member, "with all others")
        for member in self.dead:
            member.actor.bury()
        for zygote in self.zygotes:
            zygote.actors.clear()

    def check_nothing_is_left(self) -> None:
        """Everybody is dead: nothing may be left but what was stored, and all of it may be had again."""
        pool, counts = self.pool, self.report.counts
        pool.reap()
        pool.audit()
        stats = pool.stats()
        for name in (
            "takeovers",
            "rebuilds",
            "reaped",
            "evicted",
            "slab_moves",
            "cleared",
            "published",
            "full",
        ):
            counts[name] += stats[name]
        self.require(stats["processes"] == 1, f"the table names {stats['processes']} processes")
        self.require(stats["pinned"] == 0, f"{stats['pinned']} slots are still pinned")
        self.read(ALL_KEYS)
        for ns in self.spaces:
            pool.clear(ns)
            pool.set_quota(ns, None)
        self.require(pool.stats()["used_bytes"] == 0, "an emptied pool has used bytes")
        self.require_memory()
        slots = self.shape.slots
        pool.resize(slots * SLOT_BYTES)
        pool.audit()
        tickets, outcomes = pool.reserve(self.spaces[0], [f"x{i}" for i in range(slots)], MIN_OBJECT_BYTES)
        self.require(set(outcomes.tolist()) == {Outcome.RESERVED}, "an emptied pool has lost slots")
        pool.abandon(tickets)
        pool.audit()
        pool.close()
        if self.shape.is_file:
            os.unlink(self.path)

    def require_memory(self) -> None:
        """Slabs that are absent have none: what the file has is the tables' and the present slabs'."""
        geometry = _native.geometry(
            self.pool.max_bytes, self.shape.slab_slots * SLOT_BYTES, MIN_OBJECT_BYTES, self.shape.policy
        )
        rows = 64 * geometry["pin_row_bytes"]
        most = geometry["pins_at"] + rows + self.pool.capacity_bytes + 16 * SLOT_BYTES
        taken = os.stat(f"/proc/self/fd/{self.pool.native.fd}").st_blocks * 512
        self.require(taken <= most, f"the file has {taken} bytes of memory, of at most {most}")

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise SoakError(what)


@contextmanager
def zygotes() -> Iterator[dict[bool, Zygote]]:
    """One for actors with pids like ours; where this user may, one for a pid namespace of their own."""
    with ExitStack() as stack:
        made = {own: Zygote(own_pids=own) for own in ((False, True) if CAN_UNSHARE else (False,))}
        for zygote in made.values():
            stack.callback(zygote.process.wait)
            stack.callback(zygote.socket.close)
            stack.callback(kill_rest, zygote)
        yield made


def kill_rest(zygote: Zygote) -> None:
    for actor in zygote.actors:
        if not actor.is_waited_for:
            os.kill(actor.pid, signal.SIGKILL)
            actor.bury()


def run(kills: int, seed: int, kills_an_era: int = 100, say: Any = print) -> Report:
    """Until so many have been killed; SoakError or the pool's own error if anything is wrong."""
    say(f"seed {seed}")
    if not CAN_UNSHARE:
        say("this user may not make pid namespaces: all processes share one")
    report = Report()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="umbp-soak-", dir=ram_folder()) as folder, zygotes() as made:
        for number in itertools.count():
            rng = random.Random(f"{seed}.{number}")
            shape = Shape.drawn(rng)
            company = list(made.values()) if shape.own_pids else [made[False]]
            era = Era(shape, rng, company, Path(folder), report)
            try:
                era.run(min(kills_an_era, kills - report.total))
            except Exception as error:
                raise SoakError(
                    f"{type(error).__name__}: {error}\nin era {number} of seed {seed}: {shape};"
                    f" again with: make soak-pool KILLS={kills} SEED={seed}"
                ) from error
            if report.total >= kills:
                break
            if number % 10 == 9:
                say(f"{time.monotonic() - started:7.0f} s  {report.line()}")
    say(f"{time.monotonic() - started:.0f} s")
    say(report.text())
    return report


def ram_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    chosen = parser.parse_args()
    try:
        run(chosen.kills, chosen.seed, say=lambda text: print(text, flush=True))
    except SoakError as failure:
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
