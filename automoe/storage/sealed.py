"""JSON objects that detect changed bytes: the last key is the CRC-32 of all text before it."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from automoe.storage.files import read_file, replace_file
from automoe.storage.foreign import parse_json

SEAL = "crc32"
_SEAL = re.compile(rb',\s*"crc32": (\d+)\s*\}\s*\Z')


def sealed(content: Mapping[str, Any], **options: Any) -> str:
    """Return ``content`` (not empty) as JSON text whose last key is a CRC-32 of all text before it.

    Args:
        options: keyword arguments of ``json.dumps``.
    """
    text = json.dumps(content, **options)
    body = text[:-1].rstrip()
    end = text[len(body) :]
    return f'{body},{end[:-1]} "{SEAL}": {zlib.crc32(body.encode())}{end}'


def unsealed(text: bytes, must_be_sealed: bool = False) -> dict[str, Any]:
    """Parse a JSON object, and compare its CRC-32 (last key, ``crc32``) with the text before it.

    The key is removed.

    Args:
        must_be_sealed: False accepts an object without a CRC-32, since a person or another program
            may have written it.

    Raises:
        ValueError: the text is no JSON object, or its CRC-32 differs or is missing.
    """
    content = parse_json(text)
    if not isinstance(content, dict):
        raise ValueError(f"expected a mapping, got {type(content).__name__}")
    if SEAL in content:
        seal = _SEAL.search(text)
        if seal is None or zlib.crc32(text[: seal.start()]) != int(seal[1]):
            raise ValueError("it is not what was written (its CRC-32 differs)")
        del content[SEAL]
    elif must_be_sealed:
        raise ValueError(f"it has no {SEAL} at its end")
    return content


def read_json(path: Path, must_be_sealed: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file that ``replace_json`` wrote, after checking its CRC-32.

    Args:
        must_be_sealed: False accepts a file without a CRC-32.

    Raises:
        OSError: the file cannot be read.
        ValueError: the text is no JSON object, or its CRC-32 differs or is missing.
    """
    return unsealed(read_file(path), must_be_sealed)


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` as JSON with a CRC-32 to a file, and replace the old file atomically."""
    replace_file(path, sealed(content, indent=1) + "\n")
