"""Owns the demo's engine: a vLLM engine in a process group of its own, and everything that must go when it
goes.

The engine is another process so that this one stays responsive and can end it at any moment, whatever it
does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from umbp.cli.demo.errors import DemoFailedError
from umbp.testing.groups import kill_group

START_TIMEOUT_S = 300.0
ANSWER_TIMEOUT_S = 180.0
SIGN_OF_LIFE_S = 10.0
END_TIMEOUT_S = 5.0
BLOCK_TOKENS = 32
# The document with its answer must fit, and the fillers must not: see document.py.
MAX_MODEL_TOKENS = 3072
ENGINE_BLOCKS = 104
POOL_BYTES = 768 << 20
MAX_THREADS = 4
KEPT_LOGS = 4


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said to one prompt. `logprobs` are the chosen tokens' own, as hexadecimal floats."""

    prompt_tokens: int
    prompt_head: Sequence[int]
    cached_tokens: int
    ttft_s: float
    total_s: float
    token_ids: Sequence[int]
    logprobs: Sequence[str]
    text: str

    def is_same_as(self, other: Answer) -> bool:
        """Same tokens, and every bit of their logprobs."""
        return list(self.token_ids) == list(other.token_ids) and list(self.logprobs) == list(other.logprobs)


@dataclass(frozen=True, slots=True)
class Served:
    """What many prompts at once took, from handing over the first to the last token of all."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


def engine_arguments(model: Path, *, has_connector: bool = True) -> dict[str, Any]:
    """The arguments for vLLM's `LLM`: few blocks, and UMBP's pool behind them."""
    arguments: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_TOKENS,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": ENGINE_BLOCKS,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if has_connector:
        arguments["kv_transfer_config"] = transfer_config({"capacity_bytes": POOL_BYTES})
    return arguments


def transfer_config(options: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` for UMBP's connector with these options."""
    return {
        "kv_connector": "UMBPStoreConnector",
        "kv_connector_module_path": "umbp.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(options),
    }


