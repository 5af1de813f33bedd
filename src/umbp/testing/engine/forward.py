"""The forward of a step: what a model reads and writes on every rank, and whether what it read was right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from umbp.testing.engine.batch import Row
from umbp.testing.engine.memory import GARBAGE, SPOILED, Memory, Part
from umbp.testing.engine.model import NO_TOKEN, Chains

Wrong = dict[str, list[int]]
"""Of each request that read wrong bytes: the blocks, in order."""


class Forward:
    """Runs batches on all ranks, as a model would.

    A row writes the content of its tokens and reads that of all tokens it looks at: everything in full
    attention, the window of a sliding one, the state after the token before its first. What is computed from
    wrong bytes is garbage, and whatever is computed from that.
    """

    def __init__(self, memories: Sequence[Memory], chains: Chains, drafts: int) -> None:
        self._memories = memories
        self._chains = chains
        self._drafts = drafts
        self._has_draft_layer = any(part.is_draft for memory in memories for part in memory.parts)
        self._has_state = any(part.is_state for memory in memories for part in memory.parts)

    def resolve(self, rows: Sequence[Row]) -> None:
        """Say what each row really computes, now that the results of earlier steps are in."""
        for row in rows:
            row.start = row.planned
            if not row.is_fresh:
                row.start -= row.course.rejected - row.rejected_before
            if row.drafts:
                made = row.course.drafts
                row.drafts = [
                    token if token != NO_TOKEN else made[place] if place < len(made) else NO_TOKEN
                    for place, token in enumerate(row.drafts)
                ]
            row.is_lost = row.known_end > row.request.num_tokens
            row.sampled = []
            if row.known_end == row.request.num_tokens:
                row.sampled = self._chains.next_tokens(row.request, row.drafts)

    def run(self, rows: Sequence[Row]) -> Wrong:
        """The target's forward; returns what was read wrongly, first causes only."""
        for row in rows:
            if row.is_lost:
                self._write_garbage(row)
        alive = [row for row in rows if not row.is_lost]
        causes: Wrong = {}
        if self._has_state:
            for row in alive:
                if blocks := self._move_state(row):
                    causes[row.request.request_id] = blocks
        content = {row.request.request_id: self._content(row) for row in alive}
        for row in alive:
            self._write(row, content[row.request.request_id])
        tainted: set[str] = set()
        wrong = causes | self._wrong(alive, content)
        causes = dict(wrong)
        while fresh := wrong.keys() - tainted:
            tainted |= fresh
            for row in alive:
                if row.request.request_id in fresh:
                    self._write_garbage(row)
            wrong = self._wrong(alive, content)
        return causes

    def run_drafter(self, rows: Sequence[Row], tainted: Wrong) -> Wrong:
        """Judge the drafts of this step and make those of the next.

        A draft layer's KV of a token is made from the token after it as well, which the last of a block need
        not share with another request's.
        """
        alive = [row for row in rows if not row.is_lost and row.request.request_id not in tainted]
        content = {row.request.request_id: self._draft(row) for row in alive} if self._has_draft_layer else {}
        # Requests of one step may share what one of them computes in it.
        wrong: Wrong = {}
        for row in alive if content else ():
            if blocks := self._wrong_drafts(row, content[row.request.request_id]):
                wrong[row.request.request_id] = blocks
        for row in rows:
            self._settle(row)
        return wrong

    # Attention

    def _content(self, row: Row) -> np.ndarray:
        """[token, word] of all that the row may read or write."""
        known = self._chains.of(row.request)
        if not row.drafts:
            return known[: row.end]
        return np.concatenate([known[: row.known_end], self._chains.ahead(row.request, row.drafts)])

    def _write(self, row: Row, content: np.ndarray) -> None:
        for memory in self._memories:
            for part in memory.parts:
                if part.is_draft:
                    continue
                if part.is_state:
                    self._write_states(row, part, content)
                else:
                    part.write(row.tables[part.group_id], row.start, content[row.start : row.end])

    def _write_garbage(self, row: Row) -> None:
        for memory in self._memories:
            for part in memory.parts:
                table = row.tables[part.group_id]
                if not part.is_state:
                    part.spoil(table, row.start, row.end)
                elif row.course.state_place is not None:
                    for ahead in range(len(row.drafts) + 1):
                        part.memory[:, table[row.course.state_place + ahead]] = GARBAGE

    def _wrong(self, rows: Sequence[Row], content: dict[str, np.ndarray]) -> Wrong:
        found: Wrong = {}
        for row in rows:
            right = content[row.request.request_id]
            blocks: list[int] = []
            for memory in self._memories:
                for part in memory.parts:
                    if not part.is_state and not part.is_draft:
                        blocks += _differing(part, row, right, part.first_read(row.start), row.end)
            if blocks:
                found[row.request.request_id] = list(dict.fromkeys(blocks))
        return found

    # States

    def _move_state(self, row: Row) -> list[int]:
        """Bring the running state to where this step writes it; returns the block that held it if it is
        wrong.
        """
        course = row.course
        wrong: list[int] = []
        done = False
        for memory in self._memories:
            for part in memory.parts:
                if not part.is_state:
                    continue
                table = row.tables[part.group_id]
                place = course.state_place
                if place is None:
                    place = (row.start - 1) // part.block_tokens
                now = -(-row.end // part.block_tokens) - 1
                if place >= 0:
                    source = int(table[place + course.accepted - 1])
                    if not part.has_state(source, self._chains.of(row.request)[row.start - 1]):
                        wrong.append(source)
                    if place != now:
                        part.memory[:, table[now]] = part.memory[:, source]
                done = True
        if done:
            part = next(part for memory in self._memories for part in memory.parts if part.is_state)
            before, now = course.state_place, -(-row.end // part.block_tokens) - 1
            if before != now:
                course.accepted = 1
            course.state_place = now
        return list(dict.fromkeys(wrong))

    def _write_states(self, row: Row, part: Part, content: np.ndarray) -> None:
        place = row.course.state_place
        assert place is not None
        table = row.tables[part.group_id]
        for ahead in range(len(row.drafts) + 1):
            part.write_state(int(table[place + ahead]), content[row.known_end + ahead - 1])

    def _keep_boundary_state(self, row: Row) -> None:
        """After drafts were judged: the state at the block's end that they reached goes to that block."""
        course = row.course
        for memory in self._memories:
            for part in memory.parts:
                if not part.is_state:
                    continue
                boundary = row.valid_end // part.block_tokens * part.block_tokens
                if boundary < row.known_end:
                    continue
                assert course.state_place is not None
                table = row.tables[part.group_id]
                source = table[course.state_place + boundary - row.known_end]
                target = table[boundary // part.block_tokens - 1]
                if source != target:
                    part.memory[:, target] = part.memory[:, source]

    # Drafts

    def _draft(self, row: Row) -> np.ndarray:
        """Write the draft layer's content of what the row has computed; returns that of all its tokens."""
        known = self._chains.of(row.request)
        ahead = self._chains.ahead(row.request, row.sampled) if row.sampled else known[:0]
        content: np.ndarray = np.concatenate([known, ahead])[1:]
        for memory in self._memories:
            for part in memory.parts:
                if part.is_draft:
                    table = row.tables[part.group_id]
                    part.write(table, row.start, content[row.start : row.valid_end])
                    part.spoil(table, row.valid_end, row.end)
        return content

    def _wrong_drafts(self, row: Row, content: np.ndarray) -> list[int]:
        wrong: list[int] = []
        for memory in self._memories:
            for part in memory.parts:
                if part.is_draft:
                    wrong += _differing(part, row, content, 0, row.start, is_last_free=True)
        return list(dict.fromkeys(wrong))

    def _settle(self, row: Row) -> None:
        course = row.course
        if row.is_lost or not self._drafts:
            return
        course.drafts = []
        if not row.sampled:
            return
        if self._has_state:
            course.accepted = len(row.sampled)
            self._keep_boundary_state(row)
            if row.valid_end == row.end and self._ends_block(row):
                course.accepted = 1
        course.rejected += len(row.drafts) + 1 - len(row.sampled)
        course.drafts = self._chains.guess(row.request, row.sampled, self._drafts)

    def _ends_block(self, row: Row) -> bool:
        sizes = {part.block_tokens for memory in self._memories for part in memory.parts if part.is_state}
        return all(row.end % size == 0 and row.course.state_place == row.end // size - 1 for size in sizes)


def _differing(
    part: Part, row: Row, right: np.ndarray, start: int, end: int, *, is_last_free: bool = False
) -> list[int]:
    """The row's blocks whose tokens from `start` to `end` are not right."""
    if end <= start:
        return []
    table = row.tables[part.group_id]
    places = part.held(start, end)
    expected = right[start + (part.dcp_rank - start) % part.dcp_size : end : part.dcp_size, part.columns]
    found = part.read(table, start, end)
    if not is_last_free and np.array_equal(found, expected):
        return []
    same = (found == expected).all(axis=1)
    if is_last_free:
        last = places % part.block_tokens == part.block_tokens - 1
        same |= last & (found != SPOILED).all(axis=1) & (found != GARBAGE).all(axis=1)
    bad = places[~same]
    return [int(table[place]) for place in sorted(set((bad // part.block_tokens).tolist()))]
