"""Random lives of scripted engines, as many as one wants.

`python tests/connector/walk_soak.py --steps 1000000 [--seed 7] [--life 0]`, or `make soak STEPS=1000000
SEED=7`. The seed decides all of it; `--life` begins with that life of the seed. `--stories 1000`, or `make
stories STORIES=1000 SEED=7`, has hypothesis choose instead, which tells what fails in its fewest acts.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

# Before vLLM is imported, which reads them.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

REPORT_S = 10.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--far", action="store_true", help="lives with a cluster store behind the pools")
    parser.add_argument("--stories", type=int, default=0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--life", type=int, default=0)
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)

    import far_walk
    import random_walk
    import scripted_runtime

    from umbp.testing.plugins import write_plug_in

    # Backends die all the time here, and the connector says so.
    logging.disable(logging.CRITICAL)
    started_s = next_report_s = time.monotonic()

    def say(text: str) -> None:
        nonlocal next_report_s
        if time.monotonic() >= next_report_s:
            next_report_s = time.monotonic() + REPORT_S
            print(f"{time.monotonic() - started_s:6.0f} s: {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="umbp-walk-") as folder:
        plug_in = write_plug_in(Path(folder) / "plug-in", scripted_runtime.MODE, "scripted_runtime:make")
        sys.path.append(str(plug_in))
        if chosen.stories:
            from state_machine import tell_stories

            print(dict(tell_stories(Path(folder), chosen.stories, seed=chosen.seed)))
            return 0
        try:
            walk = far_walk.walk_far_lives if chosen.far else random_walk.walk_lives
            told = walk(chosen.seed, chosen.steps, Path(folder), first=chosen.life, say=say)
        except random_walk.LifeError as failure:
            traceback.print_exc()
            print(f"\n{failure}\nagain with: {failure.replay}", file=sys.stderr)
            return 1
    print(f"{chosen.steps} steps in {time.monotonic() - started_s:.0f} s, nothing wrong: {dict(told)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
