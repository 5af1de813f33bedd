"""An engine without a model, for tests of connectors and runtimes: vLLM's own scheduler and aggregation over
this package's connector, with a forward that is arithmetic. Needs vLLM.
"""

from __future__ import annotations

from umbp.testing.engine.engine import ScriptedEngine, WrongByteError
from umbp.testing.engine.model import tokens
from umbp.testing.engine.shape import BLOCK, Shape

__all__ = ["BLOCK", "ScriptedEngine", "Shape", "WrongByteError", "tokens"]
