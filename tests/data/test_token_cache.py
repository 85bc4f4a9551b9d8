"""The cache of tokenised text: made once, whole or made anew, and shared by ranks that race."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from automoe.config.schema import Config
from automoe.data.loader import Loader
from automoe.data.prepare import open_corpus
from automoe.data.tokenizer import ByteTokenizer
from automoe.errors import DataError

pytestmark = pytest.mark.usefixtures("cache")


class Refusing(ByteTokenizer):
    """Fails when asked to encode: proves that tokens came from the cache."""

    def encode_batch(self, texts):
        raise AssertionError("tokenised again")


def test_corpus_is_tokenised_once(config, cache):
    first = open_corpus(config.data, ByteTokenizer())
    again = open_corpus(config.data, Refusing())
    assert (first.tokens == again.tokens).all() and first.content == again.content


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def put_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def exchange(path: Path) -> None:
    """The entry of the same text under another name, whole in itself."""
    other = next(entry for entry in path.parent.parent.iterdir() if entry.is_dir() and entry != path.parent)
    for file in other.iterdir():
        shutil.copy(file, path.parent)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["tokens.bin", "documents.npy", "meta.json"])
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, put_a_folder, exchange])
def test_damaged_cache_is_found_and_made_anew(name, damage, config, cache, capsys):
    first = open_corpus(config.data, ByteTokenizer())
    entry = next(path for path in cache.iterdir() if path.is_dir())
    if damage is exchange:
        config.data.max_bytes = 10**9
        open_corpus(config.data, ByteTokenizer())
        config.data.max_bytes = None
    tokens = np.array(first.tokens)
    damage(entry / name)
    again = open_corpus(config.data, ByteTokenizer())
    assert (tokens == again.tokens).all() and first.content == again.content
    assert f"{entry} is damaged" in (said := capsys.readouterr().err) and "tokenised again" in said
    if damage is flip and name != "meta.json":
        assert name in said
    assert (open_corpus(config.data, Refusing()).tokens == tokens).all() and not capsys.readouterr().err


def test_file_in_the_place_of_a_cache_entry(config, cache):
    open_corpus(config.data, ByteTokenizer())
    entry = next(path for path in cache.iterdir() if path.is_dir())
    shutil.rmtree(entry)
    entry.write_text("in the way")
    assert len(open_corpus(config.data, ByteTokenizer()).lengths) == 30


def test_id_that_the_tokenizer_has_not_is_named_with_its_document(config):
    class Wrong(ByteTokenizer):
        def encode_batch(self, texts):
            return [ids + 200 * (index == 2) for index, ids in enumerate(super().encode_batch(texts))]

    with pytest.raises(DataError, match=r"02\.py: the tokenizer makes id 3\d\d .* its 258 ids end at 257"):
        open_corpus(config.data, Wrong())


def test_a_lock_that_is_a_link_is_not_followed(config, cache, tmp_path):
    open_corpus(config.data, ByteTokenizer())
    (lock,) = cache.glob("*.lock")
    shutil.rmtree(lock.with_suffix(""))
    lock.unlink()
    (tmp_path / "thesis.tex").write_text("...")
    lock.symlink_to(tmp_path / "thesis.tex")
    with pytest.raises(DataError, match="a lock file that is a link is not followed: remove it"):
        open_corpus(config.data, ByteTokenizer())
    assert (tmp_path / "thesis.tex").read_text() == "..."


def test_bad_text_leaves_nothing_in_the_cache(config, cache):
    (Path(config.data.path) / "zz.py").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"zz\.py:1: byte 0xff is not UTF-8"):
        Loader(config, 0, 1)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_writer_that_dies_blocks_nobody_and_leaves_no_entry(config, cache):
    code = (
        "import os, signal, sys; from automoe.config.data_schema import DataConfig\n"
        "from automoe.data.prepare import open_corpus; from automoe.data.tokenizer import ByteTokenizer\n"
        "class Dying(ByteTokenizer):\n"
        "    def encode_batch(self, texts): os.kill(os.getppid(), signal.SIGKILL); signal.pause()\n"
        f"open_corpus(DataConfig(kind='text', path={config.data.path!r}), Dying())"
    )
    died = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert died.returncode == -9, died.stderr
    assert [path for path in cache.iterdir() if path.is_dir()], "half an entry is left under another name"
    assert len(open_corpus(config.data, ByteTokenizer()).lengths) == 30


@pytest.mark.exhaustive
def test_ranks_that_race_share_one_entry(config, cache):
    code = (
        "import sys; from automoe.config.data_schema import DataConfig; from automoe.data.prepare import open_corpus\n"
        "from automoe.data.tokenizer import ByteTokenizer\n"
        "print(open_corpus(DataConfig(max_bytes=2_000_000), ByteTokenizer()).content)"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    contents = {racer.communicate(timeout=120)[0] for racer in racers}
    assert [racer.returncode for racer in racers] == [0] * 4 and len(contents) == 1
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_cache_directory_that_cannot_be_made(config, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file/sub: the tokenised corpus cannot be written here .*XDG_CACHE_HOME"):
        Loader(config, 0, 1, cache_dir=tmp_path / "file" / "sub")


def test_preparing_needs_no_torch_and_leaves_the_cache(cache):
    code = (
        "import sys; from automoe.config.schema import Config; from automoe.data.prepare import prepare_data\n"
        "config = Config(); config.data.max_bytes = 300_000; prepare_data(config); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    config = Config()
    config.data.max_bytes = 300_000
    open_corpus(config.data, Refusing())
