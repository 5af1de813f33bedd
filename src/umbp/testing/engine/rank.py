"""One worker of a scripted engine: its connector's half and its KV memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.worker.utils import allocate_kv_cache

from umbp.connector.connector import UMBPStoreConnector
from umbp.testing.engine.memory import Columns, Memory, plan_columns
from umbp.testing.engine.planning import worker_config
from umbp.testing.engine.shape import Shape


def own_connector(face: KVConnectorBase_V1) -> UMBPStoreConnector:
    """This package's connector in what vLLM calls."""
    connectors = face.sub_connectors if isinstance(face, MultiConnector) else [face]
    (own,) = (one for one in connectors if isinstance(one, UMBPStoreConnector))
    return own


class Rank:
    """One worker; without a connector it is its memory alone."""

    def __init__(
        self,
        config: VllmConfig,
        cache_config: KVCacheConfig,
        rank: int,
        shape: Shape | None = None,
        columns: Mapping[tuple[str, int], Columns] | None = None,
    ) -> None:
        shape = shape or Shape(ranks=config.parallel_config.tensor_parallel_size)
        if columns is None:
            columns, _ = plan_columns(shape, [cache_config])
        stage, number = divmod(rank, shape.ranks * shape.pcp)
        self.place = stage, number if shape.dcp > 1 else number % shape.ranks
        """Under what vLLM hands on its handshake: its stage, and a number there that others may share."""
        self.face: Any = None
        """What the model runner calls: the connector, or vLLM's MultiConnector around it."""
        self.connector: UMBPStoreConnector | None = None
        if shape.has_connector:
            face = KVConnectorFactory.create_connector(
                config=worker_config(config, rank),
                role=KVConnectorRole.WORKER,
                kv_cache_config=cache_config,
            )
            assert isinstance(face, KVConnectorBase_V1)
            self.face, self.connector = face, own_connector(face)
        layout = KVCacheLayout[str(cache_config.kv_cache_layout)]
        views = allocate_kv_cache(cache_config, torch.device("cpu"), layout)
        self.memory = Memory(shape, rank, cache_config, views, columns)
        if self.face is not None:
            self.face.register_kv_caches(views)

    def collect(self, finished: set[str]) -> KVConnectorOutput:
        """The results of a step, in the order in which the model runner asks for them."""
        connector = self.face
        assert connector is not None
        output = KVConnectorOutput()
        transfers = connector.get_transfer_results(finished)
        output.finished_sending = transfers.finished_sending
        output.finished_recving = transfers.finished_recving
        output.failed_recving = transfers.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        return output
