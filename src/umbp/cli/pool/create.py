"""`umbp pool create`."""

from __future__ import annotations

import json

import click

from umbp._native import slot_bytes
from umbp.cli.parameters import AS_JSON, SIZE
from umbp.cli.pool.places import DEFAULT_DIR, in_folder, path_of, progress_of
from umbp.cli.pool.show import as_dict
from umbp.errors import ConfigError
from umbp.kinds import PAGE_BYTES, format_size
from umbp.options import DEFAULT_EVICTION_POLICY, EVICTION_POLICIES
from umbp.pool import MemoryPolicy, Pool, inspect_pool, shared_geometry
from umbp.pool.geometry import MIN_OBJECT_BYTES
from umbp.pool.memory import check_node

MOST_BYTES, MOST_SLOTS = 1 << 50, (1 << 32) - 1
"""Of any pool."""
_HUGE_PAGES = {"auto": None, "on": True, "off": False}


@click.command()
@click.argument("name")
@in_folder
@click.option("--size", type=SIZE, required=True, help="Memory to take now, such as 64GiB.")
@click.option("--max-size", type=SIZE, help="What `resize` may let it grow to. Default: the size.")
@click.option(
    "--group", help="A group whose members may use it, by name or number. Default: its owner alone."
)
@click.option(
    "--slab-size",
    type=SIZE,
    help="Slabs: an object must fit one, and objects of one size fill whole ones. "
    "Default: a 256th of the size, 64MiB to 256MiB, and an eighth of a small pool.",
)
@click.option(
    "--min-object",
    type=SIZE,
    help=f"Smaller objects take as much room as this. Smaller costs more for tables (1 % of the pool at "
    f"{format_size(MIN_OBJECT_BYTES)}). Default: that, and more in a pool that may grow far.",
)
@click.option(
    "--eviction-policy",
    type=click.Choice(EVICTION_POLICIES),
    default=DEFAULT_EVICTION_POLICY,
    show_default=True,
    help="What leaves a full pool first.",
)
@click.option("--high-watermark", type=float, default=1.0, help="Share in use where eviction starts. [1.0]")
@click.option("--low-watermark", type=float, help="And where it stops. [0.95 of the high one]")
@click.option(
    "--hugepages",
    type=click.Choice(tuple(_HUGE_PAGES)),
    default="auto",
    help="Back it with huge pages; without them where the kernel has none. [auto]",
)
@click.option(
    "--numa-node", type=click.IntRange(min=-1), default=-1, help="Memory node. [-1: that of this process]"
)
@click.option("--prefault", is_flag=True, help="Touch all of its memory now rather than at its first use.")
@AS_JSON
def create(
    name: str,
    folder: str,
    size: int,
    max_size: int | None,
    group: str | None,
    slab_size: int | None,
    min_object: int | None,
    eviction_policy: str,
    high_watermark: float,
    low_watermark: float | None,
    hugepages: str,
    numa_node: int,
    prefault: bool,
    as_json: bool,
) -> None:
    """Makes the pool NAME: takes --size of memory, and keeps it until the pool is destroyed.

    It survives its engines, and is gone after a reboot. Engines that find no pool make one only if they are
    given a capacity_bytes.
    """
    path = path_of(name, folder)
    if max_size is not None and max_size < size:
        raise ConfigError(f"--max-size {format_size(max_size)} is less than --size {format_size(size)}")
    check_node(numa_node, option="--numa-node")
    low = 0.95 * high_watermark if low_watermark is None else low_watermark
    _check_watermarks(high_watermark, low)
    slab_bytes, min_object_bytes = _geometry(size, max_size, slab_size, min_object)
    with progress_of("taking memory") as progress:
        pool = Pool.create(
            path,
            size,
            max_bytes=max_size,
            group=group,
            slab_bytes=slab_bytes,
            min_object_bytes=min_object_bytes,
            eviction_policy=eviction_policy,
            high_watermark=high_watermark,
            low_watermark=low,
            memory=MemoryPolicy(hugepages=_HUGE_PAGES[hugepages], numa_node=numa_node),
            progress=progress,
        )
    with pool:
        if not as_json:
            _tell(pool, name, folder)
        _warn(pool, size)
        if prefault:
            with progress_of("touching memory") as progress:
                if reason := pool.prefault(progress):
                    click.echo(f"umbp: --prefault: this kernel can't ({reason}); done at first use", err=True)
    if as_json:  # once this process, which only made the pool, has left it
        click.echo(json.dumps(as_dict(inspect_pool(path)), indent=2))


