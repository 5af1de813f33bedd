"""Tools for tests on real engines: an engine in a process of its own, what it answers, how answers are
compared.

An engine costs some seconds to start, 15 to 25 s where it is started afresh. Ask the `engines` fixture for
one by its specification: tests with equal specifications share one, and get it idle, with empty caches. Every
call has a deadline; an engine that misses one is ended with all its processes, and the next test that asks
for it gets a new one.

    SPEC = EngineSpec(connector=UMBP)

    def test_a_restored_prompt_answers_as_the_engines_own_hit_does(engines):
        engine = engines.get(SPEC)
        prompt = random_prompt(300, seed=1)
        engine.generate(prompt)
        hit = engine.generate(prompt)
        engine.forget()
        restored = engine.generate(prompt)
        assert_same(restored, hit)
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from e2e import models
from e2e.forks import Forked, Template
from umbp.testing.groups import kill_group, members

TESTS = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 240.0
CALL_TIMEOUT_S = 120.0
BLOCK_TOKENS = 32
LOG_TAIL_BYTES = 6000

MARGIN = 0.5
"""A first choice this far ahead of the second, in logprobs, is the same however the KV was computed."""
LOGPROB_TOLERANCE = 0.2


class EngineError(Exception):
    """The engine refused a call, ended, or missed a deadline; the message ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything that makes an engine what it is. Equal specifications may share an engine.

    `connector` is the extra configuration of UMBP's connector as (name, value) pairs, or None for no
    connector; `transfer` overrides or adds fields of vLLM's KVTransferConfig, `events` are those of its
    KVEventsConfig; `arguments` are for vLLM's `LLM`; `environment` is added to the process's. `speculative`
    is vLLM's speculative configuration, and `draft` its model if it has one; `custom_ops` chooses among
    vLLM's own kernels. With `is_fresh` each of its processes is started as an operator's engine starts it;
    otherwise they are forks of one that has imported everything, and of each other.
    """

    model: models.Shape = models.TINY
    blocks: int = 64
    max_model_tokens: int = 1024
    block_tokens: int = BLOCK_TOKENS
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    is_in_process: bool = False
    connector: tuple[tuple[str, Any], ...] | None = None
    transfer: tuple[tuple[str, Any], ...] = ()
    events: tuple[tuple[str, Any], ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    speculative: tuple[tuple[str, Any], ...] = ()
    draft: models.Shape | None = None
    custom_ops: tuple[str, ...] = ()
    is_fresh: bool = False

    @property
    def workers(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def llm_arguments(self, model: Path) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "disable_log_stats": False,
            "enable_prefix_caching": True,
            "max_model_len": self.max_model_tokens,
            "block_size": self.block_tokens,
            "num_gpu_blocks_override": self.blocks,
            "max_num_seqs": 8,
            "seed": 0,
        }
        if self.tensor_parallel > 1:
            arguments |= {"tensor_parallel_size": self.tensor_parallel, "distributed_executor_backend": "mp"}
        if self.pipeline_parallel > 1:
            # On CPUs only an engine that isn't eager makes the buffers for what a stage hands on.
            arguments |= {
                "pipeline_parallel_size": self.pipeline_parallel,
                "distributed_executor_backend": "mp",
                "enforce_eager": False,
            }
        if self.speculative:
            arguments["speculative_config"] = dict(self.speculative)
        if self.custom_ops:
            arguments["compilation_config"] = {"custom_ops": list(self.custom_ops)}
        if self.draft is not None:
            arguments["speculative_config"]["model"] = str(models.make_model(self.draft, model.parent))
        transfer: dict[str, Any] = {}
        if self.connector is not None:
            transfer = {
                "kv_connector": "UMBPStoreConnector",
                "kv_connector_module_path": "umbp.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"min_load_tokens": 0} | dict(self.connector),
            }
        transfer |= dict(self.transfer)
        if transfer:
            arguments["kv_transfer_config"] = transfer
        if self.events:
            arguments["kv_events_config"] = dict(self.events)
        return arguments | dict(self.arguments)

    def process_environment(self, run_folder: Path) -> dict[str, str]:
        paths = [str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH", "")]
        environment = dict(os.environ)
        environment.update(
            PYTHONPATH=os.pathsep.join(path for path in paths if path),
            VLLM_RPC_BASE_PATH=str(run_folder),
            # Unpinned runs differ in speed and in the last digits. Two ranks can't be pinned on one node.
            VLLM_CPU_OMP_THREADS_BIND=str(own_core()) if self.workers == 1 else "nobind",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_ENABLE_V1_MULTIPROCESSING="0" if self.is_in_process else "1",
            VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # functions go to workers by collective_rpc
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="INFO",  # other tests quieten theirs
            # Compiling costs 15 s. Nothing is compiled, not even for a pipeline, which is not eager.
            TORCHDYNAMO_DISABLE="1",
            VLLM_USE_AOT_COMPILE="0",
            HF_HUB_OFFLINE="1",
        )
        if self.workers > 1:
            environment["OMP_NUM_THREADS"] = "1"
        environment.update(self.environment)
        return environment


def own_core() -> int:
    """Where engines compute that this process starts: processes that run tests side by side have one each."""
    cores = sorted(os.sched_getaffinity(0))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return cores[number % len(cores)]


UMBP: tuple[tuple[str, Any], ...] = (("capacity_bytes", 64 << 20),)
"""UMBP's connector with a pool that holds 32,768 tokens of the tiny model."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and how to continue them; `params` go to vLLM's SamplingParams."""

    tokens: tuple[int, ...]
    max_tokens: int = 8
    cache_salt: str | None = None
    params: tuple[tuple[str, Any], ...] = ()

    def changed_at(self, position: int) -> Prompt:
        """The control: the same prompt with another token at `position`."""
        tokens = list(self.tokens)
        tokens[position] = tokens[position] - 1 if tokens[position] > 2 else tokens[position] + 1
        return Prompt(tuple(tokens), self.max_tokens, self.cache_salt, self.params)


def random_prompt(length: int, *, seed: int, max_tokens: int = 8, vocabulary: int = 1024) -> Prompt:
    """Tokens drawn by `seed`; two seeds share no block. 0 and 1 are special to the models and left out."""
    source = random.Random(f"prompt-{seed}")
    return Prompt(tuple(source.randrange(2, vocabulary) for _ in range(length)), max_tokens)


def restorable(tokens: int) -> int:
    """How much of a prompt can be: whole blocks, with at least one token left to compute."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Result:
    """What one request gave. `cached_tokens` is vLLM's count at admission, of both caches together.
    `ttft_s` is from submitting the tokens to having the first token.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    runner_up_logprobs: tuple[float, ...]
    finish_reason: str
    ttft_s: float
    total_s: float


def assert_same(result: Result, reference: Result) -> None:
    """The strict rule: for two answers on one engine from the same number of cached tokens, alone in their
    batch. Tokens equal, logprobs equal to the bit.
    """
    assert result.cached_tokens == reference.cached_tokens, "not comparable: another number of cached tokens"
    assert result.token_ids == reference.token_ids
    assert result.logprobs == reference.logprobs


def assert_close(result: Result, reference: Result) -> None:
    """The loose rule: for answers whose KV was computed in other batches or chunks. Logprobs within the
    tolerance, and the same tokens, up to the first position where another token is excused by the
    reference's own choice having been a narrow one.
    """
    for position, (token, logprob, second) in enumerate(
        zip(reference.token_ids, reference.logprobs, reference.runner_up_logprobs, strict=True)
    ):
        if result.token_ids[position] != token:
            assert logprob - second <= MARGIN, f"token {position} differs"
            return
        assert abs(result.logprobs[position] - logprob) <= LOGPROB_TOLERANCE, f"logprob {position} differs"


def assert_differs(result: Result, reference: Result) -> None:
    """The control: other tokens, or a logprob that is further off than any reordering of sums explains."""
    pairs = zip(result.logprobs, reference.logprobs, strict=True)
    is_far = any(abs(one - other) > LOGPROB_TOLERANCE for one, other in pairs)
    assert result.token_ids != reference.token_ids or is_far, "the answer does not depend on what was changed"


@functools.cache
def template() -> Template:
    """Its threads are those of an engine that computes on one core, or has several ranks."""
    environment = EngineSpec().process_environment(Path(tempfile.gettempdir()))
    return Template(environment | {"OMP_NUM_THREADS": "1"})


class EngineProcess:
    """One engine in a process group of its own. Not thread-safe. Use it in a `with` block, or `stop()` it."""

    def __init__(self, spec: EngineSpec, model: Path, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.is_alive = False
        self._model = model
        self._ids = itertools.count(1)
        self._process: subprocess.Popen[bytes] | Forked | None = None
        self._commands = self._answers = -1
        self._run_folder: Path | None = None

    def __enter__(self) -> Self:
        return self if self.is_alive else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Starts the engine; raises EngineError, with nothing left behind, if it can't."""
        assert self._process is None, "started twice"
        self._run_folder = Path(tempfile.mkdtemp(prefix="umbp-e2e-"))
        their_commands, self._commands = os.pipe()
        self._answers, their_answers = os.pipe()
        with self.log.open("wb") as log:
            environment = self.spec.process_environment(self._run_folder)
            descriptors = (their_commands, their_answers)
            if self.spec.is_fresh:
                self._process = subprocess.Popen(
                    [sys.executable, str(TESTS / "e2e" / "child.py"), *map(str, descriptors)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=descriptors,
                    env=environment,
                    # No session of its own: Linux shares the cores between sessions first, and 6.18 lets one
                    # that wakes often keep the others, and a store's servers with them, waiting for seconds.
                    process_group=0,
                )
            else:
                self._process = template().fork(environment, (*descriptors, log.fileno()))
        os.close(their_commands)
        os.close(their_answers)
        self.is_alive = True
        try:
            self.call_child("start", self.spec.llm_arguments(self._model), timeout_s=timeout_s)
        except EngineError:
            self.stop()
            raise
        return self

    @property
    def pid(self) -> int:
        """The leader of the engine's process group; with `is_in_process` it is the engine core itself."""
        assert self._process is not None
        return self._process.pid

    def pids(self) -> list[int]:
        """All processes of the group, the leader first: child, engine core, workers, vLLM's helpers."""
        return [self.pid, *sorted(pid for pid in members(self.pid) if pid != self.pid)]

    def generate(self, prompt: Prompt, *, timeout_s: float = CALL_TIMEOUT_S) -> Result:
        """Answers one prompt, alone in its batch if nothing else was submitted."""
        return self.generate_all([prompt], timeout_s=timeout_s)[0]

    def generate_all(self, prompts: Sequence[Prompt], *, timeout_s: float = CALL_TIMEOUT_S) -> list[Result]:
        """Answers these prompts, submitted together."""
        return self.take([self.submit(prompt) for prompt in prompts], timeout_s=timeout_s)

    def submit(self, prompt: Prompt) -> str:
        """Hands a prompt to the engine and returns its id; `take`, `step` and `abort` go on from there."""
        request_id = f"r{next(self._ids)}"
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt.tokens)}
        if prompt.cache_salt is not None:
            tokens["cache_salt"] = prompt.cache_salt
        params = {"temperature": 0.0, "max_tokens": prompt.max_tokens, "logprobs": 2, "ignore_eos": True}
        self.call_child("submit", request_id, tokens, params | dict(prompt.params))
        return request_id

    def take(self, request_ids: Sequence[str], *, timeout_s: float = CALL_TIMEOUT_S) -> list[Result]:
        """Waits until these requests have finished and hands over their results, once."""
        results = self.call_child("take", list(request_ids), timeout_s=timeout_s)
        return [Result(request_id=name, **result) for name, result in zip(request_ids, results, strict=True)]

    def step(self, count: int = 1) -> list[str]:
        """Takes up to `count` steps that have output; returns the ids that finished. An engine core in
        another process runs on by itself.
        """
        finished: list[str] = self.call_child("step", count)
        return finished

    def abort(self, request_ids: Sequence[str]) -> None:
        self.call_child("abort", list(request_ids))

    def forget(self) -> None:
        """Empties the engine's own prefix cache, after which only the pool can answer."""
        assert self.reset_prefix_cache(), "the engine did not give up its blocks"

    def reset_prefix_cache(self, *, with_connector: bool = False) -> bool:
        return bool(self.call_child("reset_prefix_cache", with_connector))

    def metrics(self) -> dict[str, float]:
        """All counters and gauges by name, and how often histograms observed as `<name>_count`, labels
        summed; those of the connector begin with `vllm:umbp_`.
        """
        metrics: dict[str, float] = self.call_child("metrics")
        return metrics

    def shows(self, name: str, value: float, *, timeout_s: float = 30.0) -> bool:
        """Whether a metric comes to this value. What ends behind a request's last step is told with a later
        one, so small prompts are sent, each less than a block.
        """
        until_s = time.monotonic() + timeout_s
        seeds = itertools.count()
        while self.metrics()[name] != value:
            if time.monotonic() >= until_s:
                return False
            self.generate(random_prompt(3, seed=next(seeds), max_tokens=2))
        return True

    def call(self, function: str, *arguments: Any) -> Any:
        """Calls `module:function` in the child with vLLM's LLM first; with `is_in_process` that reaches the
        scheduler too, as `llm.llm_engine.engine_core.engine_core.scheduler`.
        """
        return self.call_child("call", function, arguments)

    def call_workers(self, function: str, *arguments: Any) -> list[Any]:
        """Calls `module:function` on every worker, the worker first; the answers by rank."""
        answers: list[Any] = self.call_child("call_workers", function, arguments)
        return answers

    def record_blocks(self) -> None:
        """From now on `kv_digests` works."""
        self.call_workers("e2e.probes:record_blocks")

    def kv_digests(self, result: Result, tokens: int) -> list[dict[str, list[str]]]:
        """By rank: layer -> digests of the KV bytes of the request's blocks that are needed to go on after
        its first `tokens`, in whole blocks. Right while nothing else was scheduled since.
        """
        return self.call_workers("e2e.probes:read_blocks", result.request_id, tokens)

    def poison(self) -> None:
        """Overwrites all KV memory of the idle engine and makes it forget what was there."""
        self.call_workers("e2e.probes:poison_blocks")
        self.forget()

    def call_child(self, verb: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """One command to the child; a missed deadline or an ended process ends everything and raises."""
        if not self.is_alive:
            raise EngineError("the engine is not running")
        message = pickle.dumps((verb, arguments))
        deadline_s = time.monotonic() + timeout_s
        try:
            written = 0
            while written < len(message):
                written += os.write(self._commands, message[written:])
            is_good, value = pickle.loads(self._read(deadline_s))
        except (BrokenPipeError, EOFError, TimeoutError) as error:
            tail = self.log_tail()
            self.stop()
            raise EngineError(f"{verb}: {type(error).__name__} {error}\n{tail}") from None
        if not is_good:
            raise EngineError(f"{verb}: {value}\n{self.log_tail()}")
        return value

    def _read(self, deadline_s: float) -> bytes:
        data = bytearray()
        while not _is_whole(data):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise TimeoutError("no answer in time")
            got = os.read(self._answers, 1 << 20)
            if not got:
                raise EOFError("the process ended")
            data += got
        return bytes(data)

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
        return ""

    def stop(self) -> None:
        """Kills the whole process group, and waits until all of it and all that it had is gone."""
        self.is_alive = False
        process, self._process = self._process, None
        if process is not None:
            kill_group(process.pid)
            process.wait()
        for descriptor in (self._commands, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._commands = self._answers = -1
        if self._run_folder is not None:
            shutil.rmtree(self._run_folder, ignore_errors=True)
            self._run_folder = None


def _is_whole(data: bytearray) -> bool:
    """Answers are single pickles of one write each; the stop opcode ends them."""
    if not data.endswith(b"."):
        return False
    try:
        pickle.loads(bytes(data))
    except (EOFError, pickle.UnpicklingError):
        return False
    return True


@dataclass(slots=True)
class EnginePool:
    """Engines by specification. It keeps `limit` of them running; the one unused for longest makes room."""

    folder: Path
    limit: int = 1
    _engines: dict[EngineSpec, EngineProcess] = field(default_factory=dict)
    _started: int = 0

    def get(self, spec: EngineSpec) -> EngineProcess:
        """The engine of this specification, idle, its prefix cache and pool empty."""
        engine = self._engines.pop(spec, None)
        if engine is None or not engine.is_alive:
            self._make_room()
            engine = self.fresh(spec)
        self._engines[spec] = engine
        assert engine.reset_prefix_cache(with_connector=spec.connector is not None), "the engine is not idle"
        return engine

    def fresh(self, spec: EngineSpec) -> EngineProcess:
        """An engine of the test's own, started; the test ends it, by `with` or `stop()`."""
        self._started += 1
        log = self.folder / f"engine-{self._started}.log"
        engine = EngineProcess(spec, self.model(spec.model), log)
        try:
            return engine.start()
        except BaseException:
            engine.stop()
            raise

    def unstarted(self, spec: EngineSpec) -> EngineProcess:
        """For tests of a start that fails."""
        self._started += 1
        return EngineProcess(spec, self.model(spec.model), self.folder / f"engine-{self._started}.log")

    def model(self, shape: models.Shape) -> Path:
        return models.make_model(shape, self.folder)

    def _make_room(self) -> None:
        while len(self._engines) >= self.limit:
            self._engines.pop(next(iter(self._engines))).stop()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.stop()
        self._engines.clear()


def gained(after: Mapping[str, float], before: Mapping[str, float], name: str) -> float:
    """By how much a metric has grown."""
    return after.get(name, 0.0) - before.get(name, 0.0)
