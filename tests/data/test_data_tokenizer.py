"""Tokenizers: round trips, byte counts, vocabulary sizes, and the refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from automoe.config.schema import Config
from automoe.data.tokenizer import ByteTokenizer, fitting_tokenizer, load_tokenizer
from automoe.errors import ConfigError


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert tokenizer.num_bytes([tokenizer.eos_id, tokenizer.pad_id]) == 0


@pytest.mark.parametrize("kind", ["byte_level_dir", "byte_fallback_dir"])
def test_hf_round_trip_and_byte_count(kind, request, library_texts):
    tokenizer = load_tokenizer(str(request.getfixturevalue(kind)))
    for text in [*(text[:4000] for text in library_texts), "naïve 数据 🙂 \t tabs\r\n"]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.num_bytes(ids) == len(text.encode())
        assert ids.max() < tokenizer.vocab_size and tokenizer.eos_id not in ids
    assert len(ids) > 0 and tokenizer.num_bytes([tokenizer.eos_id]) == 0


def test_hf_compresses(byte_level_dir, library_texts):
    tokenizer = load_tokenizer(str(byte_level_dir))
    assert len(tokenizer.encode(library_texts[0])) < 0.8 * len(library_texts[0].encode())


def test_wordpiece_counts_the_spaces_it_decodes(tmp_path):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.decoder = decoders.WordPiece()
    text = "the lower the lowest the newer the newest"
    tokenizer.train_from_iterator(
        [text] * 20, trainers.WordPieceTrainer(vocab_size=24, special_tokens=["[UNK]", "[SEP]"])
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "[SEP]"}}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.eos_id == tokenizer.token_to_id("[SEP]")
    assert loaded.num_bytes(loaded.encode(text)) == len(" " + text)


def test_special_tokens_in_a_document_are_plain_text(byte_level_dir):
    tokenizer = load_tokenizer(str(byte_level_dir))
    ids = tokenizer.encode("a <|end|> b")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a <|end|> b"


def test_saved_truncation_and_padding_are_switched_off(byte_level_dir, tmp_path):
    backend = Tokenizer.from_file(str(byte_level_dir / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=512)
    shutil.copytree(byte_level_dir, tmp_path / "cut")
    backend.save(str(tmp_path / "cut" / "tokenizer.json"))
    text = "import collections\nclass Tokenizer:"
    expected = load_tokenizer(str(byte_level_dir)).encode(text)
    assert load_tokenizer(str(tmp_path / "cut")).encode(text).tolist() == expected.tolist()
    assert len(expected) > 4


def test_directory_without_tokenizer_json_goes_through_transformers(byte_level_dir, tmp_path, library_texts):
    Tokenizer.from_file(str(byte_level_dir / "tokenizer.json")).model.save(str(tmp_path))
    config = {
        "tokenizer_class": "GPT2Tokenizer",
        "eos_token": "<|end|>",
        "unk_token": "<|end|>",
        "bos_token": "<|end|>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert not (tmp_path / "tokenizer.json").exists()
    loaded, reference = load_tokenizer(str(tmp_path)), load_tokenizer(str(byte_level_dir))
    assert loaded.encode(library_texts[0]).tolist() == reference.encode(library_texts[0]).tolist()
    assert loaded.eos_id == reference.eos_id
    assert loaded.vocab_size == 400


@pytest.mark.parametrize("kind", ["byte_level_dir", "byte_fallback_dir"])
def test_vocab_size_is_that_of_the_json(kind, request):
    directory = request.getfixturevalue(kind)
    content = json.loads((directory / "tokenizer.json").read_text())
    ids = [*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])]
    assert load_tokenizer(str(directory)).vocab_size == max(ids) + 1
    assert ByteTokenizer().vocab_size == 258


def test_vocab_size_counts_the_largest_id_of_a_unigram_with_added_tokens(tmp_path, library_texts):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(library_texts[:3], trainers.UnigramTrainer(vocab_size=150, show_progress=False))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id("</s>"), 1]}))
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.eos_id == tokenizer.token_to_id("</s>")
    assert loaded.vocab_size == loaded.eos_id + 1


def test_byte_case_loads_nothing_heavy():
    code = (
        "import sys, automoe.data.tokenizer as t; t.load_tokenizer('byte').encode('a')\n"
        "print([m for m in ('torch', 'transformers', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture(scope="session")
def no_pre_tokenizer_dir(tmp_path_factory, byte_fallback_dir) -> Path:
    """As Llama 2's and Mixtral's: a space before every text, and whole texts for words."""
    content = json.loads((byte_fallback_dir / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace]}
    directory = Path(shutil.copytree(byte_fallback_dir, tmp_path_factory.mktemp("tokenizers") / "prepend"))
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("kind", ["byte_level_dir", "byte_fallback_dir", "no_pre_tokenizer_dir"])
def test_long_text_in_pieces_is_the_whole_text(kind, request, library_texts, monkeypatch):
    """Also where lines are blank, long runs of spaces stand at a cut, or there is no space and no line at all."""
    monkeypatch.setattr("automoe.data.tokenizer.PIECE", 3000)
    monkeypatch.setattr("automoe.data.tokenizer.BATCH", 10_000)
    tokenizer = load_tokenizer(str(request.getfixturevalue(kind)))
    odd = ["\n" * 9000, "a" * 9000, (" " * 700 + "\n\n\n") * 12, "数据。" * 4000, "import os\r\n\t" * 900]
    for text in [" ".join(library_texts[:6]), "".join(library_texts[-3:]), *odd, "short", ""]:
        parts = [text[at : at + 7001] for at in range(0, len(text), 7001)]
        pieces = list(tokenizer.encode_long(iter(parts)))
        assert len(text) < 20_000 or len(pieces) > 4, "memory is bounded"
        found = np.concatenate(pieces) if pieces else np.zeros(0, np.int64)
        assert found.tolist() == tokenizer.encode(text).tolist()


def test_a_run_of_one_letter_is_cut_nowhere_its_ids_would_change(byte_level_dir, monkeypatch):
    """Merges of a word of thousands of letters count from its beginning."""
    monkeypatch.setattr("automoe.data.tokenizer.PIECE", 1500)
    tokenizer = load_tokenizer(str(byte_level_dir))
    text = "x = '" + "=" * 1003 + "-" * 2501 + "'\n" + "#" * 4007
    assert np.concatenate(list(tokenizer.encode_long([text]))).tolist() == tokenizer.encode(text).tolist()


def test_bytes_are_a_tokenizer_of_transformers(tmp_path):
    from transformers import AutoTokenizer

    for name, content in ByteTokenizer.files().items():
        (tmp_path / name).write_text(content)
    theirs, text = AutoTokenizer.from_pretrained(tmp_path), "naïve 数据 🙂 \t tabs\r\n  x"
    assert theirs(text).input_ids == ByteTokenizer().encode(text).tolist()
    assert theirs.decode(theirs(text).input_ids) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (256, 257)
    assert isinstance(load_tokenizer(str(tmp_path)), ByteTokenizer)


def test_the_tokenizer_is_that_of_the_checkpoint_unless_said_otherwise(byte_level_dir):
    config = Config()
    assert fitting_tokenizer(config).digest == "byte"
    config.model.hf_path, config.model.vocab_size = str(byte_level_dir), 400
    assert fitting_tokenizer(config).vocab_size == 400
    config.model.vocab_size = 399
    with pytest.raises(
        ConfigError,
        match=r"ends at 398\. Nearest .*vocab_size=400 .*, or .*data.tokenizer=the one that the checkpoint was",
    ):
        fitting_tokenizer(config)
    config.data.tokenizer = "byte"
    assert fitting_tokenizer(config).digest == "byte"


def test_tokenizer_larger_than_the_embedding_is_refused(byte_level_dir):
    config = Config()
    fitting_tokenizer(config)
    config.data.tokenizer = str(byte_level_dir)
    config.model.vocab_size = 399
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size=399: .* ids up to 399, .* ends at 398\. .*vocab_size=400"
    ):
        fitting_tokenizer(config)
    config.model.vocab_size = 400
    fitting_tokenizer(config)


def test_missing_directory(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.tokenizer=.*gone: .*does not exist.*data\.tokenizer=byte"):
        load_tokenizer(str(tmp_path / "gone"))


@pytest.mark.parametrize("content", ["version https://git-lfs.github.com/spec/v1", "[]", '{"model": {}}'])
def test_unreadable_tokenizer_json(content, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read: .*git lfs pull"):
        load_tokenizer(str(tmp_path))


def test_directory_with_no_tokenizer_at_all(tmp_path):
    (tmp_path / "notes.txt").write_text("nothing here")
    with pytest.raises(ConfigError, match=r"no tokenizer\.json in it.*Point data\.tokenizer at"):
        load_tokenizer(str(tmp_path))


def test_no_end_of_text_token(byte_level_dir, tmp_path):
    shutil.copy(byte_level_dir / "tokenizer.json", tmp_path)
    with pytest.raises(ConfigError, match=r"end-of-text token, and this tokenizer has none.*Set eos_token"):
        load_tokenizer(str(tmp_path))


def test_digest_follows_the_vocabulary_and_the_end_token(byte_level_dir, tmp_path):
    first = load_tokenizer(str(byte_level_dir)).digest
    other = Path(shutil.copytree(byte_level_dir, tmp_path / "other"))
    assert load_tokenizer(str(other)).digest == first, "where it lies does not matter"
    (other / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a"}))
    assert load_tokenizer(str(other)).digest != first
    assert np.array_equal(load_tokenizer(str(other)).byte_lengths, load_tokenizer(str(byte_level_dir)).byte_lengths)


@pytest.mark.faults
def test_a_long_document_is_tokenised_in_bounded_memory(byte_level_dir, library_texts, tmp_path):
    """Encoded at once, 8 MB of text take about 1 GB."""
    text = "".join(library_texts)
    (tmp_path / "long.txt").write_text(text * (8_000_000 // len(text) + 1))
    code = (
        "import re, sys; from pathlib import Path; from automoe.config.data_schema import DataConfig\n"
        "from automoe.data.prepare import open_corpus; from automoe.data.tokenizer import load_tokenizer\n"
        "folder = Path(sys.argv[2]); data = DataConfig(kind='text', path=str(folder / 'long.txt'))\n"
        "corpus = open_corpus(data, load_tokenizer(sys.argv[1]), folder / 'cache')\n"
        # ru_maxrss would begin with what the process that started this one had.
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1]\n"
        "print(len(corpus.lengths), corpus.text_bytes, int(peak) * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, byte_level_dir, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents, text_bytes, peak = map(int, done.stdout.split())
    assert documents == 1 and text_bytes > 8_000_000
    assert peak < 400e6
