"""The few kinds of error that UMBP raises of its own."""


class UMBPError(Exception):
    """Any error of this package that is not also a standard kind."""


class ConfigError(UMBPError, ValueError):
    """The user's input can't be used; the one-line message names the option and what to write instead."""


class SegmentError(UMBPError):
    """A pool segment can't be made, attached or trusted; the message says why and what to do."""


class CapacityError(SegmentError, ConfigError):
    """A pool of the wanted size would not fit the free memory; refused before anything is allocated."""


class InvariantError(UMBPError, AssertionError):
    """An `audit()` found a broken invariant: a fault of this package, never of its user."""


def no_thread(name: str, error: RuntimeError) -> str:
    """What to say where the system refused to start a thread."""
    return (
        f"the system gives this process no thread for {name!r} ({error}): raise `ulimit -u`, or the "
        "container's limit of processes"
    )
