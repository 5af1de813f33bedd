"""The node pool: one segment of shared memory that every process of a host attaches and works on directly.

A pool object belongs to the process that made it, serves all its threads, and refuses to work after a fork.
Keys, hashes and parents of a call stand in chain order, root first: that is what keeps ancestors younger than
their descendants in the eviction order.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from umbp import _native
from umbp.errors import ConfigError, SegmentError
from umbp.pool.allocation import refuse_unless_it_fits, while_it_fits
from umbp.pool.handle import PoolHandle, boot_id
from umbp.pool.limits import memory_limits, refuse_over_limit
from umbp.pool.memory import MemoryPolicy, MemoryReport, Progress, own_node, report_of
from umbp.pool.prefault import BackgroundPrefault, prefault
from umbp.pool.sharing import NO_QUOTA, NamespaceUse, group_id

Tickets = npt.NDArray[np.uint64]
Outcomes = npt.NDArray[np.uint8]
SealStatuses = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]
NotePhase: TypeAlias = Literal["admit", "end"]

LOCK_PATIENCE_S = 0.002
DEFAULT_MEMORY = MemoryPolicy()
EVICTION_POLICY = "lru"
"""The eviction policy of a pool whose maker names none."""


class Pool:
    """Every process's view of one pool. Verbs take batches and answer with numpy columns as long as their
    input.

    A ticket is a pin: `reserve` gives one that ends with `publish` or `abandon`, `acquire` one that ends with
    `release`. Tickets are this process's own; whoever dies holding some loses them to the next who attaches,
    and to the verbs of those who are: some of them look for the dead, a few times a second.
    """

    def __init__(self, native: _native.Pool, memory: MemoryReport | None = None) -> None:
        self.native = native
        self.memory = memory
        """What became of the memory policy, in the process that made the pool."""
        self._prefault: BackgroundPrefault | None = None

    # Making and finding pools

    @classmethod
    def create_memfd(
        cls,
        capacity_bytes: int,
        *,
        slab_bytes: int,
        min_object_bytes: int,
        high_watermark: float = 1.0,
        low_watermark: float = 0.95,
        eviction_policy: str = EVICTION_POLICY,
        lock_patience_s: float = LOCK_PATIENCE_S,
        processes: int = 2,
        memory: MemoryPolicy = DEFAULT_MEMORY,
        progress: Progress | None = None,
        hash_seed: int | None = None,
    ) -> Self:
        """A nameless pool that goes when its last process goes. Memory is taken at once, or CapacityError
        raised.

        `capacity_bytes` is rounded down to whole slabs; `min_object_bytes` bounds how many objects a slab can
        have; `processes` is how many are expected to attach (a few bytes of pin counts for each and every
        slot); `progress` hears how much memory has been taken, and may raise to give up. `hash_seed` is for
        simulations that must repeat; a random one keeps others from choosing keys that collide.
        """
        refuse_unless_it_fits(
            capacity_bytes, capacity_bytes, slab_bytes, min_object_bytes, processes, eviction_policy
        )
        node = own_node() if memory.numa_node < 0 else memory.numa_node
        native = _native.Pool.create_memfd(
            capacity_bytes,
            slab_bytes,
            min_object_bytes,
            high_watermark,
            low_watermark,
            eviction_policy,
            lock_patience_s,
            while_it_fits(capacity_bytes, progress),
            memory.native(capacity_bytes, node),
            hash_seed,
        )
        return cls(native, report_of(native, memory, node))

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        slab_bytes: int,
        min_object_bytes: int,
        max_bytes: int | None = None,
        group: str | int | None = None,
        high_watermark: float = 1.0,
        low_watermark: float = 0.95,
        eviction_policy: str = EVICTION_POLICY,
        lock_patience_s: float = LOCK_PATIENCE_S,
        processes: int = 2,
        memory: MemoryPolicy = DEFAULT_MEMORY,
        progress: Progress | None = None,
    ) -> Self:
        """A pool in a file, which stays until it is destroyed. Of several creators one wins, the others get
        SegmentError; whoever fails leaves nothing behind.

        `max_bytes` is what `resize` may let it grow to later (default: its capacity). Mode 0600, or 0660 for
        the members of `group`, by name or number. All else as for `create_memfd`.
        """
        max_bytes = capacity_bytes if max_bytes is None else max_bytes
        gid = None if group is None else group_id(group)
        refuse_unless_it_fits(
            capacity_bytes, max_bytes, slab_bytes, min_object_bytes, processes, eviction_policy, path
        )
        node = own_node() if memory.numa_node < 0 else memory.numa_node
        native = _native.Pool.create_file(
            os.path.abspath(path),
            capacity_bytes,
            max_bytes,
            slab_bytes,
            min_object_bytes,
            high_watermark,
            low_watermark,
            eviction_policy,
            gid,
            lock_patience_s,
            while_it_fits(capacity_bytes, progress, path),
            memory.native(capacity_bytes, node),
        )
        return cls(native, report_of(native, memory, node))

    @classmethod
    def attach(
        cls, place: PoolHandle | str | os.PathLike[str], *, lock_patience_s: float = LOCK_PATIENCE_S
    ) -> Self:
        """An existing pool, by handle or path. SegmentError, one sentence, where it can't be reached or
        trusted."""
        if isinstance(place, PoolHandle):
            place.check_host()
            place.check_visible()
            place = place.path
        return cls(_native.Pool.attach(os.path.abspath(place), lock_patience_s))

    @property
    def handle(self) -> PoolHandle:
        """Where other processes of this host find the pool, as long as this process has it open.

        Nothing in this process may open or duplicate that descriptor and close it again: the kernel would
        drop the byte lock by which others see that it lives. (`attach` doesn't.)
        """
        return PoolHandle(pid=os.getpid(), fd=self.native.fd, boot_id=boot_id())

    def close(self) -> None:
        """Leaves the pool; pins and reservations still held are returned. Closing twice is fine."""
        if self._prefault is not None:
            self._prefault.close()
        self.native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.native.closed:
            return "<Pool closed>"
        s = self.stats()
        return (
            f"<Pool {s['objects']} objects, {s['used_bytes']} of {s['capacity_bytes']} bytes used,"
            f" {s['processes']} processes, {s['pinned_here']} slots pinned here>"
        )

    # Geometry

    @property
    def eviction_policy(self) -> str:
        """What decides who leaves a full pool, `lru` or `hazard`; fixed when the pool was made."""
        return self.native.eviction_policy

    @property
    def capacity_bytes(self) -> int:
        """Of payloads, their seals and trailers and the room between them; changes with `resize`."""
        return self.native.capacity_bytes

    @property
    def slab_bytes(self) -> int:
        """The unit in which size classes share the arena; no object with its seal and trailer is larger, or
        lies across the edge of two."""
        return self.native.slab_bytes

    @property
    def max_bytes(self) -> int:
        """What the pool may grow to; address space is mapped for it, memory is not."""
        return self.native.max_bytes

    @property
    def arena(self) -> tuple[int, int]:
        """Address and length, in this process, of the memory that all payloads lie in: `max_bytes` of it,
        parts of which have no memory where the pool is smaller (touching those takes memory that nobody
        counts; see `arena_ranges`)."""
        return self.native.arena

    def arena_ranges(self) -> list[tuple[int, int]]:
        """Offset and length of each stretch of the arena that has memory; they change with `resize`."""
        return self.native.arena_ranges()

    @contextmanager
    def size_held(self) -> Iterator[None]:
        """Nobody resizes the pool meanwhile: for whoever registers its memory with a device, for as long as
        it is registered. SegmentError while it is being resized. A dead holder holds nothing."""
        self.native.hold_size()
        try:
            yield
        finally:
            self.native.release_size()

    def prefault(self, progress: Progress | None = None) -> str:
        """Map all of the arena's pages in this process; empty, or why it can't be done (before Linux 5.14,
        or while the pool is being resized). Their memory is taken when the pool is made in any case: this
        saves the page faults of the first use.
        """
        try:
            with self.size_held():
                reasons = (prefault(self.arena[0] + at, size, progress) for at, size in self.arena_ranges())
                return next(filter(None, reasons), "")
        except SegmentError as error:
            return str(error)

    def prefault_in_background(
        self, told: Callable[[str, float], None], *, enter: Callable[[], None] | None = None
    ) -> None:
        """Map all of the arena's pages in this process, on a thread that ends with it or with `close`.

        `told` hears of the end, unless the pool was closed or destroyed before: why not all is mapped, or
        nothing, and the seconds it took. `enter` is called first on the thread.
        """
        if self._prefault is None:
            self._prefault = BackgroundPrefault(self, told, enter)
            self._prefault.start()

    # The life of a pool in a file

    @property
    def path(self) -> str | None:
        """The pool's file; None for a nameless pool."""
        return self.native.path or None

    @property
    def is_destroyed(self) -> bool:
        """Whether somebody has destroyed it. From then on every verb misses or refuses, what this process
        holds can still be read and given back, and the memory goes when the last process leaves."""
        return self.native.is_destroyed

    def is_replaced(self, interval_s: float = 1.0) -> bool:
        """Destroyed, or its path leads to another file or to none by now: attach anew. Asks the file system
        once in `interval_s` at most, so it may be asked for at every step."""
        return self.native.is_replaced(interval_s)

    def destroy(self) -> None:
        """Deletes the pool's file and tells all who are attached. SegmentError where this user may not."""
        self.native.destroy()

    def resize(
        self,
        capacity_bytes: int,
        *,
        memory: MemoryPolicy = DEFAULT_MEMORY,
        progress: Progress | None = None,
    ) -> int:
        """Grows or shrinks the pool while it is used; its capacity then, in whole slabs up to `max_bytes`.

        Growing checks and takes memory like `create`. Shrinking evicts the coldest slabs that nobody uses and
        gives their memory back. SegmentError where too much is in use, where another process is resizing it,
        or has registered its memory with a device; CapacityError where there is no memory. A resize that is
        broken off leaves a sound pool of some size between.
        """
        start_bytes = self.capacity_bytes

        def before_portion(left_bytes: int) -> None:
            refuse_over_limit(left_bytes, memory_limits(path=self.path), "a growth")

        def reached(now_bytes: int) -> None:
            if progress is not None:
                progress(abs(now_bytes - start_bytes), abs(capacity_bytes - start_bytes))

        node = own_node() if memory.numa_node < 0 else memory.numa_node
        policy = memory.native(capacity_bytes, node)
        self.native.resize(capacity_bytes, before_portion, reached, policy)
        return self.capacity_bytes

    # Looking, without the lock

    def lookup(self, keys: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Which keys are published. Never blocks; a hit may be gone by the time it is acquired."""
        return self.native.lookup(keys)

    def lookup_raw(self, prefix: str, hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """The same for the keys `prefix + hash.hex()`, which are never built."""
        return self.native.lookup_raw(prefix, hashes)

    def states(self, keys: Sequence[str]) -> npt.NDArray[np.uint8]:
        """What is known of each key, as `KeyState`; like `lookup` in all else."""
        return self.native.states(keys)

    def match(self, prefix: str, hashes: Sequence[bytes]) -> int:
        """How many keys `prefix + hash.hex()` are published before the first that isn't."""
        return self.native.match(prefix, hashes)

    def digests(self, keys: Sequence[str]) -> Digests:
        """The 128-bit digests of keys in this pool, as rows (low, high)."""
        return self.native.digests(keys)

    def digests_raw(self, prefix: str, hashes: Sequence[bytes]) -> Digests:
        return self.native.digests_raw(prefix, hashes)

    def removed_since(self, cursor: int) -> tuple[Digests, int, bool]:
        """Digests of objects removed or evicted since `cursor` (begin with `removed_head()`), the new
        cursor, and whether some were lost: then everything that the caller believes stored must be looked
        up again."""
        return self.native.removed_since(cursor)

    def removed_head(self) -> int:
        """The cursor that misses nothing from now on."""
        return self.native.removed_head()

    # Storing

    def namespace(self, name: str) -> int:
        """The number of a namespace in this pool, made if new."""
        return self.native.namespace(name)

    def namespaces(self) -> list[NamespaceUse]:
        """Every namespace that was ever opened in this pool."""
        return [NamespaceUse.from_row(row) for row in self.native.namespaces()]

    def set_quota(self, ns: int, quota_bytes: int | None) -> bool:
        """Bounds what a namespace's slots may take (None: no bound); kept with the pool.

        At its bound a namespace evicts its own objects, never another's, and is refused where it can't. What
        is above a new bound is evicted at once, as far as nobody holds it. False: "not now".
        """
        if quota_bytes is not None and not 0 <= quota_bytes < NO_QUOTA:
            raise ConfigError(f"a quota must be a number of bytes, or None, not {quota_bytes}")
        return self.native.set_quota(ns, NO_QUOTA if quota_bytes is None else quota_bytes)

    def reserve(
        self,
        ns: int,
        keys: Sequence[str],
        object_bytes: int | npt.NDArray[np.uint64],
        parents: Sequence[str | None] | None = None,
        tokens: int = 0,
    ) -> tuple[Tickets, Outcomes]:
        """Room for new objects: RESERVED with a ticket, or EXISTS, BUSY, FULL, TOO_LARGE, NOT_NOW with ticket
        0.

        Evicts what it must, never what this call names. Keys that get room are a head of the call: after the
        first FULL no more are RESERVED. A parent that isn't stored is ignored. `tokens` is what each of the
        objects adds to `evicted_tokens` when it is evicted.
        """
        return self.native.reserve(ns, keys, _sizes(object_bytes), parents, tokens)

    def reserve_raw(
        self,
        ns: int,
        prefix: str,
        hashes: Sequence[bytes],
        object_bytes: int | npt.NDArray[np.uint64],
        parents: Sequence[bytes | None] | None = None,
        tokens: int = 0,
    ) -> tuple[Tickets, Outcomes]:
        """`reserve` for the keys `prefix + hash.hex()`; parents are hashes under the same prefix."""
        return self.native.reserve_raw(ns, prefix, hashes, _sizes(object_bytes), parents, tokens)

    def publish(self, tickets: npt.ArrayLike) -> Outcomes:
        """Makes reserved objects visible: PUBLISHED, STALE, INVALID, or NOT_NOW (still reserved: ask
        again)."""
        return self.native.publish(_tickets(tickets))

    def abandon(self, tickets: npt.ArrayLike) -> Outcomes:
        """Gives reservations back: ABANDONED, DEFERRED, INVALID."""
        return self.native.abandon(_tickets(tickets))

    # Reading

    def acquire(self, keys: Sequence[str]) -> tuple[Tickets, Outcomes]:
        """Pins published objects: HIT with a ticket, or MISS, NOT_NOW with ticket 0."""
        return self.native.acquire(keys)

    def acquire_raw(self, prefix: str, hashes: Sequence[bytes]) -> tuple[Tickets, Outcomes]:
        return self.native.acquire_raw(prefix, hashes)

    def release(self, tickets: npt.ArrayLike) -> Outcomes:
        """Returns pins: RELEASED, DEFERRED, or INVALID for a ticket that isn't held (any more)."""
        return self.native.release(_tickets(tickets))

    def touch(self, keys: Sequence[str]) -> Outcomes:
        """Marks stored objects as just used, the chain's root last: TOUCHED, MISS, NOT_NOW."""
        return self.native.touch(keys)

    def touch_raw(self, prefix: str, hashes: Sequence[bytes]) -> Outcomes:
        return self.native.touch_raw(prefix, hashes)

    def note(
        self, keys: Sequence[str], phase: NotePhase, output_tokens: int = 0, finish: str = ""
    ) -> Outcomes:
        """Tells the eviction policy of a request with the full chain of its blocks: once when it begins, and
        once at its end with how much it answered and, where known, why it stopped ("tool_calls", "end_turn").
        Touches what is stored: TOUCHED, MISS, NOT_NOW.

        The hazard policy lives on these notes; a pool that gets none evicts by age alone.
        """
        return self.native.note(keys, phase, output_tokens, finish)

    def note_raw(
        self,
        prefix: str,
        hashes: Sequence[bytes],
        phase: NotePhase,
        output_tokens: int = 0,
        finish: str = "",
    ) -> Outcomes:
        return self.native.note_raw(prefix, hashes, phase, output_tokens, finish)

    def set_time(self, seconds: float) -> None:
        """For simulations: the eviction policy's time in this process, instead of the seconds since boot."""
        self.native.set_time(seconds)

    def longest_hold_s(self) -> float:
        """The longest that this process held the pool's lock since the last call, in seconds of processor
        time; measured from the first call on."""
        return self.native.longest_hold_s()

    def payload(self, tickets: npt.ArrayLike) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Addresses and lengths, in this process, of the objects behind tickets it holds; 0 for any other."""
        return self.native.payload(_tickets(tickets))

    # Leaving the pool, and coming from elsewhere

    def seal(self, tickets: npt.ArrayLike, keys: Sequence[str], *, checksum: bool = True) -> SealStatuses:
        """Says behind each complete object's payload whose bytes they are: a `SealStatus` each, OK,
        WRONG_KEY or INVALID. `keys` are the tickets' own, reservations and pins alike.

        Without `checksum` key and length only. A payload that was stored with a checksum is sealed with that
        one, so damage since then shows; others are read, by this thread. Several processes may seal an
        object at once; all who seal in a pool use the same `checksum`.
        """
        return self.native.seal(_tickets(tickets), keys, checksum)

    def check_seal(
        self, tickets: npt.ArrayLike, keys: Sequence[str], *, checksum: bool = True
    ) -> SealStatuses:
        """Whether payload and seal are these keys', and sound: a `SealStatus` each.

        Without `checksum` the payload isn't read: the seal, key and length are checked. A reservation whose
        payload was read and found sound counts as stored with a checksum.
        """
        return self.native.check_seal(_tickets(tickets), keys, checksum)

    def adopt_seal(self, tickets: npt.ArrayLike, keys: Sequence[str]) -> SealStatuses:
        """Take over payloads that have come with their seals into reservations of this process: a
        `SealStatus` each. Seal, key and length are checked. The payload isn't read: its first load, by
        whichever process, compares it with the checksum.
        """
        return self.native.adopt_seal(_tickets(tickets), keys)

    def sealed_ranges(self, tickets: npt.ArrayLike) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Addresses and lengths, in this process, of payloads with their seals (`SEAL_BYTES` more), each one
        contiguous range; 0 for a ticket that it doesn't hold. A new reservation has no seal."""
        return self.native.sealed_ranges(_tickets(tickets))

    # Removing

    def remove(self, keys: Sequence[str]) -> Outcomes:
        """Makes objects invisible at once, frees them with their last pin: REMOVED, MISS, BUSY, NOT_NOW."""
        return self.native.remove(keys)

    def clear(self, ns: int) -> bool:
        """Removes the whole namespace for everybody; what is reserved now can't be published afterwards."""
        return self.native.clear(ns)

    def clear_all(self) -> bool:
        """`clear` for every namespace."""
        return self.native.clear_all()

    def lingering(self, ns: int) -> int | None:
        """How many of the namespace's objects were removed or cleared away and are still pinned, by whomever;
        None where that can't be told now."""
        return self.native.lingering(ns)

    # Upkeep

    def stats(self) -> dict[str, int]:
        return self.native.stats()

    def audit(self) -> None:
        """Walks the whole pool under the lock; InvariantError names the first broken invariant."""
        self.native.audit()

    def reap(self) -> int:
        """Takes back what dead processes held, all of it and now; how many they were."""
        return self.native.reap()


def _tickets(tickets: npt.ArrayLike) -> Tickets:
    return np.ascontiguousarray(tickets, dtype=np.uint64)


def _sizes(object_bytes: int | npt.NDArray[np.uint64]) -> int | npt.NDArray[np.uint64]:
    return (
        object_bytes if isinstance(object_bytes, int) else np.ascontiguousarray(object_bytes, dtype=np.uint64)
    )
