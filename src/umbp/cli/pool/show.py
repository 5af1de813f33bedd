"""`umbp pool list` and `stat`."""

from __future__ import annotations

import grp
import json
import pwd
import sys
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umbp.cli.parameters import AS_JSON
from umbp.cli.pool.places import found_path, in_folder
from umbp.kinds import format_size
from umbp.pool import PoolFile, inspect_pool, list_pools

DEAD = "dead, to be reaped"
"""The state of a process whose pins the next to use the pool takes back."""


@click.command("list")
@in_folder
@AS_JSON
def list_(folder: str, as_json: bool) -> None:
    """The pools of a folder: state, size, use, processes, owner; and what is wrong with those that can't be
    used.
    """
    found = list_pools(folder)
    if as_json:
        click.echo(json.dumps({"pools": [as_dict(pool) for pool in found]}, indent=2))
        return
    if not found:
        click.echo(f"no pool in {folder}; `umbp pool create NAME --size SIZE` makes one")
        return
    _print_tables([_list_table(found)])
    for pool in found:
        if pool.problem:
            click.echo(f"{pool.name}: {pool.problem}")


@click.command()
@click.argument("name")
@in_folder
@AS_JSON
def stat(name: str, folder: str, as_json: bool) -> None:
    """One pool in full: memory, namespaces, slabs, attached processes, and what has happened since it was
    made. Attaches nothing. Exit code 1 where the pool can't be used.
    """
    pool = inspect_pool(found_path(name, folder))
    if as_json:
        click.echo(json.dumps(as_dict(pool), indent=2))
    elif pool.problem:
        click.echo(pool.problem)
    else:
        _print_tables(_stat_tables(pool))
    sys.exit(1 if pool.problem else 0)


def _print_tables(tables: list[Table]) -> None:
    """With an empty line between them, and without the blanks that fill a column up."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    with console.capture() as capture:
        for number, table in enumerate(tables):
            console.print(*([""] if number else []), table, sep="\n")
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


def as_dict(pool: PoolFile) -> dict[str, Any]:
    """The JSON of a pool: all that is known, sizes in bytes."""
    return {
        "name": pool.name,
        "state": pool.state,
        **asdict(pool),
        "mode": f"{pool.mode:04o}",
        "owner": owner_of(pool),
        "bound_bytes": pool.bound_bytes,
        "tail_bytes": pool.tail_bytes,
    }


def owner_of(pool: PoolFile) -> str:
    """`user`, or `user:group` where a group shares it."""
    try:
        user = pwd.getpwuid(pool.owner_uid).pw_name
    except KeyError:
        user = str(pool.owner_uid)
    if pool.group_gid is None:
        return user
    try:
        return f"{user}:{grp.getgrgid(pool.group_gid).gr_name}"
    except KeyError:
        return f"{user}:{pool.group_gid}"


def _list_table(pools: list[PoolFile]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("pool", "state", "owner"):
        table.add_column(heading, overflow="fold")
    for heading in ("size", "max", "used", "objects", "processes"):
        table.add_column(heading, justify="right")
    for pool in pools:
        figures = [""] * 5
        if not pool.problem:
            dead = len(pool.processes) - pool.alive
            processes = f"{pool.alive}" + (f" (+{dead} dead)" if dead else "")
            sizes = [pool.capacity_bytes, pool.max_bytes, pool.used_bytes]
            figures = [*map(format_size, sizes), f"{pool.objects:,}", processes]
        table.add_row(escape(pool.name), pool.state, owner_of(pool), *figures)
    return table


def _stat_tables(pool: PoolFile) -> list[Table]:
    tables = [_facts(pool)]
    if pool.namespaces:
        table = _table("namespaces", "number", "used", "quota", "objects", "cleared")
        for each in pool.namespaces:
            quota = "-" if each.quota_bytes is None else format_size(each.quota_bytes)
            figures = [format_size(each.used_bytes), quota, f"{each.objects:,}", f"{each.epoch - 1:,}"]
            table.add_row(escape(each.name), str(each.id), *figures)
        tables.append(table)
    if pool.classes:
        table = _table("slots of", "slabs", "free slots", "lost at the ends")
        for slots in sorted(pool.classes, key=lambda each: each.slot_bytes):
            lost = slots.slabs * (pool.slab_bytes % slots.slot_bytes)
            row = [f"{slots.slabs:,}", f"{slots.free_slots:,}", format_size(lost)]
            table.add_row(format_size(slots.slot_bytes), *row)
        tables.append(table)
    if pool.processes:
        table = _table("process", "user", "state", "pins", "holds the size")
        for process in pool.processes:
            state = "alive" if process.is_alive else DEAD
            pins, holds = f"{process.pinned_slots:,}", "yes" if process.holds_size else "-"
            table.add_row(str(process.pid), str(process.uid), state, pins, holds)
        tables.append(table)
    table = _table("since it was made", "number")
    for name, number in pool.counters.items():
        table.add_row(name.replace("_", " "), f"{number:,}")
    return [*tables, table]


def _facts(pool: PoolFile) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    size = f"{format_size(pool.capacity_bytes)}, may grow to {format_size(pool.max_bytes)}"
    slabs = (
        f"{pool.capacity_bytes // pool.slab_bytes} of {format_size(pool.slab_bytes)}, {pool.free_slabs} free;"
        f" objects of {format_size(pool.min_object_bytes)} and more"
    )
    waste = f"{format_size(pool.bound_bytes)} free for objects of one size only"
    waste += f", {format_size(pool.tail_bytes)} lost at the ends of slabs"
    made = datetime.fromtimestamp(pool.created_s).astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
    eviction = f"{pool.eviction_policy}, from {100 * pool.high_watermark:.4g} % in use"
    eviction += f" down to {100 * pool.low_watermark:.4g} %"
    rows = {
        "pool": pool.path,
        "state": pool.state + (f" by process {pool.resizing_pid}" if pool.resizing_pid else ""),
        "owner": f"{owner_of(pool)}, mode {pool.mode:04o}, made {made}",
        "size": size,
        "used": f"{format_size(pool.used_bytes)} by {pool.objects:,} objects",
        "memory": f"{format_size(pool.memory_bytes)} with its tables",
        "slabs": slabs,
        "fragments": waste,
        "eviction": eviction,
    }
    for name, text in rows.items():
        table.add_row(name, escape(text))
    return table


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, overflow="fold")
    for heading in rest:
        table.add_column(heading, justify="right")
    return table
