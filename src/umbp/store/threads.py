"""Threads that are asked of the system, which may have none left."""

from __future__ import annotations

import threading
from collections.abc import Callable

from umbp.errors import no_thread
from umbp.store.base import StoreError


def start_thread(target: Callable[[], None], name: str) -> None:
    """A daemon. `StoreError`, one sentence, where the system has no thread for it."""
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        raise no_thread_for(name, error) from error


def no_thread_for(name: str, error: RuntimeError) -> StoreError:
    """What to say of `Thread.start`'s error."""
    return StoreError(no_thread(name, error))
