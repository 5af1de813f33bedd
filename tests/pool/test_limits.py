"""What a new pool may take, read from made folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from umbp.errors import CapacityError, ConfigError
from umbp.pool import Pool
from umbp.pool.limits import MemoryLimit, memory_limits, refuse_over_limit


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def free_bytes(root: Path) -> list[int]:
    return sorted(limit.free_bytes for limit in memory_limits(root))


def test_available_memory_bounds(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": "MemTotal: 10 kB\nMemAvailable:    8 kB\n"})
    assert free_bytes(root) == [8192]


def test_a_cgroup_leaves_its_limit_less_its_use_and_more_its_file_cache(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "1000\n",
            "sys/fs/cgroup/pod/container/memory.current": "700\n",
            "sys/fs/cgroup/pod/container/memory.stat": "anon 400\ninactive_file 100\nactive_file 50\n",
        },
    )
    assert free_bytes(root) == [450]


def test_every_ancestor_of_a_cgroup_bounds(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/container/memory.max": "max\n",
            "sys/fs/cgroup/pod/container/memory.current": "700\n",
            "sys/fs/cgroup/pod/memory.max": "900\n",
            "sys/fs/cgroup/pod/memory.current": "800\n",
        },
    )
    assert free_bytes(root) == [100]


def test_in_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/abc\n",
            "sys/fs/cgroup/memory.max": "5000\n",
            "sys/fs/cgroup/memory.current": "1000\n",
        },
    )
    assert free_bytes(root) == [4000]


def test_cgroup_v1_bounds_too(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n9:memory:/docker/abc\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "600\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": "total_inactive_file 30\ninactive_file 7\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "600\n",
        },
    )
    assert free_bytes(root) == [430]


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/fs/cgroup/memory.max": "10\n", "sys/fs/cgroup/memory.current": "30\n"})
    assert free_bytes(root) == [0]


def test_what_cannot_be_read_does_not_bound(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    root = write(tmp_path, {"sys/fs/cgroup/memory.max": "nonsense\n", "sys/fs/cgroup/memory.current": "1\n"})
    assert memory_limits(root) == []


def test_a_path_is_bounded_by_its_file_system(tmp_path: Path) -> None:
    (limit,) = memory_limits(tmp_path / "no-root", tmp_path / "pool")
    assert str(tmp_path) in limit.source
    assert limit.free_bytes > 0


def test_a_refusal_is_one_sentence_with_both_figures_and_what_to_do() -> None:
    limits = [
        MemoryLimit("the host's available memory", 5 << 30),
        MemoryLimit("the limit of cgroup /x", 1 << 30),
    ]
    refuse_over_limit(1 << 30, limits)
    refuse_over_limit(1 << 60, [])
    with pytest.raises(CapacityError) as caught:
        refuse_over_limit(2 << 30, limits)
    text = str(caught.value)
    assert "a pool of 2 GiB doesn't fit" in text
    assert "cgroup /x leaves 1 GiB" in text
    assert "choose a smaller" in text
    assert "\n" not in text
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("wanted_bytes", "said"),
    [
        (3 << 20, "a pool of 3 MiB doesn't fit: the test leaves 1 MiB;"),
        ((1 << 20) + 1, "a pool of 1048577 bytes doesn't fit: the test leaves 1048576 bytes;"),
    ],
)
def test_the_two_sizes_of_a_refusal_are_told_apart(wanted_bytes: int, said: str) -> None:
    with pytest.raises(CapacityError) as caught:
        refuse_over_limit(wanted_bytes, [MemoryLimit("the test", 1 << 20)])
    assert said in str(caught.value)


def test_a_pool_that_stops_fitting_while_it_is_made_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks start at once; each alone would fit. Who finds too little left half way lets go of all."""
    asked: list[None] = []

    def shrinking(root: Path = Path("/"), path: object = None) -> list[MemoryLimit]:
        asked.append(None)
        return [MemoryLimit("the test", 2 << 30 if len(asked) < 3 else 100 << 20)]

    monkeypatch.setattr("umbp.pool.pool.memory_limits", shrinking)
    monkeypatch.setattr("umbp.pool.allocation.memory_limits", shrinking)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match=r"the rest of a pool of .* the test leaves"):
        Pool.create_memfd(512 << 20, slab_bytes=1 << 20, min_object_bytes=4096)
    assert len(os.listdir("/proc/self/fd")) == descriptors
