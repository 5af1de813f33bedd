"""The `vllm.general_plugins` entry point: makes the connector known to vLLM by name.

Runs in every process of an engine before its configuration is resolved; importing it must stay light.
"""

from __future__ import annotations

import os

MODULE = "umbp.connector"
OWN_NAME = "UMBPConnector"
FAMILY_NAME = "UMBPStoreConnector"
REPLACE_VARIABLE = "UMBP_REPLACE_VLLM_CONNECTOR"


def register() -> None:
    """Register `UMBPConnector`, and `UMBPStoreConnector` too if vLLM has no connector of that name or
    UMBP_REPLACE_VLLM_CONNECTOR=1 asks to replace it. Safe to call again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry = KVConnectorFactory._registry
    if OWN_NAME not in registry:
        KVConnectorFactory.register_connector(OWN_NAME, MODULE, FAMILY_NAME)
    if os.environ.get(REPLACE_VARIABLE) == "1":
        registry.pop(FAMILY_NAME, None)
    if FAMILY_NAME not in registry:
        KVConnectorFactory.register_connector(FAMILY_NAME, MODULE, FAMILY_NAME)
