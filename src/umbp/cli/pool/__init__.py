"""`umbp pool`: the pools in files that the engines of a node share (mode `standalone`).

Each subcommand ends with exit code 0, with 2 and one sentence where it can't be done, and `stat` with 1 where
the pool can't be used.
"""

from __future__ import annotations

import click

from umbp.cli.lazy import LazyGroup, Subcommand

_SUBCOMMANDS = {
    "clear": Subcommand("umbp.cli.pool.change", "clear", "Empties a pool, or one namespace of it."),
    "create": Subcommand("umbp.cli.pool.create", "create", "Makes a pool, before any engine starts."),
    "destroy": Subcommand("umbp.cli.pool.change", "destroy", "Deletes a pool, also under running engines."),
    "list": Subcommand("umbp.cli.pool.show", "list_", "The pools of a folder."),
    "resize": Subcommand("umbp.cli.pool.change", "resize", "Grows or shrinks a pool while it is used."),
    "stat": Subcommand("umbp.cli.pool.show", "stat", "One pool: memory, namespaces, processes, counters."),
}


@click.group(cls=LazyGroup, subcommands=_SUBCOMMANDS)
def pool() -> None:
    """The pools that the engines of this node share.

    An engine uses one with "mode": "standalone", "pool": NAME in its kv_connector_extra_config. NAME stands
    for a file in --dir (the RAM file system, unless the engines are told another pool_dir); a path with a
    slash is taken as it is. Each subcommand prints text, or one JSON object with --json.
    """
