"""Packing of whole samples: each once an epoch, alone to itself, trained where it is marked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automoe.comm.tokens import IGNORE
from automoe.data.packing import SampleRows, best_fit

PAD = 10**6


def rows_of(lengths: list[int], seq_len: int, seed: int = 0, **options) -> SampleRows:
    """Samples whose token at place i of the corpus is i; every third token is trained."""
    array = np.array(lengths, dtype=np.int64)
    tokens = np.arange(array.sum(), dtype=np.uint32)
    options = {"seq_len": seq_len, "seed": seed, "pad_id": PAD} | options
    return SampleRows(tokens, np.cumsum(array) - array, array, trained=tokens % 3 == 0, **options)


corpora = st.lists(st.integers(1, 16), min_size=1, max_size=20)
seeds = st.integers(0, 2**32)


@settings(deadline=None)
@given(corpora, st.integers(16, 24), seeds, st.integers(0, 3), st.booleans())
def test_every_sample_is_once_in_an_epoch_whole_and_trained_as_marked(lengths, seq_len, seed, epoch, pack) -> None:
    rows = rows_of(lengths, seq_len, seed, pack=pack)
    taken = rows.take(np.arange(epoch * rows.num_rows, (epoch + 1) * rows.num_rows))
    found = []
    for tokens, labels, positions, doc_ids in zip(*vars(taken).values(), strict=True):
        count = doc_ids.max() + 1
        assert (np.diff(doc_ids[doc_ids >= 0]) >= 0).all() and count >= 1
        assert pack or count == 1
        padding = doc_ids < 0
        assert (tokens[padding] == PAD).all() and (labels[padding] == IGNORE).all() and not positions[padding].any()
        for sample in range(count):
            here = np.flatnonzero(doc_ids == sample)
            assert (np.diff(here) == 1).all() and positions[here].tolist() == list(range(len(here)))
            assert (np.diff(tokens[here]) == 1).all()
            found.append((int(tokens[here[0]]), len(here)))
            following = tokens[here[1:]]
            assert labels[here[:-1]].tolist() == np.where(following % 3 == 0, following, IGNORE).tolist()
            assert labels[here[-1]] == IGNORE
    starts = np.cumsum(lengths) - lengths
    assert sorted(found) == sorted(zip(starts.tolist(), lengths, strict=True))


@settings(deadline=None)
@given(corpora, seeds, st.lists(st.integers(-1, 40), min_size=1, max_size=4))
def test_the_samples_of_rows_are_those_their_tokens_come_from(lengths, seed, indices) -> None:
    rows = rows_of(lengths, 16, seed)
    tokens = rows.take(np.array(indices)).tokens
    came_from = np.searchsorted(np.cumsum(lengths), tokens[tokens != PAD], side="right")
    assert rows.documents(np.array(indices)).tolist() == np.unique(came_from).tolist()


def test_epochs_and_seeds_differ_and_repeat() -> None:
    lengths = [3, 5, 5, 5, 7, 9, 9, 2, 2, 4] * 4
    rows = rows_of(lengths, 16)
    assert (rows.take(np.arange(4)).tokens == rows_of(lengths, 16).take(np.arange(4)).tokens).all()
    n = rows.num_rows
    for other in (rows.take(np.arange(n, 2 * n)), rows_of(lengths, 16, seed=1).take(np.arange(n))):
        assert (other.tokens != rows.take(np.arange(n)).tokens).any()


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_rows_are_full_on_a_realistic_mix_of_lengths(seq_len: int) -> None:
    """Lengths of chats are about log-normal; here with a median of 400 tokens and a long tail that is cut off."""
    lengths = np.exp(np.random.default_rng(0).normal(6, 1, 5000)).astype(np.int64).clip(8, seq_len)
    rows = best_fit(-np.sort(-lengths), seq_len).max() + 1
    assert lengths.sum() / (rows * seq_len) >= 0.99
