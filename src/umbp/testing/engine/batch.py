"""A step between its plan and its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass(slots=True)
class Row:
    """One request in the batch: compute `count` tokens from `start` on."""

    request: Request
    table: list[int]
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(slots=True)
class Flight:
    """A step between its plan and its results: the blocks to spoil before it, and its batch."""

    output: SchedulerOutput
    rows: list[Row]
    spoiled: list[int]


class Context:
    """A forward context, as far as a connector looks at it."""

    def __init__(self, has_forward: bool) -> None:
        self.attn_metadata: dict[str, Any] | None = {} if has_forward else None
