"""The answers of the pool's verbs, one for each key, as the native core numbers them."""

from enum import IntEnum


class Outcome(IntEnum):
    """What became of one key or ticket. Arrays of outcomes are uint8 with these values."""

    RESERVED = 0
    EXISTS = 1
    """Published already."""
    BUSY = 2
    """Being written, by this or another process."""
    FULL = 3
    """No room, and nothing more that may be evicted."""
    TOO_LARGE = 4
    """No slab could ever hold it."""
    NOT_NOW = 5
    """A living process kept the lock too long; asking again later is fine."""
    PUBLISHED = 6
    STALE = 7
    """Reserved before its namespace was cleared: freed instead of published."""
    INVALID = 8
    """Not a ticket that this process holds in the state that the verb needs."""
    HIT = 9
    MISS = 10
    RELEASED = 11
    DEFERRED = 12
    """Accepted; done with this process's next call that gets the lock."""
    REMOVED = 13
    ABANDONED = 14
    TOUCHED = 15


class KeyState(IntEnum):
    """What a lookup finds of a key. Arrays of states are uint8 with these values."""

    ABSENT = 0
    RESERVED = 1
    """Being written, by this or another process."""
    PUBLISHED = 2


class CopyStatus(IntEnum):
    """What became of one object's copy."""

    OK = 0
    BAD_TICKET = 1
    """Not held by this process in the state that the copy needs."""
    BAD_BLOCK = 2
    """A block id outside the cache."""
    BAD_LENGTH = 3
    """The slot's object has another length than the layout's."""
    BAD_CHECKSUM = 4
    """Damaged, another key's, or stored without the checksum that was asked for. The target of a load may
    hold the damaged bytes."""
    FAILED = 5
    """A device's driver could not move it; what the target holds is not known."""
    BAD_ARRIVAL = 6
    """It came from elsewhere damaged, which its first load has found. The target may hold the damaged
    bytes."""
