"""What a Mooncake master tells of its cluster over HTTP (`--metrics_port`, 9003 unless said otherwise)."""

from __future__ import annotations

import http.client
import re
from dataclasses import dataclass

METRICS_PORT = 9003
MOST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class MasterFigures:
    """Memory on offer and in use, clients of all kinds, and each segment's memory by where its node is."""

    total_bytes: int
    used_bytes: int
    clients: int
    segments: tuple[tuple[str, int], ...]


def master_figures(host: str, port: int, timeout_s: float) -> MasterFigures | None:
    """`None` where nobody there tells."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        text = answer.read(MOST_BYTES).decode(errors="replace") if answer.status == http.client.OK else ""
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    figures = {name: int(value) for name, value in re.findall(r"^(master_\w+) (\d+)\s*$", text, re.MULTILINE)}
    if "master_total_capacity_bytes" not in figures:
        return None
    segments = re.findall(r'^segment_total_capacity_bytes\{segment="([^"]+)"\} (\d+)', text, re.MULTILINE)
    return MasterFigures(
        total_bytes=figures["master_total_capacity_bytes"],
        used_bytes=figures.get("master_allocated_bytes", 0),
        clients=figures.get("master_active_clients", 0),
        segments=tuple((where, int(size)) for where, size in segments),
    )
