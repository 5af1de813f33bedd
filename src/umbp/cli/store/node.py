"""`umbp store node`: a process that offers memory to a Mooncake cluster until it is told to end.

Mooncake's own `mooncake_client` does that too, but dies of SIGTERM without a word: for ten seconds its master
still promises what has gone, and sends puts there. This one leaves its cluster first.
"""

from __future__ import annotations

import signal

import click

from umbp.cli.parameters import AS_JSON, SIZE

ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


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
    # Before any thread is there: all inherit it, and Mooncake's own handlers are never asked. An older one,
    # as the one that numpy's import starts, would take the signal while nobody waits for it, and all die.
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    from umbp.cli.store.serving import serve

    serve(settings, endings, as_json)
