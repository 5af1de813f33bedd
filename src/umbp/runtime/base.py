"""The runtime contract: what keeps objects, seen from the engine's scheduler and from its workers.

A runtime makes one handle for the scheduler and one for each worker. A handle is used by the one thread that
owns its connector. Three Protocols are all that a runtime must offer; whatever more it can do it states in
its `capabilities`, as data, and then offers the methods of the `Supports...` Protocol of the same name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from umbp.data import (
    BlockTransferPlan,
    KVLayoutDescriptor,
    Rank,
    RankTopology,
    TensorLike,
    TransferJobState,
    UMBPNamespace,
)
from umbp.errors import ConfigError

HandshakeExtra: TypeAlias = Mapping[str, str | int]
"""What a worker's runtime tells the scheduler's; plain values, carried as they are."""

NotePhase: TypeAlias = Literal["admit", "end"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a runtime offers beyond the contract; an extra that isn't stated is never called."""

    hold: bool = False
    """Scheduler: `SupportsHold`; with `lookup_raw` also `SupportsRawHold`."""
    lookup_raw: bool = False
    """Scheduler: `SupportsRawLookup`."""
    presence: bool = False
    """Scheduler: `SupportsPresence`."""
    lookup_states: bool = False
    """Scheduler: `SupportsLookupStates`."""
    note: bool = False
    """Scheduler: `SupportsNote`."""
    evicted_keys: bool = False
    """Scheduler: `SupportsEvictedKeys`."""
    watch: bool = False
    """Scheduler: `SupportsWatch`."""
    prepare: bool = False
    """Scheduler: `SupportsPrepare`."""
    attach: bool = False
    """Both: the scheduler's `SupportsAttach` needs what each worker's `SupportsHandshakeExtra` made."""
    cancel: bool = False
    """Worker: `SupportsCancel`."""
    usage: bool = False
    """Worker: `SupportsUsage`."""
    local: bool = False
    """Worker: a job is copies within this host's memory, so `wait` lasts as long as those and no longer."""
    local_stores: bool = False
    """Worker: the same of stores alone; loads may have to come from further away."""
    counts: bool = False
    """Both: `SupportsCounts`."""
    tier: str = "other"
    """Both: what keeps the objects, in a word, for metrics."""
    far_tier: str = ""
    """Both: what keeps those that must be prepared and fetched, in a word, where there is such a thing."""


def capabilities_of(runtime: IUMBPRuntime) -> Capabilities:
    """What the runtime states in its attribute `capabilities`; none where it states nothing."""
    stated = getattr(runtime, "capabilities", Capabilities())
    if not isinstance(stated, Capabilities):
        raise ConfigError(
            f"runtime {type(runtime).__name__} states its capabilities as {type(stated).__name__}; "
            "it must be a umbp.runtime.base.Capabilities"
        )
    return stated


@runtime_checkable
class IUMBPRuntime(Protocol):
    """A way to keep objects. What it states in an attribute `capabilities: Capabilities` is used, no more.

    Each side makes its own runtime in its own process; both get the same options. Making a handle may take
    seconds and may raise `UMBPError`, which stops the engine's start with that sentence.
    """

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> UMBPSchedulerHandle:
        """The scheduler's handle for one namespace; its layout carries no regions."""
        ...

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> UMBPWorkerHandle:
        """The handle of the rank that `topology` names; its layout has the regions of that rank's objects."""
        ...


@runtime_checkable
class UMBPSchedulerHandle(Protocol):
    """What the scheduler may ask. A closed handle misses, refuses or does nothing; it never raises."""

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        """Whether each key is published at this moment, in order and as long as `keys`.

        Authoritative and bounded in time: what can't be answered in time, a dead backend included, is a miss.
        Promises nothing about the next moment (`SupportsHold` does).
        """
        ...

    def clear(self) -> bool:
        """Remove all objects of this handle's namespace, every rank and group; False if that failed. True may
        come before all are removed, if from now on none of them is found.

        What was stored but not published before the call can't be published afterwards, or is removed too.
        """
        ...

    def close(self) -> None:
        """Give back all that the handle owns. A second call does nothing."""
        ...


