"""Mooncake Store (`mooncake.store`), as a cluster store: one client of its own in this process.

Threads: any may call; Mooncake's own, some thirty, do the work. What docs/stores.md says of it was measured
on 0.3.13, and this module is shaped by it:

- Every call lets go of the interpreter's lock while it waits, but two. `setup` and `close` keep it, so all
  Python stands still meanwhile: `setup` for some 20 ms, but for minutes where the master is silent; `close`
  for one to two seconds, 11 s where the master is dead, and 62 s where it is silent. Therefore `open` lets a
  process of its own try first, and a client is closed only when the master answers.
- A call on a closed client, or one that is inside when it is closed, ends the process with a segmentation
  fault. Therefore the last call out of a closed store closes the client.
- Over TCP a client takes about 2,048 ranges for one peer. From there on keys fail, and a call may take a
  minute. Therefore the ranges under way are bounded here, over all threads.
- Its limits of time are read from the environment when a client is set up; ours are put there unless the
  operator's are.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from umbp.errors import InvariantError
from umbp.options import Options
from umbp.store.base import Outcome, StoreError, StoreTraits
from umbp.store.mooncake_client import (
    INSIDE,
    MODULE,
    PROBE_KEY,
    leave,
    own_address,
    package,
    queue_of_ranges,
    require_library,
    require_listener,
    require_master,
    set_environment,
    setup_arguments,
)
from umbp.store.mooncake_codes import (
    ABSENT,
    UNFIT,
    outcome_of_exists,
    outcome_of_get,
    outcome_of_put,
    outcome_of_remove,
    outcome_of_unfit,
)
from umbp.store.mooncake_settings import NAME, MooncakeSettings, read_mooncake_settings, require_room

MOST_RANGES = 1024
"""Ranges of one call. One object is one range, whatever its size."""

MOST_UNDER_WAY = 2 * MOST_RANGES
"""Ranges of all threads at once, where as many may queue for one peer: others go on beside one that hangs."""

TRAITS = {
    protocol: StoreTraits(
        name=NAME,
        # 8,192 keys take 2 to 5 ms.
        most_keys=8192,
        # Of objects of 64 KiB, 256 in a call move at 0.85 of the speed of 1,024, and 512 at 0.95.
        most_objects=MOST_RANGES,
        # 128 MiB and seals: a tenth to a fifth of a second over TCP on a loopback, so that nobody waits long
        # behind somebody else's batch. Half as large, objects of 2 MiB lose a tenth to a third of the speed.
        most_bytes=130 << 20,
        # The master's --default_kv_lease_ttl, as it is unless the operator changes it.
        lease_s=10.0,
        registers=True,
        pins=protocol == "rdma",
        recovers=True,
        # Over TCP two move no more bytes than one, and take a third more of the processor.
        calls_at_once=1 if protocol == "tcp" else 2,
    )
    for protocol in ("tcp", "rdma")
}


def make_store(options: Options, *, serves_memory: bool) -> MooncakeStore:
    settings = read_mooncake_settings(options.store_options)
    if serves_memory:
        require_room(settings.segment_bytes)
    require_library()
    return MooncakeStore(settings, serves_memory=serves_memory)


class MooncakeStore:
    """See the module; the verbs are those of `ClusterStore`."""

    def __init__(self, settings: MooncakeSettings, *, serves_memory: bool = False) -> None:
        self._settings = settings
        self._segment_bytes = settings.segment_bytes if serves_memory else 0
        self._lock = threading.Lock()
        self._client: Any = None
        self._inside = 0
        self._is_closed = False
        self._room = _Room(MOST_RANGES, settings.timeout_ms / 1000)  # until `open` knows better
        self._where: dict[str, str] = {}

    @property
    def traits(self) -> StoreTraits:
        return TRAITS[self._settings.protocol]

    def open(self) -> None:
        settings = self._settings
        host = settings.local_hostname or own_address(settings.master)
        set_environment(settings.timeout_ms)
        self._room = _Room(min(queue_of_ranges(), MOST_UNDER_WAY), settings.timeout_ms / 1000)
        require_master(settings)
        client = importlib.import_module(MODULE).MooncakeDistributedStore()
        code = client.setup(*setup_arguments(settings, host, self._segment_bytes))
        if code != 0:
            raise StoreError(
                f"Mooncake can't set up a client of the master at {settings.master} (code {code}); "
                "its log on standard error says why"
            )
        with self._lock:
            if not self._is_closed:
                self._client = client
                self._where = {"client": client.get_hostname()}
                return
        leave(client, self._settings)
        raise StoreError("the store was closed while it was opened")

    def register(self, address: int, size: int) -> None:
        with self._calling() as client:
            if client is None:
                raise StoreError("the store isn't open")
            code = client.register_buffer(address, size)
        if code != 0:
            raise StoreError(
                f"Mooncake refuses {size} bytes at {address:#x} (code {code}): memory that overlaps what is "
                "registered already, or more than may be locked (see ulimit -l)"
            )

    def unregister(self, address: int, size: int) -> None:
        with self._calling() as client:
            if client is None:
                raise StoreError("the store isn't open")
            code = client.unregister_buffer(address)
        # It answers so for what isn't registered.
        if code not in (0, -600):
            raise StoreError(f"Mooncake does not let memory at {address:#x} go (code {code})")

    def exists(self, keys: Sequence[str]) -> Sequence[Outcome]:
        codes = self._codes(len(keys), lambda client: client.batch_is_exist(list(keys)))
        return [outcome_of_exists(code) for code in codes]

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        def put(client: Any, part: slice) -> Any:
            return client.batch_put_from(list(keys[part]), list(addresses[part]), list(sizes[part]))

        codes = self._moved(put, len(keys))
        if not any(codes):
            return [Outcome.DONE] * len(codes)
        return [outcome_of_put(code) for code in codes]

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        def get(client: Any, part: slice) -> Any:
            return client.batch_get_into(list(keys[part]), list(addresses[part]), list(sizes[part]))

        codes = self._moved(get, len(keys))
        if codes == list(sizes):
            return [Outcome.DONE] * len(codes)
        outcomes = [outcome_of_get(code, size) for code, size in zip(codes, sizes, strict=True)]
        unfit = [place for place, code in enumerate(codes) if code == UNFIT]
        found = self._codes(len(unfit), lambda client: _sizes(client, [keys[place] for place in unfit]))
        for place, code in zip(unfit, found, strict=True):
            outcomes[place] = outcome_of_unfit(code, sizes[place])
        return outcomes

    def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        codes = self._codes(len(keys), lambda client: client.batch_remove(list(keys), True))
        return [outcome_of_remove(code) for code in codes]

    def remove_prefix(self, prefix: str) -> Outcome:
        """What is being put at this moment survives: the master doesn't remove what isn't complete."""
        pattern = "^" + re.sub(r"([.^$*+?()\[\]{}|\\])", r"\\\1", prefix)
        (code,) = self._codes(1, lambda client: [client.remove_by_regex(pattern, True)])
        return outcome_of_remove(code)

    def probe(self) -> bool:
        """By a question to the master: `health_check` says that all is well for a dead one too. Where nobody
        listens, asking would take 4 s.
        """
        with self._lock:
            if self._is_closed or self._client is None:
                return False
        require_listener(self._settings)
        (code,) = self._codes(1, lambda client: client.batch_is_exist([PROBE_KEY]))
        if code < 0 and not self._is_closed:
            raise StoreError(f"the Mooncake master at {self._settings.master} is silent (code {code})")
        return bool(code >= 0)

    def describe(self) -> Mapping[str, str]:
        settings = self._settings
        told = {
            "master": settings.master,
            "protocol": settings.protocol,
            "offers bytes": str(self._segment_bytes),
        }
        return told | self._where | package()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            client = None if self._inside else self._client
            if client is not None:
                self._client = None
        if client is not None:
            leave(client, self._settings)

    def audit(self) -> None:
        """At any time: what is inside is counted, and what is closed and empty has no client."""
        self._room.audit()
        INSIDE.audit()
        with self._lock:
            if self._inside < 0 or (self._is_closed and not self._inside and self._client is not None):
                raise InvariantError(f"{self._inside} calls are inside a store that is closed")

    def _moved(self, call: Callable[..., Any], count: int) -> Sequence[int]:
        """The codes of so many ranges, in as few calls as the room allows."""
        codes: list[int] = []
        room = self._room
        while len(codes) < count:
            granted = room.take(count - len(codes))
            if not granted:
                return [*codes, *[_NO_ROOM] * (count - len(codes))]
            part = slice(len(codes), len(codes) + granted)
            try:
                codes += self._codes(granted, partial(call, part=part))
            finally:
                room.give_back(granted)
        return codes

    def _codes(self, count: int, call: Callable[[Any], Sequence[int]]) -> Sequence[int]:
        """The call's codes, as many as `count`; those of a store without connection where there is none."""
        if count == 0:
            return _NOTHING
        with self._calling() as client:
            codes = [_NO_CLIENT] * count if client is None else call(client)
        return codes if len(codes) == count else [_NO_CLIENT] * count

    @contextlib.contextmanager
    def _calling(self) -> Iterator[Any | None]:
        """The client, which isn't closed meanwhile; None where there is none."""
        with self._lock:
            client = None if self._is_closed else self._client
            self._inside += client is not None
        if client is None:
            yield None
            return
        try:
            with INSIDE.call() as is_let_in:
                yield client if is_let_in else None
        finally:
            with self._lock:
                self._inside -= 1
                is_last = self._is_closed and not self._inside and self._client is not None
                if is_last:
                    self._client = None
            if is_last:
                leave(client, self._settings)


