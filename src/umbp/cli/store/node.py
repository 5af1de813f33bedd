"""`umbp store node`: a process that offers memory to a Mooncake cluster until it is told to end.

Mooncake's own `mooncake_client` does that too, but dies of SIGTERM without a word: for ten seconds its master
still promises what has gone, and sends puts there. This one leaves its cluster first.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading

import click

from umbp.cli.pool.places import AS_JSON, SIZE
from umbp.errors import ConfigError
from umbp.kinds import format_size
from umbp.options import Options
from umbp.store.base import StoreError
from umbp.store.mooncake import MooncakeStore, make_store
from umbp.store.mooncake_settings import LEAST_SEGMENT_BYTES

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LEAVE_S = 15.0
"""How long a master that doesn't answer is waited for; then it finds out by itself."""


@click.command()
@click.option("--master", required=True, metavar="HOST:PORT", help="Where mooncake_master listens.")
@click.option("--segment", type=SIZE, required=True, help="Memory to offer, such as 64GiB.")
@click.option("--protocol", default="tcp", show_default=True, help="tcp or rdma, as the engines have it.")
@click.option("--device", help="RDMA devices, with commas between. [all]")
@click.option("--local-hostname", help="By which other hosts reach this one. [its address]")
@click.option("--timeout-ms", type=int, default=5000, show_default=True, help="As in store_options.")
@AS_JSON
def node(
    master: str,
    segment: int,
    protocol: str,
    device: str | None,
    local_hostname: str | None,
    timeout_ms: int,
    as_json: bool,
) -> None:
    """Offers memory to the cluster of a Mooncake master, prints one line, and waits for SIGTERM.

    Ends with exit code 0 when it has left the cluster, with 2 and one sentence where it can't join it. A
    master that is restarted later is joined again by itself.
    """
    if segment < LEAST_SEGMENT_BYTES:
        least, given_size = format_size(LEAST_SEGMENT_BYTES), format_size(segment)
        raise ConfigError(f"--segment must be at least {least}, not {given_size}")
    given = {
        "master": master,
        "segment_bytes": segment,
        "protocol": protocol,
        "device": device,
        "local_hostname": local_hostname,
        "timeout_ms": timeout_ms,
    }
    settings = {name: value for name, value in given.items() if value is not None}
    # What it was started to ignore (nohup, &) ends nothing; whoever waits for a signal gets it all the same.
    endings = {each for each in ENDINGS if signal.getsignal(each) is not signal.SIG_IGN}
    # Before any thread is there: all inherit it, and Mooncake's own handlers are never asked.
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    try:
        store = make_store(Options(store_options=settings), serves_memory=True)
        store.open()
    except (ConfigError, StoreError) as error:
        raise type(error)(_by_flags(str(error))) from None
    told = store.describe()
    if as_json:
        click.echo(json.dumps({"master": master, "client": told["client"], "segment_bytes": segment}))
    else:
        click.echo(f"{told['client']} offers {format_size(segment)} to the cluster of {master}")
    sys.stdout.flush()
    signal.sigwait(endings)
    _leave(store)


def _by_flags(text: str) -> str:
    """The sentence with this command's flags in place of the settings that an engine would have."""

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].removesuffix('_bytes').replace('_', '-')}"

    return re.sub(r"(?:option )?'(\w+)' in 'store_options'", flag, text)


def _leave(store: MooncakeStore) -> None:
    """Tell the master, if it answers, and end: an interpreter that ends with an open client waits for it."""
    leaving = threading.Thread(target=store.close, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    sys.stdout.flush()
    os._exit(0)
