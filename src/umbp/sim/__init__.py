"""Trace -> hit rate: what a pool of a given size would have restored of recorded requests."""

from umbp.sim.curve import lru_curve
from umbp.sim.optimum import optimal_hits
from umbp.sim.replay import replay
from umbp.sim.trace import Request, Trace, read_trace

__all__ = ["Request", "Trace", "lru_curve", "optimal_hits", "read_trace", "replay"]
