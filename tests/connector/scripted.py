"""The scripted engine's names, in one place for the tests of this folder."""

from __future__ import annotations

from umbp.testing.engine.engine import ScriptedEngine
from umbp.testing.engine.model import tokens
from umbp.testing.engine.planning import cache_configs, full_attention, make_config, worker_config
from umbp.testing.engine.rank import Rank
from umbp.testing.engine.shape import BLOCK, LAYERS, Shape

__all__ = [
    "BLOCK",
    "LAYERS",
    "Rank",
    "ScriptedEngine",
    "Shape",
    "cache_configs",
    "full_attention",
    "make_config",
    "tokens",
    "worker_config",
]
