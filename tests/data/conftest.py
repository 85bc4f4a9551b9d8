"""Real text for the data tests: this Python's own library; tokenizers trained on it here."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from automoe.config.schema import Config
from automoe.storage.cache import default_cache_dir


@pytest.fixture(scope="session")
def library_texts() -> list[str]:
    """Forty library modules, ten of them with characters of several bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted([*root.glob("*.py"), *root.glob("email/*.py"), *root.glob("idlelib/*.py")])
    texts = [path.read_text(encoding="utf-8") for path in paths]
    wide = [text for text in texts if not text.isascii()][:10]
    assert wide
    return [text for text in texts if text.isascii() and text][: 40 - len(wide)] + wide


def save(tokenizer: Tokenizer, directory: Path, eos: str | None) -> Path:
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return directory


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory, library_texts) -> Path:
    """A byte-level BPE of 400 ids, as GPT-2, Qwen and DeepSeek have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(library_texts, trainer)
    return save(tokenizer, tmp_path_factory.mktemp("tokenizers") / "byte_level", "<|end|>")


@pytest.fixture(scope="session")
def byte_fallback_dir(tmp_path_factory, library_texts) -> Path:
    """A SentencePiece-like BPE with byte fallback, as Llama 2 and Mixtral have."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    specials = ["<unk>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, limit_alphabet=60)
    # Line by line: without a pre-tokenizer every text is one word, and merges over long words take minutes.
    lines = [line for text in library_texts[-20:] for line in text.splitlines()]
    tokenizer.train_from_iterator(lines, trainer)
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    for byte in range(256):
        vocab.setdefault(f"<0x{byte:02X}>", len(vocab))
    directory = save(
        Tokenizer.from_str(json.dumps(content)), tmp_path_factory.mktemp("tokenizers") / "byte_fallback", "</s>"
    )
    return directory


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return default_cache_dir()


@pytest.fixture
def config(tmp_path, library_texts) -> Config:
    """Thirty library modules cut short: about 60 rows of 256 tokens an epoch."""
    (tmp_path / "corpus").mkdir()
    for index, text in enumerate(library_texts[:30]):
        (tmp_path / "corpus" / f"{index:02}.py").write_text(text[: 200 + 20 * index], encoding="utf-8")
    config = Config()
    config.data.kind, config.data.path, config.data.val_fraction = "text", str(tmp_path / "corpus"), 0.2
    return config
