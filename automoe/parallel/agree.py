"""What must be equal on all ranks, compared before it can do harm."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any

import torch.distributed as dist

from automoe.errors import DataError


def same_on_all_ranks(value: Any, what: str) -> None:
    """Compare ``value`` over all ranks; 16 characters a rank travel, over the CPU backend. Collective.

    Args:
        value: plain JSON values.
        what: names it in the error, as the subject of a sentence: "the corpus".

    Raises:
        DataError: on every rank alike; names the ranks that differ from what most of them have, or from
            rank 0 where no value is more frequent than its.
    """
    mine = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, mine)
    usual = Counter(digests).most_common(1)[0][0]  # of equally frequent ones the first met
    differing = [rank for rank, digest in enumerate(digests) if digest != usual]
    if differing:
        ranks = ", ".join(str(rank) for rank in differing[:16]) + (", ..." if len(differing) > 16 else "")
        raise DataError(
            f"{what} is not the same on all ranks: {len(differing)} of {len(digests)} differ from the others: "
            f"rank {ranks}. Give every node the same files, or a run_dir and data on a disk that all share"
        )
