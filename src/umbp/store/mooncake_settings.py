"""`store_options` of the store `mooncake`, and what of them can be told to be wrong before all else.

Mooncake itself goes over TCP where it is to use RDMA and finds no device, and tells of the rest in codes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from umbp.errors import CapacityError, ConfigError
from umbp.kinds import Choice, Size, Text, Whole, format_size, nearest
from umbp.pool.limits import memory_limits, refuse_over_limit
from umbp.store.mooncake_metadata import PATTERN
from umbp.store.settings import read_settings, setting

NAME = "mooncake"

LEAST_SEGMENT_BYTES = 16 << 20
"""Less than that Mooncake refuses to offer."""

RDMA_DEVICES = "/sys/class/infiniband"


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeSettings:
    """`store_options` of the store `mooncake`."""

    master: str = setting(
        "",
        Text("host:port", r"[^\s:/]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}"),
        "where `mooncake_master` listens for calls",
        is_required=True,
    )
    protocol: str = setting("tcp", Choice(("tcp", "rdma")), "how bytes move between hosts")
    device: str = setting(
        "",
        Text("names of RDMA devices, with commas between", r"[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*"),
        "the devices to use; with `rdma` alone",
        default="all",
    )
    segment_bytes: int = setting(
        0, Size(low=0), "memory that each worker offers to the cluster; 0: none, storage nodes have it all"
    )
    buffer_bytes: int = setting(
        0, Size(low=0), "memory of Mooncake's own for calls that copy; nothing here makes such calls"
    )
    local_hostname: str | None = setting(
        None,
        Text("a host's name or address", r"[^\s:/]+"),
        "by which the other hosts reach this one",
        default="the address from which the master is reached",
    )
    metadata: str = setting(
        "P2PHANDSHAKE",
        Text("P2PHANDSHAKE, or an URL of http, https, etcd or redis", PATTERN),
        "Mooncake's metadata server, the same for all clients and nodes of a cluster: else none reads what "
        "another holds",
    )
    timeout_ms: int = setting(
        1500,
        Whole(100, 600_000, "ms"),
        "a master or node that is silent for longer is taken for dead; of the whole process",
    )


def read_mooncake_settings(given: Mapping[str, object], rdma_devices: str = RDMA_DEVICES) -> MooncakeSettings:
    """`ConfigError` for what is wrong in itself or on this host, whose devices are the folder's entries."""
    settings = read_settings(MooncakeSettings, NAME, given)
    if not 1 <= int(settings.master.rpartition(":")[2]) <= 65535:
        raise ConfigError(
            f"option 'master' in 'store_options' must have a port from 1 to 65535, not '{settings.master}'"
        )
    if settings.device and settings.protocol != "rdma":
        raise ConfigError("option 'device' in 'store_options' has no effect without protocol 'rdma'")
    if 0 < settings.segment_bytes < LEAST_SEGMENT_BYTES:
        raise ConfigError(
            f"option 'segment_bytes' in 'store_options' must be 0 or at least "
            f"{format_size(LEAST_SEGMENT_BYTES)}, not {format_size(settings.segment_bytes)}"
        )
    if settings.protocol == "rdma":
        _require_devices(settings.device, rdma_devices)
    return settings


def require_room(segment_bytes: int, beside_bytes: int = 0) -> None:
    """`ConfigError` where this host hasn't the memory that is to be offered, beside what else is to be taken:
    Mooncake takes it as it is written to, and the kernel kills whoever takes the last of it.
    """
    what = "'segment_bytes' in 'store_options'" + (" and the pool" if beside_bytes else "")
    try:
        refuse_over_limit(segment_bytes + beside_bytes, memory_limits(), what)
    except CapacityError as error:
        raise ConfigError(str(error)) from None


def _require_devices(names: str, folder: str) -> None:
    there: list[str] = []
    with contextlib.suppress(OSError):
        there = sorted(os.listdir(folder))
    if not there:
        raise ConfigError(
            "'protocol' in 'store_options' is rdma, which needs an RDMA device, and this host shows none "
            f"({folder}): load its driver, give the container its devices, or write 'tcp'"
        )
    for name in filter(None, names.split(",")):
        if name not in there:
            hint = nearest(name, there) or ";"
            raise ConfigError(
                f"option 'device' in 'store_options': this host has no RDMA device '{name}'{hint} there "
                f"{'is' if len(there) == 1 else 'are'} {', '.join(there)}"
            )
