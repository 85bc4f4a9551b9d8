"""How many micro-batches' activations a pipeline rank holds at once, by walking its schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def rank_actions(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, pp_rank: int
) -> Iterator[tuple[bool, int]]:
    """(is_forward, local stage) of one pp rank's whole step, in order.

    The orders are those of torch.distributed.pipelining: GPipe runs all forwards first; 1F1B starts
    ``pp - pp_rank`` forwards, then alternates; Interleaved1F1B takes rounds of up to ``pp``
    micro-batches through its stages in turn (arXiv 2104.04473, section 2.2).
    """
    total = num_micro_batches * stages_per_rank
    round_size = num_micro_batches // max(1, num_micro_batches // pp)
    if schedule == "GPipe":
        ahead = total
    elif schedule == "1F1B":
        ahead = pp - pp_rank
    else:
        ahead = (stages_per_rank - 1) * round_size + 2 * (pp - 1 - pp_rank) + 1
    ahead = min(ahead, total)
    for index in range(total + ahead):
        if index < total:
            yield True, index // round_size % stages_per_rank
        done = index - ahead + 1
        if 0 <= done < total:
            yield False, stages_per_rank - 1 - done // round_size % stages_per_rank


def peak_in_flight(
    stage_bytes: Sequence[float], schedule: str, pp: int, num_micro_batches: int, pp_rank: int
) -> tuple[float, list[int]]:
    """Most activation bytes that one pp rank holds, and how many micro-batches of each local stage then.

    Args:
        stage_bytes: activation bytes of one micro-batch in each of the rank's stages, in order.
    """
    held = [0] * len(stage_bytes)
    peak, peak_held = 0.0, list(held)
    for is_forward, stage in rank_actions(schedule, pp, len(stage_bytes), num_micro_batches, pp_rank):
        held[stage] += 1 if is_forward else -1
        now = sum(count * size for count, size in zip(held, stage_bytes, strict=True))
        if now > peak:
            peak, peak_held = now, list(held)
    return peak, peak_held
