"""The demo's engine process: one vLLM engine, driven by lines of JSON; run as
`python -m umbp.cli.demo.child FD FOLDER`.

Commands come on standard input, answers go to the descriptor FD, all that vLLM prints goes to the log that
the parent gave as standard output. The end of standard input means that the parent is gone: then this process
ends its whole process group, in the middle of whatever it does, so that no death of the parent leaves an
engine, what vLLM has in the RAM file system, or FOLDER with its sockets, behind.
"""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import sys
import threading
import time
import traceback
from typing import IO, Any

from umbp.testing.groups import kill_group

SERVE_ARGUMENTS = ("seed", "prompts", "prompt_tokens", "output_tokens")


def main() -> None:
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(
        target=_listen, args=(sys.stdin, commands, sys.argv[2]), name="umbp-demo-listen", daemon=True
    ).start()
    engine: _Engine | None = None
    while True:
        command = commands.get()
        verb = command["verb"]
        try:
            if verb == "start":
                engine = _Engine(command["arguments"])
                answer: dict[str, Any] = engine.describe()
            elif engine is None:
                raise RuntimeError("the engine has not been started")
            elif verb == "ask":
                answer = engine.ask(command["messages"], command["max_tokens"])
            elif verb == "serve":
                answer = engine.serve(**{name: command[name] for name in SERVE_ARGUMENTS})
            elif verb == "counters":
                answer = engine.counters()
            else:
                raise RuntimeError(f"unknown command {verb}")
        # The top of this process: the parent reports it, the log has the traceback.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")


def _listen(stream: IO[str], commands: queue.Queue[dict[str, Any]], run_folder: str) -> None:
    for line in stream:
        commands.put(json.loads(line))
    shutil.rmtree(run_folder, ignore_errors=True)
    kill_group(os.getpgid(0))


class _Engine:
    """One vLLM engine and its answers."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._asked = 0

    def describe(self) -> dict[str, Any]:
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__, "pid": os.getpid()}

    def ask(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        """Answers one prompt alone on the engine.

        TTFT runs from handing the tokens over to having the first token in hand; turning text into tokens is
        outside of it, being the same for every prompt.
        """
        from vllm import RequestOutput, SamplingParams, TokensPrompt

        tokens = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1)
        self._asked += 1
        engine = self._llm.llm_engine
        first_s: float | None = None
        final: Any = None
        start_s = time.perf_counter()
        engine.add_request(f"demo-{self._asked}", TokensPrompt(prompt_token_ids=tokens), params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if not isinstance(output, RequestOutput):
                    raise TypeError(f"the engine answered with a {type(output).__name__}")
                if first_s is None and output.outputs and output.outputs[0].token_ids:
                    first_s = time.perf_counter()
                final = output
        end_s = time.perf_counter()
        if final is None or first_s is None or final.outputs[0].finish_reason not in ("stop", "length"):
            raise RuntimeError("the engine ended the request without an answer")
        answer = final.outputs[0]
        return {
            "prompt_tokens": len(tokens),
            "prompt_head": list(tokens[:64]),
            "cached_tokens": int(final.num_cached_tokens or 0),
            "ttft_s": first_s - start_s,
            "total_s": end_s - start_s,
            "token_ids": [int(token) for token in answer.token_ids],
            # As hexadecimal, so that equality here is equality of every bit.
            "logprobs": [
                float(at[token].logprob).hex()
                for token, at in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
            "text": answer.text,
        }

    def serve(self, seed: int, prompts: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
        """Answers many made-up prompts at once; two seeds make prompts that share no block."""
        from vllm import RequestOutput, SamplingParams, TokensPrompt

        source = random.Random(seed)
        size = int(self._llm.llm_engine.model_config.get_vocab_size())
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        engine = self._llm.llm_engine
        texts = [[source.randrange(size // 2, size) for _ in range(prompt_tokens)] for _ in range(prompts)]
        begun_s = time.perf_counter()
        for tokens in texts:
            self._asked += 1
            engine.add_request(f"demo-{self._asked}", TokensPrompt(prompt_token_ids=tokens), params)
        ended: list[RequestOutput] = []
        while engine.has_unfinished_requests():
            ended += [out for out in engine.step() if isinstance(out, RequestOutput) and out.finished]
        seconds = time.perf_counter() - begun_s
        if len(ended) != prompts or any(out.outputs[0].finish_reason != "length" for out in ended):
            raise RuntimeError("the engine ended a request without an answer")
        return {
            "seconds": seconds,
            "prompt_tokens": prompts * prompt_tokens,
            "output_tokens": sum(len(out.outputs[0].token_ids) for out in ended),
            "cached_tokens": sum(int(out.num_cached_tokens or 0) for out in ended),
        }

    def counters(self) -> dict[str, float]:
        """All of the engine's counters by name, labels summed up."""
        from vllm.v1.metrics.reader import Counter

        totals: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if isinstance(metric, Counter):
                totals[metric.name] = totals.get(metric.name, 0.0) + metric.value
        return totals


if __name__ == "__main__":
    main()
