"""What the connector counts, and how vLLM's logs and Prometheus show it.

Counters are kept where the fact is known: tokens by the scheduler (once per engine), bytes and seconds by
each worker (summed over ranks). vLLM carries `UMBPStats.data` to the process that exports it, so it holds
plain values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: dict[str, str] = {
    "asked_tokens": "Prompt tokens, beyond the engine's own prefix hit, that the pool was asked for.",
    "hit_tokens": "Tokens that the engine was promised from the pool.",
    "loaded_tokens": "Tokens whose KV was restored from the pool on every rank.",
    "failed_load_tokens": "Promised tokens that could not be restored and were recomputed.",
    "stored_tokens": "Tokens whose KV every rank has put into the pool, or found there.",
    "dropped_store_tokens": "Tokens whose KV some rank could not put into the pool, and all after them.",
    "failed_load_requests": "Requests with a block that could not be restored.",
    "loaded_bytes": "Bytes copied from the pool into the engine's KV memory, over all ranks.",
    "stored_bytes": "Bytes copied from the engine's KV memory into the pool, over all ranks.",
    "load_seconds": "Seconds that loads took from their start to their end, summed over loads and ranks.",
    "store_seconds": "Seconds that stores took from their start to their end, summed over stores and ranks.",
    "evicted_objects": "Objects that left a full pool for newer ones, over all ranks.",
}
"""Every counter by name, with its meaning; exported as `vllm:umbp_<name>`."""

GAUGES: dict[str, str] = {
    "pool_used_bytes": "Pool memory that holds objects, over all ranks.",
    "pool_capacity_bytes": "Pool memory, over all ranks.",
    "pool_objects": "Objects in the pool, over all ranks.",
    "pool_pinned_objects": "Objects that a promise, a load or a store keeps in the pool, over all ranks.",
}
"""Every gauge by name, with its meaning; the latest value of each rank, summed."""


@dataclass
class UMBPStats(KVConnectorStats):
    """`data["counters"]`: name -> amount since the last report; `data["gauges"]`: rank -> name -> latest
    value.
    """

    def add(self, name: str, amount: float) -> None:
        """Count `amount` more of a counter of `COUNTERS`."""
        if amount:
            counters = self.data.setdefault("counters", {})
            counters[name] = counters.get(name, 0) + amount

    def set_gauges(self, rank: int, values: dict[str, float]) -> None:
        """Replace one rank's gauges."""
        self.data.setdefault("gauges", {})[str(rank)] = values

    @property
    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = self.data.get("counters", {})
        return counters

    @property
    def gauges(self) -> dict[str, float]:
        """The gauges, summed over the ranks that reported."""
        totals: dict[str, float] = {}
        for values in self.data.get("gauges", {}).values():
            for name, value in values.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    def take(self) -> UMBPStats | None:
        """What was counted since the last call, or None; starts anew."""
        if self.is_empty():
            return None
        taken = UMBPStats(data=self.data)
        self.data = {}
        return taken

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> UMBPStats:
        for name, amount in other.data.get("counters", {}).items():
            self.add(name, amount)
        for rank, values in other.data.get("gauges", {}).items():
            self.data.setdefault("gauges", {})[rank] = dict(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The line of vLLM's periodic log: MB, seconds and tokens of the interval."""
        shown: dict[str, int | float] = {}
        for name, value in {**self.counters, **self.gauges}.items():
            if name.endswith("_bytes"):
                shown[name.removesuffix("_bytes") + "_MB"] = round(value / 1e6, 1)
            else:
                shown[name] = round(value, 4)
        return shown

    def is_empty(self) -> bool:
        return not self.data.get("counters") and not self.data.get("gauges")


class UMBPPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of every engine of one front-end process."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[int, dict[str, Any]] = {engine: {} for engine in per_engine_labelvalues}
        self._add(self._counter_cls, COUNTERS)
        self._add(self._gauge_cls, GAUGES)
        self._ranks: dict[int, UMBPStats] = {engine: UMBPStats() for engine in per_engine_labelvalues}

    def _add(self, metric_class: Any, names: dict[str, str]) -> None:
        for name, meaning in names.items():
            # Counter-like names get Prometheus's `_total` from the client itself.
            metric = metric_class(
                name=f"vllm:umbp_{name}", documentation=meaning, labelnames=self._labelnames
            )
            for engine, values in self.per_engine_labelvalues.items():
                self._metrics[engine][name] = metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        metrics = self._metrics[engine_idx]
        latest = UMBPStats(data=transfer_stats_data)
        for name, amount in latest.counters.items():
            metrics[name].inc(amount)
        known = self._ranks[engine_idx]
        for rank, values in latest.data.get("gauges", {}).items():
            known.set_gauges(int(rank), values)
        for name, value in known.gauges.items():
            metrics[name].set(value)
