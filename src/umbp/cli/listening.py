"""Where this process listens for TCP connections, as Linux tells it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

_LISTENS = "0A"


def listening() -> set[str]:
    """Addresses with ports, such as `0.0.0.0:15943`; empty where the kernel doesn't tell."""
    own = _own_sockets()
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as rows:
            for row in list(rows)[1:]:
                fields = row.split()
                if fields[3] == _LISTENS and fields[9] in own:
                    found.add(_in_words(fields[1], family))
    return found


def _own_sockets() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for each in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{each}")
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found


def _in_words(local: str, family: socket.AddressFamily) -> str:
    """The kernel writes addresses as words of 32 bits in the host's own byte order."""
    address, _, port = local.partition(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    packed = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
    host = socket.inet_ntop(family, packed)
    return f"[{host}]:{int(port, 16)}" if family == socket.AF_INET6 else f"{host}:{int(port, 16)}"
