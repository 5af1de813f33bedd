"""Ends with the process that started this one, however that ends.

Linux gives a process a signal at its parent's end, and takes for that the end of the very thread that started
it. Run as `launch.py PARENT SIGNAL PROGRAM ...`, by its path since it needs the standard library alone, it
asks for that signal and becomes the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie(parent: int, told: int = signal.SIGKILL) -> None:
    """Get this signal when the parent ends, which has told its number, and whose main thread has started this
    process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(told), *[ctypes.c_ulong(0)] * 3) != 0:
        raise OSError(ctypes.get_errno(), "prctl refuses the signal at the parent's end")
    if os.getppid() != parent:
        os.kill(os.getpid(), told)  # it ended before we asked


def main() -> None:
    parent, told, program, *arguments = sys.argv[1:]
    tie(int(parent), int(told))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; the program would inherit it
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(program, [program, *arguments])


if __name__ == "__main__":
    main()
