"""From a configuration to a checked, tokenised, split corpus; without torch, so that the launcher can too."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from automoe.config.schema import Config
from automoe.data.token_cache import TokenCorpus, open_corpus
from automoe.data.tokenizer import Tokenizer, check_vocab_fits, load_tokenizer
from automoe.errors import DataError

Split = Literal["train", "validation"]


def prepare_data(config: Config, cache_dir: Path | None = None) -> tuple[Tokenizer, TokenCorpus]:
    """Open the corpus, tokenised into the cache if it is not there yet, and refuse what cannot train.

    Called before ranks start, it finds bad text while one process is there to say so, and leaves the
    ranks a cache to map.

    Args:
        cache_dir: where the tokenised corpus is kept; None is ``default_cache_dir()``.

    Raises:
        ConfigError: a tokenizer that cannot be loaded or is larger than the embedding.
        DataError: text that cannot be read, a document too long under ``on_long=error``, or an empty split.
    """
    check_vocab_fits(config)
    tokenizer = load_tokenizer(config.data.tokenizer)
    corpus = open_corpus(config.data, tokenizer, cache_dir)
    if config.data.on_long == "error":
        _refuse_long(corpus, config.train.seq_len)
    split_documents(corpus, config.data.val_fraction, "train")
    if config.train.val_every:
        split_documents(corpus, config.data.val_fraction, "validation")
    return tokenizer, corpus


def split_documents(corpus: TokenCorpus, val_fraction: float, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths of the documents of one split.

    A document belongs to validation when the hash of its text, read as a fraction of 2**64, is below
    ``val_fraction``: equal texts never stand on both sides, and adding documents moves none. If that
    leaves a side empty, the document of lowest hash alone is validation; a corpus of one document
    gives up its tail.

    Raises:
        DataError: nothing is left for the split.
    """
    starts, lengths = corpus.starts, corpus.lengths
    if len(lengths) == 1 and val_fraction > 0:
        tail = max(2, round(int(lengths[0]) * val_fraction))  # two tokens make one label
        head = int(lengths[0]) - tail
        if head >= 2:
            return (starts, lengths - tail) if split == "train" else (starts + head, np.array([tail]))
    validation = corpus.hashes.astype(np.float64) / 2.0**64 < val_fraction
    if val_fraction > 0 and len(lengths) > 1 and (validation.all() or not validation.any()):
        validation = corpus.hashes == corpus.hashes.min()
    chosen = validation if split == "validation" else ~validation
    if not chosen.any():
        raise DataError(
            f"No document for the {split} split: {len(lengths)} documents, {int(lengths.sum())} tokens, "
            f"data.val_fraction={val_fraction}. Add documents or change data.val_fraction; without a validation "
            f"split set train.val_every=0."
        )
    return starts[chosen], lengths[chosen]


def _refuse_long(corpus: TokenCorpus, seq_len: int) -> None:
    too_long = np.flatnonzero(corpus.lengths > seq_len)
    if len(too_long):
        raise DataError(
            f"{corpus.where(too_long[0])}: a document of {corpus.lengths[too_long[0]]} tokens, its end-of-text token "
            f"counted, does not fit train.seq_len={seq_len} under data.on_long=error ({len(too_long)} of "
            f"{len(corpus.lengths)} documents do not; the longest has {corpus.lengths.max()}). Shorten it, raise "
            f"train.seq_len, or set data.on_long=split."
        )
