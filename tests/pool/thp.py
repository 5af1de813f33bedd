"""The kernel's own refusals, for one process: no huge pages, no say in memory nodes."""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SET_THP_DISABLE = 38, 22, 41
MBIND = {"x86_64": 237, "aarch64": 235}

_prctl = ctypes.CDLL(None, use_errno=True).prctl


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """This process gets none inside, whatever the host's settings."""
    assert _prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        _prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0)


def refuse_memory_nodes() -> None:
    """From now on `mbind` is forbidden here, as by a container's default seccomp profile. There is no way
    back: for a process that ends soon."""
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (load, 0, 0, 0),
            (jump_if_equal, 0, 1, MBIND[platform.machine()]),
            (give, 0, 0, 0x00050000 | 1),  # fails with EPERM
            (give, 0, 0, 0x7FFF0000),
        )
    )
    code = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    assert _prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    filter_ = Filter(4, ctypes.addressof(code))
    assert _prctl(PR_SET_SECCOMP, 2, ctypes.byref(filter_), 0, 0) == 0


def mapped_bytes(what: str, address: int) -> int:
    """A figure of `/proc/self/smaps`, such as `Rss`, of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            inside = start <= address < end
        elif inside and first == f"{what}:":
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {what} at {address:#x}")


def touch(address: int, size: int) -> None:
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))[::4096]
    pages.max()
