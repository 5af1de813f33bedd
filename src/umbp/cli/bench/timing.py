"""Times of interleaved cases: each round runs every case once, so that a disturbance meets them all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one case, a round each."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """The middle half of the rounds, as a share of the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s

    def per(self, reference: Times) -> float:
        """This median over the reference's."""
        return self.median_s / reference.median_s


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Times]:
    """Runs every case once unmeasured, then once a round, in the mapping's order."""
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            begin = time.perf_counter()
            case()
            seconds[name].append(time.perf_counter() - begin)
    return {name: Times(tuple(each)) for name, each in seconds.items()}


def timed(call: Callable[[], T]) -> tuple[T, float]:
    """What one call answers, and the seconds it takes."""
    begin = time.perf_counter()
    answer = call()
    return answer, time.perf_counter() - begin
