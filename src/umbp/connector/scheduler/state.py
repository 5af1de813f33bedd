"""What the scheduler side knows of one request, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from umbp.connector.scheduler.wait import Wait
from umbp.data import RequestTracker

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Promise:
    """Tokens `[start, end)` of a request: what they need is in the pool on every rank, kept under `owner`.

    0 ......... start ......... end ......... limit
    | the engine's own | promised | to compute |
    """

    owner: str
    start: int
    end: int
    tails: Mapping[int, bytes] = field(default_factory=dict)
    """Of each cache group in which the end lies inside a block: the name that this block is kept under."""
    far_tokens: int = 0
    """So many of them must be fetched before they can be loaded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The last reply to the engine's question, so that asking again while nothing changed costs nothing."""

    local_tokens: int
    limit_tokens: int
    tokens: int


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. Mutable; owned by the scheduler's thread."""

    request: Request
    tracker: RequestTracker = field(default_factory=RequestTracker)
    answer: Answer | None = None
    promise: Promise | None = None
    is_prepared: bool = False
    """The runtime was asked to find out what is stored of it, and may still be at it."""
    local_tokens: int = 0
    """What the engine had itself when it last asked."""
    passed_tokens: int = 0
    """So many were found beyond the engine's own, and passed over as not worth a load."""
    is_loading: bool = False
    has_failed_load: bool = False
    has_lost_store: bool = False
    """A block of it found no place in the pool: what comes after could not be found, and is not stored."""
    stores_again: int = 0
    """How often lost blocks of it were stored once more."""
    is_stale: bool = False
    """Computed before a reset: its blocks must not be stored any more."""
    mark_hash: bytes | None = None
    """The hash at the mark of what has been stored: in a session with more input to come, others may take its
    place.
    """
    promised_tokens: int | None = None
    """So many of its first tokens another engine stores; None until that was looked at."""
    first_asked_s: float | None = None
    wait: Wait | None = None
    state_ends: dict[int, set[int]] = field(default_factory=dict)
    """Of each cache group that keeps a state: the tokens at which one was planned to be stored."""
    was_counted: bool = False
    """Asked and hit tokens are counted at the first admission alone."""

    def forget_blocks(self) -> None:
        """The engine took its blocks away: whatever it computes next is new."""
        self.tracker.replace_blocks(())
        self.answer = None
        self.has_lost_store = False
        self.stores_again = 0
        self.is_stale = False
