"""`umbp bench`: medians, and ratios against a named reference that is measured in the same run.

A subcommand makes a `report.Report` and shows it, as a table or as one JSON object (`--json`).
"""

from __future__ import annotations

import click

from umbp.cli.ending import termination_as_interrupt
from umbp.cli.lazy import LazyGroup, Subcommand

_SUBCOMMANDS = {
    "copy": Subcommand(
        "umbp.cli.bench.copy", "command", "Blocks into the pool and out of it, against one big memcpy."
    ),
    "engine": Subcommand(
        "umbp.cli.bench.engine", "command", "A real engine's throughput with the connector, against without."
    ),
    "lookup": Subcommand(
        "umbp.cli.bench.lookup", "command", "Stored keys looked up from another process, against a dict."
    ),
    "pool": Subcommand(
        "umbp.cli.bench.pool", "command", "What storing and reading cost an object, in small and large pools."
    ),
    "store": Subcommand(
        "umbp.cli.bench.store", "command", "Objects into a cluster store and back, against its own client."
    ),
}


@click.group(cls=LazyGroup, subcommands=_SUBCOMMANDS)
@click.pass_context
def bench(context: click.Context) -> None:
    """How fast the node pool is on this machine: medians, and ratios against a named reference.

    Every subcommand prints a table, or one JSON object with --json.
    """
    # Some start servers and engines, which end with them.
    context.with_resource(termination_as_interrupt())
