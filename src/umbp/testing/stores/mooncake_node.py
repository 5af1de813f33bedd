"""A storage node of Mooncake, for tests: `python -m umbp.testing.stores.mooncake_node HOST:PORT BYTES` offers
memory until it is killed.
"""

from __future__ import annotations

import signal
import sys

from umbp.store.mooncake import MooncakeStore
from umbp.store.mooncake_settings import MooncakeSettings


def main() -> None:
    master, segment_bytes = sys.argv[1:]
    settings = MooncakeSettings(master=master, segment_bytes=int(segment_bytes), timeout_ms=5000)
    store = MooncakeStore(settings, serves_memory=True)
    store.open()
    print("up", flush=True)
    # Closing would take seconds, and the master misses a node that is gone soon enough.
    signal.pause()


if __name__ == "__main__":
    main()
