"""One rank's loads and stores between the engine's KV memory and a pool on the same host.

The handle's methods run on the worker's thread; the copies run on a thread of the handle's own, loads and stores
each on theirs, so that a load never waits behind a store. Both leave the GIL alone while they move bytes.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from umbp.data import (
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVLayoutDescriptor,
    RankTopology,
    TensorLike,
    TransferJobState,
    UMBPNamespace,
)
from umbp.options import Options
from umbp.pool import Pool
from umbp.runtime.base import HandshakeExtra

logger = logging.getLogger("vllm.umbp")
