"""FLOPs and bytes sent of context parallelism, for the model and the planner. Needs no torch.

The P ranks of a cp group share a row, which is cut into 2 P chunks. Rank r holds chunk r and its
mirror, chunk 2 P - 1 - r (``automoe.model.rows.head_tail_index``).
"""

from __future__ import annotations

from typing import NamedTuple

from automoe.config.schema import AttentionConfig

# FLOPs of a matrix product that take as long as sending one byte between ranks. cuda: an H100 with
# 400 TFLOP/s and 450 GB/s over NVLink. cpu: one core with gloo, measured between 110 and 770.
FLOPS_PER_BYTE = {"cuda": 900, "cpu": 250}


def query_blocks(
    num_queries: int, num_ranks: int, rank: int, window: int = 0
) -> list[tuple[slice, slice]]:
    """Return a rank's blocks of queries, each with the smallest range of keys that it attends to.

    A row has 2 P chunks, of which each of P ranks holds one from the head and its mirror from the
    tail; each is a block. Causal masking leaves each rank 2 P + 1 pairs of a query chunk and a key
    chunk instead of 4 P; a sliding window leaves fewer. If P is 1, the whole row is one block.

    Args:
        num_queries: positions of the row that the rank holds.
        num_ranks: P, ranks of the cp group.
        rank: rank within the cp group.
        window: sliding-window size in tokens; 0 for full causal attention.

    Returns:
        (slice of the rank's positions, slice of the full row's keys) per block.
    """
    if num_ranks == 1:
        return [(slice(0, num_queries), slice(0, num_queries))]
    chunk = num_queries // 2
    blocks = []
    for start, number in ((0, rank + 1), (chunk, 2 * num_ranks - rank)):
        # All queries of the block mask the keys after its end, and the keys before the window of
        # its first query.
        first = max((number - 1) * chunk - window + 1, 0) if window else 0
        blocks.append((slice(start, start + chunk), slice(first, number * chunk)))
    return blocks


def mean_keys(seq_len: int, num_ranks: int, window: int = 0) -> float:
    """Return the mean number of keys per query that attention reads on the cp rank with most work.

    A rank has two blocks, chunks of queries with a range of keys (``query_blocks``). Masked keys
    within a block count too; a single rank reads all ``seq_len`` keys.

    Args:
        seq_len: tokens of a row.
        num_ranks: ranks of the cp group.
        window: sliding-window size in tokens; 0 for full causal attention.
    """
    chunk = seq_len // (2 * num_ranks)
    if num_ranks == 1 or not chunk:
        return float(seq_len)
    ranks = [query_blocks(2 * chunk, num_ranks, rank, window) for rank in (0, num_ranks - 1)]
    return max(sum(keys.stop - keys.start for _, keys in blocks) for blocks in ranks) / 2


class Exchange(NamedTuple):
    """Elements per position that a cp rank sends to exchange positions for heads (Ulysses).

    Attributes:
        into: in the all-to-all of queries, keys and values, including the share that stays on the
            rank.
        gathered: to each other rank, in the all-gather of MLA's rotary key; 0 without MLA.
        out: in the all-to-all of attention's output, including the share that stays on the rank.
    """

    into: int
    gathered: int
    out: int


def exchange_widths(attention: AttentionConfig, linear: bool, tp: int, cp: int) -> Exchange:
    """Return the elements per position that a cp rank sends to exchange positions for heads (Ulysses).

    Args:
        linear: True for a gated delta net, which exchanges the input of its convolution.
        tp, cp: sizes of the mesh axes.
    """
    if linear:
        values = attention.linear_num_value_heads * attention.linear_value_head_dim
        keys = attention.linear_num_key_heads * attention.linear_key_head_dim
        into = 2 * keys + values + 2 * attention.linear_num_value_heads
        return Exchange(into // tp, 0, values // tp)
    heads = attention.num_heads // tp
    if attention.kind == "mla":
        rope = attention.qk_rope_head_dim
        query = attention.qk_nope_head_dim + rope
        into = heads * query + expanded_width(attention, tp)
        return Exchange(into, rope, heads * attention.v_head_dim)
    key_heads = max(attention.num_kv_heads // tp, cp)  # fewer are repeated for the ranks
    dim = attention.head_dim
    return Exchange((heads + 2 * key_heads) * dim, 0, heads * dim)


def expanded_width(attention: AttentionConfig, tp: int) -> int:
    """Return the number of elements of a token's keys and values on a tp rank, expanded by MLA."""
    return attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim) // tp


def gathers_latents(latent: int, expanded: int, device_type: str, num_bytes: int) -> bool:
    """Return True if cp ranks gather MLA's latents; False if they gather keys and values.

    Gathering latents sends less, but each rank then expands the tokens of the other ranks too: 2
    latent * expanded FLOPs per token, and twice as many backward. Gathering keys and values sends
    their full width in the all-gather, and again in the backward's reduce-scatter. The two costs
    are compared by ``FLOPS_PER_BYTE``: FLOPs that take as long as sending one byte.

    Args:
        latent: width of a token's latent, 512 in DeepSeek-V3.
        expanded: width of a token's keys and values in this rank's heads, 32,768 in DeepSeek-V3.
        device_type: ``cuda`` or ``cpu``.
        num_bytes: bytes per number.
    """
    saved = 2 * num_bytes * (expanded - latent)
    return 6 * latent * expanded < FLOPS_PER_BYTE[device_type] * saved
