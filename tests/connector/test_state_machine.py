"""Stories of engines that hypothesis tells: what goes wrong is told in its fewest acts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("umbp._native", reason="the native core isn't built")

from state_machine import tell_stories

from umbp.connector import compat
from umbp.connector.scheduler.account import Quarantine
from umbp.connector.scheduler.write import ThroughWriter
from umbp.connector.worker import WorkerSide

STORIES = 110
"""So many, always the same ones, are held to every rule."""

MANY_STORIES = 5 * STORIES
"""And among so many there is one about each fault that is planted below; the first that fails ends them."""


@pytest.mark.slow
def test_no_story_leaves_a_wrong_byte_or_an_uneven_account(root: Path) -> None:
    told = tell_stories(root, STORIES)
    print(told)
    for counter in ("hit_tokens", "loaded_tokens", "failed_load_tokens", "stored_tokens"):
        assert told[counter], f"nothing was counted as {counter}"


# What the stories are for: they find connectors with such faults


def unpin_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given back before the store that reads them is reported."""
    plan, give_back = ThroughWriter.plan, ThroughWriter.give_back

    def planned(self: Any, *arguments: Any) -> Any:
        entry = plan(self, *arguments)
        if entry is not None:
            compat.unpin_blocks(self._block_pool, entry.block_ids)
        return entry

    def given_back(self: Any, entry: Any, *rest: Any) -> Any:
        compat.pin_blocks(self._block_pool, entry.block_ids)
        return give_back(self, entry, *rest)

    patch.setattr(ThroughWriter, "plan", planned)
    patch.setattr(ThroughWriter, "give_back", given_back)


def report_twice(patch: pytest.MonkeyPatch) -> None:
    """A load that has ended is told in the next step once more."""
    collect = WorkerSide.collect

    def collected(self: Any) -> set[str]:
        ended: set[str] = collect(self)
        before: set[str] = self.__dict__.get("told", set())
        self.told = ended
        return ended | before

    patch.setattr(WorkerSide, "collect", collected)


def skip_quarantine(patch: pytest.MonkeyPatch) -> None:
    """What a load has lost is promised again at once."""
    patch.setattr(Quarantine, "add", lambda self, one: None)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [unpin_early, report_twice, skip_quarantine])
def test_the_stories_find_a_fault_that_is_planted(
    root: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception) as found:  # noqa: PT011 # of whatever kind: what matters is the story
        tell_stories(root, MANY_STORIES, shrinks=False)
    assert any("state.begin(" in note for note in found.value.__notes__)
