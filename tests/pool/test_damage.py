"""Damaged segments: refused before anything is mapped; damaged while in use, answered in bounded time, with
errors of ours or sound answers. `make sanitize` damages far more, under a sanitizer."""

from __future__ import annotations

import os
import random
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from actors import pattern, read_payload, store
from refusals import assert_refused
from zygote import Actor, Zygote

from umbp import _native
from umbp.errors import SegmentError
from umbp.pool import Pool

MakePool = Callable[..., Pool]
GEOMETRY = _native.geometry(1 << 20, 1 << 16, 3000)
FIXED_BYTES = 16 + 8 * len(GEOMETRY) + 8 + 16 + 4 * 4 + 8 + 8 + 8
"""What is set at creation: magic, version, size, geometry, seed, id, owner, limits, date, their checksum."""
VERBS: list[tuple[str, Any]] = [
    ("lookup", ["x", "y"]),
    ("acquire", ["x", "y"]),
    ("store", 0, [f"n{i}" for i in range(40)]),
    ("touch", ["x", "n1"]),
    ("remove", ["y", "n1"]),
    ("stats",),
    ("removed_since", 0),
    ("reap",),
    ("clear", 0),
    ("lingering", 0),
    ("audit",),
]
OURS = ("SegmentError", "InvariantError", "ConfigError")
VERB_S = 20


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def assert_every_verb_ends(actor: Actor) -> int:
    """With an answer or an error of ours; how many errors."""
    errors = 0
    for verb, *args in VERBS:
        actor.send(verb, *args)
        assert actor.has_answer(VERB_S), f"{verb} doesn't end"
        try:
            actor.receive()
        except RuntimeError as error:
            assert str(error).startswith(OURS), error
            errors += 1
    return errors


def test_every_flipped_byte_of_the_fixed_header_is_refused(pool_file: Path) -> None:
    header = pool_file.read_bytes()[:FIXED_BYTES]
    for offset in range(FIXED_BYTES):
        for flip in (0x01, 0x80, 0xFF):
            overwrite(pool_file, offset, bytes([header[offset] ^ flip]))
            assert_refused(pool_file)
        overwrite(pool_file, offset, header[offset : offset + 1])
    Pool.attach(pool_file).close()


def test_every_flipped_byte_of_the_live_header_is_refused_or_survived(
    pool_file: Path, zygote: Zygote
) -> None:
    whole = pool_file.read_bytes()[:4096]
    for offset in range(FIXED_BYTES, 1024, 4):
        overwrite(pool_file, offset, bytes([whole[offset] ^ 0xFF]))
        with zygote.episode():
            actor = zygote.spawn("serve", os.fspath(pool_file))
            try:
                assert_every_verb_ends(actor)
            except EOFError:
                actor.wait_until_dead()  # attaching was refused; a crash shows below
            assert os.waitstatus_to_exitcode(actor.bury()) == 0, f"byte {offset}"
        overwrite(pool_file, 0, whole)


def test_what_is_no_plain_file_is_refused(tmp_path: Path, pool_file: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    os.symlink(tmp_path / "absent", tmp_path / "dangling")
    os.symlink("loop", tmp_path / "loop")
    os.symlink(tmp_path, tmp_path / "folder")
    for path in (tmp_path, tmp_path / "fifo", tmp_path / "folder", Path("/dev/null"), Path("/dev/zero")):
        assert_refused(path, "isn't a file")
    assert_refused(tmp_path / "dangling", "No such file")
    assert_refused(tmp_path / "loop", "symbolic links")
    os.symlink(pool_file, tmp_path / "link")
    with Pool.attach(tmp_path / "link") as pool, Pool.attach(pool_file) as same:
        assert pool.native.process_slot == same.native.process_slot


@pytest.mark.parametrize("mode", [0o602, 0o606, 0o662, 0o666, 0o777])
def test_a_file_that_everybody_may_write_is_refused(pool_file: Path, mode: int) -> None:
    pool_file.chmod(mode)
    assert stat.S_IMODE(pool_file.stat().st_mode) == mode
    assert_refused(pool_file, "everybody may write")


def test_any_length_but_its_own_is_refused(pool_file: Path) -> None:
    size = pool_file.stat().st_size
    for length in (size + 4096, size + 1, size - 1, size - 4096, size // 2, 4096, 4095, 1024, 1, 0):
        os.truncate(pool_file, length)
        assert_refused(pool_file)


def test_the_holes_of_a_sparse_copy_are_filled(pool_file: Path, tmp_path: Path) -> None:
    """Scenario: a tool that leaves out zeros has copied a pool; its users would die in a full file system."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "--sparse=always", pool_file, copy], check=True)
    assert copy.stat().st_blocks * 512 < 1 << 20
    with Pool.attach(copy) as pool:
        assert copy.stat().st_blocks * 512 >= pool.capacity_bytes
        assert pool.lookup(["x", "y"]).all()
        tickets, _ = pool.acquire(["x"])
        assert read_payload(pool, int(tickets[0])) == pattern("x")
        pool.audit()


@pytest.mark.parametrize("seed", range(12))
def test_tables_damaged_under_a_living_process_are_an_error_or_a_sound_answer(
    make_pool: MakePool, zygote: Zygote, seed: int
) -> None:
    """Bytes and links change while two processes are attached; neither crashes, spins or leaves the arena."""
    rng = random.Random(seed)
    pool = make_pool(slots=64, slab_slots=8)
    store(pool, pool.namespace("a"), ["x", "y"])
    geometry = _native.geometry(64 * 4096, 8 * 4096, 3000)
    tables = [
        (384, 1024),  # the header's live part and what follows it
        (geometry["namespaces_at"], geometry["namespaces_at"] + 512),
        (geometry["classes_at"], geometry["classes_at"] + 256),
        (geometry["slabs_at"], geometry["slabs_at"] + 8 * 64),
        (geometry["index_at"], geometry["records_at"]),
        (geometry["records_at"], geometry["records_at"] + 64 * 128),
        (geometry["pins_at"], geometry["pins_at"] + 2 * geometry["pin_row_bytes"]),
    ]
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("removed_head")
    for _ in range(25):
        begin, end = rng.choice(tables)
        at = rng.randrange(begin, end) // 4 * 4
        link = rng.choice([rng.randrange(64), rng.randrange(8), 0xFFFFFFFF, rng.randrange(1 << 32)])
        os.pwrite(pool.native.fd, link.to_bytes(4, "little"), at)
        assert_every_verb_ends(actor)
        try:
            tickets, _ = pool.acquire(["x", "n1", "n2"])
            addresses, lengths = pool.payload(tickets)
            first, size = pool.arena
            for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True):
                assert address == 0 or first <= address <= address + length <= first + size
            pool.release(tickets)
        except SegmentError:
            pass
    actor.call("removed_head")
