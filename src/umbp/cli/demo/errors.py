"""How the demo ends when it can't show what it is there to show."""

from umbp.errors import UMBPError


class NotInstalledError(UMBPError):
    """Something that the demo needs is not installed; the message says what to install. Exit code 2."""


class DemoFailedError(UMBPError):
    """The demo ran into something that is not as it should be; the message says what. Exit code 1."""
