"""What context parallelism computes and sends, as the model does it and the plan counts it. No
torch.

Ranks that share rows have them as ``automoe.parallel.context.head_tail_index`` cuts them: of 2 P
chunks one from the head and its mirror from the tail.
"""

from __future__ import annotations

from automoe.config.schema import AttentionConfig

# How many operations of a product take as long as one byte between ranks: an H100, 400 TFLOP/s in
# products and 450 GB/s over NVLink; one core and gloo on one machine, measured to lie between 110
# and 770.
FLOPS_PER_BYTE = {"cuda": 900, "cpu": 250}


def query_blocks(
    num_queries: int, num_ranks: int, rank: int, window: int = 0
) -> list[tuple[slice, slice]]:
    """Runs of the row among a rank's positions, and the keys of the row that one of its queries
    sees.

    So each of P ranks computes 2 P + 1 pairs of chunks, of the 4 P that there are, and fewer with a
    ``window``.
    """
    if num_ranks == 1:
        return [(slice(0, num_queries), slice(0, num_queries))]
    chunk, found = num_queries // 2, []
    for start, number in ((0, rank + 1), (chunk, 2 * num_ranks - rank)):
        # Later keys are masked for all of the block's queries, and so are those further back than
        # its first sees.
        first = max((number - 1) * chunk - window + 1, 0) if window else 0
        found.append((slice(start, start + chunk), slice(first, number * chunk)))
    return found


def mean_keys(seq_len: int, num_ranks: int, window: int = 0) -> float:
    """Keys that a query is multiplied by on the rank whose blocks are the largest, on average over
    its queries."""
    chunk = seq_len // (2 * num_ranks)
    if num_ranks == 1 or not chunk:
        return float(seq_len)
    ranks = [query_blocks(2 * chunk, num_ranks, rank, window) for rank in (0, num_ranks - 1)]
    return max(sum(keys.stop - keys.start for _, keys in blocks) for blocks in ranks) / 2


def expanded_width(attention: AttentionConfig, tp: int) -> int:
    """Numbers of a token's keys and values in the heads of one of ``tp`` ranks, as MLA's latent
    expands to them."""
    return attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim) // tp


def gathers_latents(latent: int, expanded: int, device_type: str, num_bytes: int) -> bool:
    """Whether ranks that share rows gather MLA's latent, and each expands the whole row; else what
    it expands to.

    To expand a token of another rank again takes 2 latent * expanded operations, and twice as many
    backward. To send what it expands to instead takes its width in a gather, and again in the
    reduce-scatter of the backward.

    Args:
        latent: numbers of a token's latent, 512 in DeepSeek-V3.
        expanded: of its keys and values in this rank's heads, 32,768 in DeepSeek-V3.
        num_bytes: of a number.
    """
    saved = 2 * num_bytes * (expanded - latent)
    return 6 * latent * expanded < FLOPS_PER_BYTE[device_type] * saved
