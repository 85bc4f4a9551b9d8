"""Pairs of answers as files, and what makes a run of them small."""

from __future__ import annotations

import json
from pathlib import Path

import torch

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_pairs(path: Path, count: int = 24) -> Path:
    """A question, a preferred and a rejected answer a line, of different lengths: letters that say nothing."""
    generator = torch.Generator().manual_seed(1)

    def word(most: int) -> str:
        length = int(torch.randint(2, most, (), generator=generator))
        return "".join(LETTERS[int(i)] for i in torch.randint(26, (length,), generator=generator))

    def record(n: int) -> dict:
        prompt = [{"role": "user", "content": f"{n}? {word(9)}"}]
        return {"prompt": prompt} | {
            key: [{"role": "assistant", "content": word(12)}] for key in ("chosen", "rejected")
        }

    path.write_text("".join(json.dumps(record(n)) + "\n" for n in range(count)))
    return path
