"""The options on a pool's memory: from the user's words to the pool's policy, and what became of them to the
log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from umbp.kinds import format_size
from umbp.options import Options
from umbp.pool import MemoryPolicy, Pool
from umbp.pool.memory import MemoryReport, Progress
from umbp.transfer.cores import use_free_cores

logger = logging.getLogger("vllm.umbp")

PROGRESS_S = 2.0
"""What takes longer says how far it is, so often."""


def memory_policy(options: Options) -> MemoryPolicy:
    return MemoryPolicy(options.dram_use_hugepages, options.dram_numa_node)


def progress_log(what: str, now: Callable[[], float] = time.monotonic) -> Progress:
    """A line now and then: "UMBP: taking the pool's memory: 4 GiB of 16 GiB"."""
    next_s = now() + PROGRESS_S

    def progress(done_bytes: int, all_bytes: int) -> None:
        nonlocal next_s
        now_s = now()
        if now_s >= next_s:
            next_s = now_s + PROGRESS_S
            logger.info("UMBP: %s: %s of %s", what, format_size(done_bytes), format_size(all_bytes))

    return progress


def settle_memory(pool: Pool, options: Options, made: MemoryReport | None) -> None:
    """After a pool was made or attached: map its pages as the options say, and tell the log what of the
    memory's options could be had, each lack once. `made` is what its maker got, where this process made it.
    """
    if made is not None:
        logger.info("UMBP: the pool's memory: %s", made)
        for shortfall in made.shortfalls():
            logger.warning("UMBP: %s", shortfall)
    if not options.dram_prefault:
        map_in_background(pool, options)
        return
    start_s = time.monotonic()
    reason = pool.prefault(progress_log("mapping the pool's pages"))
    if reason:
        logger.warning("UMBP: the pool's pages can't be mapped early (%s); it works without", reason)
    else:
        logger.info("UMBP: mapped the pool's pages in %.1f s", time.monotonic() - start_s)


def map_in_background(pool: Pool, options: Options) -> None:
    """Begin to map the pool's pages, unless the options leave that to their first use; doesn't wait."""
    if options.dram_prefault is not False:
        pool.prefault_in_background(_tell_of_the_end, enter=use_free_cores)


def _tell_of_the_end(reason: str, taken_s: float) -> None:
    if reason:
        logger.info("UMBP: the pool's pages are mapped by their first use alone (%s)", reason)
    else:
        logger.info("UMBP: mapped the pool's pages in the background, in %.1f s", taken_s)
