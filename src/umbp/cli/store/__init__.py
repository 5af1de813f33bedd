"""`umbp store`: what a cluster store needs beside the engines."""

from __future__ import annotations

import click

from umbp.cli.lazy import LazyGroup, Subcommand

_SUBCOMMANDS = {
    "node": Subcommand("umbp.cli.store.node", "node", "Offers this host's memory to a Mooncake cluster."),
}


@click.group(cls=LazyGroup, subcommands=_SUBCOMMANDS)
def store() -> None:
    """The cluster store behind engines in mode distributed. Each subcommand prints text, or one JSON object
    with --json.
    """
