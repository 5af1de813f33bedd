"""Which engine moves the blocks of given KV tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from umbp.transfer.cores import free_cores
from umbp.transfer.cuda import CudaDriver
from umbp.transfer.direct import DirectEngine
from umbp.transfer.driver import DriverError
from umbp.transfer.engine import CopyEngine, Engine
from umbp.transfer.staged import StagedEngine

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.umbp")


def engine_for(kv_caches: Mapping[str, Any], threads: int) -> Engine:
    """The core's own copies for KV in host memory; for KV on a device the driver's, or staged ones where the
    driver has none. `ValueError` for tensors on several kinds of device."""
    kinds = {str(getattr(tensor, "device", "cpu")).partition(":")[0] for tensor in kv_caches.values()}
    if kinds == {"cpu"}:
        return CopyEngine(threads, free_cores())
    if len(kinds) > 1:
        raise ValueError(f"KV caches on several kinds of device can't be copied: {', '.join(sorted(kinds))}")
    return device_engine(cast("Mapping[str, torch.Tensor]", kv_caches), threads)


def device_engine(kv_caches: Mapping[str, torch.Tensor], threads: int) -> Engine:
    """For tensors of one device."""
    import torch

    staged = StagedEngine(kv_caches, threads)
    device = next(iter(kv_caches.values())).device
    if device.type != "cuda" or torch.version.hip is not None:
        return staged
    try:
        driver = CudaDriver(device)
    except DriverError as error:
        logger.info("UMBP: copies go by way of staging memory: %s", error)
        return staged
    return DirectEngine(kv_caches, driver, staged, threads)
