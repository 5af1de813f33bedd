"""What `umbp store node` does once it can't be ended unseen: this loads what starts threads."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Mapping
from typing import Any

import click

from umbp.errors import ConfigError
from umbp.kinds import format_size
from umbp.options import Options
from umbp.store.base import StoreError
from umbp.store.mooncake import MooncakeStore, make_store
from umbp.store.mooncake_settings import LEAST_SEGMENT_BYTES

LEAVE_S = 15.0
"""How long a master that doesn't answer is waited for; then it finds out by itself."""


def serve(settings: Mapping[str, Any], endings: Collection[signal.Signals], as_json: bool) -> None:
    """Offers memory as the store's settings say, tells of it, waits for one of `endings`, which all threads
    block, and ends the process. ConfigError and StoreError speak of the command's flags.
    """
    master, segment = settings["master"], settings["segment_bytes"]
    if segment < LEAST_SEGMENT_BYTES:
        least, given_size = format_size(LEAST_SEGMENT_BYTES), format_size(segment)
        raise ConfigError(f"--segment must be at least {least}, not {given_size}")
    try:
        store = make_store(Options(store_options=dict(settings)), serves_memory=True)
        store.open()
    except (ConfigError, StoreError) as error:
        raise type(error)(_by_flags(str(error))) from None
    told = store.describe()
    if as_json:
        click.echo(json.dumps({"master": master, "client": told["client"], "segment_bytes": segment}))
    else:
        click.echo(f"{told['client']} offers {format_size(segment)} to the cluster of {master}")
    sys.stdout.flush()
    signal.sigwait(endings)
    _leave(store)


def _by_flags(text: str) -> str:
    """The sentence with this command's flags in place of the settings that an engine would have."""

    def flag(found: re.Match[str]) -> str:
        return f"--{found[1].removesuffix('_bytes').replace('_', '-')}"

    return re.sub(r"(?:option )?'(\w+)' in 'store_options'", flag, text)


def _leave(store: MooncakeStore) -> None:
    """Tell the master, if it answers, and end: an interpreter that ends with an open client waits for it."""
    leaving = threading.Thread(target=store.close, daemon=True)
    leaving.start()
    leaving.join(LEAVE_S)
    sys.stdout.flush()
    os._exit(0)
