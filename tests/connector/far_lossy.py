"""Engines on a network that loses packets, in a network namespace of their own: `unshare -n far_lossy.py
FOLDER`. Ends with 0 where all went as it should.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from far_engines import Lab, make_lab

WELL_S, ILL_S = 0.06, 0.02
"""How long all packets arrive, and how long none does, turn by turn, on a network that loses some."""


def main() -> None:
    folder = Path(sys.argv[1])
    run("ip", "link", "set", "lo", "up")
    with make_lab(folder, folder) as lab:
        lab.check_back()
        with lab.watching():
            lose_some(lab)
        with lab.watching():
            lose_all(lab)


def lose_some(lab: Lab) -> None:
    """It is slow, and still right."""
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        losing = pool.submit(blink, is_over)
        restored = 0
        for _ in range(6):
            prompt = lab.stored()
            restored += sum(engine.restores(prompt) for engine in lab.readers)
        is_over.set()
        lost = losing.result()
    assert lost > 0
    print(f"{restored} tokens restored while {lost} packets were lost")
    lab.check_back()


def blink(is_over: threading.Event) -> int:
    """Lose whatever is sent, time and again; how many packets that were."""
    lost = 0
    while not is_over.wait(WELL_S):
        lose()
        is_over.wait(ILL_S)
        lost += find()
    return lost


def lose() -> None:
    """From now on no packet arrives, and nobody is told so."""
    run("tc", "qdisc", "replace", "dev", "lo", "root", "blackhole")


def find() -> int:
    """All is well again; how many packets were lost."""
    found = re.search(r"dropped (\d+)", run("tc", "-s", "qdisc", "show", "dev", "lo"))
    run("tc", "qdisc", "del", "dev", "lo", "root")
    assert found is not None
    return int(found[1])


def lose_all(lab: Lab) -> None:
    """Nobody says that anything is wrong; nothing arrives."""
    prompts = [lab.stored() for _ in range(4)]
    lose()
    timeouts = lab.within.lookup_gate.counts().timeouts
    for prompt in prompts:
        assert [engine.restores(prompt) for engine in lab.readers] == [0, 0]
        lab.first.serve(lab.new())
    assert lab.within.lookup_gate.counts().timeouts == timeouts + 1, "it is waited for once"
    find()
    lab.check_back()


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
