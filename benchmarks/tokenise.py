"""Tokenising a text file that is larger than memory should be: peak memory, seconds and megabytes a second.

One file of 2 GB, Python's own sources and those of the installed packages in a new order each time they repeat, is
tokenised into the cache by a BPE of 32,000 ids that is trained on the spot, by the call that training makes. A process of
its own does it on one thread; its peak is the kernel's VmHWM. Afterwards ids are counted back into bytes.

    python benchmarks/tokenise.py               # 20 minutes or more; writes benchmarks/results/tokenise.json
    python benchmarks/tokenise.py --mb 50 --out /dev/stdout
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from provenance import commit, cpu_model

HERE = Path(__file__).resolve().parent
VOCABULARY = 32_000
TRAINED_ON = 600  # files
# Qwen's words, which are those of most tokenizers of today.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=2000, help="size of the text (default 2000)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tokenise.json")
    parser.add_argument("--tmp", help="where text and tokens are written (default: the system's)")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(args.measure)))
        return
    used = commit("../automoe/data", "tokenise.py")
    with tempfile.TemporaryDirectory(prefix="automoe-tokenise-", dir=args.tmp) as scratch:
        folder = Path(scratch)
        sources = python_files()
        train_tokenizer(folder / "tokenizer", sources)
        unique, written = write_text(folder / "text.txt", sources, args.mb * 10**6)
        environment = os.environ | {"RAYON_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--measure", scratch]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["bytes_of_ids"] == written, (result, written)
    report = {
        "what": "one text file tokenised into the cache by a byte-level BPE, one thread",
        "commit": used,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("tokenizers", "numpy")},
        "text_bytes": written,
        "different_bytes": unique,
        "vocabulary": VOCABULARY,
        **result,
        "mb_per_cpu_second": written / 1e6 / result["cpu_seconds"],
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{written / 1e6:,.0f} MB: {result['seconds']:,.0f} s, {report['mb_per_cpu_second']:.2f} MB a CPU-second, "
          f"peak {result['peak_mib']:,.0f} MiB")  # fmt: skip


def python_files() -> list[Path]:
    """Python's own sources first, then those of the packages."""
    roots = [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    return list(dict.fromkeys(file for root in roots for file in sorted(root.rglob("*.py")) if file.is_file()))


def train_tokenizer(folder: Path, files: list[Path]) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([split, by_bytes]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (file.read_text(encoding="utf-8", errors="ignore") for file in files[:TRAINED_ON])
    bpe.train_from_iterator(texts, trainer)
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def write_text(path: Path, files: list[Path], num_bytes: int) -> tuple[int, int]:
    """At least ``num_bytes`` of sources, in another order each time round; bytes that differ, and all of them."""
    order, written, unique = random.Random(0), 0, 0
    with path.open("wb") as text:
        while written < num_bytes:
            for file in order.sample(files, len(files)):
                written += text.write(file.read_text(encoding="utf-8", errors="ignore").encode())
                if written >= num_bytes:
                    break
            unique = unique or written
    return unique, written


def measure(folder: Path) -> dict[str, Any]:
    """What tokenising ``text.txt`` took, in this process."""
    import numpy as np

    from automoe.config.schema import DataConfig
    from automoe.data.prepare import open_corpus
    from automoe.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    data = DataConfig(kind="text", path=str(folder / "text.txt"))
    begin, cpu = time.perf_counter(), time.process_time()
    corpus = open_corpus(data, tokenizer, folder / "cache")
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
    counts = sum(
        np.bincount(corpus.tokens[at : at + (1 << 24)], minlength=tokenizer.vocab_size)
        for at in range(0, len(corpus.tokens), 1 << 24)
    )
    return {
        "tokens": len(corpus.tokens),
        "bytes_of_ids": int(counts @ tokenizer.byte_lengths),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "peak_mib": peak,
    }


if __name__ == "__main__":
    main()
