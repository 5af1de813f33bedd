"""What the subcommands take, a pool's name and folder; and how they tell of slow work."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from umbp.errors import ConfigError
from umbp.kinds import format_size, nearest
from umbp.options import OPTIONS, Options
from umbp.pool import list_pools, pool_path
from umbp.pool.memory import Progress

DEFAULT_DIR = str(Options().pool_dir)
REPORT_INTERVAL_S = 2.0


def _absolute(ctx: click.Context, param: click.Parameter, value: str) -> str:
    """As `pool_dir` has to be, which is shown to be copied."""
    if not value:
        raise click.BadParameter("it must be a folder, not ''", ctx, param)
    return absolute(value)


def absolute(path: str) -> str:
    try:
        return os.path.abspath(path)
    except OSError as error:
        reason = f"the folder in which this runs is gone ({error.strerror})"
        raise ConfigError(f"{path!r} can't be found: {reason}") from None


def in_folder(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--dir`, which all subcommands have."""
    option = click.option(
        "--dir",
        "folder",
        default=DEFAULT_DIR,
        show_default=True,
        type=click.Path(file_okay=False),
        callback=_absolute,
        help="Folder of the pool's file, as pool_dir of the engines.",
    )
    return option(function)


def path_of(name: str, folder: str) -> str:
    """The file of a pool by its name, or a path as it is; ConfigError for what can't be a name."""
    if os.sep in name:
        return absolute(name)
    try:
        OPTIONS["pool"].kind.parse(name)
    except ValueError as error:
        raise ConfigError(f"a pool's name {error}") from None
    return pool_path(folder, name)


def found_path(name: str, folder: str) -> str:
    """`path_of` a pool that is there; ConfigError names those that are."""
    path = path_of(name, folder)
    if os.path.exists(path):
        return path
    if os.sep in name:
        raise ConfigError(f"there is no file {path}")
    there = [pool.name for pool in list_pools(folder)]
    place = "" if folder == DEFAULT_DIR else f" --dir {shlex.quote(folder)}"
    make = f"; `umbp pool create {name}{place} --size SIZE` makes it"
    hint = nearest(name, there) or (f"; there is: {', '.join(there)}" if there else make)
    raise ConfigError(f"there is no pool {name!r} in {folder}{hint}")


@contextmanager
def progress_of(what: str) -> Iterator[Progress]:
    """A bar on a terminal, else a line on stderr every two seconds."""
    if not sys.stderr.isatty():
        yield _lines(what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)


def _lines(what: str) -> Progress:
    said_s = time.monotonic()

    def progress(done_bytes: int, all_bytes: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= REPORT_INTERVAL_S:
            said_s = time.monotonic()
            click.echo(f"{what}: {format_size(done_bytes)} of {format_size(all_bytes)}", err=True)

    return progress