def engine_environment(run_folder: Path, threads: int | None = None) -> dict[str, str]:
    """The child's environment: pinned threads, no traffic, its sockets where they are swept."""
    cores = sorted(os.sched_getaffinity(0))
    # One core stays free for the scheduler and the copies. Unpinned runs differ in speed and in the last
    # digits.
    count = threads if threads is not None else max(1, min(MAX_THREADS, len(cores) - 1))
    environment = dict(os.environ)
    environment.update(
        VLLM_RPC_BASE_PATH=str(run_folder),
        VLLM_CPU_OMP_THREADS_BIND=",".join(str(core) for core in cores[:count]),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
        VLLM_NO_USAGE_STATS="1",
        # The engine runs eagerly; the few helpers that would still be compiled cost the first answer 15 s.
        TORCHDYNAMO_DISABLE="1",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    return environment


def _keep_newest(files: Iterable[Path], count: int) -> None:
    """Failures keep their logs, and a run that was killed could not remove its own: older ones go here."""
    for file in sorted(files, key=lambda each: each.stat().st_mtime)[:-count]:
        file.unlink(missing_ok=True)


class EngineProcess:
    """A vLLM engine in a process group of its own; leaving the `with` block ends the group, whatever it does.

    `log` has what vLLM printed; it is kept only where the engine failed.
    """

    def __init__(self, arguments: Mapping[str, Any], log: Path, *, threads: int | None = None) -> None:
        self.log = log
        self._arguments = dict(arguments)
        self._threads = threads
        self._process: subprocess.Popen[str] | None = None
        self._answers = -1
        self._pending = b""
        self._run_folder: Path | None = None
        self._has_failed = False

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        _keep_newest(self.log.parent.glob(f"*{self.log.suffix}"), KEPT_LOGS)
        self._run_folder = Path(tempfile.mkdtemp(prefix="umbp-demo-"))
        try:
            self._spawn(self._run_folder)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, run_folder: Path) -> None:
        self._answers, theirs = os.pipe()
        try:
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "umbp.cli.demo.child", str(theirs), str(run_folder)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs,),
                    env=engine_environment(run_folder, self._threads),
                    # A group of its own: Ctrl-C in the terminal comes here only; one signal ends them all.
                    process_group=0,
                    text=True,
                )
        finally:
            os.close(theirs)

    def start(self, still_waiting: Callable[[float], None] = lambda waited_s: None) -> dict[str, Any]:
        """Starts the engine; returns its versions. Call it once, first.

        `still_waiting` is told every ten seconds how many have passed.
        """
        command = {"verb": "start", "arguments": self._arguments}
        return self._call(command, START_TIMEOUT_S, still_waiting)

    def ask(self, system: str, text: str, *, max_tokens: int) -> Answer:
        """One prompt, alone on the engine, at temperature 0."""
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return Answer(
            **self._call({"verb": "ask", "messages": messages, "max_tokens": max_tokens}, ANSWER_TIMEOUT_S)
        )

    def serve(self, seed: int, *, prompts: int, prompt_tokens: int, output_tokens: int) -> Served:
        """So many prompts at once, of tokens drawn by `seed`, each answered with so many tokens."""
        command = {
            "verb": "serve",
            "seed": seed,
            "prompts": prompts,
            "prompt_tokens": prompt_tokens,
            "output_tokens": output_tokens,
        }
        return Served(**self._call(command, ANSWER_TIMEOUT_S))

    def cpu_seconds(self) -> float:
        """Processor time that the engine's processes have used up to now."""
        assert self._process is not None, "the engine is running"
        ticks = 0
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # The name in parentheses may hold blanks; behind it: state, parent, group, ...
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def counters(self) -> dict[str, float]:
        return {
            name: float(value) for name, value in self._call({"verb": "counters"}, ANSWER_TIMEOUT_S).items()
        }

    def _call(
        self,
        command: Mapping[str, Any],
        timeout_s: float,
        still_waiting: Callable[[float], None] = lambda waited_s: None,
    ) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None:
            raise DemoFailedError("The engine's process is not running.")
        try:
            process.stdin.write(json.dumps(command) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(f"The engine's process ended ({self._how_it_ended()})") from None
        answer: dict[str, Any] = json.loads(self._read_line(timeout_s, command["verb"], still_waiting))
        if "error" in answer:
            raise self._failed(f"The engine could not {command['verb']}: {answer['error']}")
        return answer

    def _read_line(self, timeout_s: float, verb: str, still_waiting: Callable[[float], None]) -> bytes:
        start_s = time.monotonic()
        next_sign_s = SIGN_OF_LIFE_S
        while b"\n" not in self._pending:
            waited_s = time.monotonic() - start_s
            if waited_s >= timeout_s:
                raise self._failed(f"The engine did not {verb} in time")
            if waited_s >= next_sign_s:
                still_waiting(waited_s)
                next_sign_s += SIGN_OF_LIFE_S
            nap_s = max(0.0, min(timeout_s, next_sign_s) - waited_s)
            if not select.select([self._answers], [], [], nap_s)[0]:
                continue
            got = os.read(self._answers, 1 << 20)
            if not got:
                raise self._failed(f"The engine's process ended ({self._how_it_ended()})")
            self._pending += got
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        process = self._process
        if process is None:
            return "it never ran"
        try:
            code = process.wait(timeout=END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _failed(self, what: str) -> DemoFailedError:
        self._has_failed = True
        return DemoFailedError(f"{what.rstrip('.')}. What vLLM printed: {self.log}")

    def stop(self) -> None:
        """Ends the whole group and removes what it left; safe to call at any time and again."""
        process, self._process = self._process, None
        if process is not None:
            # No farewell: the pool is the engine's own memory and goes with it, and an engine that is asked
            # to end takes seconds. The engine core is a process of its own in this group.
            kill_group(process.pid)
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1
        if self._run_folder is not None:
            shutil.rmtree(self._run_folder, ignore_errors=True)
            self._run_folder = None
        if not self._has_failed:
            self.log.unlink(missing_ok=True)
