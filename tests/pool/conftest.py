"""Small pools, and a zygote that forks real processes to share them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from actors import store
from zygote import Zygote

from umbp.pool import Pool, slot_bytes


@pytest.fixture
def make_pool() -> Iterator[Callable[..., Pool]]:
    """Pools of a few slots; closed at the end."""
    pools: list[Pool] = []

    def make(slots: int = 32, *, slab_slots: int = 4, object_bytes: int = 3000, **options: float) -> Pool:
        slot = slot_bytes(object_bytes)
        pool = Pool.create_memfd(
            slots * slot,
            slab_bytes=slab_slots * slot,
            min_object_bytes=object_bytes,
            **options,  # type: ignore[arg-type]
        )
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pool_file(tmp_path: Path) -> Path:
    """A pool of two objects that nobody has attached."""
    path = tmp_path / "pool"
    with Pool.create(path, 1 << 20, slab_bytes=1 << 16, min_object_bytes=3000) as pool:
        store(pool, pool.namespace("a"), ["x", "y"])
    return path


@pytest.fixture(scope="session")
def session_zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def zygote(session_zygote: Zygote) -> Iterator[Zygote]:
    with session_zygote.episode():
        yield session_zygote
