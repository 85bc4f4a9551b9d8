"""Names in a run's ``metrics.jsonl``, and the perplexity of a loss. No torch."""

from __future__ import annotations

import math
from typing import Any

from automoe.storage.sealed import SEAL

# tokens: trained tokens (labels that count) of the whole run so far
REQUIRED_KEYS = (
    "step loss grad_norm lr tokens tokens_per_second mfu peak_memory_bytes expert_max_load"
).split()
# Optional keys of a step's record, and keys that a validation adds.
OTHER_KEYS = (
    "step_seconds skipped skip_reason skipped_rows skipped_documents num_skipped_documents "
    "mfu_full_attention seq_balance_loss global_balance_loss micro_batch_balance_loss z_loss "
    "indexer_loss routes_differ max_share max_over_mean entropy dropped_share zero_expert_share "
    "max_attention_logit fp8_clipped_share probe_seconds_min probe_seconds_median probe_seconds_max slowest_rank "
    "slowest_host checkpoint_seconds checkpoint_share checkpoint_in_flight checkpoint_failures"
).split()
VALIDATION_KEYS = ("val_loss", "val_loss_ema", "val_perplexity", "val_bits_per_byte")


def is_taken(name: str) -> bool:
    """Return True if automoe itself may write the key ``name`` into a step's record.

    A user's own metric needs another name.
    """
    taken = (*REQUIRED_KEYS, *OTHER_KEYS, *VALIDATION_KEYS, SEAL)
    of_depth = ("mtp_loss.", "mtp_acceptance.", "val_mtp_loss.", "val_mtp_acceptance.")
    return name in taken or name.startswith(("val_loss.", *of_depth))


def perplexity(loss: Any) -> float:
    """Return exp(loss) for a loss in nats per token; infinity if a float cannot hold it.

    Args:
        loss: number, or its string form in a record.
    """
    try:
        return math.exp(float(loss))
    except OverflowError:
        return math.inf