@runtime_checkable
class UMBPWorkerHandle(Protocol):
    """What a worker may ask. Plans come in the worker's own keys, as a list or as one of the two batches.

    A job's `error` that begins with a word of `LossReason` and a colon is counted under that word.

    Plans may carry ranges; those without are resolved by block and group against the registered buffers.
    """

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
        """Learn the KV caches by layer, each unique allocation once; they live until `close`.

        May be called again with other buffers while no job runs; after a `ValueError` the last good
        registration holds.
        """
        ...

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        """Start to fill blocks from objects and return the job at once.

        A key that is absent or damaged fails alone, its block's bytes then being undefined. The caller leaves
        the blocks alone until the job is final.
        """
        ...

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        """Start to copy blocks into objects, unseen before `publish`, and return the job at once.

        A key already stored, or a second one in the same batch, completes without a copy or with the same
        bytes. A key that finds no room fails alone. The caller must not let the blocks change until the job
        is final.
        """
        ...

    def wait(self, job: TransferJobState) -> TransferJobState:
        """Block until `job` is final and its buffers are safe to reuse; returns it."""
        ...

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        """The job if it is final and its buffers are safe to reuse, else None; never blocks."""
        ...

    def publish(self, job: TransferJobState) -> None:
        """Make a store's completed keys visible to lookups; failed keys stay invisible. Once is enough.

        A key that can't be published any more, after a `clear` for one, may become a failed key of the job.
        `ValueError` for a load, for another handle's job and for a store that isn't final.
        """
        ...

    def close(self) -> None:
        """End all jobs, then forget the buffers; what was not published is abandoned.

        A closed handle fails every key it is given; a second call does nothing.
        """
        ...


@runtime_checkable
class SupportsHold(Protocol):
    """Capability `hold`, scheduler: what is promised to the engine can't be evicted before it is loaded."""

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        """Protect the longest present run at the start of `keys` for this request; returns the run's length.

        Stops at the first key that is absent. Keys come block by block, all ranks of a block side by side, so
        a block is held once the answer covers its last rank. Holds of one request add up; a key is held once.
        """
        ...

    def unhold(self, request_id: str) -> None:
        """Give back all that the request holds; a request that holds nothing is no error."""
        ...


@runtime_checkable
class SupportsRawLookup(Protocol):
    """Capability `lookup_raw`, scheduler: by block hash, without key texts."""

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks every rank of the handle's topology has published; else like `lookup`."""
        ...


@runtime_checkable
class SupportsPresence(Protocol):
    """Capability `presence`, scheduler: by block hash, for blocks that aren't one prefix."""

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        """Whether every rank of the handle's topology has published each block; else like `lookup`."""
        ...


@runtime_checkable
class SupportsRawHold(Protocol):
    """Capabilities `hold` and `lookup_raw` together, scheduler."""

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        """`hold` for all ranks of these blocks; returns how many leading blocks are now held on every rank.

        A block that some rank lacks is held on none.
        """
        ...


class LookupState(StrEnum):
    """What is known of a key: there, being written, or not there."""

    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


@runtime_checkable
class SupportsLookupStates(Protocol):
    """Capability `lookup_states`, scheduler."""

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        """`lookup` that tells a key being written from one that isn't there; hits are `lookup`'s. Never
        waits: with `prepare`, what wasn't prepared lately may be missed.

        What is written on another host is not there, and what is written by whoever dies may stay pending.
        """
        ...


@runtime_checkable
class SupportsNote(Protocol):
    """Capability `note`, scheduler: what the eviction policy may know of a request. Advice; never raises."""

    def note(
        self,
        request_id: str,
        phase: NotePhase,
        block_hashes: Sequence[bytes],
        output_tokens: int = 0,
        finish: str = "",
        group_id: int = 0,
    ) -> None:
        """Called once when a request is admitted and once at its end, with its full chain from the root.

        `output_tokens` and the engine's finish reason are known at the end only. Of a model with several
        cache groups, called for each: with `group_id` for those but the first, and the group's own blocks.
        """
        ...


