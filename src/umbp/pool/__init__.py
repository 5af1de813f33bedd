"""The node pool over the native core: segments, slots, tickets, limits."""

from umbp._native import slot_bytes
from umbp.pool.geometry import shared_geometry
from umbp.pool.handle import PoolHandle
from umbp.pool.inspection import PoolFile, destroy_pool, inspect_pool, list_pools
from umbp.pool.memory import MemoryPolicy, MemoryReport
from umbp.pool.outcomes import CopyStatus, KeyState, Outcome
from umbp.pool.pool import Pool
from umbp.pool.seal import SEAL_BYTES, SealStatus
from umbp.pool.sharing import NamespaceUse, pool_path

__all__ = [
    "SEAL_BYTES",
    "CopyStatus",
    "KeyState",
    "MemoryPolicy",
    "MemoryReport",
    "NamespaceUse",
    "Outcome",
    "Pool",
    "PoolFile",
    "PoolHandle",
    "SealStatus",
    "destroy_pool",
    "inspect_pool",
    "list_pools",
    "pool_path",
    "shared_geometry",
    "slot_bytes",
]
