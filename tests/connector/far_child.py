"""A scripted engine in a process of its own, to be killed: `far_child.py MASTER ROOT WHAT OPTIONS`.

It says what it does in words on its standard output, each on a line, and reads a line where it says
`reads`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from far_engines import PROMPT, TimedEngine, far_shape
from scripted import tokens

KEPT, NEW = tokens(PROMPT, 1), tokens(PROMPT, 900)
"""A prompt that another engine has stored before, and one that it hasn't."""


def main() -> None:
    master, root, what, options = sys.argv[1:]
    engine = TimedEngine(Path(root), far_shape(master, json.loads(options)))
    tell("up")
    DEEDS[what](engine)


def tell(word: str) -> None:
    print(word, flush=True)


def send(engine: TimedEngine) -> None:
    """Store a prompt, and stay in sending it, as the storage nodes are stopped."""
    listen()
    engine.add(NEW)
    engine.step_until(lambda: engine.gates[0].counts().running > 0)
    tell("sends")
    threading.Event().wait()


def fetch(engine: TimedEngine) -> None:
    """Ask for a prompt, and stay in fetching it."""
    listen()
    engine.add(KEPT)
    engine.step_until(lambda: engine.gates[0].counts().running > 0)
    tell("fetches")
    threading.Event().wait()


def listen() -> None:
    tell("reads")
    sys.stdin.readline()


DEEDS: dict[str, Callable[[TimedEngine], None]] = {"send": send, "fetch": fetch}


if __name__ == "__main__":
    main()
