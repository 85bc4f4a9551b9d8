"""A byte that has changed in JSON of ours is seen, and JSON of others is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automoe.storage.sealed import SEAL, read_json, replace_json, sealed, unsealed

CONTENT = {"step": 3, "loss": 5.25, "lr": 1e-3, "text": "é\n", "nested": {"a": [1, None]}}


@pytest.mark.parametrize("options", [{}, {"indent": 1}])
def test_every_bit_counts(options: dict[str, int]) -> None:
    text = sealed(CONTENT, **options).encode()
    assert unsealed(text) == CONTENT
    for place in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[place] ^= 1 << bit
            try:
                found = unsealed(bytes(damaged))
            except ValueError:
                continue
            # The seal's own name, or white space after it.
            assert {key: found[key] for key in CONTENT} == CONTENT and SEAL not in found


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[1]", b"3", b"\xff\xfe", b"\0\0\0", b'{"a": 1, "crc32": "x"}', b"[" * 100_000]
)
def test_what_is_no_object_or_was_changed_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        unsealed(text)


def test_what_others_wrote_is_read(tmp_path: Path) -> None:
    assert unsealed(b'{"a": 1}\n') == {"a": 1}
    replace_json(tmp_path / "a.json", CONTENT)
    assert read_json(tmp_path / "a.json") == CONTENT == read_json(tmp_path / "a.json", must_be_sealed=True)
    (tmp_path / "a.json").write_text(json.dumps(CONTENT))
    assert read_json(tmp_path / "a.json") == CONTENT
    with pytest.raises(ValueError, match="has no crc32"):
        read_json(tmp_path / "a.json", must_be_sealed=True)
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_json(tmp_path / "folder", CONTENT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "folder"], "no scratch file stays"
