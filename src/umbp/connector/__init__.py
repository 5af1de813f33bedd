"""UMBP's connector for vLLM: the only folder that imports vLLM.

The class is made reachable lazily, so that vLLM's plug-in loader and the other submodules import little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umbp.connector.connector import UMBPStoreConnector
    from umbp.connector.connector import UMBPStoreConnector as UMBPConnector

__all__ = ["UMBPConnector", "UMBPStoreConnector"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from umbp.connector.connector import UMBPStoreConnector

        return UMBPStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
