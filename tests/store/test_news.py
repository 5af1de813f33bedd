"""What an operator's log is told of a store that goes away and comes back: why, once, and that it is back."""

from __future__ import annotations

import logging

import pytest

from umbp.store.news import QUIET_S, StoreNews


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="vllm.umbp")
    return caplog


def lines(said: pytest.LogCaptureFixture) -> list[str]:
    """What has been said since the last look."""
    found = [record.getMessage() for record in said.records]
    said.clear()
    assert all(line.startswith("UMBP: the store 'far' can ") for line in found if "can be" in line)
    return found


def test_an_absence_is_a_line_when_it_begins_one_when_more_is_known_and_one_when_it_ends(
    said: pytest.LogCaptureFixture,
) -> None:
    news = StoreNews("far")
    news.away(100.0, "it is silent")
    (line,) = lines(said)
    assert line.endswith(": it is silent")
    news.still_away(100.3, "wrong password")
    (line,) = lines(said)
    assert line.endswith(": wrong password")
    for tick in range(1, 200):
        news.still_away(100.3 + tick, "wrong password")
    assert lines(said) == []
    news.back(112.0)
    assert lines(said) == ["UMBP: the store 'far' can be used again, after 12.0 s"]


def test_what_comes_and_goes_is_told_of_every_half_minute(said: pytest.LogCaptureFixture) -> None:
    news = StoreNews("far")
    told = []
    for second in range(600):
        news.away(float(second), "refused")
        news.still_away(second + 0.25, "still refused")
        news.back(second + 0.5)
        told += lines(said)
    assert 10 <= len(told) <= 3 * 600 / QUIET_S


def test_ever_new_reasons_are_told_of_every_half_minute(said: pytest.LogCaptureFixture) -> None:
    news = StoreNews("far")
    news.away(0.0, "silent")
    for second in range(1, 601):
        news.still_away(float(second), f"reason {second}")
    assert 10 <= len(lines(said)) <= 600 / QUIET_S + 2


def test_an_absence_that_began_in_a_quiet_time_is_told_of_when_it_lasts(
    said: pytest.LogCaptureFixture,
) -> None:
    news = StoreNews("far")
    news.away(0.0, "refused")
    news.back(1.0)
    lines(said)
    news.away(2.0, "refused")
    for second in range(3, 60):
        news.still_away(float(second), "refused")
    assert len(lines(said)) == 1
    news.back(60.0)
    assert lines(said) == ["UMBP: the store 'far' can be used again, after 58.0 s"]


def test_a_start_says_what_it_waits_for(said: pytest.LogCaptureFixture) -> None:
    news = StoreNews("far")
    news.still_away(1.0, "nobody listens")
    news.still_away(1.5, "nobody listens")
    (line,) = lines(said)
    assert line.endswith(": nobody listens")
    news.back(2.0)
    assert len(lines(said)) == 1


def test_a_store_that_is_there_at_once_is_no_news(said: pytest.LogCaptureFixture) -> None:
    StoreNews("far").back(1.0)
    assert lines(said) == []
