"""A step between its plan and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from umbp.testing.engine.owners import Spoils


@dataclass(slots=True)
class Course:
    """What the model runner keeps of a request while it runs."""

    tables: list[list[int]]
    """of each cache group; grows only, so it keeps blocks that the scheduler has taken back"""
    rejected: int = 0
    """drafts so far that were wrong: what is planned ahead of results counts on none"""
    drafts: list[int] = field(default_factory=list)
    state_place: int | None = None
    """Which of its blocks holds the running state, with those of drafts in the blocks behind it."""
    accepted: int = 1
    """Of those states, how many tokens the right one is ahead of the first, plus one."""


@dataclass(slots=True)
class Row:
    """One request in the batch: compute `count` tokens from `planned` on, the last `drafts` of them guessed.

    `planned` is as the scheduler knew it; with steps in flight, drafts that turned out wrong shift it back.
    """

    request: Request
    course: Course
    tables: list[np.ndarray]
    planned: int
    count: int
    drafts: Sequence[int]
    is_fresh: bool
    rejected_before: int

    # Set when the step runs.
    start: int = 0
    is_lost: bool = False
    """Its request ended or was stopped meanwhile, so that the tokens to compute are not there."""
    sampled: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def known_end(self) -> int:
        """Where the request's own tokens end and drafts begin."""
        return self.end - len(self.drafts)

    @property
    def valid_end(self) -> int:
        """How far the computed tokens are the request's, once its drafts have been judged."""
        return self.known_end + max(0, len(self.sampled) - 1)


@dataclass(slots=True)
class Flight:
    """A step between its plan and its results: the blocks to spoil before it, and its batch."""

    output: SchedulerOutput
    rows: list[Row]
    spoils: Spoils


class Context:
    """A forward context, as far as a connector looks at it."""

    def __init__(self, has_forward: bool) -> None:
        self.attn_metadata: dict[str, Any] | None = {} if has_forward else None
