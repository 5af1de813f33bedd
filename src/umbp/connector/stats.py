"""What the connector counts, and how vLLM's logs and Prometheus show it.

Counters are kept where the fact is known: tokens, and the bytes that they stand for, by the scheduler (once
per engine), bytes that move and seconds by each worker (summed over ranks). vLLM carries `UMBPStats.data` to
the process that exports it, so it holds plain values only.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from umbp.data import LossReason

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: dict[str, str] = {
    "asked_tokens": "Prompt tokens, beyond the engine's own prefix hit, that the pool was asked for.",
    "asked_bytes": "Bytes that all ranks would have loaded, had the pool had all that it was asked for.",
    "hit_tokens": "Tokens that the engine was promised from the pool.",
    "hit_bytes": "Bytes of the objects that were promised, over all ranks.",
    "passed_hit_tokens": "Tokens that the pool has and that were computed anew, as that takes no longer.",
    "passed_hit_bytes": "Bytes of the objects that the pool has and that were passed over, over all ranks.",
    "awaited_requests": "Requests that waited for what another engine stores of their prompt.",
    "awaited_in_vain_requests": "Those of them that went on without some of it, as it took too long.",
    "loaded_tokens": "Tokens whose KV was restored from the pool on every rank.",
    "loaded_bytes": "Bytes copied from the pool into the engine's KV memory, over all ranks.",
    "reloaded_tokens": "Tokens restored for a request that was admitted before, as after a preemption.",
    "reloaded_bytes": "Bytes copied for a request that was admitted before, over all ranks.",
    "failed_load_tokens": "Promised tokens that could not be restored and were recomputed.",
    "failed_load_bytes": "Bytes that could not be copied from the pool, over all ranks.",
    "failed_load_requests": "Requests with a block that could not be restored.",
    "stored_tokens": "Tokens whose KV every rank has put into the pool, or found there.",
    "stored_bytes": "Bytes copied from the engine's KV memory into the pool, over all ranks.",
    "dropped_store_tokens": "Tokens whose KV some rank could not put into the pool, and all after them.",
    "dropped_store_bytes": "Bytes that could not be put into the pool, and all after them, over all ranks.",
    "evicted_tokens": "Tokens whose KV left a full pool for newer ones.",
    "evicted_objects": "Objects that left a full pool for newer ones, over all ranks.",
    "evicted_bytes": "Pool memory of objects that left a full pool for newer ones, over all ranks.",
    "store_lookups": "Questions to the cluster store, one for each prompt that the pool lacks a part of.",
    "store_lookup_batches": "Round trips to the cluster store that those questions took.",
    "store_lookup_objects": "Objects that the cluster store was asked for.",
    "store_lookup_failures": "Questions that the cluster store did not answer in time, or not at all.",
    "fetched_bytes": "Bytes fetched from the cluster store into the pool, over all ranks.",
    "fetched_objects": "Objects fetched from the cluster store into the pool, over all ranks.",
    "failed_fetch_objects": "Objects that could not be fetched from the cluster store, over all ranks.",
    "sent_bytes": "Bytes of the objects sent to the cluster store, or found there, over all ranks.",
    "sent_objects": "Objects sent from the pool to the cluster store, or found there, over all ranks.",
    "dropped_send_objects": "Objects that were not sent to the cluster store, over all ranks.",
    "store_failures": "Times that the cluster store was left alone after it had failed, over all processes.",
    "store_away_seconds": "Seconds for which it was left alone, over all processes.",
    "load_seconds": "Seconds that loads took from their start to their end, summed over loads and ranks.",
    "store_seconds": "Seconds that stores took from their start to their end, summed over stores and ranks.",
}
"""Every counter by name, with its meaning; exported as `vllm:umbp_<name>`."""

TIERED = ("tier",)
WITH_REASON = ("tier", "reason")
LABELS: dict[str, tuple[str, ...]] = {
    "hit_tokens": TIERED,
    "hit_bytes": TIERED,
    "passed_hit_tokens": TIERED,
    "passed_hit_bytes": TIERED,
    "loaded_tokens": TIERED,
    "loaded_bytes": TIERED,
    "reloaded_tokens": TIERED,
    "reloaded_bytes": TIERED,
    "stored_tokens": TIERED,
    "stored_bytes": TIERED,
    "evicted_tokens": TIERED,
    "evicted_objects": TIERED,
    "evicted_bytes": TIERED,
    "store_lookups": TIERED,
    "store_lookup_batches": TIERED,
    "store_lookup_objects": TIERED,
    "store_lookup_failures": TIERED,
    "fetched_bytes": TIERED,
    "fetched_objects": TIERED,
    "failed_fetch_objects": WITH_REASON,
    "sent_bytes": TIERED,
    "sent_objects": TIERED,
    "dropped_send_objects": WITH_REASON,
    "store_failures": TIERED,
    "store_away_seconds": TIERED,
    "failed_load_tokens": WITH_REASON,
    "failed_load_bytes": WITH_REASON,
    "dropped_store_tokens": WITH_REASON,
    "dropped_store_bytes": WITH_REASON,
}
"""The labels of those counters that have any: what keeps the objects, and why they were not moved."""

LABEL_VALUES: dict[str, tuple[str, ...]] = {"tier": ("dram",), "reason": tuple(LossReason)}
"""Label values that are exported from the start, so that rates are right from the first event on."""

GAUGES: dict[str, str] = {
    "pool_used_bytes": "Pool memory that holds objects, over all ranks.",
    "pool_capacity_bytes": "Pool memory, over all ranks.",
    "pool_objects": "Objects in the pool, over all ranks.",
    "send_waiting_objects": "Objects that wait to be sent to the cluster store, over all ranks.",
    "pool_pinned_objects": "Objects that a promise, a load or a store keeps in the pool, over all ranks.",
}
"""Every gauge by name, with its meaning; the latest value of each rank, summed."""

HISTOGRAMS: dict[str, str] = {
    "load_job_seconds": "Seconds that one request's load took on one rank, from its start to its end.",
    "store_job_seconds": "Seconds that one request's store of one step took on one rank, from its start.",
}
"""Every histogram by name, with its meaning."""

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

OBSERVATIONS_LIMIT = 2048
"""Of one histogram's observations on their way to the front end the latest so many are kept: far more than a
step has."""

SEPARATOR = "|"
"""Between a counter's name and its labels' values."""


@dataclass
class UMBPStats(KVConnectorStats):
    """Plain values in `data`, each part there only where it has something:

    `counters`: series -> amount since the last report; a series is the counter's name with the values of its
    labels in order, such as `failed_load_tokens|dram|absent`.
    `gauges`: rank -> name -> latest value.
    `seconds`: histogram -> what was observed since the last report.
    """

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count `amount` more of a counter of `COUNTERS`, under the values of its `LABELS`."""
        if len(labels) != len(LABELS.get(name, ())):
            raise ValueError(f"{name} has the labels {LABELS.get(name, ())}, not {labels}")
        self._add(SEPARATOR.join((name, *labels)), amount)

    def add_all(self, counts: Mapping[tuple[str, ...], float]) -> None:
        """Count what a runtime has counted, as far as such counters are known here."""
        for (name, *labels), amount in counts.items():
            if name in COUNTERS and len(labels) == len(LABELS.get(name, ())):
                self.add(name, amount, *labels)

    def _add(self, series: str, amount: float) -> None:
        if amount:
            counters = self.data.setdefault("counters", {})
            counters[series] = counters.get(series, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        """One more observation of a histogram of `HISTOGRAMS`."""
        self._observe(name, [seconds])

    def _observe(self, name: str, seconds: list[float]) -> None:
        kept = self.data.setdefault("seconds", {}).setdefault(name, [])
        kept += seconds
        del kept[:-OBSERVATIONS_LIMIT]

    def set_gauges(self, rank: int, values: dict[str, float]) -> None:
        """Replace one rank's gauges."""
        self.data.setdefault("gauges", {})[str(rank)] = values

    @property
    def series(self) -> Mapping[str, float]:
        """Every series with its amount."""
        series: dict[str, float] = self.data.get("counters", {})
        return series

    @property
    def counters(self) -> dict[str, float]:
        """Every counter by name, summed over its labels."""
        totals: dict[str, float] = {}
        for series, amount in self.series.items():
            name = series.partition(SEPARATOR)[0]
            totals[name] = totals.get(name, 0) + amount
        return totals

    @property
    def gauges(self) -> dict[str, float]:
        """The gauges, summed over the ranks that reported."""
        totals: dict[str, float] = {}
        for values in self.data.get("gauges", {}).values():
            for name, value in values.items():
                totals[name] = totals.get(name, 0) + value
        return totals

    @property
    def seconds(self) -> Mapping[str, list[float]]:
        """What was observed, by histogram."""
        seconds: dict[str, list[float]] = self.data.get("seconds", {})
        return seconds

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
        for series, amount in other.data.get("counters", {}).items():
            self._add(series, amount)
        for rank, values in other.data.get("gauges", {}).items():
            self.data.setdefault("gauges", {})[rank] = dict(values)
        for name, seconds in other.data.get("seconds", {}).items():
            self._observe(name, seconds)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The line of vLLM's periodic log: MB, seconds and tokens of the interval, and of each histogram the
        median and the largest in ms.
        """
        shown: dict[str, int | float] = {}
        for name, value in {**self.counters, **self.gauges}.items():
            if name.endswith("_bytes"):
                shown[name.removesuffix("_bytes") + "_MB"] = round(value / 1e6, 1)
            else:
                shown[name] = round(value, 4)
        for name, seconds in self.seconds.items():
            if seconds:
                what = name.removesuffix("_seconds")
                shown[what + "_median_ms"] = round(statistics.median(seconds) * 1e3, 2)
                shown[what + "_max_ms"] = round(max(seconds) * 1e3, 2)
        return shown

    def is_empty(self) -> bool:
        return not any(self.data.get(part) for part in ("counters", "gauges", "seconds"))


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
        self._metrics: dict[str, Any] = {}
        self._series: dict[tuple[int, str], Any] = {}
        self._add(self._counter_cls, COUNTERS)
        self._add(self._gauge_cls, GAUGES)
        self._add(self._histogram_cls, HISTOGRAMS, buckets=BUCKETS_S)
        self._ranks: dict[int, UMBPStats] = {engine: UMBPStats() for engine in per_engine_labelvalues}

    def _add(self, metric_class: Any, names: Mapping[str, str], **how: Any) -> None:
        for name, meaning in names.items():
            labels = LABELS.get(name, ())
            # Counter-like names get Prometheus's `_total` from the client itself.
            self._metrics[name] = metric_class(
                name=f"vllm:umbp_{name}",
                documentation=meaning,
                labelnames=[*self._labelnames, *labels],
                **how,
            )
            for engine in self.per_engine_labelvalues:
                for values in product(*(LABEL_VALUES[label] for label in labels)):
                    self._of(engine, SEPARATOR.join((name, *values)))

    def _of(self, engine: int, series: str) -> Any:
        """The metric of one engine and one set of label values."""
        found = self._series.get((engine, series))
        if found is None:
            name, *values = series.split(SEPARATOR)
            labels = (*self.per_engine_labelvalues[engine], *values)
            found = self._series[engine, series] = self._metrics[name].labels(*labels)
        return found

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        latest = UMBPStats(data=transfer_stats_data)
        for series, amount in latest.series.items():
            self._of(engine_idx, series).inc(amount)
        for name, seconds in latest.seconds.items():
            metric = self._of(engine_idx, name)
            for one in seconds:
                metric.observe(one)
        known = self._ranks[engine_idx]
        for rank, values in latest.data.get("gauges", {}).items():
            known.set_gauges(int(rank), values)
        for name, value in known.gauges.items():
            self._of(engine_idx, name).set(value)
