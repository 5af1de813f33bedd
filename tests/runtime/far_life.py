"""Handles of mode `distributed` on a real store, in a process of their own: `far_life.py OPTIONS`.

It stores, says "serves" and waits for a line on its standard input; then it stores again, closes, says how
long that took, and ends.
"""

from __future__ import annotations

import json
import sys
import time

from umbp.options import parse_options
from umbp.runtime.distributed import DistributedRuntime
from umbp.testing.rig import Rig, hashes


def main() -> None:
    rig = Rig(DistributedRuntime(parse_options(json.loads(sys.argv[1]))), "life")
    store(rig, "before")
    print("serves", flush=True)
    sys.stdin.readline()
    store(rig, "after")
    begun_s = time.monotonic()
    rig.close()
    print(f"closed in {time.monotonic() - begun_s:.1f} s", flush=True)


def store(rig: Rig, salt: str) -> None:
    (rank,) = rig.ranks
    job = rank.worker.store(rank.store_plans("batch", hashes(8, salt), list(range(8))))
    rank.worker.wait(job)
    rank.worker.publish(job)


if __name__ == "__main__":
    main()
