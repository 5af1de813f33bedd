"""The pool as the scheduler sees it: all pipeline stages as one, behind a few questions.

Scheduler thread only. This is the edge where a runtime's faults stop: whatever goes wrong is a miss, said
once a minute.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

from vllm.logger import init_logger

from umbp.connector.scheduler.stage import Reports, Stage, namespace_of
from umbp.data import BlockIdentityCodec, EngineTopology
from umbp.errors import ConfigError
from umbp.runtime.base import IUMBPRuntime, LookupState, Wanted, capabilities_of

logger = init_logger("vllm.umbp")

T = TypeVar("T")


class PoolView:
    """Misses everything until `open`; never raises after it. A block is there if every stage that has layers
    of its cache group has it.
    """

    def __init__(self, runtime: IUMBPRuntime, topology: EngineTopology) -> None:
        self._runtime = runtime
        self._can = capabilities_of(runtime)
        self._topology = topology
        self._stages: tuple[Stage, ...] = ()
        self._codec: BlockIdentityCodec | None = None
        self._parts: dict[str, list[str]] = {}
        """The names under which stages hold what an owner has, where there are several stages."""
        self._part_numbers = itertools.count()
        self._last_complaint_s = float("-inf")

    @property
    def is_open(self) -> bool:
        return bool(self._stages)

    @property
    def is_local(self) -> bool:
        """Whether the objects that it tells of are kept in this host's memory."""
        return self._can.local or self._can.local_stores

    @property
    def tier(self) -> str:
        """What keeps the objects, in a word, for metrics."""
        return self._can.tier

    def block_bytes(self, group_id: int) -> int:
        """Bytes of one block's objects of a cache group on all ranks; 0 until they have told them."""
        return sum(stage.block_bytes(group_id) for stage in self._stages)

    @property
    def codec(self) -> BlockIdentityCodec:
        """Keys of rank 0 in the first stage's namespace; workers rewrite them to their own rank and
        namespace.
        """
        if self._codec is None:
            raise RuntimeError("the pool is not open yet")
        return self._codec

    def open(self, reports: Reports) -> None:
        """Adopt what the workers report; `ConfigError` where those of one stage disagree. Again after a
        sleep: binds anew.
        """
        ranks = self._topology.rank_count
        if len(reports) < ranks:
            raise ConfigError(
                f"{len(reports)} of {ranks} workers reported what they keep; "
                "every worker of the engine must run this connector"
            )
        places = self._topology.stages()
        namespaces = [namespace_of(place, reports) for place in places]
        if not self._stages:
            self._stages = tuple(
                Stage(self._runtime, self._can, place, namespace, reports[place.all_namespaces()[0]])
                for place, namespace in zip(places, namespaces, strict=True)
            )
            self._codec = self._stages[0].codec
        for stage in self._stages:
            stage.bind(reports)

    @property
    def far_tier(self) -> str:
        """What keeps the objects that must be fetched."""
        return self._can.far_tier or self._can.tier

    def take_counts(self) -> list[Mapping[tuple[str, ...], float]]:
        """What each stage's runtime has counted by itself since the last call."""
        if not self._can.counts:
            return []
        nothing: Mapping[tuple[str, ...], float] = {}
        return [self._ask(stage.handle.take_counts, nothing) for stage in self._stages]

    def to_fetch(self, owner: str, group_id: int) -> int:
        """How many of the blocks of a cache group that `owner` holds some rank has yet to fetch."""
        if not self._can.prepare:
            return 0
        parts = (owner,) if len(self._stages) == 1 else self._parts.get(owner, ())
        nothing: Mapping[int, int] = {}
        return max(
            (
                sum(
                    self._ask(partial(stage.handle.to_fetch, part), nothing).get(group_id, 0)
                    for part in parts
                )
                for stage in self._stages
            ),
            default=0,
        )

    @property
    def prepares(self) -> bool:
        """Whether questions may take longer than a step: then `prepare` comes before them."""
        return self._can.prepare

    def prepare(self, owner: str, wanted: Sequence[Wanted], patience_s: float = 0.0) -> bool:
        """Whether all that can be told of these blocks is known by now; else to be asked again in the next
        step. Each stage finds out by itself, and may wait so long.
        """
        if not self._can.prepare:
            return True
        ready = [self._ask(partial(stage.prepare, owner, wanted, patience_s), True) for stage in self._stages]
        return all(ready)

    @property
    def is_cut_off(self) -> bool:
        """Whether what other engines store now can't be found, for a while at least."""
        return self._can.prepare and any(self._ask(stage.handle.is_cut_off, False) for stage in self._stages)

    def unprepare(self, owner: str) -> None:
        """Nobody waits for what was to be prepared for `owner`."""
        if self._can.prepare:
            for stage in self._stages:
                self._ask(partial(stage.handle.unprepare, owner), None)

    def present(self, group_id: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a cache group every rank has at this moment."""
        return self._ask(lambda: self._present(group_id, hashes), 0)

    def _present(self, group_id: int, hashes: Sequence[bytes]) -> int:
        keepers = self._keepers(group_id)
        count = len(hashes) if keepers else 0
        for stage in keepers:
            if count:
                count = stage.present(group_id, hashes[:count])
        return count

    def is_written(self, group_id: int, name: bytes) -> bool:
        """Whether some rank is just writing this block."""
        if not self._can.lookup_states:
            return False
        nothing = [LookupState.MISS]
        found = (self._ask(partial(one.states, group_id, name), nothing) for one in self._keepers(group_id))
        return any(LookupState.PENDING in states for states in found)

    def stored(self, group_id: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks of a cache group every rank has at this moment; they need not be one prefix."""
        nothing = [False] * len(hashes)
        keepers = self._keepers(group_id)
        if not keepers:
            return nothing
        columns = self._ask(lambda: [stage.stored(group_id, hashes) for stage in keepers], [nothing])
        return columns[0] if len(columns) == 1 else [all(found) for found in zip(*columns, strict=True)]

    def hold(self, owner: str, group_id: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a cache group every rank has; kept there until `unhold(owner)` where the
        runtime can. What one owner holds adds up.
        """
        if not self._can.hold:
            return self.present(group_id, hashes)
        if len(self._stages) == 1:
            return self._ask(lambda: self._stages[0].hold(owner, group_id, hashes), 0)
        return self._hold_everywhere(owner, group_id, hashes[: self.present(group_id, hashes)])

    def _hold_everywhere(self, owner: str, group_id: int, hashes: Sequence[bytes]) -> int:
        """Hold, stage by stage, what all of them had a moment ago.

        A stage that has lost blocks meanwhile leaves the others with a surplus. A runtime gives back all of
        an owner's holds or none: so what is common is held anew, under another name, and then the first hold
        is given back.
        """
        keepers = self._keepers(group_id)
        count = len(hashes)
        surplus = None
        while count:
            part = f"{owner}/{next(self._part_numbers)}"
            wanted = hashes[:count]
            held = self._ask(partial(_hold_part, keepers, part, group_id, wanted), 0)
            if surplus is not None:
                self._unhold_part(surplus)
            if held == count:
                self._parts.setdefault(owner, []).append(part)
                return count
            surplus, count = part, held
        if surplus is not None:
            self._unhold_part(surplus)
        return 0

    def unhold(self, owner: str) -> None:
        """Give back what `owner` holds; an owner without holds is fine."""
        if not self._can.hold:
            return
        parts = (owner,) if len(self._stages) == 1 else self._parts.pop(owner, ())
        for part in parts:
            self._unhold_part(part)

    def _unhold_part(self, part: str) -> None:
        for stage in self._stages:
            self._ask(partial(stage.unhold, part), None)

    def watch(self, group_id: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks of a cache group every rank has; `take_lost` tells when one of those goes."""
        return self._ask(lambda: self._watch(group_id, hashes), [False] * len(hashes))

    def _watch(self, group_id: int, hashes: Sequence[bytes]) -> list[bool]:
        columns = [stage.handle.watch(group_id, hashes) for stage in self._keepers(group_id)]
        if not columns:
            return [False] * len(hashes)
        return [all(found) for _, *found in zip(hashes, *columns, strict=True)]

    def take_lost(self) -> list[tuple[int, bytes]]:
        """Watched blocks, by group and hash, that some rank has lost since the last call."""
        nothing: dict[tuple[int, bytes], None] = {}
        lost = dict(nothing)
        for stage in self._stages:
            lost.update(self._ask(partial(_lost_by, stage), nothing))
        return list(lost)

    @property
    def takes_notes(self) -> bool:
        """Whether the eviction policy listens."""
        return self._can.note

    def note(
        self, group_id: int, request_id: str, phase: str, hashes: Sequence[bytes], *end: int | str
    ) -> None:
        """Tell the eviction policy of a request's blocks in one cache group; `end` is the number of output
        tokens and the finish reason.
        """
        if not self._can.note:
            return
        # A runtime that knows of one group only need not know the word.
        group = {"group_id": group_id} if group_id else {}
        for stage in self._keepers(group_id):
            self._ask(partial(stage.handle.note, request_id, phase, hashes, *end, **group), None)

    def clear(self) -> bool:
        """Remove the objects of all stages; True where nothing is left, also if nothing was ever opened."""
        cleared = [bool(self._ask(stage.handle.clear, False)) for stage in self._stages]
        return all(cleared)

    def clear_soon(self) -> None:
        """Once more, in the middle of a step: what takes long is done beside it, and nothing is found
        meanwhile.
        """
        for stage in self._stages:
            self._ask(stage.handle.clear_soon if self._can.prepare else stage.handle.clear, None)

    def disbelieve(self, blocks: Collection[tuple[int, bytes]]) -> None:
        """These, by cache group and name, were said to be there and could not be loaded."""
        if self._can.prepare and blocks:
            for stage in self._stages:
                self._ask(partial(stage.handle.disbelieve, blocks), None)

    def close(self) -> None:
        for stage in self._stages:
            self._ask(stage.handle.close, None)
        self._stages = ()

    def _keepers(self, group_id: int) -> list[Stage]:
        return [stage for stage in self._stages if stage.keeps(group_id)]

    def _ask(self, question: Callable[[], T], otherwise: T) -> T:
        try:
            return question()
        except Exception:
            # The edge to code that may not be ours: a fault there must cost a recomputation, never the
            # engine.
            now = time.monotonic()
            if now - self._last_complaint_s > 60:
                self._last_complaint_s = now
                logger.exception(
                    "UMBP: the runtime failed a question of the scheduler; answering with a miss"
                )
            return otherwise


def _hold_part(stages: Sequence[Stage], part: str, group_id: int, hashes: Sequence[bytes]) -> int:
    """How many of these leading blocks all stages hold now; some stages may hold more."""
    return min(stage.hold(part, group_id, hashes) for stage in stages)


def _lost_by(stage: Stage) -> dict[tuple[int, bytes], None]:
    """What the stage has lost, each once and in order."""
    return dict.fromkeys(stage.handle.take_lost())
