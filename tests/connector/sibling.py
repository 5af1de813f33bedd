"""Another connector, to stand beside this package's under vLLM's MultiConnector, and told what to lose.

Its siblings of all ranks and both roles meet on a `Shelf`, which a test puts on the table under a name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from umbp.testing.engine import BLOCK

Rows = list[tuple[int, bytes, int]]
"""Blocks of one request: cache group, hash, and block of the engine."""

SHELVES: dict[str, Shelf] = {}


@dataclass(slots=True)
class Shelf:
    """What the siblings of one test keep, and how they behave."""

    load_async: bool = True
    greets: bool = False
    """Whether its workers have a handshake of their own."""
    loses: Callable[[int, int], bool] = lambda rank, row: False
    """Which blocks of its loads are lost: by rank, and by place in the load."""
    holds_back: bool = False
    """Whether asynchronous loads wait, and blocks of requests that ended are kept, until this is over."""
    keeps_blocks: bool = False
    """Whether it sends what a request computed after its end, and its blocks have to wait for that."""
    thinks_for: int = 0
    """So many more questions are answered with "ask again"."""
    content: dict[tuple[int, str, bytes], Any] = field(default_factory=dict)
    """Blocks by rank, layer and hash."""
    ends: set[bytes] = field(default_factory=set)
    """The hashes at which a whole prompt has ended."""
    loads: int = 0


def beside(name: str, **how: Any) -> tuple[Shelf, dict[str, object]]:
    """A shelf on the table, and the configuration of a sibling that uses it."""
    shelf = SHELVES[name] = Shelf(**how)
    return shelf, {
        "kv_connector": "Sibling",
        "kv_connector_module_path": "sibling",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shelf": name},
    }


@dataclass
class SiblingMetadata(KVConnectorMetadata):
    loads: dict[str, Rows] = field(default_factory=dict)
    stores: list[Rows] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SiblingGreeting(KVConnectorHandshakeMetadata):
    word: str = "hello"


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Stores a prompt's blocks when all of it has been computed, and finds whole prompts again, once for each
    request.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        assert self._kv_transfer_config is not None
        self._shelf = SHELVES[self._kv_transfer_config.kv_connector_extra_config["shelf"]]
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._rank = vllm_config.parallel_config.rank
        # The scheduler's
        self._requests: dict[str, Any] = {}
        self._starts: dict[str, int] = {}
        self._tried: set[str] = set()
        self._meta = SiblingMetadata()
        # A worker's
        self._caches: dict[str, Any] = {}
        self._loading: dict[str, Rows] = {}
        self._ended: list[str] = []
        self._failed_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """A real one would connect."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._shelf.thinks_for:
            self._shelf.thinks_for -= 1
            return None, False
        if request.request_id in self._tried:
            return 0, False
        limit = (request.num_tokens - 1) // BLOCK
        ends = [row for row in range(limit) if request.block_hashes[row] in self._shelf.ends]
        found = (ends[-1] + 1) * BLOCK - num_computed_tokens if ends else 0
        if found <= 0 or request.skip_reading_prefix_cache:
            return 0, False
        self._starts[request.request_id] = num_computed_tokens // BLOCK
        return found, self._shelf.load_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if not num_external_tokens:
            self._requests[request.request_id] = request
            return
        self._tried.add(request.request_id)
        start = self._starts[request.request_id]
        end = start + num_external_tokens // BLOCK
        self._meta.loads[request.request_id] = self._rows(request, blocks.get_block_ids(), start, end)

    def _rows(self, request: Any, tables: Any, start: int, end: int) -> Rows:
        return [
            (group, request.block_hashes[row], table[row])
            for group, table in enumerate(tables)
            for row in range(start, min(end, len(table)))
            if table[row]
        ]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in computed.items():
            request = self._requests.get(request_id)
            if request is None:
                continue
            whole = request.num_prompt_tokens // BLOCK
            if not whole or tokens + scheduler_output.num_scheduled_tokens[request_id] < whole * BLOCK:
                continue
            tables = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            self._meta.stores.append(self._rows(request, tables, 0, whole))
            self._shelf.ends.add(request.block_hashes[whole - 1])
            del self._requests[request_id]
        meta, self._meta = self._meta, SiblingMetadata()
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        if self._shelf.keeps_blocks and block_ids and request.status is not RequestStatus.FINISHED_ABORTED:
            self._meta.ended.append(request.request_id)
            return True, None
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        return bool(self._meta.ended)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return SiblingGreeting() if self._shelf.greets else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._metadata()
        self._ended += meta.ended
        self._loading.update(meta.loads)
        self._shelf.loads += len(meta.loads)
        if not self._shelf.load_async:
            for request_id in meta.loads:
                self._failed_blocks |= self._load(request_id)

    def _load(self, request_id: str) -> set[int]:
        lost = set()
        for place, (group, block_hash, block) in enumerate(self._loading.pop(request_id)):
            if self._shelf.loses(self._rank, place):
                lost.add(block)
                continue
            for layer in self._groups[group]:
                self._caches[layer][block] = self._shelf.content[self._rank, layer, block_hash]
        return lost

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are stored after the forward."""

    def wait_for_save(self) -> None:
        for rows in self._metadata().stores:
            for group, block_hash, block in rows:
                for layer in self._groups[group]:
                    self._shelf.content[self._rank, layer, block_hash] = self._caches[layer][block].clone()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults()
        if self._shelf.holds_back:
            return results
        results.finished_sending.update(self._ended)
        self._ended.clear()
        for request_id in list(self._loading):
            lost = self._load(request_id)
            results.finished_recving.add(request_id)
            if lost and len(self._groups) > 1:
                results.failed_recving.add(request_id)
            else:
                self._failed_blocks |= lost
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def _metadata(self) -> SiblingMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, SiblingMetadata)
        return metadata
