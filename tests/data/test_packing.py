"""Packing: every token once an epoch, labels inside documents, order from the seed alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automoe.comm.tokens import IGNORE
from automoe.data.packing import PackedRows, seeded_order

PAD = 10**6


def packed(lengths: list[int], seq_len: int, seed: int = 0, document_mask: bool = True) -> PackedRows:
    """Documents whose token at place i of the corpus is i: a token tells where it came from."""
    array = np.array(lengths, dtype=np.int64)
    return PackedRows(
        np.arange(array.sum(), dtype=np.uint32),
        np.cumsum(array) - array,
        array,
        seq_len=seq_len,
        seed=seed,
        pad_id=PAD,
        document_mask=document_mask,
    )


corpora = st.lists(st.integers(1, 20), min_size=1, max_size=12)
seq_lens = st.integers(1, 17)
seeds = st.integers(0, 2**32)


@settings(deadline=None)
@given(corpora, seq_lens, seeds, st.integers(0, 5), st.booleans())
def test_every_token_appears_once_in_an_epoch(lengths, seq_len, seed, epoch, document_mask):
    rows = packed(lengths, seq_len, seed, document_mask)
    taken = rows.take(np.arange(epoch * rows.num_rows, (epoch + 1) * rows.num_rows))
    real = taken.doc_ids >= 0
    assert sorted(taken.tokens[real]) == list(range(sum(lengths)))
    assert (taken.tokens[~real] == PAD).all() and (taken.labels[~real] == IGNORE).all()
    assert (~real).sum() < seq_len, "padding fills up the last row only"


@settings(deadline=None)
@given(corpora, seq_lens, seeds, st.lists(st.integers(-1, 40), min_size=1, max_size=4))
def test_the_documents_of_rows_are_those_their_tokens_come_from(lengths, seq_len, seed, indices):
    rows = packed(lengths, seq_len, seed)
    tokens = rows.take(np.array(indices)).tokens
    came_from = np.searchsorted(np.cumsum(lengths), tokens[tokens != PAD], side="right")
    assert rows.documents(np.array(indices)).tolist() == np.unique(came_from).tolist()


@settings(deadline=None)
@given(corpora, seq_lens, seeds, st.booleans())
def test_labels_are_the_next_token_of_the_same_document(lengths, seq_len, seed, document_mask):
    rows = packed(lengths, seq_len, seed, document_mask)
    taken = rows.take(np.arange(2 * rows.num_rows))
    last_tokens = set(np.cumsum(lengths) - 1)
    for token, label in zip(taken.tokens.ravel(), taken.labels.ravel(), strict=True):
        if token == PAD or token in last_tokens:
            assert label == IGNORE
        else:
            assert label == token + 1, "also across the end of a row"


@settings(deadline=None)
@given(corpora, seq_lens, seeds)
def test_doc_ids_and_positions_restart_at_documents(lengths, seq_len, seed):
    rows = packed(lengths, seq_len, seed)
    taken = rows.take(np.arange(rows.num_rows))
    document_of = np.repeat(np.arange(len(lengths)), lengths)
    for tokens, positions, doc_ids in zip(taken.tokens, taken.positions, taken.doc_ids, strict=True):
        seen: list[int] = []  # documents of this row, in order
        count = 0
        for token, position, doc_id in zip(tokens, positions, doc_ids, strict=True):
            if token == PAD:
                assert doc_id == -1
                continue
            if not seen or seen[-1] != document_of[token]:
                seen.append(document_of[token])
                count = 0
            assert (position, doc_id) == (count, len(seen) - 1)
            count += 1


@settings(deadline=None)
@given(corpora, seq_lens)
def test_without_document_mask_a_row_is_one_document(lengths, seq_len):
    rows = packed(lengths, seq_len, document_mask=False)
    taken = rows.take(np.arange(rows.num_rows))
    real = taken.tokens != PAD
    assert (taken.doc_ids == np.where(real, 0, -1)).all()
    assert (taken.positions == np.where(real, np.arange(seq_len), 0)).all()
    assert (taken.tokens == packed(lengths, seq_len).take(np.arange(rows.num_rows)).tokens).all()


@settings(deadline=None)
@given(corpora, seq_lens, seeds, st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_a_row_depends_on_its_index_alone(lengths, seq_len, seed, indices):
    together = packed(lengths, seq_len, seed).take(np.array(indices))
    for place, index in enumerate(indices):
        alone = packed(lengths, seq_len, seed).take(np.array([index]))
        for name in ("tokens", "labels", "positions", "doc_ids"):
            assert (getattr(together, name)[place] == getattr(alone, name)[0]).all()


def test_documents_are_shuffled_by_seed_and_epoch():
    def neighbours(seed: int, epoch: int) -> set[frozenset[int]]:
        """Which documents share a row: blind to the order of rows."""
        tokens = packed([5] * 40, 10, seed).take(np.arange(20 * epoch, 20 * (epoch + 1))).tokens
        return {frozenset(row // 5) for row in tokens}

    unshuffled = {frozenset((2 * i, 2 * i + 1)) for i in range(20)}
    orders = [unshuffled, neighbours(1, 0), neighbours(1, 1), neighbours(2, 0)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
    assert neighbours(1, 1) == neighbours(1, 1)


def test_rows_are_shuffled_by_seed_and_epoch():
    def first_tokens(seed: int, epoch: int) -> list[int]:
        """Of one long document, which the shuffle of documents cannot change."""
        return packed([200], 10, seed).take(np.arange(20 * epoch, 20 * (epoch + 1))).tokens[:, 0].tolist()

    orders = [list(range(0, 200, 10)), first_tokens(1, 0), first_tokens(1, 1), first_tokens(2, 0)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_index_minus_one_is_a_row_of_padding():
    taken = packed([6, 4], 5).take(np.array([0, -1]))
    assert (taken.doc_ids[0] >= 0).all()
    assert (taken.tokens[1] == PAD).all() and (taken.labels[1] == IGNORE).all() and (taken.doc_ids[1] == -1).all()


def test_documents_of_one_token_train_nothing():
    taken = packed([1] * 12, 4).take(np.arange(3))
    assert (taken.labels == IGNORE).all()
    assert sorted(taken.tokens.ravel()) == list(range(12))


def test_seeded_order_never_changes():
    """A checkpoint's place in the data means nothing if another version shuffles otherwise."""
    assert seeded_order(8, 0, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert seeded_order(8, 7, 3, 1).tolist() == [1, 6, 5, 0, 7, 2, 3, 4]


@pytest.mark.parametrize("n", [1, 2, 1000])
def test_seeded_order_is_a_permutation(n):
    assert sorted(seeded_order(n, 5)) == list(range(n))
