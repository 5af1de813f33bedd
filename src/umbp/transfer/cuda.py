"""The CUDA driver: pinned host memory and batched copies, through `cuda-bindings` (the extra `umbp[cuda]`).

One call starts thousands of copies. `cuda-bindings` would want three Python objects for each of them (2.4 ms
for the 15,360 ranges of 256 objects, about as long as the copies take), so it is asked for the function's
address, and the columns go to it as they are, without the GIL.

The function is asked for as CUDA 12.8 defined it, which every later driver keeps: CUDA 13 dropped an argument
from the newer one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from umbp.transfer.driver import Addresses, DriverError

if TYPE_CHECKING:
    import torch

CUDA_VERSION = 12080
SRC_ACCESS_ORDER_STREAM = 1
PREFER_OVERLAP_WITH_COMPUTE = 1
MEMHOSTREGISTER_PORTABLE = 1


class Location(ctypes.Structure):
    """`CUmemLocation`; zeros where the driver can tell by itself."""

    _fields_ = (("kind", ctypes.c_int), ("index", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`."""

    _fields_ = (
        ("src_access_order", ctypes.c_int),
        ("src_hint", Location),
        ("dst_hint", Location),
        ("flags", ctypes.c_uint),
    )


BATCH_COPY = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # how many
    ctypes.POINTER(CopyAttributes),
    ctypes.POINTER(ctypes.c_size_t),  # the first copy of each of the attributes
    ctypes.c_size_t,  # how many of those
    ctypes.POINTER(ctypes.c_size_t),  # out: the copy that failed
    ctypes.c_void_p,  # stream
)
"""`cuMemcpyBatchAsync` of CUDA 12.8."""

_pins: dict[tuple[int, int], int] = {}
"""Ranges that are pinned in this process, with how often: engines may share a pool, the driver takes one
registration."""
_pins_lock = threading.Lock()


class CudaApi:
    """The driver's functions for one device, by the bindings; no torch."""

    def __init__(self, index: int) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DriverError(f"cuda-bindings can't be imported ({error}): pip install umbp[cuda]") from None
        self._driver: Any = driver
        self._call(driver.cuInit, 0)
        self._context = self._call(driver.cuDevicePrimaryCtxRetain, self._call(driver.cuDeviceGet, index))
        self._batch_copy = BATCH_COPY(self._address_of(b"cuMemcpyBatchAsync"))

    def register(self, address: int, size: int) -> None:
        self.enter()
        self._call(self._driver.cuMemHostRegister, address, size, MEMHOSTREGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        self.enter()
        self._call(self._driver.cuMemHostUnregister, address)

    def enter(self) -> None:
        """Make the device's context the calling thread's: torch does so late, and the driver asks for it."""
        self._call(self._driver.cuCtxSetCurrent, self._context)

    def start_copies(self, stream: int, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        attributes = CopyAttributes(
            src_access_order=SRC_ACCESS_ORDER_STREAM, flags=PREFER_OVERLAP_WITH_COMPUTE
        )
        columns = [np.ascontiguousarray(each, dtype=np.uint64) for each in (targets, sources, sizes)]
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self.enter()
        code = self._batch_copy(
            *(column.ctypes.data for column in columns),
            len(sizes),
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            ctypes.byref(failed),
            stream,
        )
        if code:
            raise DriverError(f"cuMemcpyBatchAsync of {len(sizes)} copies: {self._name_of(code)}")

    def _address_of(self, symbol: bytes) -> int:
        """`DriverError` where the driver hasn't got the function."""
        try:
            code, address, found = self._driver.cuGetProcAddress(symbol, CUDA_VERSION, 0)
        except RuntimeError as error:
            raise DriverError(f"the CUDA driver can't be used ({error})") from None
        if int(code) or int(found) or not int(address):
            raise DriverError(f"this CUDA driver has no {symbol.decode()}, which came with CUDA 12.8")
        return int(address)

    def _call(self, function: Callable[..., tuple[Any, ...]], *arguments: Any) -> Any:
        """The bindings' way to answer: an error code, then the result. They load the driver at the first
        call, and raise where there is none or it lacks the function."""
        try:
            code, *results = function(*arguments)
        except RuntimeError as error:
            raise DriverError(f"the CUDA driver can't be used ({error})") from None
        if int(code):
            raise DriverError(f"{function.__name__}: {self._name_of(int(code))}")
        return results[0] if results else None

    def _name_of(self, code: int) -> str:
        try:
            return str(self._driver.CUresult(code).name)
        except ValueError:
            return f"error {code}"


class CudaDriver:
    """A CUDA device of torch's, whose streams and events order what the driver copies. `DriverError` where
    `cuda-bindings` is missing or the driver older than 12.8."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._device = device
        self.api = CudaApi(device.index)

    def fence(self) -> Any:
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def stream(self) -> CudaStream:
        return CudaStream(self.api, self._cuda.Stream(device=self._device), self._cuda.Event(blocking=True))

    def pin(self, address: int, size: int) -> None:
        with _pins_lock:
            if not _pins.get((address, size)):
                self.api.register(address, size)
            _pins[address, size] = _pins.get((address, size), 0) + 1

    def unpin(self, address: int, size: int) -> None:
        with _pins_lock:
            _pins[address, size] -= 1
            if _pins[address, size] == 0:
                del _pins[address, size]
                self.api.unregister(address)


class CudaStream:
    """A side stream of torch's. `ended` is an event that is waited for asleep: the stream's own way to wait
    would keep a processor busy."""

    def __init__(self, api: CudaApi, stream: Any, ended: Any) -> None:
        self._api = api
        self._stream = stream
        self._ended = ended

    def wait(self, fence: Any) -> None:
        if fence is not None:
            _by_torch(self._stream.wait_event, fence)

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self._api.start_copies(self._stream.cuda_stream, targets, sources, sizes)

    def synchronize(self) -> None:
        _by_torch(self._ended.record, self._stream)
        _by_torch(self._ended.synchronize)


def _by_torch(function: Callable[..., Any], *arguments: Any) -> None:
    try:
        function(*arguments)
    except RuntimeError as error:
        raise DriverError(str(error).partition("\n")[0]) from error
