"""The reference runtime: the contract and every extra over one Python dict. Right before quick.

It is the oracle that quicker runtimes are held against, and it stands in for one where only the connector is
meant. Scheduler and workers must share one instance, in one process; jobs are over when they are returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from umbp.data import (
    BlockIdentityCodec,
    BlockTransferPlan,
    KVLayoutDescriptor,
    KVLayoutPlanner,
    KVRange,
    LossReason,
    Rank,
    RankTopology,
    TensorLike,
    TransferJobState,
    TransferJobStatus,
    UMBPNamespace,
)
from umbp.errors import ConfigError, InvariantError
from umbp.runtime.base import Capabilities, HandshakeExtra, LookupState, NotePhase


class ReferenceRuntime:
    """Keeps at most `capacity` objects; of those that nobody holds the one least recently used goes first."""

    capabilities = Capabilities(
        hold=True,
        lookup_raw=True,
        presence=True,
        lookup_states=True,
        note=True,
        evicted_keys=True,
        watch=True,
        attach=True,
        cancel=True,
        usage=True,
        local=True,
        tier="dram",
    )

    def __init__(self, capacity: int = 1 << 20) -> None:
        self.shelf = Shelf(capacity)

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> ReferenceSchedulerHandle:
        return ReferenceSchedulerHandle(self.shelf, namespace, topology)

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> ReferenceWorkerHandle:
        return ReferenceWorkerHandle(self.shelf, namespace, topology, layout)

    def die(self) -> None:
        """From now on the backend answers nobody: lookups miss and transfers fail."""
        self.shelf.is_dead = True

    def audit(self) -> None:
        self.shelf.audit()


@dataclass(eq=False)
class Shelf:
    """All objects, published and being written, and who holds them. `InvariantError` where the accounts are
    off.
    """

    capacity: int
    is_dead: bool = False
    objects: dict[str, bytes] = field(default_factory=dict)
    """Published, oldest first."""
    written: dict[str, bytes] = field(default_factory=dict)
    """Stored but not published."""
    holds: dict[tuple[object, str], set[str]] = field(default_factory=dict)
    """Keys by (handle, request)."""
    evicted: list[str] = field(default_factory=list)
    evictions: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    """What objects count for where evicted tokens are counted."""
    evicted_tokens: int = 0

    def held_keys(self) -> set[str]:
        return set().union(*self.holds.values())

    def make_room(self) -> bool:
        """Whether one more object fits, after the oldest free one has gone if it must."""
        if len(self.objects) + len(self.written) < self.capacity:
            return True
        held = self.held_keys()
        victim = next((key for key in self.objects if key not in held), None)
        if victim is None:
            return False
        self.evictions += 1
        self.evicted_tokens += self.tokens.get(victim, 0)
        self.remove(victim)
        return True

    def remove(self, key: str) -> None:
        del self.objects[key]
        self.tokens.pop(key, None)
        self.evicted.append(key)

    def touch(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.objects[key] = self.objects.pop(key)

    def audit(self) -> None:
        if len(self.objects) + len(self.written) > self.capacity:
            raise InvariantError(
                f"{len(self.objects)} + {len(self.written)} objects in {self.capacity} places"
            )
        if both := self.objects.keys() & self.written.keys():
            raise InvariantError(f"published and being written at once: {sorted(both)}")


class ReferenceSchedulerHandle:
    """Asks the shelf; misses everything until it is bound."""

    def __init__(self, shelf: Shelf, namespace: UMBPNamespace, topology: RankTopology) -> None:
        self._shelf = shelf
        self._prefix = f"umbp:vllm:v1:{namespace}:"
        self._codec = BlockIdentityCodec(namespace)
        self._ranks = topology.all_namespaces()
        self._is_bound = False
        self._is_closed = False
        self._told = len(shelf.evicted)
        self._watched: dict[tuple[int, bytes], None] = {}

    @property
    def _is_mute(self) -> bool:
        return self._is_closed or self._shelf.is_dead or not self._is_bound

    def bind_workers(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        missing = sorted(set(self._ranks) - extras.keys())
        if missing:
            raise ConfigError(f"no worker has reported for ranks {missing}")
        self._is_bound = True

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        return [state is LookupState.HIT for state in self.lookup_states(keys)]

    def lookup_states(self, keys: Sequence[str]) -> list[LookupState]:
        return [self._state(key) for key in keys]

    def _state(self, key: str) -> LookupState:
        if self._is_mute or not key.startswith(self._prefix):
            return LookupState.MISS
        if key in self._shelf.objects:
            return LookupState.HIT
        return LookupState.PENDING if key in self._shelf.written else LookupState.MISS

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(bool, self.present_raw(group_id, block_hashes)))

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> list[bool]:
        return [all(self.lookup(self._keys(group_id, block))) for block in block_hashes]

    def _keys(self, group_id: int, block_hash: bytes) -> list[str]:
        return [self._codec.key_for_namespace(block_hash, group_id, rank) for rank in self._ranks]

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        run = list(takewhile(lambda key: self._state(key) is LookupState.HIT, keys))
        if run:
            self._shelf.touch(run)
            self._shelf.holds.setdefault((self, request_id), set()).update(run)
        return len(run)

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        count = self.lookup_raw(group_id, block_hashes)
        for block_hash in block_hashes[:count]:
            self.hold(request_id, self._keys(group_id, block_hash))
        return count

    def unhold(self, request_id: str) -> None:
        self._shelf.holds.pop((self, request_id), None)

    def note(
        self,
        request_id: str,
        phase: NotePhase,
        block_hashes: Sequence[bytes],
        output_tokens: int = 0,
        finish: str = "",
        group_id: int = 0,
    ) -> None:
        """The age of an object is all that the reference goes by."""

    def take_evicted_keys(self) -> list[str]:
        gone = self._shelf.evicted[self._told :]
        self._told = len(self._shelf.evicted)
        return [key for key in gone if key.startswith(self._prefix)]

    def watch(self, group_id: int, block_hashes: Sequence[bytes]) -> list[bool]:
        present = self.present_raw(group_id, block_hashes)
        for block_hash, is_there in zip(block_hashes, present, strict=True):
            if is_there:
                self._watched[group_id, block_hash] = None
        return present

    def take_lost(self) -> list[tuple[int, bytes]]:
        lost = [block for block in self._watched if not all(self.lookup(self._keys(*block)))]
        for block in lost:
            del self._watched[block]
        return lost

    def clear(self) -> bool:
        if self._is_mute:
            return False
        shelf = self._shelf
        for key in [key for key in shelf.objects if key.startswith(self._prefix)]:
            shelf.remove(key)
        for key in [key for key in shelf.written if key.startswith(self._prefix)]:
            del shelf.written[key]
        for holder, keys in list(shelf.holds.items()):
            shelf.holds[holder] = keys & shelf.objects.keys()
        return True

    def close(self) -> None:
        self._is_closed = True
        for holder in [holder for holder in self._shelf.holds if holder[0] is self]:
            del self._shelf.holds[holder]


class ReferenceWorkerHandle:
    """Copies between the registered memory and the shelf, byte range by byte range."""

    def __init__(
        self, shelf: Shelf, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> None:
        self._shelf = shelf
        self._topology = topology
        is_first = topology.local_namespace == topology.all_namespaces()[0]
        self._layout = layout.counted_if(is_first)
        self._planner = KVLayoutPlanner(layout.regions)
        self._buffers: Mapping[str, TensorLike] = {}
        self._stores: dict[TransferJobState, dict[str, bytes]] = {}
        self._is_closed = False

    def handshake_extra(self) -> HandshakeExtra:
        return {"rank": str(self._topology.local_namespace)}

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
        self._planner.register_kv_caches(kv_caches)
        self._buffers = dict(kv_caches)

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = self._started(plans)
        for plan in self._movable(job):
            stored = self._shelf.objects.get(plan.key)
            if stored is None:
                job.fail([plan.key], f"{LossReason.ABSENT}: not stored")
                continue
            for piece in self._ranges(plan):
                content = stored[piece.object_offset : piece.object_offset + piece.length]
                ctypes.memmove(piece.base_address, content, piece.length)
            job.complete([plan.key])
        return self._sized(job)

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = self._started(plans)
        written = self._stores[job] = {}
        shelf = self._shelf
        for plan in self._movable(job):
            if plan.key not in shelf.objects and plan.key not in shelf.written:
                if not shelf.make_room():
                    job.fail([plan.key], f"{LossReason.FULL}: no room")
                    continue
                content = bytearray(sum(piece.length for piece in self._ranges(plan)))
                for piece in self._ranges(plan):
                    end = piece.object_offset + piece.length
                    content[piece.object_offset : end] = ctypes.string_at(piece.base_address, piece.length)
                written[plan.key] = shelf.written[plan.key] = bytes(content)
                shelf.tokens[plan.key] = self._layout.tokens_of(plan.group_id)
            job.complete([plan.key])
        return self._sized(job)

    def wait(self, job: TransferJobState) -> TransferJobState:
        return job

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        return job

    def cancel(self, job: TransferJobState) -> None:
        """Nothing to leave out: a job is over when it is returned."""

    def publish(self, job: TransferJobState) -> None:
        if job not in self._stores:
            raise ValueError("only a store of this handle can be published")
        shelf = self._shelf
        for key, content in self._stores[job].items():
            # A clear in between has taken the object away; then there is nothing to publish.
            if shelf.written.get(key) is content:
                del shelf.written[key]
                shelf.objects[key] = content
        self._stores[job] = {}

    def usage(self) -> dict[str, float]:
        shelf = self._shelf
        sizes = [len(content) for objects in (shelf.objects, shelf.written) for content in objects.values()]
        return {
            "pool_capacity_bytes": shelf.capacity * max(sizes, default=0),
            "pool_used_bytes": sum(sizes),
            "pool_objects": len(shelf.objects),
            "pool_pinned_objects": len(shelf.held_keys()),
            "evicted_objects": shelf.evictions,
            # The ranks share the shelf: one of them tells it.
            "evicted_tokens": shelf.evicted_tokens if self._layout.counted_tokens else 0,
        }

    def close(self) -> None:
        self._is_closed = True
        for job in self._stores:
            for key, content in self._stores[job].items():
                if self._shelf.written.get(key) is content:
                    del self._shelf.written[key]
        self._stores.clear()
        self._buffers = {}

    def _started(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        return job

    def _movable(self, job: TransferJobState) -> Iterable[BlockTransferPlan]:
        """The job's plans, or none of them where nothing can move; a job without plans is complete."""
        if not job.keys:
            job.complete()
        elif self._is_closed or self._shelf.is_dead:
            what = "the handle is closed" if self._is_closed else "the backend is dead"
            job.fail(job.keys, f"{LossReason.GONE}: {what}")
        else:
            return job.plans
        return ()

    def _ranges(self, plan: BlockTransferPlan) -> Sequence[KVRange]:
        return plan.ranges or self._planner.materialize(plan).ranges

    def _sized(self, job: TransferJobState) -> TransferJobState:
        if job.status is not TransferJobStatus.FAILED or job.completed_keys:
            job.plan_bytes = [sum(piece.length for piece in self._ranges(plan)) for plan in job.plans]
        return job
