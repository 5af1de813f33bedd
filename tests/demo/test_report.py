"""What the demo calls a problem, and what it prints."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from umbp.cli.demo import report
from umbp.cli.demo.engine import Answer
from umbp.cli.demo.measure import Measurement, Round

USED = {"umbp": "1", "vllm": "2", "torch": "3", "python": "4", "model": "5"}


def answer(ttft_s: float, cached_tokens: int, logprob: float = -1.0) -> Answer:
    return Answer(
        prompt_tokens=2900,
        prompt_head=[1, 2, 3],
        cached_tokens=cached_tokens,
        ttft_s=ttft_s,
        total_s=ttft_s + 0.1,
        token_ids=[7, 8],
        logprobs=[logprob.hex(), (-2.0).hex()],
        text="It is [bold]the same[/bold].",
    )


GOOD_ROUND = Round(
    cold=answer(4.0, 0, -1.1),
    engine_hit=answer(0.1, 2880),
    restored=answer(0.11, 2880),
    restored_tokens=2880,
    restored_bytes=66_355_200,
    failed_tokens=0,
    still_held_tokens=0,
)
GOOD = Measurement(rounds=[GOOD_ROUND] * 3, control=answer(4.0, 0, -3.0))


def with_round(**changes: object) -> Measurement:
    return replace(GOOD, rounds=[GOOD_ROUND, replace(GOOD_ROUND, **changes), GOOD_ROUND])  # type: ignore[arg-type]


def test_a_good_measurement_has_no_problem() -> None:
    assert GOOD.problems() == []


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (with_round(restored=answer(0.11, 2880, -1.0000001)), "differs"),
        (with_round(restored_tokens=0, restored_bytes=0), "nothing was restored"),
        (with_round(restored_tokens=2848), "2848 of 2880"),
        (with_round(restored_bytes=0), "no bytes"),
        (with_round(failed_tokens=32), "failed"),
        (with_round(still_held_tokens=64), "still held 64"),
        (with_round(cold=answer(4.0, 32)), "not cold"),
        (with_round(engine_hit=answer(0.1, 0)), "own prefix cache was not hit"),
        (replace(GOOD, control=answer(4.0, 0)), "did not change"),
        (replace(GOOD, control=answer(4.0, 32, -3.0)), "32 tokens"),
        (replace(GOOD, rounds=[replace(GOOD_ROUND, restored=answer(5.0, 2880))] * 3), "computing"),
    ],
)
def test_whatever_is_not_as_it_should_be_is_said(result: Measurement, word: str) -> None:
    problems = result.problems()
    assert any(word in problem for problem in problems)
    assert all(problem.endswith(".") and "\n" not in problem for problem in problems)


def test_times_are_medians_and_counts_the_least_of_all_rounds() -> None:
    times = (0.3, 0.1, 0.2)
    rounds = [replace(GOOD_ROUND, restored=answer(t, 2880), restored_tokens=int(1000 * t)) for t in times]
    result = replace(GOOD, rounds=rounds)
    assert result.restored_s == 0.2
    assert result.tokens_restored == 100


def test_the_object_for_programs_survives_json_and_has_every_promised_name() -> None:
    told = json.loads(json.dumps(report.as_json(GOOD, USED)))
    promised = {
        "ttft_cold_s",
        "ttft_engine_hit_s",
        "ttft_restored_s",
        "tokens_restored",
        "bytes_restored",
        "identical",
        "control_differs",
        "versions",
    }
    assert promised <= set(told)
    assert told["identical"] is True
    assert told["control_differs"] is True
    assert told["versions"] == USED


def test_the_table_shows_the_times_and_takes_the_answer_as_plain_text() -> None:
    console = Console(file=io.StringIO(), width=120)
    report.show(console, GOOD, USED)
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    assert all(part in printed for part in ("4.000", "0.100", "0.110", "2880", "66.4 MB", "[bold]"))
    assert "NOT" not in printed
    assert "NO other" not in printed


@pytest.mark.parametrize("width", [30, 40, 50, 60, 79, 80, 100, 200])
def test_the_result_is_readable_at_every_width(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    report.show(console, GOOD, USED)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    assert "…" not in console.file.getvalue()
    for part in (
        "new (cold)",
        "in vLLM's own cache",
        "in UMBP's pool",
        "4.000 .. 4.000",
        "0.110",
        "0.028",
    ):
        assert any(part in line for line in lines), f"{part!r} is whole on one line"
    assert "reused" in console.file.getvalue()


def test_the_table_says_loudly_when_answers_differ() -> None:
    console = Console(file=io.StringIO(), width=120)
    report.show(console, with_round(restored=answer(0.11, 2880, -1.5)), USED)
    assert isinstance(console.file, io.StringIO)
    assert "NOT the same" in console.file.getvalue()
