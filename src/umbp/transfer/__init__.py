"""Moving bytes between the engine's KV memory and the pool."""

from umbp.transfer.engine import CopyEngine
from umbp.transfer.runs import BlockRuns, derive_runs

__all__ = ["BlockRuns", "CopyEngine", "derive_runs"]
