"""KV caches without torch: numpy memory that answers what this package reads of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class FakeTensor:
    """A view of numpy memory with the questions of `umbp.data.TensorLike`; strides count elements, as torch's
    do.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: npt.DTypeLike = np.uint8) -> FakeTensor:
        return cls(np.zeros(shape, dtype))

    @classmethod
    def strided(
        cls, backing: npt.NDArray[np.uint8], offset: int, shape: Sequence[int], strides: Sequence[int]
    ) -> FakeTensor:
        """A view of bytes in `backing` from `offset` on; like all views it is checked to lie inside."""
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if offset < 0 or last >= backing.nbytes:
            raise ValueError(f"the view ends at byte {last} of {backing.nbytes}")
        return cls(np.ndarray(tuple(shape), np.uint8, backing, offset, tuple(strides)))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def dim(self) -> int:
        return self.array.ndim

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return self.array.itemsize

    @overload
    def stride(self) -> tuple[int, ...]: ...
    @overload
    def stride(self, dim: int, /) -> int: ...
    def stride(self, *dim: int) -> int | tuple[int, ...]:
        strides = tuple(stride // self.array.itemsize for stride in self.array.strides)
        return strides[dim[0]] if dim else strides

    def __repr__(self) -> str:
        return f"FakeTensor(shape={self.shape}, stride={self.stride()}, element_size={self.element_size()})"
