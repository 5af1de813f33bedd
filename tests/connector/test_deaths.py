"""Engines on a real Mooncake Store whose parts die, fall silent and come back, by real signals.

Whatever happens there, every request ends, and the engines check every byte in every step; a step waits for
the store no longer than it may, and once; and what is well again is used again by the engines that are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from far_engines import LOOKUP_S, Lab, make_lab
from scripted import BLOCK

from umbp.testing.stores.servers import why_no_mooncake

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Lab]:
    if why := why_no_mooncake():
        pytest.skip(why)
    with make_lab(tmp_path_factory.mktemp("cluster"), root) as lab:
        yield lab


@pytest.fixture
def watched(lab: Lab) -> Iterator[Lab]:
    """Steps are timed from here on."""
    lab.check_back()
    with lab.watching():
        yield lab


def test_with_the_master_killed_engines_go_on_and_hits_return_with_another_one(watched: Lab) -> None:
    lab = watched
    lost = [lab.stored() for _ in range(2)]
    lab.cluster.master.kill()
    for prompt in lost:
        assert [engine.restores(prompt) for engine in lab.readers] == [0, 0]
    lab.first.serve(lab.new())
    lab.cluster.revive_master()
    lab.check_back()


def test_a_silent_master_is_waited_for_once_and_what_it_has_is_restored_when_it_goes_on(watched: Lab) -> None:
    lab = watched
    prompts = [lab.stored() for _ in range(4)]
    lab.cluster.master.stop()
    timeouts = lab.within.lookup_gate.counts().timeouts
    for prompt in prompts[:2]:
        assert [engine.restores(prompt) for engine in lab.readers] == [0, 0]
    assert lab.within.lookup_gate.counts().timeouts == timeouts + 1, "waited for once"
    assert sum(wait_s > LOOKUP_S / 2 for wait_s in lab.within.waits_s) <= 1
    lab.first.serve(lab.new())
    lab.cluster.master.go_on()
    lab.check_back()
    assert [engine.restores(prompts[3]) for engine in lab.readers] == [10 * BLOCK, 10 * BLOCK]


def test_a_master_restarted_at_once_costs_what_it_knew_and_nothing_else(watched: Lab) -> None:
    lab = watched
    lost = lab.stored()
    lab.cluster.master.kill()
    lab.cluster.revive_master()
    assert [engine.restores(lost) for engine in lab.readers] == [0, 0]
    lab.check_back()


def test_a_node_killed_while_it_is_read_costs_what_it_had(watched: Lab) -> None:
    """Scenario: both nodes are stopped, so that the reads are under way for certain, and one is killed."""
    lab = watched
    prompt = lab.stored()
    dies, stays = lab.cluster.nodes
    for node in (dies, stays):
        node.stop()
    for engine in lab.readers:
        engine.add(prompt, 2)
        engine.step_until(lambda engine=engine: engine.gates[0].counts().running > 0)
    dies.kill()
    stays.go_on()
    for engine in lab.readers:
        engine.step_until(lambda engine=engine: not engine.scheduler.has_requests())
    lab.cluster.nodes.remove(dies)
    lab.cluster.add_node()
    lab.check_back()


def test_nodes_that_go_on_after_a_read_was_given_up_harm_nobody(watched: Lab) -> None:
    """Scenario: bytes arrive for slots that were given up meanwhile; they must not lie in somebody else's."""
    lab = watched
    prompt = lab.stored()
    for node in lab.cluster.nodes:
        node.stop()
    assert [engine.restores(prompt) for engine in lab.readers] == [0, 0]
    for node in lab.cluster.nodes:
        node.go_on()
    for _ in range(4):
        for engine in lab.engines:
            engine.serve(lab.new())
    lab.check_back()
