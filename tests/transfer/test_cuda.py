"""The CUDA driver through the real `cuda-bindings`, over a stand-in for the driver's library that works on
host memory. It can't tell whether a GPU does what its manual says; it tells whether we ask as the manual
says."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from umbp.transfer.cuda import CopyAttributes, CudaApi
from umbp.transfer.driver import DriverError

HAS_BINDINGS = importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings")
needs_bindings = pytest.mark.skipif(not HAS_BINDINGS, reason="cuda-bindings isn't installed: umbp[cuda]")

Run = Callable[..., list[str]]

PREPARED = """
import numpy as np
from umbp.transfer.cuda import CudaApi, CudaDriver
from umbp.transfer.driver import DriverError

def refused(function, *arguments):
    try:
        function(*arguments)
    except DriverError as error:
        print(error)
    else:
        raise AssertionError("passed")

def columns(*values):
    return [np.array(value, dtype=np.uint64) for value in values]

source, target = np.arange(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
a, b = source.ctypes.data, target.ctypes.data
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stand-in of the driver's library")
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", str(path), str(source)], check=True)
    return path


@pytest.fixture
def run(library: Path, tmp_path: Path) -> Run:
    """Runs code beside the stand-in; its lines, then those of the library's log."""

    def ran(code: str, **environment: str) -> list[str]:
        log = tmp_path / "log"
        result = subprocess.run(
            [sys.executable, "-c", PREPARED + code],
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(library.parent),
                "FAKE_CUDA_LOG": str(log),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines() + (log.read_text().splitlines() if log.exists() else [])

    return ran


@needs_bindings
def test_a_batch_is_one_call_on_the_stream_that_it_names(run: Run) -> None:
    code = """
CudaApi(3).start_copies(0x77, *columns([b, b + 24], [a + 8, a + 16], [8, 8]))
print(target.tolist() == [*range(8, 16), *[0] * 16, *range(16, 24), *[0] * 32])
"""
    assert run(code) == ["True", "copied 2 on 77"]


@needs_bindings
def test_the_context_is_made_current_on_every_thread(run: Run) -> None:
    code = """
import threading
api = CudaApi(3)
thread = threading.Thread(target=api.start_copies, args=(0x77, *columns([b], [a], [8])))
thread.start()
thread.join()
"""
    assert run(code) == ["copied 1 on 77"]


@needs_bindings
def test_a_range_is_registered_once_however_many_ask(run: Run) -> None:
    code = """
driver, other = CudaDriver.__new__(CudaDriver), CudaDriver.__new__(CudaDriver)
driver.api = other.api = CudaApi(3)
driver.pin(0x10000, 4096)
other.pin(0x10000, 4096)
driver.unpin(0x10000, 4096)
refused(other.api.register, 0x10000, 4096)
other.unpin(0x10000, 4096)
refused(other.api.unregister, 0x10000)
"""
    assert run(code) == [
        "cuMemHostRegister: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "cuMemHostUnregister: CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
        "register 10000 4096",
        "unregister 10000 0",
    ]


@needs_bindings
def test_what_the_driver_refuses_is_one_sentence(run: Run) -> None:
    code = """
refused(CudaApi(3).start_copies, 0x77, *columns([b, b], [a, a], [8, 0]))
refused(CudaApi, 1)
"""
    assert run(code) == [
        "cuMemcpyBatchAsync of 2 copies: CUDA_ERROR_INVALID_VALUE",
        "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE",
    ]


@needs_bindings
def test_a_driver_before_cuda_12_8_is_refused(run: Run) -> None:
    assert run("refused(CudaApi, 3)", FAKE_CUDA_OLD="1") == [
        "this CUDA driver has no cuMemcpyBatchAsync, which came with CUDA 12.8"
    ]


def test_without_bindings_or_driver_there_is_no_api() -> None:
    """Whichever is missing here, it is one sentence."""
    if shutil.which("nvidia-smi"):
        pytest.skip("this host may have a CUDA driver")
    with pytest.raises(DriverError) as caught:
        CudaApi(0)
    assert "\n" not in str(caught.value)


@needs_bindings
def test_the_attributes_lie_in_memory_as_the_bindings_have_them() -> None:
    from cuda.bindings import driver

    theirs = driver.CUmemcpyAttributes()
    theirs.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    theirs.flags = int(driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)
    theirs.dstLocHint.id = 9
    ours = CopyAttributes(src_access_order=1, flags=1)
    ours.dst_hint.index = 9
    assert ctypes.string_at(theirs.getPtr(), ctypes.sizeof(ours)) == bytes(ours)
    assert int(driver.CU_MEMHOSTREGISTER_PORTABLE) == 1
