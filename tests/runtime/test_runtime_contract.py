"""The contract holds for the reference, for a runtime that keeps nothing, and through every wrapper."""

from __future__ import annotations

from typing import cast

import pytest

from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.null import NullRuntime
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.runtime.wrap.metered import MeteredRuntime
from umbp.runtime.wrap.slow import Pace, SlowRuntime
from umbp.testing.clock import TickClock
from umbp.testing.contract import RuntimeContract
from umbp.testing.reference import ReferenceRuntime


def kill_reference(runtime: IUMBPRuntime) -> None:
    cast(ReferenceRuntime, runtime).die()


class TestReferenceRuntime(RuntimeContract):
    kill = staticmethod(kill_reference)

    @pytest.fixture
    def runtime(self) -> ReferenceRuntime:
        return ReferenceRuntime()


class TestSmallReferenceRuntime(RuntimeContract):
    capacity_objects = 12

    @pytest.fixture
    def runtime(self) -> ReferenceRuntime:
        return ReferenceRuntime(capacity=12)


class TestNullRuntime(RuntimeContract):
    stores_nothing = True

    @pytest.fixture
    def runtime(self) -> NullRuntime:
        return NullRuntime()


class TestFaultyRuntime(RuntimeContract):
    may_fail = True

    @pytest.fixture(params=[1, 2, 3])
    def runtime(self, request: pytest.FixtureRequest) -> FaultyRuntime:
        plan = FaultPlan(request.param, 0.3, 0.1, 0.3, 0.1, 0.3, 0.2)
        return FaultyRuntime(ReferenceRuntime(), plan)


class TestFaultlessFaultyRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> FaultyRuntime:
        return FaultyRuntime(ReferenceRuntime(), FaultPlan())


class TestMeteredRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> MeteredRuntime:
        return MeteredRuntime(ReferenceRuntime())


class TestSlowRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> SlowRuntime:
        clock = TickClock()
        delays = {"lookup": 0.1, "hold": 0.1, "load": 1.0, "store": 2.0, "publish": 0.1}

        def tick() -> float:
            clock.advance(0.01)
            return clock.now_s

        return SlowRuntime(ReferenceRuntime(), Pace(delays, tick, clock.sleep))


class Plain:
    """A runtime with the documented methods and nothing else: what a plug-in's author writes first."""

    def __init__(self) -> None:
        self._whole = ReferenceRuntime()

    def create_scheduler_handle(self, *args: object) -> object:
        handle = self._whole.create_scheduler_handle(*args)  # type: ignore[arg-type]
        handle._is_bound = True
        return Only(handle, "lookup clear close")

    def create_worker_handle(self, *args: object) -> object:
        handle = self._whole.create_worker_handle(*args)  # type: ignore[arg-type]
        return Only(handle, "register_buffers load store wait poll publish close")


class Only:
    def __init__(self, handle: object, verbs: str) -> None:
        for verb in verbs.split():
            setattr(self, verb, getattr(handle, verb))


class TestPlainRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> Plain:
        return Plain()


class TestMeteredPlainRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> MeteredRuntime:
        return MeteredRuntime(cast(IUMBPRuntime, Plain()))
