"""Memory and work of compressed attention (DeepSeek-V4) on a rank. Needs no torch.

The table uses b bytes per element, w = max(b, 4), and these letters: T tokens of the rank, R = T tp
positions that its heads read, S sequence, N heads of all tp ranks, D their width, L the latent of
queries, E = R / ratio entries (pooled keys), overlap 1 if their windows overlap, else 0, G groups of
heads that are projected to O numbers each, J heads of the indexer, Dj their width.

    queries and outputs        b T (L + 4 N D + G O) + b R L + (4 + w) T N
    keys                       b (T + R) D
    entries of width D         (b + w) R D (1 + overlap) + 2 b E D
    indexer                    R S / ratio, a byte each; w [T J (Dj + 1) + E Dj], entries of width Dj
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from automoe.config.schema import AttentionConfig, has_indexer, ratio_of, window_of

if TYPE_CHECKING:
    from automoe.planner.activations import TokenLoad

# Chunk lengths of automoe.kernels.compressed_attention and index_scores, repeated here because the planner must not
# import torch.
CHUNK, INDEX_CHUNK = 256, 128


def kept_bytes(attention: AttentionConfig, layer: int, load: TokenLoad, again: bool) -> float:
    """Return the bytes that a layer's compressed attention keeps for its backward pass.

    Args:
        load: sizes of one micro-batch on the rank.
        again: True if the backward pass computes the softmax attention again.
    """
    size, wide = load.number_bytes, max(4, load.number_bytes)
    tokens, row = load.tokens, load.tokens * load.tp
    assert attention.q_lora_rank is not None, "refused by the rules"
    heads, latent = tokens * attention.num_heads, attention.q_lora_rank
    dim, ratio = attention.head_dim, ratio_of(attention, layer)
    numbers = (tokens + row) * (latent + dim) + heads * dim * (3 if again else 4)
    numbers += tokens * attention.o_groups * attention.o_lora_rank
    num_bytes = float(size * numbers + 4 * (heads + 2 * tokens) + wide * heads * (not again))
    if not ratio:
        return num_bytes
    num_bytes += _pooled_bytes(attention, layer, load, dim)
    if has_indexer(attention, layer):
        learnt = float(tokens * attention.index_n_heads * (attention.index_head_dim + 1))
        learnt += row / ratio * attention.index_head_dim
        num_bytes += load.window_numbers / ratio + wide * learnt
        num_bytes += _pooled_bytes(attention, layer, load, attention.index_head_dim)
    return num_bytes


def _pooled_bytes(attention: AttentionConfig, layer: int, load: TokenLoad, dim: int) -> float:
    """Return the bytes that pooling windows into entries (keys) of width ``dim`` keeps for its backward pass.

    The rotated entries are included.
    """
    size, wide, row = load.number_bytes, max(4, load.number_bytes), load.tokens * load.tp
    ratio = ratio_of(attention, layer)
    overlaps = ratio == attention.sparse_ratio
    places = 16 * (1 + overlaps)  # in all rows, of kv and of gates, and of the windows before
    numbers = dim * (1 + overlaps) * (size + wide)  # the values of windows, and their weights
    return row * (numbers + places + (2 * size * dim + 4) / ratio)


def shared_bytes(
    attention: AttentionConfig, layers: Iterable[int], load: TokenLoad, again: bool
) -> float:
    """Return the bytes of tensors that a stage's layers share in one micro-batch, kept until its backward pass.

    They are rotary angles, the positions of pooling windows, and masks [queries, entries] of the entries (keys
    pooled from windows) that each query sees.

    Args:
        again: True if a layer is recomputed, and so reads all of these again; False leaves out those that no
            backward pass reads.
    """
    size, row, dims = load.number_bytes, load.tokens * load.tp, attention.qk_rope_head_dim
    ratios = {ratio_of(attention, layer) for layer in layers}
    num_bytes = size * row * dims * (2.0 if again else len({ratio > 0 for ratio in ratios}))
    for ratio in ratios - {0}:
        seen = again or ratio != attention.sparse_ratio
        num_bytes += row * (8 + (size * dims + 8) / ratio) + seen * load.window_numbers / ratio
    return num_bytes


def temporary_bytes(attention: AttentionConfig, layer: int, load: TokenLoad) -> float:
    """Return the largest temporary bytes of a layer's attention.

    The largest of three is taken: softmax attention and pooling in the backward pass, and the indexer's loss.
    """
    size, wide = load.number_bytes, max(4, load.number_bytes)
    row, dim, ratio = load.tokens * load.tp, attention.head_dim, ratio_of(attention, layer)
    heads = load.tokens * attention.num_heads
    positions = row // load.rows  # of one sequence
    queries = min(CHUNK, positions)
    keys = min(positions, queries + window_of(attention, layer))
    keys += positions // ratio if ratio else 0
    scores = queries / positions * heads * keys
    narrow = (2 * size + wide * load.on_cpu) * (size < wide)  # copies that the products read
    gradients = size * heads * dim
    parts = 1 + (ratio == attention.sparse_ratio)
    pooling = gradients + 4.0 * wide * row * dim * parts * (ratio > 0)
    num_bytes = 2.0 * gradients + scores * (2 * wide + narrow) + wide * row * dim
    num_bytes += 3 * wide * load.rows * keys * dim
    if not has_indexer(attention, layer):
        return max(num_bytes, pooling)
    # as for ``automoe.planner.workspace``; the entries are copied for all heads
    by_head = max(attention.num_heads / load.tp, attention.index_n_heads)
    held = max(2.0, 1 + 3 * min(1.0, INDEX_CHUNK / positions) * by_head)
    copied = size * attention.num_heads / load.tp * dim * row / ratio
    return max(num_bytes, pooling, wide * load.window_numbers / ratio * held + copied)


def score_flops(attention: AttentionConfig, layer: int, seq_len: int) -> float:
    """Return the FLOPs per position, in the forward pass, of the attention scores and outputs of all heads.

    Each chunk of queries multiplies all keys that some of its queries may see. A row has ``seq_len`` positions.
    """
    ratio, queries = ratio_of(attention, layer), min(CHUNK, seq_len)
    keys = min(seq_len, queries + window_of(attention, layer))
    entries = (seq_len + queries) / (2 * ratio) if ratio else 0
    return 4.0 * attention.num_heads * attention.head_dim * (keys + entries)


def gathered_width(attention: AttentionConfig, layer: int) -> int:
    """Return how many elements per token tp ranks all-gather in a layer with compressed attention.

    They belong to latents of queries, to keys, and to the projections from which entries (a pooled
    key per window) are made.
    """
    widths = attention.head_dim + attention.index_head_dim * has_indexer(attention, layer)
    ratio = ratio_of(attention, layer)
    pooled = 2 * widths * (1 + (ratio == attention.sparse_ratio)) * (ratio > 0)
    return (attention.q_lora_rank or 0) + attention.head_dim + pooled
