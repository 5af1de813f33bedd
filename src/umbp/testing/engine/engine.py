"""An engine without a model: vLLM's scheduler, this connector's halves, and a forward that is arithmetic.

The KV of a token is a pattern drawn from all tokens up to it, from the layer and from the rank. A step writes
the patterns of the tokens that it computes, then reads back the whole of each request, as attention would: a
byte that the connector restored wrongly, late, elsewhere or not at all is an error in the step that meets it.
Blocks that change owners are spoiled first, so that nothing is right by being left over. What a step computes
from blocks whose load failed is spoiled as well, on every rank, as a real model's would be.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from umbp.connector.connector import UMBPStoreConnector
from umbp.connector.stats import UMBPStats
from umbp.testing.engine.batch import Context, Flight, Row
from umbp.testing.engine.events import EventRecorder
from umbp.testing.engine.memory import SPOILED
from umbp.testing.engine.model import Chains
from umbp.testing.engine.planning import cache_configs, make_config
from umbp.testing.engine.rank import Rank
from umbp.testing.engine.shape import BLOCK, HEAD_SIZE, HEADS, LAYERS, Shape


class WrongByteError(AssertionError):
    """A request's KV isn't what its tokens make it."""


class ScriptedEngine:
    """One engine. `step` runs what the engine core runs in a step; every check is in it."""

    def __init__(self, root: Path, shape: Shape) -> None:
        self.shape = shape
        self.config = make_config(root, shape)
        *per_rank, for_scheduler = cache_configs(self.config)
        self.ranks = [Rank(self.config, one, rank) for rank, one in enumerate(per_rank)]
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(for_scheduler, self.config)
        scheduler_class = self.config.scheduler_config.get_scheduler_cls()
        assert issubclass(scheduler_class, Scheduler)
        self.scheduler: Scheduler = scheduler_class(
            vllm_config=self.config,
            kv_cache_config=for_scheduler,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=True,
        )
        connector = self.scheduler.get_kv_connector()
        assert isinstance(connector, UMBPStoreConnector)
        self.connector = connector
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.events = EventRecorder()
        if shape.tells_events:
            self.scheduler.kv_event_publisher = self.events
        self._aggregator = KVOutputAggregator.from_connector(connector, shape.ranks)
        handshakes: Any = {
            (0, rank): one.connector.get_handshake_metadata() for rank, one in enumerate(self.ranks)
        }
        if shape.ranks > 1:
            handshakes = pickle.loads(pickle.dumps(handshakes))
        connector.set_xfer_handshake_metadata_pp_aware(handshakes)
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_block, hash_function)
        self._chains = Chains(shape.ranks)
        self._tables: dict[str, list[int]] = {}
        self._in_flight: deque[Flight] = deque()
        self._ids = itertools.count()
        self.stats = UMBPStats()
        self.finished: dict[str, Request] = {}
        self.invalid_blocks: list[set[int]] = []
        self.steps = 0
        self.between: Callable[[], None] = lambda: None
        """Called after a step's forward and before its results are taken in: what arrives in the middle."""

    # What a user does

    def make_request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        reads_cache: bool = True,
    ) -> Request:
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        parameters.skip_reading_prefix_cache = not reads_cache
        return Request(
            request_id=request_id or f"r{next(self._ids)}",
            prompt_token_ids=list(prompt),
            sampling_params=parameters,
            pooling_params=None,
            cache_salt=salt,
            block_hasher=self._hasher,
        )

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **how: Any) -> Request:
        request = self.make_request(prompt, max_tokens, **how)
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def run(self, prompt: Sequence[int], max_tokens: int = 1, **how: Any) -> Request:
        """Serve one prompt to its end and drain."""
        request = self.add(prompt, max_tokens, **how)
        self.drain()
        assert request.request_id in self.finished
        return request

    def forget_prefixes(self) -> None:
        """The engine's own cache is emptied; the pool isn't."""
        assert self.scheduler.reset_prefix_cache()

    def change_weights(self) -> bool:
        """Empty the engine's cache and the pool, as after an update of the model's weights. If that is told
        to have worked, the same tokens make another KV from now on: whatever is old shows.
        """
        worked = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        if worked:
            self._chains.change_weights()
        return worked

    def drain(self, limit: int = 500) -> int:
        """Step until the engine core would go to sleep; how many steps it took."""
        for step in range(limit):
            if not self.scheduler.has_requests() and not self._in_flight:
                return step
            self.step()
        side = self.connector.scheduler_side
        states = {request_id: request.status.name for request_id, request in self.scheduler.requests.items()}
        raise AssertionError(
            f"still busy after {limit} steps: {states}, loads {side._loads}, stores {side._stores}, "
            f"{self.pool.get_num_free_blocks()} free blocks of {self.shape.blocks}"
        )

    # One step

    def step(self) -> SchedulerOutput:
        """Plan a step, as late a run of it as the engine's depth allows, and what its results do."""
        self.steps += 1
        if self._in_flight and not self.scheduler.has_requests():
            return self._land()
        owners = self._owners()
        output = self.scheduler.schedule()
        self._in_flight.append(Flight(output, self._rows(output), self._changed_owners(owners)))
        if len(self._in_flight) == self.shape.depth or not output.num_scheduled_tokens:
            self._land()
        return output

    @property
    def is_in_flight(self) -> bool:
        return bool(self._in_flight)

    def land(self) -> None:
        """Let what is in flight end."""
        while self._in_flight:
            self._land()

    def _land(self) -> SchedulerOutput:
        flight = self._in_flight.popleft()
        output, rows = flight.output, flight.rows
        for rank in self.ranks:
            rank.memory.spoil(flight.spoiled)
        runner_output = self._execute(output, rows)
        self.between()
        core_outputs = self.scheduler.update_from_output(output, runner_output)
        for one in core_outputs.values():
            if one.scheduler_stats is not None and one.scheduler_stats.kv_connector_stats:
                self.stats.aggregate(UMBPStats(data=one.scheduler_stats.kv_connector_stats))
        for row in rows:
            if row.request.is_finished():
                self.finished[row.request.request_id] = row.request
        for request_id in output.finished_req_ids:
            self._tables.pop(request_id, None)
            self._chains.forget(request_id)
        self.connector.scheduler_side.audit()
        return output

    def _rows(self, output: SchedulerOutput) -> list[Row]:
        """The batch, with block tables kept as the model runner keeps them."""
        rows = []
        for new in output.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
            rows.append(self._row(new.req_id, new.num_computed_tokens, output))
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert new_blocks is not None
                self._tables[request_id] = list(new_blocks[0])
            elif new_blocks is not None:
                self._tables[request_id].extend(new_blocks[0])
            rows.append(self._row(request_id, cached.num_computed_tokens[index], output))
        return rows

    def _row(self, request_id: str, computed: int, output: SchedulerOutput) -> Row:
        table = self._tables[request_id]
        assert table == self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
        return Row(
            self.scheduler.requests[request_id],
            list(table),
            computed,
            output.num_scheduled_tokens[request_id],
        )

    def _execute(self, output: SchedulerOutput, rows: list[Row]) -> ModelRunnerOutput:
        """All ranks side by side, each in the order of the model runner's hooks."""
        context: Any = Context(bool(rows))
        is_multi = len(self.ranks) > 1
        for rank in self.ranks:
            meta = output.kv_connector_metadata
            assert meta is not None
            if is_multi:
                meta = pickle.loads(pickle.dumps(meta))
            rank.connector.handle_preemptions(meta)
            rank.connector.bind_connector_metadata(meta)
            if output.has_sync_kv_loads:
                rank.connector.start_load_kv(context)
        # A request that ended meanwhile may lack the token that the step was to compute.
        wrong = self._forward([row for row in rows if row.end <= row.request.num_tokens])
        results = []
        for rank in self.ranks:
            if not output.has_sync_kv_loads:
                rank.connector.start_load_kv(context)
            rank.connector.wait_for_save()
            results.append(rank.results(output.finished_req_ids))
        lost = set().union(*(result.invalid_block_ids for result in results))
        if unexplained := {blocks[0] for blocks in wrong.values()} - lost:
            raise WrongByteError(
                f"step {self.steps}: blocks {sorted(unexplained)} hold wrong bytes, and no rank has reported "
                f"them; requests and their wrong blocks: {wrong}"
            )
        if lost:
            self.invalid_blocks.append(lost)
        sampled = [
            [self._chains.next_token(row.request)] if row.end == row.request.num_tokens else []
            for row in rows
        ]
        outputs = [self._runner_output(rows, sampled, result) for result in results]
        if not is_multi:
            return outputs[0]
        merged = self._aggregator.aggregate([pickle.loads(pickle.dumps(one)) for one in outputs])
        assert isinstance(merged, ModelRunnerOutput)
        return merged

    def _runner_output(
        self, rows: list[Row], sampled: list[list[int]], result: KVConnectorOutput
    ) -> ModelRunnerOutput:
        if not rows:
            return ModelRunnerOutput.with_kv_conn_output_only(result)
        ids = [row.request.request_id for row in rows]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=result,
        )

    # The model

    def _forward(self, rows: list[Row]) -> dict[str, list[int]]:
        """Compute all rows on all ranks; returns each request's blocks that hold wrong bytes, in order, where
        there are any. What is computed from those is spoiled, and whatever is computed from that.
        """
        for row in rows:
            right = self._chains.of(row.request, row.end)[row.start :]
            for index, rank in enumerate(self.ranks):
                rank.memory.write(row.table, row.start, right[:, index])
        causes = self._wrong(rows)
        tainted: set[str] = set()
        wrong = causes
        while fresh := wrong.keys() - tainted:
            tainted |= fresh
            for row in rows:
                if row.request.request_id in fresh:
                    garbage = np.full((row.count, len(LAYERS), HEADS, 2 * HEAD_SIZE), SPOILED + 1, np.int16)
                    for rank in self.ranks:
                        rank.memory.write(row.table, row.start, garbage)
            wrong = self._wrong(rows)
        return causes

    def _wrong(self, rows: list[Row]) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for row in rows:
            right = self._chains.of(row.request, row.end)
            places: set[int] = set()
            for index, rank in enumerate(self.ranks):
                read = rank.memory.read(row.table, row.end)
                if not np.array_equal(read, right[:, index]):
                    same = (read == right[:, index]).reshape(row.end, -1).all(axis=1)
                    places |= set((np.flatnonzero(~same) // BLOCK).tolist())
            if places:
                found[row.request.request_id] = [row.table[place] for place in sorted(places)]
        return found

    # Spoiling

    def _owners(self) -> dict[int, tuple[Any, frozenset[str]]]:
        """Of each block: its hash in the engine's prefix cache, and the requests that have it."""
        requests: dict[int, set[str]] = {}
        manager = self.scheduler.kv_cache_manager
        for request_id in self.scheduler.requests:
            for block_id in manager.get_block_ids(request_id)[0]:
                requests.setdefault(block_id, set()).add(request_id)
        return {
            block.block_id: (block.block_hash, frozenset(requests.get(block.block_id, ())))
            for block in self.pool.blocks
        }

    def _changed_owners(self, before: Mapping[int, tuple[Any, frozenset[str]]]) -> list[int]:
        """Blocks to spoil: with new owners, and not handed on to them by the engine's own cache."""
        changed = []
        for block_id, (block_hash, requests) in self._owners().items():
            old_hash, old_requests = before[block_id]
            is_handed_on = block_hash is not None and block_hash == old_hash
            if requests and not requests & old_requests and not is_handed_on:
                changed.append(block_id)
        return changed

    # Accounts

    def check_drained(self) -> None:
        """After a drain: nothing is pinned, nothing is open, nobody is remembered."""
        side = self.connector.scheduler_side
        side.audit()
        assert not self.scheduler.requests
        assert (len(side._loads), len(side._stores)) == (0, 0)
        assert not side._requests
        assert not side.has_pending_stores()
        assert self.pool.get_num_free_blocks() == self.shape.blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)

    def restored_tokens(self) -> int:
        return int(self.stats.counters.get("loaded_tokens", 0))

    def count(self, name: str) -> int:
        """A counter of the connector's, as vLLM was given it."""
        return int(self.stats.counters.get(name, 0))

    def close(self) -> None:
        self.connector.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()
