"""Mooncake's metadata server (`metadata` in `store_options`): what its log says of one that can't be used, in
our words.
"""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

PORTS = {"http": 80, "https": 443, "etcd": 2379, "redis": 6379}
"""The kinds of servers, and where each listens unless the URL says otherwise."""

PATTERN = rf"P2PHANDSHAKE|({'|'.join(PORTS)})://[^\s/?#]+.*"

_SAID_OF_IT = re.compile(r"^[EF]\d+ \S+ +\d+ transfer_metadata_plugin\.cpp:\d+\] (.*)$", re.MULTILINE)
NOT_THERE_YET = "http=404 body: metadata not found"
"""An error to Mooncake's log, and how a server that is well answers who asks before somebody has told it."""

_INSTEAD = "mend 'metadata' in 'store_options' (P2PHANDSHAKE needs no server)"


def metadata_trouble(url: str, log: str, timeout_s: float) -> str | None:
    """One sentence on the server at the URL, where the log of a client that couldn't be set up speaks of it.

    Whether anybody is there is found out anew, for as long as the timeout for each of its hosts.
    """
    said = [each for each in _SAID_OF_IT.findall(log) if NOT_THERE_YET not in each]
    if not said:
        return None
    kind, _, rest = url.partition("://")
    # A name and a password before the host are nobody's business.
    where = re.split(r"[/?#]", rest)[0].rpartition("@")[2]
    if "Unable to find metadata storage plugin" in said[0]:
        return f"this build of Mooncake knows no metadata server of the kind {kind!r}; {_INSTEAD}"
    if status := re.search(r" http=(\d+) ", said[0]):
        return (
            f"what answers at {kind}://{where} is no metadata server of Mooncake's "
            f"(HTTP status {status[1]}); {_INSTEAD}"
        )
    if why_not := _nobody_there(where, PORTS.get(kind, 0), timeout_s):
        return f"no metadata server answers at {kind}://{where} ({why_not}); start it there, or {_INSTEAD}"
    reason = re.split(r" err: |curl: |: ", said[0])[-1].strip()
    return f"Mooncake can't use the metadata server at {kind}://{where} ({reason}); {_INSTEAD}"


def _nobody_there(hosts: str, port: int, timeout_s: float) -> str:
    """Why none of the hosts can be connected to; empty where one can."""
    why_not = "the URL names no host"
    for each in filter(None, re.split("[,;]", hosts)):
        try:
            address = urlsplit(f"//{each}")
            socket.create_connection((address.hostname or "", address.port or port), timeout_s).close()
        except (OSError, ValueError) as error:
            why_not = str(error)
        else:
            return ""
    return why_not
