"""The loader: one order of data on every mesh, exact resume, and refusal of data that changed."""

from __future__ import annotations

import copy
import json
import os
import threading
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.schema import Config
from automoe.data.loader import Loader
from automoe.data.prepare import split_documents
from automoe.data.tokenizer import load_tokenizer
from automoe.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("cache")
FIELDS = ("tokens", "labels", "positions", "doc_ids")


def joined(batches: list[StepBatch]) -> list[torch.Tensor]:
    return [torch.cat([getattr(batch, name) for batch in batches]) for name in FIELDS]


def equal(left: list[StepBatch], right: list[StepBatch]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(joined(left), joined(right), strict=True))


def steps(config: Config, n: int, dp_size: int = 1, state: dict | None = None) -> tuple[list[StepBatch], dict]:
    """The rows of ``n`` steps, ranks joined in order, and the state after them."""
    loaders = [Loader(config, rank, dp_size) for rank in range(dp_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
    batches = [loader.next_step() for _ in range(n) for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    assert all(other == states[0] for other in states)
    return batches, states[0]


def test_batch_is_what_the_contract_says(config):
    loader = Loader(config, 1, 2)
    loader.next_step()
    batch = loader.next_step()
    for name in FIELDS:
        assert getattr(batch, name).shape == (8, 256) and getattr(batch, name).dtype == torch.int64
    assert batch.first_row == 16 + 8
    trained = batch.labels[batch.labels != IGNORE]
    assert batch.num_bytes == int((trained < 256).sum()) > 0
    inside = batch.labels[:, :-1] != IGNORE
    assert torch.equal(batch.labels[:, :-1][inside], batch.tokens[:, 1:][inside])
    assert int(batch.positions.max()) < 256


@pytest.mark.parametrize("dp_size", [2, 4, 8])
def test_global_batches_do_not_depend_on_the_mesh(config, dp_size):
    alone, state = steps(config, 7)
    together, state_together = steps(config, 7, dp_size)
    assert equal(alone, together) and state == state_together
    assert sum(batch.num_bytes for batch in alone) == sum(batch.num_bytes for batch in together)


def test_an_epoch_trains_every_document_once(config):
    loader = Loader(config, 0, 1)
    config.train.global_batch_size = loader.rows_per_epoch
    batches, _ = steps(config, 2)
    assert not torch.equal(batches[0].tokens, batches[1].tokens), "shuffled again"
    for batch in batches:
        counts = torch.bincount(batch.tokens.flatten(), minlength=258)
        texts = [Path(config.data.path, f"{i:02}.py").read_bytes() for i in range(30)]
        validation = list(Loader(config, 0, 1).batches("validation", 100))
        counts += torch.bincount(torch.cat([b.tokens for b in validation]).flatten(), minlength=258)
        assert counts[:256].tolist() == [b"".join(texts).count(bytes([byte])) for byte in range(256)]
        assert counts[256] == 30


@pytest.mark.parametrize("dp_before, dp_after", [(1, 1), (1, 4), (4, 2), (2, 1)])
def test_resume_goes_on_exactly_under_any_dp_size(config, dp_before, dp_after):
    whole, end = steps(config, 9)
    _, state = steps(config, 4, dp_before)
    rest, state = steps(config, 5, dp_after, state)
    assert equal(whole[4:], rest) and state == end


def test_a_growing_batch_reads_the_same_rows_in_order_on_any_mesh_and_after_a_resume(config):
    whole, _ = steps(config, 4)
    config.train.rampup_batch_size = [4, 4, 24]  # of 16 rows: a larger one every 8 rows
    grown, end = steps(config, 8)
    assert [len(batch.tokens) for batch in grown] == [4, 4, 8, 12, 16, 16, 16, 16]
    assert [batch.first_row for batch in grown[:6]] == [0, 4, 8, 16, 28, 44]
    assert all(torch.equal(a[:60], b[:60]) for a, b in zip(joined(whole), joined(grown), strict=True))
    _, state = steps(config, 3, 2)
    rest, state = steps(config, 5, 4, state)
    assert equal(grown[3:], rest) and state == end


def test_the_step_after_is_made_by_a_thread_and_counts_when_it_is_taken(config, monkeypatch):
    loader, made, plain = Loader(config, 0, 1), [], Loader._step

    def step(self, consumed_rows):
        made.append((consumed_rows, threading.current_thread() is threading.main_thread()))
        return plain(self, consumed_rows)

    monkeypatch.setattr(Loader, "_step", step)
    rows = config.train.global_batch_size
    first = loader.next_step()
    wait([loader._ahead[1]])
    assert made == [(0, True), (rows, False)]
    assert loader.state_dict()["consumed_rows"] == rows, "of what was taken alone"
    assert loader.last_batch()[:2] == (0, rows - 1)
    second = loader.next_step()
    state = loader.state_dict()
    wait([loader._ahead[1]])
    loader.load_state_dict(state | {"consumed_rows": 0})  # gone back: what was made ahead is not taken
    assert equal([loader.next_step()], [first]) and made[3] == (0, True)
    assert equal([loader.next_step()], [second])


def test_what_goes_wrong_in_the_thread_is_raised_in_its_step(config, monkeypatch):
    loader, plain, rows = Loader(config, 0, 1), Loader._step, config.train.global_batch_size

    def step(self, consumed_rows):
        if consumed_rows == rows:
            raise DataError("a damaged row")
        return plain(self, consumed_rows)

    monkeypatch.setattr(Loader, "_step", step)
    loader.next_step()
    wait([loader._ahead[1]])
    with pytest.raises(DataError, match="a damaged row"):
        loader.next_step()
    assert loader.consumed_rows == rows


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_resume_at_the_end_of_an_epoch(config, offset):
    """Batches that end one row before, at, and one row after the epoch's last row."""
    rows = Loader(config, 0, 1).rows_per_epoch
    config.train.global_batch_size = rows + offset
    whole, end = steps(config, 3)
    first, state = steps(config, 1)
    rest, resumed_end = steps(config, 2, 1, state)
    assert equal(whole, first + rest) and resumed_end == end == {**end, "consumed_rows": 3 * (rows + offset)}


def test_resume_with_another_batch_size_keeps_the_order(config):
    whole, _ = steps(config, 6)
    _, state = steps(config, 2)
    config.train.global_batch_size = 8
    rest, _ = steps(config, 8, 2, state)
    assert equal(whole[2:], rest)


def test_changed_data_is_refused(config):
    _, state = steps(config, 2)
    victim = Path(config.data.path) / "07.py"
    text = victim.read_bytes()
    stamp = victim.stat()
    victim.write_bytes(text[:50] + bytes([text[50] ^ 1]) + text[51:])
    os.utime(victim, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same time: one bit differs
    with pytest.raises(DataError, match=r"data changed since the checkpoint.*content was \w+, is \w+.*new run_dir"):
        steps(config, 1, state=state)
    victim.write_bytes(text)
    steps(config, 1, state=state)
    (Path(config.data.path) / "new.py").write_text("print('new')\n")
    with pytest.raises(DataError, match=r"documents was 30, is 31; files was 30, is 31; text_bytes was"):
        steps(config, 1, state=state)


@pytest.mark.parametrize("state", [None, {}, {"prompts": "0123", "history": {}}])
def test_a_checkpoint_of_a_session_or_of_rollouts_is_refused(config, state):
    for check in ("check_state", "load_state_dict"):
        with pytest.raises(DataError, match="of a session or of recipe=grpo.*automoe export"):
            getattr(Loader(config, 0, 1), check)(state)


def test_moved_data_is_not_changed_data(config, tmp_path):
    whole, _ = steps(config, 3)
    _, state = steps(config, 2)
    Path(config.data.path).rename(tmp_path / "elsewhere")
    config.data.path = str(tmp_path / "elsewhere")
    rest, _ = steps(config, 1, state=state)
    assert equal(whole[2:], rest)


def test_other_settings_are_refused_by_name(config, byte_level_dir):
    _, state = steps(config, 1)
    for change, message in [
        (("train", "seed", 1), r"train\.seed was 0, is 1\. Restore"),
        (("train", "seq_len", 128), r"train\.seq_len was 256, is 128\. Restore"),
        (("data", "document_mask", False), r"data\.document_mask was True, is False\. Restore"),
        (("data", "val_fraction", 0.1), r"data\.val_fraction was 0\.2, is 0\.1\. Restore"),
        (("data", "tokenizer", str(byte_level_dir)), r"content was .*tokenizer was byte, is \w+-eos0\. Restore"),
    ]:
        group, key, value = change
        other = copy.deepcopy(config)
        other.model.vocab_size = 400
        setattr(getattr(other, group), key, value)
        with pytest.raises(DataError, match=message):
            steps(other, 1, state=state)


def test_validation_is_fixed_disjoint_and_never_repeats(config):
    ranks = [Loader(config, rank, 2) for rank in range(2)]
    batches = [batch for pair in zip(*(r.batches("validation", 100) for r in ranks), strict=True) for batch in pair]
    tokens = joined(batches)[0]
    text = bytes(tokens[tokens < 256].tolist())
    files = [path.read_bytes() for path in sorted(Path(config.data.path).iterdir())]
    # Rows may come in any order, so that a text lies in pieces: of three parts a border of rows cuts two at most.
    # A part that another file has too says nothing of where this one is.
    parts = [
        [part for part in (raw[:100], raw[100:200], raw[-100:]) if sum(part in one for one in files) == 1]
        for raw in files
    ]
    inside = [raw for raw, own in zip(files, parts, strict=True) if any(part in text for part in own)]
    assert 0 < len(inside) < len(files)
    assert len(text) == sum(map(len, inside)), "each validation byte once"
    ranks[0].next_step()
    config.train.seed = 3
    other_seed = list(Loader(config, 0, 1).batches("validation", 100))
    assert equal(other_seed, batches)
    assert equal(list(ranks[0].batches("validation", 1)), batches[:1])
    train_text = bytes(steps(config, 4)[0][0].tokens.flatten().clamp(max=255).tolist())
    assert not any(part in train_text for raw, own in zip(files, parts, strict=True) if raw in inside for part in own)


def test_validation_split_walks_its_own_rows(config):
    loader = Loader(config, 0, 1, split="validation")
    first = next(loader.batches("validation", 1))
    config.train.global_batch_size = loader.rows_per_epoch
    step = Loader(config, 0, 1, split="validation").next_step()
    assert torch.equal(step.tokens, first.tokens[: loader.rows_per_epoch])


def test_last_validation_batch_fills_up_with_rows_that_train_nothing(config):
    loader = Loader(config, 0, 1, split="validation")
    config.train.global_batch_size = 4 * loader.rows_per_epoch
    filled = [next(Loader(config, rank, 4).batches("validation", 2)) for rank in range(4)]
    assert filled[0].num_bytes > 0
    for batch in filled[1:]:
        assert (batch.labels == IGNORE).all() and (batch.doc_ids == -1).all() and batch.num_bytes == 0
        assert int(batch.tokens.max()) < config.model.vocab_size


def test_rows_without_a_trained_label(tmp_path, byte_level_dir):
    """Documents of one token: empty after a tokenizer's normalizer, say. Nothing to train, nothing breaks."""
    (tmp_path / "a.txt").write_text("ab")
    config = Config()
    config.data.kind, config.data.path, config.data.val_fraction = "text", str(tmp_path / "a.txt"), 0.0
    config.train.seq_len, config.train.val_every = 1, 0
    batch = Loader(config, 0, 1).next_step()
    end = batch.tokens[:, 0] == 256
    assert end.any() and (batch.labels[end] == IGNORE).all()
    assert batch.num_bytes == int((batch.labels[:, 0] == ord("b")).sum())


def test_single_document_gives_up_its_tail(tmp_path, library_texts):
    (tmp_path / "book.txt").write_text(library_texts[0])
    config = Config()
    config.data.kind, config.data.path, config.data.val_fraction = "text", str(tmp_path / "book.txt"), 0.1
    config.data.document_mask = False
    loader = Loader(config, 0, 1)
    tokens = torch.cat([batch.tokens for batch in loader.batches("validation", 100)]).flatten()
    tail = bytes(sorted(tokens[tokens < 256].tolist()))
    raw = library_texts[0].encode()
    assert tail == bytes(sorted(raw[len(raw) + 1 - round(0.1 * (len(raw) + 1)) :]))
    assert loader._rows_of("train", 0).num_tokens + len(tail) + 1 == len(raw) + 1


def test_empty_split_is_refused(config):
    config.data.val_fraction = 0.0
    message = r"No document for the validation split: 30 documents.*val_every=0"
    with pytest.raises(DataError, match=message):
        Loader(config, 0, 1)
    config.train.val_every = 0
    loader = Loader(config, 0, 1)
    with pytest.raises(DataError, match=message):
        next(loader.batches("validation", 1))


def test_few_documents_still_give_one_to_validation(config):
    config.data.val_fraction = 1e-9
    assert len(list(Loader(config, 0, 1).batches("validation", 100))) == 1


def test_long_document_is_refused_with_file_line_and_lengths(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (3, 256, 255, 400)))
    config = Config()
    config.data.kind, config.data.path, config.data.on_long = "jsonl", str(path), "error"
    message = (
        r"a\.jsonl:2: a document of 257 tokens.*train\.seq_len=256.*\(2 of 4 documents do not; the longest has 401\)"
    )
    for _ in range(2):  # tokenised now, then from the cache
        with pytest.raises(DataError, match=message):
            Loader(config, 0, 1)
    config.data.on_long = "split"
    Loader(config, 0, 1).next_step()
    config.data.on_long, config.train.seq_len = "error", 401
    Loader(config, 0, 1).next_step()


def test_a_small_embedding_is_refused(config):
    config.model.vocab_size = 256
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size=256: .*ids up to 257.*ends at 255.*model\.vocab_size=264"
    ):
        Loader(config, 0, 1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_every_kind_with_an_hf_tokenizer(kind, tmp_path, library_texts, byte_level_dir):
    path = tmp_path / f"corpus.{kind}"
    if kind == "text":
        path.mkdir()
        for index, text in enumerate(library_texts):
            (path / f"{index:02}.txt").write_text(text, newline="")
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"body": text}) + "\n" for text in library_texts))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"body": library_texts}), path)
    config = Config()
    config.data.kind, config.data.path, config.data.text_key = kind, str(path), "body"
    config.data.tokenizer, config.model.vocab_size = str(byte_level_dir), 400
    config.data.val_fraction, config.train.val_every, config.train.seq_len = 0.0, 0, 2048
    config.train.global_batch_size = Loader(config, 0, 1).rows_per_epoch
    loader = Loader(config, 0, 1)
    batch = loader.next_step()
    assert loader.corpora[0].text_bytes == sum(len(text.encode()) for text in library_texts)
    # Every byte is trained except those of each document's first token.
    tokenizer = load_tokenizer(str(byte_level_dir))
    first = sum(tokenizer.num_bytes(tokenizer.encode(text)[:1]) for text in library_texts)
    assert batch.num_bytes == loader.corpora[0].text_bytes - first


def test_id_that_the_embedding_has_not_is_named_with_its_document(config):
    """As where a page of the cache goes bad under a run: never an IndexError out of a kernel."""
    loader = Loader(config, 0, 1)
    tokens = np.array(loader.corpora[0].tokens)
    starts, _ = split_documents(loader.corpora[0], config.data.val_fraction, "train")
    tokens[starts[3] + 7] = 999
    victim = loader.corpora[0].where(int(np.searchsorted(loader.corpora[0].starts, starts[3])))
    loader._rows_of("train", 0).tokens = tokens
    config.train.global_batch_size = loader.rows_per_epoch
    loader.rows_per_rank = loader.rows_per_epoch
    with pytest.raises(DataError, match=rf"{victim}: token 7 .* is id 999.*ends at 263 \(model\.vocab_size=264\)"):
        loader.next_step()


def test_default_corpus_gives_steps():
    batch = Loader(Config(), 0, 4).next_step()
    assert batch.tokens.shape == (4, 256) and batch.num_bytes > 900
