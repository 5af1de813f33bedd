"""A storage node of Mooncake, for tests: `python -m umbp.testing.stores.mooncake_node HOST:PORT BYTES` offers
memory until its standard input ends.
"""

from __future__ import annotations

import os
import sys

from umbp.store.mooncake import MooncakeStore
from umbp.store.mooncake_settings import MooncakeSettings


def main() -> None:
    master, segment_bytes = sys.argv[1:]
    settings = MooncakeSettings(master=master, segment_bytes=int(segment_bytes), timeout_ms=5000)
    store = MooncakeStore(settings, serves_memory=True)
    store.open()
    print("up", flush=True)
    sys.stdin.read()
    # Closing would take seconds, and the master misses a node that is gone soon enough.
    os._exit(0)


if __name__ == "__main__":
    main()
