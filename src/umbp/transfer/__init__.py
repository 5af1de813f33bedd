"""Moving bytes between the engine's KV memory and the pool."""

from umbp.transfer.choice import engine_for
from umbp.transfer.engine import CopyEngine, Engine
from umbp.transfer.runs import BlockRuns, derive_runs

__all__ = ["BlockRuns", "CopyEngine", "Engine", "derive_runs", "engine_for"]
