"""What libraries write to standard error past Python, kept from the terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

MOST_BYTES = 1 << 20
_STANDARD_ERROR = 2


@contextlib.contextmanager
def hushed() -> Iterator[Callable[[], str]]:
    """While inside, what anything in this process writes to standard error goes to a file; the call gives its
    beginning. Threads that write later than that are heard again.
    """
    if sys.stderr is None:  # closed, and its number may be another file's
        yield str
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept, os.fdopen(os.dup(_STANDARD_ERROR), "wb") as terminal:
        os.dup2(kept.fileno(), _STANDARD_ERROR)
        try:
            # Not by seeking: the place in the file is where whoever writes goes on.
            yield lambda: os.pread(kept.fileno(), MOST_BYTES, 0).decode(errors="replace")
        finally:
            sys.stderr.flush()
            os.dup2(terminal.fileno(), _STANDARD_ERROR)
