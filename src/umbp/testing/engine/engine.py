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
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from umbp.connector.connector import UMBPStoreConnector
from umbp.connector.stats import UMBPStats
from umbp.testing.engine.batch import Context, Course, Flight, Row
from umbp.testing.engine.events import EventRecorder
from umbp.testing.engine.forward import Forward, Wrong
from umbp.testing.engine.memory import plan_columns
from umbp.testing.engine.model import Chains
from umbp.testing.engine.owners import Owners
from umbp.testing.engine.planning import cache_configs, kv_cache_planning, make_config
from umbp.testing.engine.rank import Rank, own_connector
from umbp.testing.engine.shape import Shape

PATIENCE_S = 3.0
"""Steps without a model take no time: whoever waits for an answer from elsewhere makes many of them."""


class WrongByteError(AssertionError):
    """A request's KV isn't what its tokens make it, or memory was written that belongs to nobody."""


class ScriptedEngine:
    """One engine. `step` runs what the engine core runs in a step; every check is in it."""

    def __init__(self, root: Path, shape: Shape) -> None:
        self.shape = shape
        self.config = make_config(root, shape)
        *per_rank, for_scheduler = cache_configs(self.config, shape)
        columns, words = plan_columns(shape, per_rank)
        self.ranks = [Rank(self.config, one, rank, shape, columns) for rank, one in enumerate(per_rank)]
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
        # vLLM asks for a compiler before it takes the second runner; its scheduler does not need one.
        self.scheduler.use_v2_model_runner = shape.runner == 2
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.events = EventRecorder()
        if shape.tells_events:
            self.scheduler.kv_event_publisher = self.events
        self._connector = self._attach() if shape.has_connector else None
        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(hash_block, hash_function)
        self._chains = Chains(words)
        self._forward = Forward([rank.memory for rank in self.ranks], self._chains, shape.drafts)
        self._owners = Owners(self.scheduler, [rank.memory for rank in self.ranks])
        self._courses: dict[str, Course] = {}
        self._in_flight: deque[Flight] = deque()
        self._ids = itertools.count()
        self.stats = UMBPStats()
        self.finished: dict[str, Request] = {}
        self.handed_over: dict[str, dict[str, Any]] = {}
        """What responses have told the engine that goes on with each request."""
        self.invalid_blocks: list[set[int]] = []
        self.loads: Counter[str] = Counter()
        """How often the scheduler has begun to wait for each request's load."""
        self.reports = [Counter[str]() for _ in self.ranks]
        """How often each rank has reported the end of it."""
        self.reused_tokens = 0
        """Tokens that requests had at their start and did not compute, whoever had kept them."""
        self.steps = 0
        self.between: Callable[[], None] = lambda: None
        """Called after a step's forward and before its results are taken in: what arrives in the middle."""

    def _attach(self) -> UMBPStoreConnector:
        """Bring the connector's halves together, as the engine core does."""
        face = self.scheduler.get_kv_connector()
        assert isinstance(face, KVConnectorBase_V1)
        self._aggregator = KVOutputAggregator.from_connector(face, self.shape.world)
        self.shake_hands()
        return own_connector(face)

    def shake_hands(self) -> None:
        """Hand the workers' handshakes to the scheduler, as at the start and after a sleep."""
        handshakes: Any = {}
        for rank in self.ranks:
            assert rank.face is not None
            handshake = rank.face.get_handshake_metadata()
            if handshake is not None:
                handshakes[rank.place] = handshake
        if self.shape.world > 1:
            handshakes = pickle.loads(pickle.dumps(handshakes))
        face = self.scheduler.get_kv_connector()
        assert isinstance(face, KVConnectorBase_V1)
        face.set_xfer_handshake_metadata_pp_aware(handshakes)

    @property
    def connector(self) -> UMBPStoreConnector:
        """The scheduler's half."""
        assert self._connector is not None, "this engine has no connector"
        return self._connector

    # What a user does

    def make_request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        request_id: str | None = None,
        salt: str | None = None,
        reads_cache: bool = True,
        priority: int = 0,
        resumable: bool = False,
        transfer_params: object = None,
    ) -> Request:
        parameters = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        if transfer_params is not None:
            parameters.extra_args = {"kv_transfer_params": transfer_params}
        parameters.skip_reading_prefix_cache = not reads_cache
        return Request(
            request_id=request_id or f"r{next(self._ids)}",
            prompt_token_ids=list(prompt),
            sampling_params=parameters,
            pooling_params=None,
            cache_salt=salt,
            priority=priority,
            resumable=resumable,
            arrival_time=float(self.steps),
            block_hasher=self._hasher,
        )

    def add(self, prompt: Sequence[int], max_tokens: int = 1, **how: Any) -> Request:
        request = self.make_request(prompt, max_tokens, **how)
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        # Of several at once vLLM makes a set, whose order is another in each process.
        for request_id in request_ids:
            self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

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
        """Step until the engine core would go to sleep; how many steps it took. After so many steps and
        `PATIENCE_S` it is taken to step for ever.
        """
        begun_s = time.monotonic()
        for step in itertools.count():
            if not self.scheduler.has_requests() and not self._in_flight:
                return step
            if step >= limit and time.monotonic() - begun_s > PATIENCE_S:
                break
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
        self._owners.before_schedule()
        waiting = self._loading()
        output = self.scheduler.schedule()
        self._owners.forget_uncomputed({copy[1] for copy in output.kv_cache_block_copies or ()})
        self.loads.update(self._loading() - waiting)
        self._in_flight.append(Flight(output, self._rows(output), self._owners.after_schedule()))
        if len(self._in_flight) == self._depth or not output.num_scheduled_tokens:
            self._land()
        return output

    @property
    def _depth(self) -> int:
        return max(self.shape.depth, self.shape.stages)

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
        if touched := self._owners.spoil(flight.spoils):
            raise WrongByteError(f"step {self.steps}: nobody's blocks {touched} have been written")
        if output.kv_cache_block_copies:
            for rank in self.ranks:
                rank.memory.copy((copy[0], copy[1]) for copy in output.kv_cache_block_copies)
        runner_output = self._execute(output, rows)
        self.between()
        core_outputs = self.scheduler.update_from_output(output, runner_output)
        for one in core_outputs.values():
            self.handed_over.update(
                {each.request_id: each.kv_transfer_params for each in one.outputs if each.kv_transfer_params}
            )
            if one.scheduler_stats is not None and one.scheduler_stats.kv_connector_stats:
                told = one.scheduler_stats.kv_connector_stats
                if self.shape.before or self.shape.after:
                    told = told.get(UMBPStoreConnector.__name__, {})
                self.stats.aggregate(UMBPStats(data=told))
        self._hand_over_drafts(rows)
        for row in rows:
            if row.request.is_finished():
                self.finished[row.request.request_id] = row.request
        for request_id in output.finished_req_ids:
            self._courses.pop(request_id, None)
            self._chains.forget(request_id)
        if self._connector is not None:
            self._connector.scheduler_side.audit()
        return output

    def _hand_over_drafts(self, rows: Sequence[Row]) -> None:
        """Drafts go to the scheduler, unless it plans before they are made: then the runner keeps them."""
        if not self.shape.drafts or not rows or self.config.scheduler_config.async_scheduling:
            return
        ids = [row.request.request_id for row in rows]
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [list(row.course.drafts) for row in rows]))

    def _loading(self) -> set[str]:
        return {
            request_id
            for request_id, request in self.scheduler.requests.items()
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            and request_id not in self.scheduler.finished_recving_kv_req_ids
        }

    def _rows(self, output: SchedulerOutput) -> list[Row]:
        """The batch, with block tables kept as the model runner keeps them."""
        rows = []
        for new in output.scheduled_new_reqs:
            self._courses[new.req_id] = Course([list(blocks) for blocks in new.block_ids])
            rows.append(self._row(new.req_id, new.num_computed_tokens, output, is_fresh=True))
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            new_blocks = cached.new_block_ids[index]
            is_resumed = request_id in cached.resumed_req_ids
            if is_resumed:
                assert new_blocks is not None
                self._courses[request_id] = Course([list(blocks) for blocks in new_blocks])
            elif new_blocks is not None:
                for table, more in zip(self._courses[request_id].tables, new_blocks, strict=True):
                    table.extend(more)
            rows.append(self._row(request_id, cached.num_computed_tokens[index], output, is_fresh=is_resumed))
        return rows

    def _row(self, request_id: str, computed: int, output: SchedulerOutput, *, is_fresh: bool) -> Row:
        course = self._courses[request_id]
        self.reused_tokens += computed if is_fresh else 0
        planned = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        for mine, theirs in zip(course.tables, planned, strict=True):
            if mine != theirs:
                # The scheduler has taken blocks back that are out of the layers' sight.
                assert len(mine) == len(theirs), (request_id, mine, theirs)
                assert all(a == b or b == 0 for a, b in zip(mine, theirs, strict=True)), (mine, theirs)
        return Row(
            self.scheduler.requests[request_id],
            course,
            [np.array(table) for table in course.tables],
            computed,
            output.num_scheduled_tokens[request_id],
            output.scheduled_spec_decode_tokens.get(request_id, ()),
            is_fresh,
            course.rejected,
        )

    def _execute(self, output: SchedulerOutput, rows: list[Row]) -> ModelRunnerOutput:
        """All ranks side by side, each in the order of the model runner's hooks."""
        for rank in self.ranks:
            self._begin(rank, output, bool(rows))
        self._forward.resolve(rows)
        wrong = self._forward.run(rows)
        # With speculation, results are collected before the drafter's layer is written and stores are begun.
        collects_first = bool(self.shape.drafts) and (self.shape.runner == 1 or kv_cache_planning is not None)
        if not collects_first:
            wrong |= self._forward.run_drafter(rows, wrong)
        results = [self._end(rank, output, bool(rows), collects_first=collects_first) for rank in self.ranks]
        if collects_first:
            wrong |= self._forward.run_drafter(rows, wrong)
            for rank in self.ranks:
                if rank.face is not None:
                    rank.face.wait_for_save()
                    rank.face.clear_connector_metadata()
        self._explain(wrong, results)
        return self._merged(rows, results)

    def _begin(self, rank: Rank, output: SchedulerOutput, has_forward: bool) -> None:
        if rank.face is None:
            return
        meta = output.kv_connector_metadata
        assert meta is not None
        if self.shape.world > 1:
            meta = pickle.loads(pickle.dumps(meta))
        rank.face.handle_preemptions(meta)
        rank.face.bind_connector_metadata(meta)
        if output.has_sync_kv_loads:
            context: Any = Context(has_forward)
            rank.face.start_load_kv(context)

    def _end(
        self, rank: Rank, output: SchedulerOutput, has_forward: bool, *, collects_first: bool
    ) -> KVConnectorOutput:
        if rank.face is None:
            return KVConnectorOutput()
        if not output.has_sync_kv_loads:
            # The second runner has left its forward's context by now.
            context: Any = Context(has_forward and self.shape.runner == 1)
            rank.face.start_load_kv(context)
        if not collects_first:
            rank.face.wait_for_save()
        result = rank.collect(output.finished_req_ids)
        if not collects_first:
            rank.face.clear_connector_metadata()
        return result

    def _explain(self, wrong: Wrong, results: Sequence[KVConnectorOutput]) -> None:
        """Whatever a forward read wrongly, a rank has to have reported; and each load ends once a rank."""
        lost = set().union(*(result.invalid_block_ids for result in results))
        if unexplained := {blocks[0] for blocks in wrong.values()} - lost:
            raise WrongByteError(
                f"step {self.steps}: blocks {sorted(unexplained)} hold wrong bytes, and no rank has reported "
                f"them; requests and their wrong blocks: {wrong}"
            )
        if lost:
            self.invalid_blocks.append(lost)
        for reports, result in zip(self.reports, results, strict=True):
            reports.update(result.finished_recving or ())
            assert all(reports[one] <= self.loads[one] for one in result.finished_recving or ())

    def _merged(self, rows: list[Row], results: Sequence[KVConnectorOutput]) -> ModelRunnerOutput:
        """What the engine core is given: the last stage's tokens, everybody's transfers."""
        speaker = self.shape.ranks * (self.shape.stages - 1)
        outputs = [
            self._runner_output(rows if rank == speaker else [], result)
            for rank, result in enumerate(results)
        ]
        if self.shape.world == 1 or self._connector is None:
            return outputs[speaker]
        merged = self._aggregator.aggregate(
            [pickle.loads(pickle.dumps(one)) for one in outputs], output_rank=speaker
        )
        assert isinstance(merged, ModelRunnerOutput)
        return merged

    def _runner_output(self, rows: list[Row], result: KVConnectorOutput) -> ModelRunnerOutput:
        transfers = result if self._connector is not None else None
        if not rows:
            return ModelRunnerOutput.with_kv_conn_output_only(result)
        ids = [row.request.request_id for row in rows]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[list(row.sampled) for row in rows],
            kv_connector_output=transfers,
        )

    # Accounts

    def check_drained(self) -> None:
        """After a drain: nothing is pinned, nothing is open, nobody is remembered."""
        if self._connector is not None:
            side = self._connector.scheduler_side
            side.audit()
            assert (len(side._loads), len(side._stores)) == (0, 0)
            assert not side._requests
            assert not side.has_pending_stores()
            for rank, reports in enumerate(self.reports):
                assert reports == self.loads, f"rank {rank} reported {reports} of {self.loads}"
        assert not self.scheduler.requests
        assert self.pool.get_num_free_blocks() == self.shape.blocks - 1
        assert all(block.ref_cnt == 0 for block in self.pool.blocks if not block.is_null)
        self._owners.check()

    def restored_tokens(self) -> int:
        """Also those of requests that came back."""
        return self.count("loaded_tokens") + self.count("reloaded_tokens")

    def count(self, name: str) -> int:
        """A counter of the connector's, as vLLM was given it."""
        return int(self.stats.counters.get(name, 0))

    def close(self) -> None:
        if self._connector is None:
            return
        self._connector.shutdown()
        for rank in self.ranks:
            assert rank.face is not None
            rank.face.shutdown()