@runtime_checkable
class SupportsEvictedKeys(Protocol):
    """Capability `evicted_keys`, scheduler."""

    def take_evicted_keys(self) -> Sequence[str]:
        """Keys of this namespace that went since the last call, by whichever process, `clear` included; each
        once, oldest first. The first call begins: told are keys that the handle was noted of since, or asked
        to watch.
        """
        ...


@runtime_checkable
class SupportsWatch(Protocol):
    """Capability `watch`, scheduler: by block hash, when what was there on every rank is so no more."""

    def watch(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        """Whether every rank of the handle's topology has published each block; else like `lookup`. Those
        that are there are watched from now on: none of them can go without being told.
        """
        ...

    def take_lost(self) -> Sequence[tuple[int, bytes]]:
        """Watched blocks, as group and hash, that some rank has lost by now, by whichever process, `clear`
        included; each once, and not watched any more. One that is there again may be left out.
        """
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of one cache group that a request may load."""

    group_id: int
    block_hashes: Sequence[bytes]
    is_chain: bool
    """A block is of use only where all before it are there."""


@runtime_checkable
class SupportsPrepare(Protocol):
    """Capability `prepare`, scheduler: some answers take longer than a step may."""

    def prepare(self, request_id: str, wanted: Sequence[Wanted], patience_s: float = 0.0) -> bool:
        """Whether lookups and holds of these blocks tell by now all that they can, for a while. False: it is
        being found out; ask again in the next step. True at the latest when `lookup_timeout_ms` have gone
        since the first time, with what is known then. It may wait for `patience_s`, no longer. Never raises.

        Blocks that weren't prepared lately may be missed, never more.
        """
        ...

    def unprepare(self, request_id: str) -> None:
        """The request doesn't want them any more; one that was not prepared is no error."""
        ...

    def to_fetch(self, request_id: str) -> Mapping[int, int]:
        """By cache group, how many of the blocks that the request holds some rank has yet to fetch."""
        ...

    def disbelieve(self, blocks: Collection[tuple[int, bytes]]) -> None:
        """A load of these, by cache group and hash, has failed: what is known of them counts no more."""
        ...

    def is_cut_off(self) -> bool:
        """Whether what others store now can't be found before something comes back that has failed: nobody
        need wait for it. Never raises.
        """
        ...

    def clear_soon(self) -> None:
        """`clear` that waits for nothing: from now on nothing is found that was there, and it is removed as
        soon as that can be.
        """
        ...


@runtime_checkable
class SupportsCounts(Protocol):
    """Capability `counts`, both: what a runtime counts by itself."""

    def take_counts(self) -> Mapping[tuple[str, ...], float]:
        """What was counted since the last call: amounts by a counter's name and the values of its labels, as
        the connector's metrics have them; others are left out. Cheap, never raises.
        """
        ...


@runtime_checkable
class SupportsHandshakeExtra(Protocol):
    """Capability `attach`, worker."""

    def handshake_extra(self) -> HandshakeExtra:
        """What the scheduler needs to reach this worker's objects; asked once, after `register_buffers`."""
        ...


@runtime_checkable
class SupportsAttach(Protocol):
    """Capability `attach`, scheduler: the handle misses everything until it is bound."""

    def bind_workers(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        """Attach to what all ranks' workers made; called at start, and again after the engine has slept.

        `UMBPError` stops the start with its sentence.
        """
        ...


@runtime_checkable
class SupportsCancel(Protocol):
    """Capability `cancel`, worker."""

    def cancel(self, job: TransferJobState) -> None:
        """Ask that what has not begun be left out; `wait` or `poll` tell as ever when the job is final."""
        ...


@runtime_checkable
class SupportsUsage(Protocol):
    """Capability `usage`, worker: what the rank's share of the pool holds, for metrics."""

    def usage(self) -> Mapping[str, float]:
        """`pool_capacity_bytes`, `pool_used_bytes`, `pool_objects`, `pool_pinned_objects`, and the running
        totals `evicted_objects` and, where known, `evicted_bytes` and `evicted_tokens` (as the layouts'
        `counted_tokens` has it); cheap, never raises.
        """
        ...
