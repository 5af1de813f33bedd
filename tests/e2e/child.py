"""The engine process of the harness: one vLLM `LLM`, driven by pickled commands; run as `child.py IN OUT`, or
forked by `template.py`.

The end of the command stream means that the test process is gone: then the whole process group is ended.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from typing import Any

from umbp.testing.groups import kill_group


def serve(commands_fd: int, answers_fd: int, *, forks: bool) -> None:
    """Does as it is told until the commands end. The other processes of an engine that `forks` are forks of
    this one.
    """
    if forks:
        leave = functools.partial(_leave_streams, os.getpid(), (commands_fd, answers_fd))
        os.register_at_fork(after_in_child=leave)
    commands: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue()
    stream = os.fdopen(commands_fd, "rb")
    answers = os.fdopen(answers_fd, "wb", buffering=0)
    threading.Thread(target=_listen, args=(stream, commands), daemon=True).start()
    engine: Engine | None = None
    while True:
        verb, arguments = commands.get()
        try:
            if engine is None:
                engine = Engine(*arguments, forks=forks)
                answer: tuple[bool, Any] = (True, None)
            else:
                answer = (True, getattr(engine, verb)(*arguments))
        except BaseException as error:  # noqa: BLE001 - the top of this process; the test sees it
            traceback.print_exc()
            answer = (False, f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)


def _leave_streams(first: int, descriptors: tuple[int, ...]) -> None:
    """Runs in forks of the first process, which must not keep its streams open when it is gone, and in forks
    of theirs, where the numbers mean something else.
    """
    if os.getppid() == first:
        for each in descriptors:
            os.close(each)


def _listen(stream: Any, commands: queue.Queue[tuple[str, tuple[Any, ...]]]) -> None:
    try:
        while True:
            commands.put(pickle.load(stream))
    except EOFError:
        kill_group(os.getpgid(0))


def _change_platform(*, keeps_prefix_cache: bool, forks: bool) -> None:
    """Let vLLM have a prefix cache where its platform would switch it off: its hits are the reference then,
    right or wrong. And let it fork where its platform would start processes afresh.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def update(platform: type[CpuPlatform], config: Any) -> None:
        check(platform, config)
        if keeps_prefix_cache:
            config.cache_config.enable_prefix_caching = True
        if forks:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(update)


class Engine:
    """The commands, by name; see `harness.EngineProcess` for what each promises."""

    def __init__(self, arguments: dict[str, Any], *, forks: bool) -> None:
        from vllm import LLM

        from umbp.runtime import distributed

        if limit_s := os.environ.get("E2E_STORE_START_TIMEOUT_S"):
            distributed.START_TIMEOUT_S = float(limit_s)
        _change_platform(keeps_prefix_cache="E2E_KEEP_PREFIX_CACHE" in os.environ, forks=forks)
        self._llm = LLM(**arguments)
        self._done: dict[str, dict[str, Any]] = {}
        self._running: dict[str, dict[str, Any]] = {}

    def submit(self, request_id: str, prompt: dict[str, Any], params: dict[str, Any]) -> None:
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(detokenize=False, **params)
        self._running[request_id] = {"start_s": time.perf_counter(), "first_s": None, "output": None}
        self._llm.llm_engine.add_request(request_id, TokensPrompt(**prompt), sampling)

    def step(self, count: int) -> list[str]:
        """Takes up to `count` steps with output; the ids that finished in them."""
        finished = []
        for _ in range(count):
            if not self._llm.llm_engine.has_unfinished_requests():
                break
            for output in self._llm.llm_engine.step():
                state = self._running[output.request_id]
                now_s = time.perf_counter()
                if state["first_s"] is None and output.outputs[0].token_ids:
                    state["first_s"] = now_s
                state["output"], state["end_s"] = output, now_s
                if output.finished:
                    self._finish(output.request_id)
                    finished.append(output.request_id)
        return finished

    def _finish(self, request_id: str) -> None:
        state = self._running.pop(request_id)
        output = state["output"]
        answer = output.outputs[0]
        chosen, seconds = [], []
        for token, at in zip(answer.token_ids, answer.logprobs or (), strict=False):
            chosen.append(float(at[token].logprob))
            others = sorted((value.logprob for other, value in at.items() if other != token), reverse=True)
            seconds.append(float(others[0]) if others else float("-inf"))
        self._done[request_id] = {
            "prompt_tokens": len(output.prompt_token_ids or ()),
            "cached_tokens": int(output.num_cached_tokens or 0),
            "token_ids": tuple(int(token) for token in answer.token_ids),
            "logprobs": tuple(chosen),
            "runner_up_logprobs": tuple(seconds),
            "finish_reason": str(answer.finish_reason),
            "ttft_s": (state["first_s"] or state["end_s"]) - state["start_s"],
            "total_s": state["end_s"] - state["start_s"],
        }

    def take(self, request_ids: list[str]) -> list[dict[str, Any]]:
        """Steps until all of these have finished, then hands their results over."""
        while any(request_id not in self._done for request_id in request_ids):
            if not self._llm.llm_engine.has_unfinished_requests():
                raise RuntimeError("the engine has nothing to do, and a request has no result")
            self.step(1)
        return [self._done.pop(request_id) for request_id in request_ids]

    def abort(self, request_ids: list[str]) -> None:
        self._llm.llm_engine.abort_request(request_ids)
        for request_id in request_ids:
            self._running.pop(request_id, None)
            self._done.pop(request_id, None)

    def reset_prefix_cache(self, with_connector: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=with_connector))

    def metrics(self) -> dict[str, float]:
        from vllm.v1.metrics.reader import Counter, Gauge, Histogram

        totals: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if isinstance(metric, Counter | Gauge):
                totals[metric.name] = totals.get(metric.name, 0.0) + metric.value
            elif isinstance(metric, Histogram):
                name = f"{metric.name}_count"
                totals[name] = totals.get(name, 0.0) + metric.count
        return totals

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return resolve(name)(self._llm, *arguments)

    def call_workers(self, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        return self._llm.collective_rpc(resolve(name), args=arguments)


def resolve(name: str) -> Any:
    """`package.module:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), forks=False)