class _Room:
    """So many ranges may be under way, of which one call takes half at the most. Whoever wants some waits for
    a while until they fit, behind those who came before.
    """

    def __init__(self, most: int, patience_s: float) -> None:
        self._most = most
        self._patience_s = patience_s
        self._taken = 0
        self._line: deque[object] = deque()
        self._freed = threading.Condition()

    def take(self, wanted: int) -> int:
        """How many of them may go now, to be given back; 0: none, in all that time."""
        wanted = min(wanted, max(self._most // 2, 1))
        place = object()
        with self._freed:
            self._line.append(place)
            fits = self._freed.wait_for(
                lambda: self._line[0] is place and self._taken + wanted <= self._most, self._patience_s
            )
            self._line.remove(place)
            granted = wanted if fits else 0
            self._taken += granted
            self._freed.notify_all()  # the next one may fit as well
            return granted

    def give_back(self, granted: int) -> None:
        with self._freed:
            self._taken -= granted
            self._freed.notify_all()

    def audit(self) -> None:
        with self._freed:
            if not 0 <= self._taken <= self._most:
                raise InvariantError(f"{self._taken} ranges of {self._most} are under way")


def _sizes(client: Any, keys: Sequence[str]) -> Sequence[int]:
    """The objects' sizes, or errors; there is no question for several. A master that doesn't answer one isn't
    asked for the rest.
    """
    sizes: list[int] = []
    for key in keys:
        is_heard = not sizes or sizes[-1] >= 0 or sizes[-1] == ABSENT
        sizes.append(client.get_size(key) if is_heard else sizes[-1])
    return sizes


_NO_CLIENT = -900
_NO_ROOM = -700
_NOTHING: Sequence[int] = ()
