"""Mooncake's clients: what they are set up with, and how one is made and left without holding anybody up.

Why it takes this care is told in `umbp.store.mooncake`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from umbp.errors import ConfigError, InvariantError
from umbp.store.base import StoreError
from umbp.store.mooncake_metadata import NOT_THERE_YET, metadata_trouble
from umbp.store.mooncake_settings import MooncakeSettings

DISTRIBUTIONS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
MODULE = "mooncake.store"

TRIED_WITH = "0.3.13"
"""The version that what is said of Mooncake was measured on."""

PROBE_KEY = "umbp:probe"
"""Nobody puts it; asking for it takes the way over the network that every question takes."""

RETRY_S = 5.0
"""So often a client that waits to be closed asks whether its master answers again."""


LAST_CALLS_S = 10.0
"""How long an interpreter that ends waits for calls inside: the longest that was seen took 4.5 s."""


class Inside:
    """The threads of this process that are inside Mooncake.

    One that comes out when the interpreter is gone ends the process with `std::terminate`. So whoever wants
    to go in when the interpreter begins to end is sent away, and whoever is inside is waited for.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._count = 0
        self._is_watching = False
        self.is_over = False

    @contextlib.contextmanager
    def call(self) -> Iterator[bool]:
        """Whether the caller may go in."""
        with self._change:
            if not self._is_watching:
                self._is_watching = True
                atexit.register(self.end)
            is_let_in = not self.is_over
            self._count += is_let_in
        try:
            yield is_let_in
        finally:
            if is_let_in:
                with self._change:
                    self._count -= 1
                    self._change.notify_all()

    def end(self) -> None:
        """Let nobody in any more, and return when all have come out, or after a while."""
        with self._change:
            self.is_over = True
            self._change.wait_for(lambda: not self._count, LAST_CALLS_S)

    def audit(self) -> None:
        if self._count < 0:
            raise InvariantError(f"{self._count} threads are inside Mooncake")


INSIDE = Inside()
"""Of this process."""


def require_library() -> None:
    """`ConfigError` of one sentence where Mooncake can't be loaded here."""
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "store 'mooncake' needs its package: pip install 'umbp[mooncake]' "
            "(hosts with CUDA: pip install mooncake-transfer-engine)"
        )
    # Read when it is loaded, and never again; else each client tells twenty lines of how well it is.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        importlib.import_module(MODULE)
    except ImportError as error:
        raise ConfigError(
            f"store 'mooncake' can't load what its package needs ({error}); install libibverbs, libnuma "
            f"and libcurl (Debian: apt-get install libibverbs1 libnuma1 libcurl4)"
        ) from None


QUEUED_RANGES = "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"
MOST_QUEUED = 4096
MOONCAKES_OWN_QUEUE = 1024
"""Where the variable isn't a number from 1 to 65,535."""


def set_environment(timeout_ms: int) -> None:
    """What Mooncake reads when a client is set up. Seconds are the unit of what it knows of nodes."""
    wanted = {
        QUEUED_RANGES: MOST_QUEUED,
        "MC_RPC_TIMEOUT_MS": timeout_ms,
        "MC_RPC_CONNECT_TIMEOUT_MS": timeout_ms,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": math.ceil(timeout_ms / 1000),
        "MC_STORE_CLIENT_SETUP_RETRIES": 1,
    }
    for name, value in wanted.items():
        os.environ.setdefault(name, str(value))


def queue_of_ranges() -> int:
    """How many ranges wait for one peer over TCP and none fails, with the environment as it is: what doesn't
    fit into the queue waits for a second to enter it.
    """
    try:
        most = int(os.environ.get(QUEUED_RANGES, ""))
    except ValueError:
        return MOONCAKES_OWN_QUEUE
    return most if 1 <= most <= 65535 else MOONCAKES_OWN_QUEUE


_NO_ERRORS = ("Local segment descriptor not found", NOT_THERE_YET)
"""Errors to Mooncake's log, of clients that are well."""

_TRIAL = """
import os, sys
from mooncake.store import MooncakeDistributedStore as Store
*arguments, key = sys.argv[1:]
host, metadata, protocol, device, master = arguments
client = Store()
code = client.setup(host, metadata, 0, 0, protocol, device, master) or client.batch_is_exist([key])[0]
os._exit(0 if code >= 0 else 1)
"""


