"""What an object carries beyond its pool: a seal directly behind the payload, in a format of its own.

`Pool.seal` writes it, `Pool.check_seal` and `Pool.adopt_seal` read it; docs/design.md has its bytes. Payload
and seal travel as one range, so whoever fetches an object on another host knows whether it is the one that
was asked for, whole.
"""

from enum import IntEnum

from umbp._native import SEAL_BYTES

__all__ = ["SEAL_BYTES", "SealStatus"]


class SealStatus(IntEnum):
    """What a seal says of one object. Arrays of these are uint8 with these values."""

    OK = 0
    INVALID = 1
    """Not a ticket that this process holds, or its slot is damaged."""
    NO_SEAL = 2
    """None, or one of another version."""
    WRONG_KEY = 3
    """Another key's."""
    WRONG_LENGTH = 4
    """Of a payload of another length."""
    BAD_CHECKSUM = 5
    """Payload or seal are damaged, or it was sealed without the checksum that was asked for."""
