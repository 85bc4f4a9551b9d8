"""Tokenised corpora in a cache on disk, and their split into training and validation.

One process writes the cache for all ranks of a machine, which map it into memory. This module does
not import torch, so that the launcher can prepare data too.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

from automoe.config.batch import steps_for
from automoe.config.data_schema import DataConfig, sources_of
from automoe.config.rule_engine import check_rows
from automoe.config.rules_settings import settings_rows
from automoe.config.schema import Config
from automoe.data.chat import read_conversations
from automoe.data.chat_corpus import tokenise_chat
from automoe.data.chat_template import ChatTemplate, chat_template_of
from automoe.data.corpora import find_files, read_documents, reader_digest
from automoe.data.packing import PackedRows, SampleRows
from automoe.data.tokenise import place_of, tokenise_documents
from automoe.data.tokenizer import Tokenizer, fitting_tokenizer
from automoe.errors import DataError
from automoe.storage.cache import default_cache_dir, open_entry
from automoe.storage.guarded import guarded

Split = Literal["train", "validation"]
Documents = tuple[np.ndarray, np.ndarray]  # starts and lengths, [N] each
FORMAT = 4  # part of the cache key: raise it when the files below change
# Fewest and most synthetic rows; in between, as many rows as have SYNTHETIC_TOKENS in all.
SYNTHETIC_ROWS = (64, 4096)
SYNTHETIC_TOKENS = 1 << 22
_SAMPLE = 1 << 16  # bytes hashed at each end of a file


@dataclass(frozen=True)
class TokenCorpus:
    """Tokenised corpus of one source: all documents in the order of the files; texts end with EOS.

    A document is a text, or a token sequence of a conversation (of both answers of a preference
    pair).

    Attributes:
        tokens: [sum of lengths] ids of the N documents, one after the other.
        starts, lengths: [N] int64 start in ``tokens`` and length of each document.
        hashes: [N] uint64 hash of a document's text, or of a conversation's tools and prompt (all
            messages if it has none), which decides on its split.
        file_ids, lines: [N] int64 index into ``paths``, and 1-based line (0: the whole file).
        content: digest of tokens, loss masks and lengths; it does not depend on names of files.
        text_bytes: UTF-8 bytes of all texts.
        firsts: [N] length of the preferred sequence of each pair; None without pairs.
        trained: [sum of lengths] True for tokens to generate; None: all tokens.
        chat: counts of ``tokenise_chat``; None if documents are not conversations.
    """

    tokens: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    hashes: np.ndarray
    file_ids: np.ndarray
    lines: np.ndarray
    paths: list[Path]
    content: str
    text_bytes: int
    firsts: np.ndarray | None = None
    trained: np.ndarray | None = None
    chat: dict[str, Any] | None = None

    def where(self, index: int) -> str:
        """Return ``file`` or ``file:line`` of the document with this index."""
        return place_of(self.paths[self.file_ids[index]], int(self.lines[index]))


def open_corpus(
    data: DataConfig,
    tokenizer: Tokenizer,
    cache_dir: Path | None = None,
    template: ChatTemplate | None = None,
) -> TokenCorpus:
    """Return the tokenised corpus from the cache; tokenise it first if the cache lacks it.

    The name of a cache entry depends on the names of the files, their sizes, mtimes, ctimes, first
    and last bytes, on the tokenizer and on the reading options. So a changed file is read again.

    Args:
        data: settings of one source.
        cache_dir: directory of the cache; None: ``default_cache_dir()``.
        template: chat template if ``data`` holds conversations, else None.

    Raises:
        DataError: text cannot be read, or the cache directory cannot be written.
    """
    files = find_files(data)
    paths = list(files.values())
    entry = (
        cache_dir or default_cache_dir()
    ) / f"{data.kind}-{_cache_key(data, files, tokenizer, template)}"

    def write(folder: Path) -> dict[str, Any]:
        if template is not None:
            read = read_conversations(data, paths)
            return tokenise_chat(folder, read, template, tokenizer.vocab_size, data.is_preference)
        return tokenise_documents(folder, read_documents(data, paths), tokenizer, paths)

    # A stranger's texts, tokenizer or template may crash the process, so a child does the work.
    facts = open_entry(
        entry, lambda folder: guarded(f"{paths[0]}: reading", partial(write, folder))
    )
    columns = np.load(entry / "documents.npy", mmap_mode="r")
    lengths = columns[0].astype(np.int64)
    tokens = np.zeros(0, facts["dtype"])
    if lengths.any():  # An empty file cannot be mapped.
        tokens = np.memmap(entry / "tokens.bin", facts["dtype"], "r")
    return TokenCorpus(
        tokens=tokens,
        starts=np.cumsum(lengths) - lengths,
        lengths=lengths,
        hashes=columns[1],
        file_ids=columns[2].astype(np.int64),
        lines=columns[3].astype(np.int64),
        paths=paths,
        content=facts["content"],
        text_bytes=facts["text_bytes"],
        firsts=columns[4].astype(np.int64) if data.is_preference else None,
        trained=np.memmap(entry / "trained.bin", np.bool_, "r")
        if template and len(tokens)
        else None,
        chat=facts.get("chat"),
    )


def _cache_key(
    data: DataConfig,
    files: dict[str, Path],
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
) -> str:
    settings = [FORMAT, tokenizer.digest, data.kind, data.text_key, data.max_bytes]
    content = (
        json.dumps([*settings, version("tokenizers")]).encode() + reader_digest(data.kind).encode()
    )
    if template is not None:
        # transformers renders conversations.
        content = template.digest.encode() + content + version("transformers").encode()
        content += template.tokenizer_settings()
    key = hashlib.blake2b(content, digest_size=16)
    for name, path in files.items():
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                sample = file.read(_SAMPLE)
                file.seek(max(len(sample), stat.st_size - _SAMPLE))
                sample += file.read(_SAMPLE)
        except OSError as error:
            raise DataError(
                f"{path}: cannot be read ({error.strerror}). Check the file."
            ) from error
        # A program may set a file's mtime; only the kernel sets the ctime.
        facts = [name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        key.update(json.dumps(facts).encode() + sample)
    return key.hexdigest()


def prepare_data(
    config: Config, cache_dir: Path | None = None
) -> tuple[Tokenizer, list[TokenCorpus]]:
    """Return the tokenizer and the corpus of each source, tokenised into the cache if necessary.

    The launcher calls this function before ranks start: one process then reports bad text, and the
    ranks find a cache to map.

    Args:
        cache_dir: directory of the cache; None: ``default_cache_dir()``.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or has more ids than the embedding has rows.
        DataError: text cannot be read, a document is too long under ``on_long=error``, or a split
            is empty.
    """
    tokenizer = fitting_tokenizer(config)
    if config.data.is_synthetic:
        return tokenizer, [synthetic_corpus(config.model.vocab_size, config.train.seq_len)]
    corpora = []
    for _, _, source in sources_of(config.data):
        alone = replace(config, data=source)
        corpora.append(open_corpus(source, tokenizer, cache_dir, chat_template_of(alone)))
        _check_corpus(alone, corpora[-1])
    return tokenizer, corpora


def with_steps(config: Config) -> Config:
    """Tokenise the data, and return ``config`` with ``train.steps`` computed from ``train.epochs``.

    Without epochs, ``config`` is returned unchanged. For a recipe that reads no data, it is
    returned unchanged and nothing is tokenised.

    Raises:
        ConfigError: the tokenizer cannot be loaded, or the computed number of steps violates a rule
            of the configuration.
        DataError: text cannot be read.
    """
    if not getattr(config.recipe_args, "reads_data", True):
        return config
    tokenizer, corpora = prepare_data(config)
    train = config.train
    if not train.epochs:
        return config
    rows = 0
    for corpus, (_, _, source) in zip(corpora, sources_of(config.data), strict=True):
        rows += pack(corpus, replace(config, data=source), "train", tokenizer.pad_id).num_rows
    steps = steps_for(train, train.epochs * rows)
    by_steps = replace(config, train=replace(train, steps=steps, epochs=0.0))
    check_rows(by_steps, settings_rows(by_steps))
    return replace(config, train=replace(train, steps=steps))


def pack(corpus: TokenCorpus, config: Config, split: Split, pad_id: int) -> PackedRows:
    """Return the packed rows of one split of one source; ``SampleRows`` for conversations.

    Args:
        config: the run's configuration, with the source's settings as ``data``.
        pad_id: token id of padding.

    Raises:
        DataError: the split has no document.
    """
    starts, lengths = fitting_documents(corpus, config, split)
    options = {
        "seq_len": config.train.seq_len,
        "seed": config.train.seed if split == "train" else 0,
        "pad_id": pad_id,
        "document_mask": config.data.document_mask,
    }
    if corpus.trained is None:
        return PackedRows(corpus.tokens, starts, lengths, **options)
    firsts = None
    if corpus.firsts is not None:
        firsts = corpus.firsts[np.searchsorted(corpus.starts, starts)]
    options |= {"trained": corpus.trained, "firsts": firsts, "pack": config.data.chat.pack}
    return SampleRows(corpus.tokens, starts, lengths, **options)


def synthetic_corpus(vocab_size: int, seq_len: int) -> TokenCorpus:
    """Return a corpus of documents of ``seq_len`` uniformly random ids below ``vocab_size``.

    It is equal on every machine, and its ids stand for no text.
    """
    count = max(SYNTHETIC_ROWS[0], min(SYNTHETIC_ROWS[1], SYNTHETIC_TOKENS // seq_len))
    # NumPy promises stable raw bits, as ``seeded_order`` explains.
    generator = np.random.PCG64(np.random.SeedSequence((vocab_size, seq_len)))
    hashes = generator.random_raw(count)
    tokens = (generator.random_raw(count * seq_len) % np.uint64(vocab_size)).astype(np.uint32)
    return TokenCorpus(
        tokens=tokens,
        starts=np.arange(count) * seq_len,
        lengths=np.full(count, seq_len),
        hashes=hashes,
        file_ids=np.zeros(count, dtype=np.int64),
        lines=np.arange(1, count + 1),
        paths=[Path("synthetic")],
        content=hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest(),
        text_bytes=0,
    )


def _check_corpus(config: Config, corpus: TokenCorpus) -> None:
    """Raise ``DataError`` if a run with this configuration cannot use the corpus.

    It cannot if a document is too long under ``on_long=error``, a split is empty, or an export
    needs a stop token that the chat template does not have.
    """
    data = config.data
    if config.checkpoint.export_hf and corpus.chat and corpus.chat["refused"]:
        raise DataError(
            f"The export asks the chat template for its stop token: {corpus.chat['refused']} Or "
            "set checkpoint.export_hf=false."
        )
    too_long = np.flatnonzero(corpus.lengths > config.train.seq_len)
    if len(too_long) and data.on_long == "error":
        unit, several, others = "document", "documents", "split"
        if data.is_preference:
            unit, several, others = "pair", "samples", "drop"
        elif data.is_chat:
            unit, several, others = "conversation", "samples", "drop or truncate"
        raise DataError(
            f"{corpus.where(too_long[0])}: a {unit} of {corpus.lengths[too_long[0]]} tokens does not fit "
            f"train.seq_len={config.train.seq_len} under data.on_long=error ({len(too_long)} of "
            f"{len(corpus.lengths)} {several} do not; the longest has {corpus.lengths.max()}). Shorten it, raise "
            f"train.seq_len, or set data.on_long={others}."
        )
    fitting_documents(corpus, config, "train")
    if config.train.val_every:
        fitting_documents(corpus, config, "validation")


def fitting_documents(corpus: TokenCorpus, config: Config, split: Split) -> Documents:
    """Return starts and lengths of the documents of one split, with conversations cut to a row.

    Plain text may be longer than a row, since packing cuts it. A conversation longer than a row is
    left out (``data.on_long=drop``) or loses its end (``truncate``); it is then left out if no
    trained token remains.

    Returns:
        (index of each document's first token in ``corpus.tokens``, its number of tokens), both [n].

    Raises:
        DataError: no document is left for the split.
    """
    starts, lengths = split_documents(corpus, config.data.val_fraction, split)
    seq_len = config.train.seq_len
    long = lengths > seq_len
    if corpus.trained is None or not long.any():
        return starts, lengths
    fits = ~long
    if config.data.on_long == "truncate":
        lengths = np.minimum(lengths, seq_len)
        for place in np.flatnonzero(long):
            fits[place] = corpus.trained[starts[place] + 1 : starts[place] + seq_len].any()
    if not fits.any():
        unit = "pair of answers" if config.data.is_preference else "conversation"
        why = f" (the shortest has {lengths.min()} tokens)"
        if config.data.on_long == "truncate":
            why = ", and no answer begins before that"
        raise DataError(
            f"No {unit} is left for the {split} split: each is longer than train.seq_len={seq_len}{why}"
            f", under data.on_long={config.data.on_long}. Raise train.seq_len."
        )
    return starts[fits], lengths[fits]


def split_documents(corpus: TokenCorpus, val_fraction: float, split: Split) -> Documents:
    """Return starts and lengths of the documents of one split.

    A document belongs to the validation split if the hash of its text, as a fraction of 2**64, is
    below ``val_fraction``. So equal texts are in the same split, and new documents do not move
    others. If that leaves a split empty, the document with the lowest hash is the validation split.
    If there is only one plain text, its last ``val_fraction`` of tokens is the validation split.

    Returns:
        (index of each document's first token in ``corpus.tokens``, its number of tokens), both [n].

    Raises:
        DataError: no document is left for the split.
    """
    starts = corpus.starts
    lengths = corpus.lengths
    if len(lengths) == 1 and val_fraction > 0 and corpus.trained is None:
        tail = max(2, round(int(lengths[0]) * val_fraction))  # two tokens make one label
        head = int(lengths[0]) - tail
        if head >= 2:
            return (
                (starts, lengths - tail) if split == "train" else (starts + head, np.array([tail]))
            )
    validation = corpus.hashes.astype(np.float64) / 2.0**64 < val_fraction
    if val_fraction > 0 and len(lengths) > 1 and (validation.all() or not validation.any()):
        validation = corpus.hashes == corpus.hashes.min()
    chosen = validation if split == "validation" else ~validation
    if not chosen.any():
        raise DataError(
            f"No document for the {split} split: {len(lengths)} documents, {int(lengths.sum())} tokens, "
            f"data.val_fraction={val_fraction} (equal ones share a split). Add documents, raise data.max_bytes, or "
            "set data.val_fraction=0 train.val_every=0, which trains on all."
        )
    return starts[chosen], lengths[chosen]