def require_master(settings: MooncakeSettings) -> None:
    """`StoreError` unless a client can be set up, tried in a process of its own: in this one, all Python
    would stand still where the master is silent.
    """
    timeout_s = settings.timeout_ms / 1000
    require_listener(settings)
    if settings.local_hostname is not None:
        require_name(settings.local_hostname)
    local = settings.local_hostname or own_address(settings.master)
    arguments = (local, settings.metadata, settings.protocol, settings.device, settings.master, PROBE_KEY)
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "MC_LOG_LEVEL": "ERROR"},
            timeout=timeout_s * 4 + 20,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        log = (error.stderr or b"").decode(errors="replace")
        trouble = metadata_trouble(settings.metadata, log, timeout_s)
        raise StoreError(trouble or f"the Mooncake master at {settings.master} is silent") from error
    if done.returncode != 0:
        raise StoreError(_why_no_client(settings, done.stderr.decode(errors="replace"), done.returncode))


def _why_no_client(settings: MooncakeSettings, log: str, exit_code: int) -> str:
    if trouble := metadata_trouble(settings.metadata, log, settings.timeout_ms / 1000):
        return trouble
    why = first_error(log) or f"exit code {exit_code}"
    if "RPC call timed out" in why:
        return (
            f"what listens at {settings.master} doesn't answer as a Mooncake master: it is stopped, or "
            "something else (it may be the master's metrics); mend 'master' in 'store_options'"
        )
    return f"no client of the Mooncake master at {settings.master} can be set up: {why}"


def first_error(log: str) -> str:
    """What Mooncake says first in its log of errors; later lines tell what came of it. Empty where it says
    nothing.
    """
    errors = [line.partition("] ")[2] for line in log.splitlines() if line.startswith("E")]
    return next((each for each in errors if not any(said in each for said in _NO_ERRORS)), "")


def _connect(settings: MooncakeSettings) -> None:
    """Connect to the master's port and leave it at that; a silent master takes connections too."""
    host, _, port = settings.master.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=settings.timeout_ms / 1000).close()


def require_listener(settings: MooncakeSettings) -> None:
    """`StoreError` where nobody listens at the master's port."""
    try:
        _connect(settings)
    except (OSError, OverflowError, UnicodeError) as error:
        raise StoreError(
            f"no Mooncake master answers at {settings.master} ({error}); start mooncake_master there, or "
            "mend 'master' in 'store_options'"
        ) from error


def setup_arguments(settings: MooncakeSettings, host: str, segment_bytes: int) -> tuple[object, ...]:
    return (
        host,
        settings.metadata,
        segment_bytes,
        settings.buffer_bytes,
        settings.protocol,
        settings.device,
        settings.master,
    )


def leave(client: Any, settings: MooncakeSettings) -> None:
    """Close the client, now if its master answers, else on a thread that waits until it does: closing stops
    all Python for as long as the master is silent.
    """
    if not _closed(client, settings):
        later = threading.Thread(
            target=_close_later, args=(client, settings), name="umbp-mooncake-close", daemon=True
        )
        later.start()


def _close_later(client: Any, settings: MooncakeSettings) -> None:
    never = threading.Event()
    while not INSIDE.is_over and not _closed(client, settings):
        never.wait(RETRY_S)


def _closed(client: Any, settings: MooncakeSettings) -> bool:
    """Close the client if its master answers; whether it did."""
    # The look saves the 4 s that a client takes to find that nobody is there.
    try:
        require_listener(settings)
    except StoreError:
        return False
    with INSIDE.call() as is_let_in:
        if not is_let_in or client.batch_is_exist([PROBE_KEY])[0] < 0:
            return False
        client.close()
        return True


def own_address(master: str) -> str:
    """The address from which the master is reached; nothing is sent."""
    host, _, port = master.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(address)
            return str(asking.getsockname()[0])
    except (OSError, OverflowError, IndexError, UnicodeError) as error:
        raise StoreError(
            f"the host of 'master' in 'store_options' can't be found: {master} ({error})"
        ) from error


def require_name(local_hostname: str) -> None:
    """`StoreError` for a name that nobody can resolve: whoever announces it is found by nobody."""
    try:
        socket.getaddrinfo(local_hostname, None)
    except (OSError, UnicodeError) as error:
        raise StoreError(
            f"'local_hostname' in 'store_options' can't be found: {local_hostname} ({error}); give the name "
            "or address by which the other hosts reach this one"
        ) from error


def package() -> dict[str, str]:
    for each in DISTRIBUTIONS:
        with contextlib.suppress(PackageNotFoundError):
            return {"package": each, "version": version(each), "tried with": TRIED_WITH}
    return {}
