"""Errors of a save or a load, in words for people and the same on every rank."""

from __future__ import annotations

import errno
import os

from torch.distributed.checkpoint.api import CheckpointException

from automoe.comm.agreement import for_all, worst
from automoe.errors import SaveError


def dcp_error(error: CheckpointException) -> Exception:
    """Return the error that torch.distributed.checkpoint wraps, the same on every rank.

    ``CheckpointException`` itself is not an ``Exception``.
    """
    return worst(for_all(rank, error.failures[rank][0]) for rank in sorted(error.failures))


def save_error(error: OSError, step: int, newest: str | None) -> SaveError:
    """Return a save's write error as a user message; ``newest`` is the newest existing step."""
    reason = error.strerror or os.strerror(error.errno or errno.EIO)
    if error.filename is not None:
        reason += f" ({error.filename})"
    if newest == f"step-{step}":
        outcome = f"the checkpoint of step {step} was written, but LATEST was not or older ones not deleted: {reason}"
    else:
        newest_text = (
            f"{newest} stays the newest checkpoint" if newest else "there is no checkpoint yet"
        )
        outcome = f"the checkpoint of step {step} was not saved: {reason}; {newest_text}"
    return SaveError(f"{outcome}. Free space or repair the disk")
