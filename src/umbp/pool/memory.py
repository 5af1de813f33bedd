"""Where a pool's memory lies and in what pages: huge pages, memory nodes, pages mapped before their first
use.

All of it is speed alone. What the kernel doesn't give is said in `MemoryReport.shortfalls`, and the pool
works without.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from umbp import _native
from umbp.errors import ConfigError

Progress = Callable[[int, int], None]
"""Hears how many bytes are done, of how many."""

HUGE_PATIENCE_S = 0.25
HUGE_PATIENCE_S_PER_GIB = {None: 0.25, True: 4.0}
"""How long the kernel may take to make huge pages, by whether they were asked for by name. It takes 0.06 s a
GiB where they lie ready (small pages: 0.25 s); long where memory is in pieces, or where a virtual machine has
given it back to its host. A start that nobody asked to be slow becomes twice as long at most."""

NODE_SAMPLES = 64
NODE_SHARE = 0.9
"""A pool of which fewer of the sampled pages lie on the wanted node isn't there."""

NODES = Path("sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """What is wished for. `hugepages`: True and None ask for them, and differ in whether their lack is worth
    a warning; False doesn't ask. `numa_node`: -1 is the node of the processors that this thread may run on.
    """

    hugepages: bool | None = None
    numa_node: int = -1

    def native(self, capacity_bytes: int, node: int | None) -> _native.MemoryPolicy:
        per_gib_s = HUGE_PATIENCE_S_PER_GIB.get(self.hugepages)
        return _native.MemoryPolicy(
            use_huge_pages=per_gib_s is not None,
            node=-1 if node is None else node,
            huge_patience_s=HUGE_PATIENCE_S + (per_gib_s or 0.0) * capacity_bytes / 2**30,
        )


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a new pool's maker got. `asked_bytes` are the whole huge pages' worth in it, `huge_bytes` what
    huge pages back; `node_share` the share of sampled pages on `node`, None where that isn't known."""

    policy: MemoryPolicy
    asked_bytes: int
    huge_bytes: int
    taken_s: float
    huge_reason: str
    node: int | None
    node_share: float | None
    node_reason: str

    def shortfalls(self) -> list[str]:
        """What was asked for by name and isn't there, a sentence each."""
        found = []
        if self.policy.hugepages and self.huge_bytes < self.asked_bytes:
            found.append(
                f"huge pages back {_share(self.huge_bytes, self.asked_bytes)} of the pool"
                f" ({self.huge_reason}); it works with small ones"
            )
        if self.policy.numa_node >= 0 and self.node_reason:
            found.append(
                f"the pool's memory can't be put on node {self.node} ({self.node_reason});"
                " it lies where the kernel put it"
            )
        elif self.policy.numa_node >= 0 and self.node_share is not None and self.node_share < NODE_SHARE:
            found.append(
                f"node {self.node} had room for {self.node_share:.0%} of the pool;"
                " the rest lies on other nodes"
            )
        return found

    def __str__(self) -> str:
        text = f"taken in {self.taken_s:.1f} s"
        if self.asked_bytes and self.policy.hugepages is not False:
            text += f", huge pages for {_share(self.huge_bytes, self.asked_bytes)}"
        if self.node is not None and not self.node_reason:
            text += f", on memory node {self.node}"
        return text


def report_of(native: _native.Pool, policy: MemoryPolicy, node: int | None) -> MemoryReport:
    """On a pool that this process has just made."""
    facts: dict[str, Any] = native.memory
    address, size = native.arena[0], native.capacity_bytes
    share = None
    if node is not None and not facts["node_reason"]:
        share = node_share(address, size, node)
    return MemoryReport(policy=policy, node=node, node_share=share, **facts)


def memory_nodes(root: Path = Path("/")) -> dict[int, frozenset[int]]:
    """The host's nodes that have memory, with their processors; empty where the kernel tells of none."""
    folder = root / NODES
    having = _numbers(folder / "has_memory")
    nodes = {}
    for path in sorted(folder.glob("node[0-9]*")):
        node = int(path.name.removeprefix("node"))
        if having is None or node in having:
            nodes[node] = frozenset(_numbers(path / "cpulist") or ())
    return nodes


def allowed_nodes(root: Path = Path("/")) -> frozenset[int] | None:
    """The nodes that this process may have memory on; None where the kernel doesn't tell."""
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return frozenset(_parsed(value.strip()))
    return None


def check_node(node: int, root: Path = Path("/"), option: str = "option 'dram_numa_node'") -> None:
    """ConfigError, one sentence, for a node that isn't there or isn't this process's to use; -1 is fine.
    `option` is what the user set."""
    if node < 0:
        return
    nodes, allowed = memory_nodes(root), allowed_nodes(root)
    usable = sorted(nodes if allowed is None else set(nodes) & allowed)
    if node in usable:
        return
    names = ", ".join(map(str, usable)) or "none that the kernel tells of"
    what = "this process may not use" if node in nodes else "this host doesn't have"
    raise ConfigError(
        f"{option} names memory node {node}, which {what}; there is: {names}; -1 takes the process's own"
    )


def own_node(root: Path = Path("/")) -> int | None:
    """The one node of all processors that this thread may run on; None where there is no choice, or where
    they are on several: then the kernel knows better."""
    nodes = memory_nodes(root)
    if len(nodes) < 2:
        return None
    mine = os.sched_getaffinity(0)
    around = [node for node, processors in nodes.items() if processors & mine]
    return around[0] if len(around) == 1 and mine <= nodes[around[0]] else None


def node_share(address: int, size: int, node: int) -> float | None:
    """The share of pages on a node, from a sample that is touched; None where the kernel doesn't tell."""
    spots = np.linspace(0, size - 1, min(NODE_SAMPLES, max(1, size // 4096))).astype(np.uint64)
    found = [each for each in _native.nodes_of(spots + np.uint64(address)) if each >= 0]
    return found.count(node) / len(found) if found else None


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _numbers(path: Path) -> set[int] | None:
    try:
        return _parsed(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _parsed(text: str) -> set[int]:
    """The kernel's way to write a set of numbers: `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
