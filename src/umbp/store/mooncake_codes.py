"""Mooncake's error codes, and what each means to us.

They are `ErrorCode` of its `mooncake-store/include/types.h`, as of 0.3.13 and 0.3.14; what they come with was
tried on 0.3.13. The Python calls give them back as they are. A code that isn't here is BROKEN.
"""

from __future__ import annotations

from umbp.store.base import Outcome

DONE, MISS, LATER, BROKEN = Outcome.DONE, Outcome.MISS, Outcome.LATER, Outcome.BROKEN
DAMAGED = Outcome.DAMAGED

ABSENT = -704
UNFIT = -600
SPOILED = -801

OUTCOMES: dict[int, Outcome] = {
    0: DONE,
    -1: BROKEN,  # internal error, or a client that was never set up
    -10: LATER,  # a buffer overflowed
    -100: BROKEN,  # no such shard
    -101: LATER,  # no segment: no node offers memory at this moment
    -102: LATER,  # the segment is there already
    -103: LATER,  # the master doesn't know this client (yet, or any more): it introduces itself again
    -200: LATER,  # no room: full of leased objects, or no node at all
    -300: BROKEN,  # versions differ
    -400: MISS,  # not a key
    -500: BROKEN,  # writing failed
    UNFIT: MISS,  # wrong arguments: the object is larger than the range, or the key is empty
    -601: LATER,  # another client is at it
    -700: LATER,  # not a moment to write it
    -701: LATER,  # nor to read it
    -702: MISS,  # no usable replica
    -703: LATER,  # is being put
    ABSENT: MISS,
    -705: DONE,  # is there already
    -706: LATER,  # leased, and removal wasn't forced
    -707: LATER,  # the lease ran out under the transfer, so the bytes may be another object's
    -708: LATER,  # is being copied or moved
    -709: LATER,  # is not
    -710: MISS,  # no such replica
    -711: DONE,  # the replica is there already
    -712: MISS,  # the replica is gone
    -713: LATER,  # the replica isn't in memory
    -714: LATER,  # the replica is in use
    -800: BROKEN,  # the transfer failed: the node that has it is dead or silent, or its queue is full
    SPOILED: MISS,  # its own checksum doesn't hold
    -900: BROKEN,  # no connection to the master
    -901: BROKEN,  # the master is silent
    -1010: BROKEN,  # the master is a standby
    -1011: BROKEN,  # the master can't do it in its mode
    -1100: MISS,  # of objects on disk, to -1203: the file isn't there
    -1101: MISS,
    -1102: MISS,
    -1103: LATER,  # the file can't be written
    -1104: MISS,
    -1105: LATER,  # the file is locked
    -1106: MISS,
    -1200: MISS,
    -1201: DONE,
    -1202: LATER,
    -1203: LATER,
    -1300: LATER,  # offloading to disk is off
    -1301: LATER,
    -1400: MISS,  # no such task
    -1401: LATER,  # too many tasks wait
    -1402: MISS,
    -1700: LATER,  # the tenant's quota is used up
    -1701: BROKEN,  # the tenant isn't registered
}


def outcome_of(code: int) -> Outcome:
    return OUTCOMES.get(code, Outcome.BROKEN)


def outcome_of_put(code: int) -> Outcome:
    """A put can't miss: what can't be taken as it is, isn't taken."""
    outcome = outcome_of(code)
    return LATER if outcome is MISS else outcome


def outcome_of_get(code: int, size: int) -> Outcome:
    """A get gives the object's size back. One that is smaller than the range was written to its start; of one
    that is larger `UNFIT` is all that is said, which says as much of other calls: see `outcome_of_unfit`.
    """
    if code >= 0:
        return DONE if code == size else DAMAGED
    if code == SPOILED:
        return DAMAGED
    outcome = outcome_of(code)
    return LATER if outcome is DONE else outcome


def outcome_of_unfit(found: int, size: int) -> Outcome:
    """Of a get that was `UNFIT`, when the object's size was asked for: its size, or an error."""
    return DAMAGED if found >= 0 and found != size else MISS


def outcome_of_exists(code: int) -> Outcome:
    """1 or 0, or an error; what can't be read at this moment isn't there."""
    if code >= 0:
        return DONE if code == 1 else MISS
    return BROKEN if outcome_of(code) is BROKEN else MISS


def outcome_of_remove(code: int) -> Outcome:
    return DONE if code >= 0 or outcome_of(code) is MISS else outcome_of(code)