def _geometry(
    size: int, max_size: int | None, slab_size: int | None, min_object: int | None
) -> tuple[int, int]:
    """Bytes of a slab and of the smallest object; ConfigError, one sentence, names the option to change."""
    slab_bytes, min_object_bytes = slab_size, min_object
    if slab_bytes is None or min_object_bytes is None:
        by_default = shared_geometry(size, max_size)
        slab_bytes = by_default[0] if slab_bytes is None else slab_bytes
        # Smaller where the slab asked for has no room for the default.
        least = min(by_default[1], max(1, slab_bytes - PAGE_BYTES))
        min_object_bytes = least if min_object_bytes is None else min_object_bytes
    if slab_bytes == 0 or slab_bytes % PAGE_BYTES:
        raise ConfigError(
            f"--slab-size must be a multiple of {format_size(PAGE_BYTES)} such as 64MiB,"
            f" not {slab_bytes} bytes"
        )
    if slab_bytes > size:
        raise ConfigError(
            f"--slab-size {format_size(slab_bytes)} is more than --size {format_size(size)};"
            " choose smaller slabs or a larger pool"
        )
    if min_object_bytes == 0:
        raise ConfigError("--min-object must be at least 1 byte, not 0; leave it out for the default")
    if slot_bytes(min_object_bytes) > slab_bytes:
        raise ConfigError(
            f"--min-object {format_size(min_object_bytes)}, with 128 bytes of seal and trailer, doesn't fit a"
            f" slab of {format_size(slab_bytes)}; choose a smaller one, or a larger --slab-size"
        )
    most_bytes = max(size, max_size or 0)
    if most_bytes > MOST_BYTES:
        raise ConfigError(f"a pool may have, and grow to, {format_size(MOST_BYTES)} at most")
    is_chosen = max_size is not None or min_object is not None
    if is_chosen and most_bytes // slab_bytes * (slab_bytes // slot_bytes(min_object_bytes)) >= MOST_SLOTS:
        raise ConfigError(
            f"{format_size(most_bytes)} would hold more than 2**32 objects of {format_size(min_object_bytes)}"
            "; choose a larger --min-object"
        )
    return slab_bytes, min_object_bytes


def _check_watermarks(high: float, low: float) -> None:
    if not 0 < high <= 1:
        raise ConfigError(f"--high-watermark must be a share above 0 and up to 1, not {high:g}")
    if not 0 < low <= high:
        raise ConfigError(
            f"--low-watermark must be above 0 and up to --high-watermark ({high:g}), not {low:g}"
        )


def _tell(pool: Pool, name: str, folder: str) -> None:
    grows = f", may grow to {format_size(pool.max_bytes)}" if pool.max_bytes > pool.capacity_bytes else ""
    slab, smallest = format_size(pool.slab_bytes), format_size(pool.native.min_object_bytes)
    size = format_size(pool.capacity_bytes)
    click.echo(f"{pool.path}: {size}{grows}; slabs of {slab}, objects of {smallest} and more")
    if pool.memory is not None:
        click.echo(f"memory {pool.memory}")
    if "/" not in name:
        place = "" if folder == DEFAULT_DIR else f', "pool_dir": "{folder}"'
        click.echo(f'engines use it with "mode": "standalone", "pool": "{name}"{place}')


def _warn(pool: Pool, asked_bytes: int) -> None:
    """Of what isn't as asked for."""
    for shortfall in pool.memory.shortfalls() if pool.memory is not None else ():
        click.echo(f"umbp: {shortfall}", err=True)
    if pool.capacity_bytes < 0.95 * asked_bytes:
        left_out = format_size(asked_bytes - pool.capacity_bytes)
        click.echo(
            f"umbp: {left_out} of the size are no whole slab and are left out; choose another --slab-size",
            err=True,
        )
