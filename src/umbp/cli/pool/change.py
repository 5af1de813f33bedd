"""`umbp pool resize`, `clear` and `destroy`."""

from __future__ import annotations

import json
import sys

import click

from umbp.cli.parameters import AS_JSON, SIZE
from umbp.cli.pool.places import found_path, in_folder, progress_of
from umbp.errors import ConfigError, SegmentError
from umbp.kinds import format_size, nearest
from umbp.pool import NamespaceUse, Pool, destroy_pool, inspect_pool

PATIENCE_S = 2.0
"""How long a command waits for the pool's lock: an operator has more time than an engine."""
MOST_NAMED = 8
"""Of the namespaces that are there, in an error about one that isn't."""


@click.command()
@click.argument("name")
@click.argument("size", type=SIZE)
@in_folder
@AS_JSON
def resize(name: str, size: int, folder: str, as_json: bool) -> None:
    """Grows or shrinks the pool NAME to SIZE while its engines go on.

    Up to what it was created to grow to, in whole slabs. Shrinking evicts what was used least recently, and
    keeps whatever is being read, written or promised to a request.
    """
    with Pool.attach(found_path(name, folder), lock_patience_s=PATIENCE_S) as pool:
        before = pool.capacity_bytes
        if not 1 <= size // pool.slab_bytes <= pool.max_bytes // pool.slab_bytes:
            raise ConfigError(
                f"the size must be from one slab ({format_size(pool.slab_bytes)}) to what the pool was made"
                f" to grow to ({format_size(pool.max_bytes)}), not {format_size(size)}"
            )
        with progress_of("resizing") as progress:
            after = pool.resize(size, progress=progress)
        text = f"{pool.path}: {format_size(before)} -> {format_size(after)}"
        click.echo(
            json.dumps({"path": pool.path, "before_bytes": before, "after_bytes": after}) if as_json else text
        )


@click.command()
@click.argument("name")
@click.option("--namespace", help="Only this one, by its full name or its number in `stat`.")
@in_folder
@AS_JSON
def clear(name: str, namespace: str | None, folder: str, as_json: bool) -> None:
    """Empties the pool NAME, for all engines; the pool stays.

    What is being stored now isn't published any more; what is being read is freed afterwards.
    """
    with Pool.attach(found_path(name, folder), lock_patience_s=PATIENCE_S) as pool:
        before = pool.stats()["objects"]
        is_done = pool.clear_all() if namespace is None else pool.clear(_namespace(pool, namespace))
        if not is_done:
            raise SegmentError(f"{pool.path} can't be cleared now: a stopped process holds its lock")
        cleared = max(0, before - pool.stats()["objects"])
        text = f"{pool.path}: {cleared} objects cleared"
        click.echo(json.dumps({"path": pool.path, "cleared_objects": cleared}) if as_json else text)


def _namespace(pool: Pool, text: str) -> int:
    """Of a namespace that is there: asking for any other would make it."""
    found = pool.namespaces()
    by_name = [each.id for each in found if each.name == text or _is_cut(each.name, text)]
    by_number = [each.id for each in found if text.isdecimal() and each.id == int(text)]
    for number in by_name if len(by_name) == 1 else by_number:
        return number
    if by_name:
        raise ConfigError(
            f"several namespaces of {pool.path} begin like that; name one by its number in stat"
        )
    hint = nearest(text, [each.name for each in found]) or _those_there(found)
    raise ConfigError(f"{pool.path} has no namespace {text!r}{hint}")


def _those_there(found: list[NamespaceUse]) -> str:
    """As `--namespace` takes them; the first few of many."""
    if not found:
        return "; it has none yet"
    names = ", ".join(f"{each.id} ({each.name})" for each in found[:MOST_NAMED])
    more = f" and {len(found) - MOST_NAMED} more in `umbp pool stat`" if len(found) > MOST_NAMED else ""
    return f"; there is: {names}{more}"


def _is_cut(shown: str, text: str) -> bool:
    """Whether a long name is listed by its head."""
    head = text.encode()[:191]
    return len(head) == 191 and shown == head.decode(errors="replace")


def is_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


@click.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Don't ask.")
@in_folder
@AS_JSON
def destroy(name: str, yes: bool, folder: str, as_json: bool) -> None:
    """Deletes the pool NAME and all that is stored in it.

    Running engines notice: they go on without it, and take up a new pool of the same name. Its memory is free
    when the last of them has let go of it: a busy one within a second, an idle one with its next
    request.
    """
    path = found_path(name, folder)
    found = inspect_pool(path)
    attached = [process for process in found.processes if process.is_alive]
    if attached:
        who = ", ".join(str(process.pid) for process in attached)
        click.echo(f"{len(attached)} processes use {path} (pid {who}); they go on without it", err=True)
    if not yes:
        if not is_terminal():
            raise ConfigError(f"to destroy {path} without being asked, give --yes")
        click.confirm(f"Destroy {path} with {found.objects} objects?", abort=True, err=True)
    destroy_pool(path)
    pids = [process.pid for process in attached]
    click.echo(json.dumps({"path": path, "attached_pids": pids}) if as_json else f"{path}: destroyed")
