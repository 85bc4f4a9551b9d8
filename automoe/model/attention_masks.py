"""Which keys a query may attend to: as a dense mask, or as blocks of scores for FlexAttention.

Letters: B rows, S positions of this rank's queries, R positions of the whole row, Q queries and K
keys of one block of queries (``automoe.config.context.query_blocks``), q and k their blocks of
``BLOCK`` positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from automoe.comm.communicators import SINGLE_RANK, Communicator
from automoe.comm.tokens import Tokens
from automoe.config.context import query_blocks
from automoe.model.rows import gather_row

BLOCK = 128  # positions of FlexAttention's blocks of queries and of keys


class QueryBlock(NamedTuple):
    """A block of a rank's queries, the range of keys that they read, and their mask.

    Under context parallelism a rank has two blocks of queries, which see different ranges of keys.

    Attributes:
        queries: range of this rank's positions.
        keys: range of the positions of keys.
        mask: [B, 1, queries, keys] bool, True where a query sees a key; or FlexAttention's mask; or
            for ring attention document ids [B, R]. None: plain causality.
    """

    queries: slice
    keys: slice
    mask: Tensor | BlockMask | None


# The arguments are those of ``dense_masks``.
MaskFn = Callable[[Tokens, Communicator, int, bool], list[QueryBlock]]


def document_ids(tokens: Tokens, keys: Communicator, always: bool) -> Tensor | None:
    """Return the document ids [B, S] that masks need; None if no sequence holds two documents.

    Without documents SDPA takes its causal kernel, and one document per sequence is common. Ids are
    compared on the CPU only, since on a GPU this would cost a host sync, and only if this rank
    holds whole sequences; in all other cases they are returned.

    Args:
        keys: the ranks from which attention gathers keys.
        always: return the ids even if each sequence is one document.
    """
    docs_BS = tokens.doc_ids
    if docs_BS is None or docs_BS.device.type != "cpu" or keys.num_ranks > 1 or always:
        return docs_BS
    return None if bool((docs_BS == docs_BS[:, :1]).all()) else docs_BS


def attention_mask(
    tokens: Tokens, keys: Communicator = SINGLE_RANK, window: int = 0, always: bool = False
) -> Tensor | None:
    """Return a mask [B, 1, S, R], True where a query may attend to a key; None for plain causality.

    S are this rank's positions, R those of the whole sequence.

    Args:
        keys: the ranks from which attention gathers keys.
        window: a query attends to at most this many positions of its sequence, its own included;
            0: no limit.
        always: mask all sequences that have document ids, whatever the ids, since compiled code is
            specialised to one case.
    """
    docs_BS = document_ids(tokens, keys, always)
    if docs_BS is None and keys.num_ranks == 1 and not window:
        return None
    return seen_keys(tokens, keys, window, docs_BS)[:, None]


def seen_keys(
    tokens: Tokens, keys: Communicator, window: int = 0, docs_BS: Tensor | None = None
) -> Tensor:
    """Return [B, S, R], True where a query of this rank may see a key of the whole sequence.

    Args:
        keys: the ranks from which attention gathers keys.
        window: positions that a query sees, its own included; 0: no limit.
        docs_BS: document ids of this rank's positions; None: a sequence is one document.
    """
    key_index_BR = torch.arange(
        tokens.index.shape[1] * keys.num_ranks, device=tokens.index.device
    ).unsqueeze(0)
    mask_BSR = key_index_BR[:, None, :] <= tokens.index[:, :, None]
    if window:
        mask_BSR = mask_BSR & (key_index_BR[:, None, :] > tokens.index[:, :, None] - window)
    if docs_BS is not None:
        mask_BSR = mask_BSR & (gather_row(docs_BS, keys)[:, None, :] == docs_BS[:, :, None])
    return mask_BSR


def dense_masks(tokens: Tokens, keys: Communicator, window: int, always: bool) -> list[QueryBlock]:
    """Return the blocks of this rank's queries, each with a dense bool mask or None (plain causality).

    Args:
        keys: the ranks from which attention gathers keys.
        window: positions that a query sees, its own included; 0: no limit.
        always: make a mask for all sequences that have document ids, whatever the ids.
    """
    mask = attention_mask(tokens, keys, window, always)
    blocks = query_blocks(tokens.index.shape[1], keys.num_ranks, keys.rank, window)
    if keys.num_ranks == 1:
        return [QueryBlock(*blocks[0], mask)]
    return [QueryBlock(q, kv, mask[:, :, q, kv]) for q, kv in blocks]


def block_masks(
    tokens: Tokens, keys: Communicator, window: int, always: bool = True
) -> list[QueryBlock]:
    """Return the blocks of this rank's queries, each with FlexAttention's ``BlockMask``.

    The mask is made from document borders, without scores and without a host sync. Sequences
    without document ids get one too, a causal one, so ``always`` has no effect. A document is a run
    of positions with one id.

    Args:
        keys: the ranks from which attention gathers keys.
        window: positions that a query sees, its own included; 0: no limit.
    """
    first_BS = torch.zeros_like(tokens.index)
    if tokens.doc_ids is not None:
        docs_BR = gather_row(tokens.doc_ids, keys)
        place_R = torch.arange(docs_BR.shape[1], device=docs_BR.device)
        begins_BR = docs_BR != docs_BR.roll(1, dims=1)
        first_BS = torch.where(begins_BR, place_R, 0).cummax(1).values.gather(1, tokens.index)
    if window:
        first_BS = torch.maximum(first_BS, tokens.index - window + 1)
    made = []
    for q, kv in query_blocks(tokens.index.shape[1], keys.num_ranks, keys.rank, window):
        ranges = (x[:, q].int() - kv.start for x in (first_BS, tokens.index))
        made.append(QueryBlock(q, kv, _block_mask(*ranges, kv.stop - kv.start)))
    return made


def _block_mask(first_BQ: Tensor, last_BQ: Tensor, num_keys: int) -> BlockMask:
    """Return FlexAttention's mask of Q queries, each of which sees a range of keys.

    Args:
        first_BQ, last_BQ: number of the first and of the last key that each query sees. The ranges
            of successive queries overlap or touch.
        num_keys: number of keys.
    """
    num_queries = first_BQ.shape[1]
    padding = 0, -num_queries % BLOCK
    # padding sees nothing, so it adds no block of keys, and no block with padding is full
    first_BqQ = F.pad(first_BQ, padding, value=num_keys).unflatten(1, (-1, BLOCK))
    last_BqQ = F.pad(last_BQ, padding, value=-1).unflatten(1, (-1, BLOCK))
    starts_k = torch.arange(0, num_keys, BLOCK, device=first_BQ.device)
    ends_k = starts_k + BLOCK - 1
    # Ranges of successive queries overlap or touch: a block of queries sees one range of keys.
    seen = (first_BqQ.amin(2, True) <= ends_k) & (last_BqQ.amax(2, True) >= starts_k)
    whole = (first_BqQ.amax(2, True) <= starts_k) & (last_BqQ.amin(2, True) >= ends_k)
    listed = []
    for chosen_B1qk in ((seen & ~whole).unsqueeze(1).int(), whole.unsqueeze(1).int()):
        order = chosen_B1qk.argsort(dim=-1, descending=True, stable=True)
        listed += [chosen_B1qk.sum(-1, dtype=torch.int32), order.int()]
    first_BQ, last_BQ = first_BQ.contiguous(), last_BQ.contiguous()

    def mask_mod(b, h, query, key):
        return (first_BQ[b, query] <= key) & (key <= last_BQ[b, query])

    lengths = num_queries, num_keys
    return BlockMask.from_kv_blocks(
        *listed, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )
