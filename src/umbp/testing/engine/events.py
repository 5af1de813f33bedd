"""A subscriber to an engine's KV events, which keeps what they say is there."""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_events import (
    MEDIUM_CPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    KVEventBatch,
)

TEXT = msgspec.msgpack.Encoder()
BATCH = msgspec.msgpack.Decoder(type=KVEventBatch)


class EventRecorder(EventPublisher):
    """Stands where vLLM's publisher does. Events take the way that they take to a subscriber."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []
        """All of the pool's, in order."""
        self.own_events: list[Any] = []
        """All of the engine's own cache's."""
        self.stored: dict[tuple[int | None, int | bytes], BlockStored] = {}
        """What the pool has by now, by group and hash, with the event that said so."""

    def publish(self, events: EventBatch) -> None:
        for event in BATCH.decode(TEXT.encode(events)).events:
            # The engine's own cache is cleared by itself; what is in the pool stays.
            if isinstance(event, AllBlocksCleared):
                continue
            if event.medium != MEDIUM_CPU:
                self.own_events.append(event)
                continue
            self.events.append(event)
            self._replay(event)

    def shutdown(self) -> None:
        """Nothing to end."""

    def _replay(self, event: BlockStored | BlockRemoved) -> None:
        for block_hash in event.block_hashes:
            place = event.group_idx, block_hash
            is_known = place in self.stored
            assert is_known == isinstance(event, BlockRemoved), f"{event} tells what is known"
            if isinstance(event, BlockStored):
                self.stored[place] = event
            else:
                del self.stored[place]
