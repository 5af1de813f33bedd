"""The node pool over the native core: segments, slots, tickets, limits."""

from umbp._native import slot_bytes
from umbp.pool.handle import PoolHandle
from umbp.pool.memory import MemoryPolicy, MemoryReport
from umbp.pool.outcomes import CopyStatus, Outcome
from umbp.pool.pool import Pool

__all__ = ["CopyStatus", "MemoryPolicy", "MemoryReport", "Outcome", "Pool", "PoolHandle", "slot_bytes"]
