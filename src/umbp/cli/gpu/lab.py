"""The GPU under test, or whatever stands for it: engines, and a compute stream that can be kept busy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from umbp.pool import Pool
from umbp.transfer import Engine
from umbp.transfer.cuda import CudaDriver
from umbp.transfer.direct import DirectEngine
from umbp.transfer.driver import DriverError
from umbp.transfer.staged import StagedEngine

if TYPE_CHECKING:
    import torch

THREADS = 2
BUSY_ROUNDS = 40
BUSY_SIZE = 4096
"""So many products of matrices of this size keep any of today's GPUs at work for tens of milliseconds."""


class Lab(Protocol):
    device: torch.device

    def engines(self, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Engine]:
        """By name; each serves every layout, or raises."""
        ...

    def missing(self) -> dict[str, str]:
        """The engines that can't be checked here, with the reason."""
        ...

    def launch(self, work: Callable[[], object]) -> None:
        """Give work to the compute stream; it may run much later."""
        ...

    def keep_busy(self) -> None:
        """Give the compute stream work that takes a while."""
        ...

    def settle(self) -> None:
        """Wait for all of it."""
        ...


class GpuLab:
    """A device of torch's."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.device = device
        self._torch: Any = torch
        self._module = torch.get_device_module(device)
        self._matrix = torch.ones((BUSY_SIZE, BUSY_SIZE), dtype=torch.float16, device=device)
        self._product = torch.empty_like(self._matrix)
        self._why_not_direct = self._try_driver()

    def engines(self, kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Engine]:
        found: dict[str, Engine] = {"staged": StagedEngine(kv_caches, THREADS)}
        if not self._why_not_direct:
            fallback = StagedEngine(kv_caches, THREADS)
            driver = CudaDriver(self.device)
            found["direct"] = DirectEngine(kv_caches, driver, fallback, THREADS, shortest_bytes=1)
        return found

    def missing(self) -> dict[str, str]:
        return {"direct": self._why_not_direct} if self._why_not_direct else {}

    def launch(self, work: Callable[[], object]) -> None:
        work()

    def keep_busy(self) -> None:
        for _ in range(BUSY_ROUNDS):
            self._torch.mm(self._matrix, self._matrix, out=self._product)

    def settle(self) -> None:
        self._module.synchronize(self.device)

    def _try_driver(self) -> str:
        if self.device.type != "cuda" or self._torch.version.hip is not None:
            return f"{self.device.type} devices without CUDA have staged copies only"
        try:
            CudaDriver(self.device)
        except DriverError as error:
            return str(error)
        return ""


def is_what_it_says(name: str, engine: Engine, pool: Pool) -> bool:
    """Whether an engine called direct copies directly to its end: a fallback would check the wrong thing."""
    return name != "direct" or (isinstance(engine, DirectEngine) and engine.reaches(pool))
