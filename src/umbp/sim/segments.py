"""Runs of neighbouring blocks of a chain that have something in common: what both exact curves count by."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt


def segments(values: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Begin, end and value of each run of equal values, from the first on."""
    if not len(values):
        return
    cuts = np.flatnonzero(np.diff(values)) + 1
    begins, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(values)]
    yield from zip(begins, ends, values[begins].tolist(), strict=True)
