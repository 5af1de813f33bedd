"""So many at once, in the order in which they lined up."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

from umbp.errors import InvariantError


class Turns:
    """A line whose first few have their turn. Any thread."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._line: deque[Turn] = deque()
        self._change = threading.Condition()

    def line_up(self) -> Turn:
        """A place at the end of the line, to be given up by `end`."""
        turn = Turn(self)
        with self._change:
            self._line.append(turn)
        return turn

    def wait(self, turn: Turn, timeout_s: float | None) -> bool:
        with self._change:
            return self._change.wait_for(
                lambda: any(each is turn for each in islice(self._line, self._at_once)), timeout_s
            )

    def end(self, turn: Turn) -> None:
        with self._change:
            if turn in self._line:
                self._line.remove(turn)
                self._change.notify_all()

    def audit(self) -> None:
        """While nobody is at work."""
        with self._change:
            if self._line:
                raise InvariantError(f"{len(self._line)} turns were never ended")


class Turn:
    """A place in the line."""

    __slots__ = ("_turns",)

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def wait(self, timeout_s: float | None) -> bool:
        """Return when it has come; False where that took too long, or it was ended meanwhile."""
        return self._turns.wait(self, timeout_s)

    def end(self) -> None:
        """Let the next one in, or leave the line. A second time does nothing."""
        self._turns.end(self)
