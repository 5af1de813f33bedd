"""The scheduler's view of node pools: it attaches to what the workers made and asks them directly.

Lookups read the pools' indexes without a lock; holds are pins of the scheduler's own. Runs on the engine
core's one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from umbp.data import BlockIdentityCodec, Rank, RankTopology, UMBPNamespace
from umbp.errors import SegmentError
from umbp.pool import Outcome, Pool, PoolHandle
from umbp.pool.pool import LOCK_PATIENCE_S, Tickets
from umbp.runtime.base import HandshakeExtra, NotePhase


class PoolSchedulerHandle:
    """The scheduler's view of the pools of all ranks. Misses everything until `bind_workers`."""

    def __init__(
        self, namespace: UMBPNamespace, topology: RankTopology, lock_patience_s: float = LOCK_PATIENCE_S
    ) -> None:
        self._namespace = namespace
        self._lock_patience_s = lock_patience_s
        self._codec = BlockIdentityCodec(namespace)
        self._ranks = topology.all_namespaces()
        self._pools: dict[Rank, Pool] = {}
        self._namespace_ids: dict[Rank, int] = {}
        self._prefixes: dict[str, Rank | None] = {}
        self._held: dict[str, list[tuple[Pool, Tickets]]] = {}
        self._held_keys: dict[str, set[str]] = {}

    def bind_workers(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        """Attach to every rank's pool; `SegmentError` names the rank that can't be reached."""
        missing = [rank for rank in self._ranks if rank not in extras]
        if missing:
            raise SegmentError(
                f"the worker of rank {missing[0]} reported no pool: all workers must run this connector"
            )
        self._detach()
        self._prefixes.clear()
        for rank in self._ranks:
            handle = _pool_handle(rank, extras[rank])
            pool = Pool.attach(handle, lock_patience_s=self._lock_patience_s)
            self._pools[rank] = pool
            self._namespace_ids[rank] = pool.namespace(self._namespace.value)

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        hits = [False] * len(keys)
        for rank, positions in self._by_rank(keys).items():
            found = self._pools[rank].lookup([keys[i] for i in positions])
            for position, hit in zip(positions, found, strict=True):
                hits[position] = bool(hit)
        return hits

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        if not self._pools:
            return 0
        hashes = list(block_hashes)
        for rank, pool in self._pools.items():
            if not hashes:
                return 0
            del hashes[pool.match(self._codec.key_prefix(group_id, rank), hashes) :]
        return len(hashes)

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        held = self._held_keys.setdefault(request_id, set())
        present = 0
        for key in keys:
            if key not in held and not self._hold_one(request_id, key):
                break
            held.add(key)
            present += 1
        if not held:
            del self._held_keys[request_id]
        return present

    def _hold_one(self, request_id: str, key: str) -> bool:
        rank = self._rank_of(key)
        if rank is None:
            return False
        pool = self._pools[rank]
        tickets, outcomes = pool.acquire([key])
        is_hit = bool(outcomes[0] == Outcome.HIT)
        if is_hit:
            self._held.setdefault(request_id, []).append((pool, tickets))
        return is_hit

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        count = self.lookup_raw(group_id, block_hashes)
        taken: list[tuple[Pool, Tickets]] = []
        for rank, pool in self._pools.items():
            if count == 0:
                break
            prefix = self._codec.key_prefix(group_id, rank)
            tickets, outcomes = pool.acquire_raw(prefix, list(block_hashes[:count]))
            is_hit = outcomes == Outcome.HIT
            leading = int(np.argmin(is_hit)) if not is_hit.all() else len(is_hit)
            pool.release(tickets[leading:][is_hit[leading:]])
            taken.append((pool, tickets[:leading]))
            count = leading
        # What a later rank lost since the lookup, the earlier ones need not keep.
        for pool, tickets in taken:
            pool.release(tickets[count:])
        if count:
            self._held.setdefault(request_id, []).extend((pool, tickets[:count]) for pool, tickets in taken)
        return count

    def unhold(self, request_id: str) -> None:
        self._held_keys.pop(request_id, None)
        for pool, tickets in self._held.pop(request_id, ()):
            pool.release(tickets)

    def note(
        self,
        request_id: str,
        phase: NotePhase,
        block_hashes: Sequence[bytes],
        output_tokens: int = 0,
        finish: str = "",
    ) -> None:
        hashes = list(block_hashes)
        for rank, pool in self._pools.items():
            pool.touch_raw(self._codec.key_prefix(0, rank), hashes)

    def clear(self) -> bool:
        cleared = [pool.clear(self._namespace_ids[rank]) for rank, pool in self._pools.items()]
        return all(cleared)

    def close(self) -> None:
        self._detach()

    def audit(self) -> None:
        """Every attached pool's own audit."""
        for pool in self._pools.values():
            pool.audit()

    def _detach(self) -> None:
        for request_id in list(self._held):
            self.unhold(request_id)
        for pool in self._pools.values():
            pool.close()
        self._pools = {}

    def _by_rank(self, keys: Sequence[str]) -> dict[Rank, list[int]]:
        positions: dict[Rank, list[int]] = {}
        for position, key in enumerate(keys):
            rank = self._rank_of(key)
            if rank is not None:
                positions.setdefault(rank, []).append(position)
        return positions

    def _rank_of(self, key: str) -> Rank | None:
        """The attached rank whose pool holds this key; None for a key that isn't of this namespace."""
        prefix = key[: key.rfind(":") + 1]
        if prefix not in self._prefixes:
            group = prefix.rpartition(":g")[2].removesuffix(":")
            self._prefixes[prefix] = next(
                (
                    rank
                    for rank in self._pools
                    if group.isdecimal() and prefix == self._codec.key_prefix(int(group), rank)
                ),
                None,
            )
        rank = self._prefixes[prefix]
        return rank if rank in self._pools else None


def _pool_handle(rank: Rank, extra: HandshakeExtra) -> PoolHandle:
    try:
        return PoolHandle(pid=int(extra["pid"]), fd=int(extra["fd"]), boot_id=str(extra["boot_id"]))
    except (KeyError, TypeError, ValueError):
        raise SegmentError(f"the worker of rank {rank} reported no usable pool: {dict(extra)!r}") from None
