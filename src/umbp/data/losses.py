"""Why objects were not moved, in the few words by which losses are counted."""

from __future__ import annotations

from enum import StrEnum

from umbp.data.jobs import TransferJobState, TransferJobStatus


class LossReason(StrEnum):
    """A job whose `error` begins with one of these words and a colon has lost its keys for that reason."""

    ABSENT = "absent"
    """It isn't stored, or no more."""
    DAMAGED = "damaged"
    """Its bytes are not those that were stored."""
    FULL = "full"
    """There is no room, and nothing that may go for it."""
    CLEARED = "cleared"
    """It was cleared away between its store and its publishing."""
    BUSY = "busy"
    """The pool, or the cluster store, could not do it in time."""
    GONE = "gone"
    """The pool itself is not there, or the cluster store does not answer."""
    CANCELLED = "cancelled"
    """It took too long."""
    BEHIND = "behind"
    """One before it was lost, without which it is of no use."""
    FAILED = "failed"
    """Anything else."""


_WORDS = {str(reason): reason for reason in LossReason}


def reason_of(job: TransferJobState) -> LossReason:
    """Why keys of a job that is final were not moved, as far as it tells."""
    if job.status is TransferJobStatus.CANCELLED:
        return LossReason.CANCELLED
    return _WORDS.get((job.error or "").partition(":")[0], LossReason.FAILED)
