"""Does sending bytes between the ranks of a machine beat reading them from the page cache?

Three readers fill the same float32 parameters from the same files, in turns, round by round:

    send   every byte is read once on a machine and sent over gloo to the other ranks that need it
    read   every rank reads the ranges that it needs with preadv
    map    every rank maps the files and copies the ranges that it needs (bfloat16 files alone)

Files are in the page cache (warm), or dropped from it before each turn (cold). Seconds are those of the slowest rank,
CPU seconds of all ranks together, scratch is the peak of resident memory above what all parameters take.

    python benchmarks/hf_sharing.py             # writes benchmarks/results/hf_sharing.json
    python benchmarks/hf_sharing.py --quick
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import hf_load
import torch
from provenance import commit, cpu_model

from automoe.config.schema import MeshConfig
from automoe.hf import read, reader
from automoe.hf.read import DTYPES, Reader
from automoe.verify.pool import RankPool

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
CASES = {
    "2 ranks: dp_replicate": (2, MeshConfig(dp_replicate=2, dp_shard=1)),
    "2 ranks: tp etp": (2, MeshConfig(dp_shard=1, tp=2, etp=2)),
    "4 ranks: ep ep_shard": (4, MeshConfig(dp_shard=4, ep=2, ep_shard=2)),
    "4 ranks: dp_replicate dp ep": (4, MeshConfig(dp_replicate=2, dp_shard=2, ep=2, ep_replicate=2)),
    "4 ranks: dp tp ep etp": (4, MeshConfig(dp_shard=2, tp=2, ep=2, etp=2)),
    "8 ranks: ep ep_shard": (8, MeshConfig(dp_shard=8, ep=4, ep_shard=2)),
    "8 ranks: dp tp ep etp": (8, MeshConfig(dp_shard=2, tp=4, ep=2, etp=4)),
}


class Mapped(Reader):
    """Ranges copied out of mapped files."""

    def fill(self, ranges: Any) -> None:
        maps: dict[str, Any] = {}
        warnings.simplefilter("ignore")  # the maps are not writable, and nobody writes
        for one in ranges:
            data = one.source.data
            if data.file not in maps:
                with open(self.catalog.folder / data.file, "rb") as file:
                    maps[data.file] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            dtype, count = DTYPES[data.dtype], torch.Size(data.shape).numel()
            stored = torch.frombuffer(maps[data.file], dtype=dtype, count=count, offset=data.start).view(data.shape)
            while stored.dim() < 3:
                stored = stored.unsqueeze(0)
            part = stored[slice(*one.matrices), slice(*one.rows), slice(*one.cols)]
            one.place.copy_(part.reshape(one.place.shape))


def turn(how: str, path: Path, mesh: MeshConfig) -> dict[str, Any]:
    """One load on this rank."""
    hf_load.MESHES["case"] = mesh
    parts = hf_load.parts_on(path, "case")
    read.Reader = Mapped if how == "map" else Reader  # type: ignore[misc]
    load: Any = reader.load_hf if how == "send" else read.load_hf
    seen = hf_load.measured(lambda: load(parts, path))
    seen.pop("result")
    return seen | {"checksum": hf_load.checksum(parts)}


def drop_cache(path: Path) -> None:
    for file in path.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def measure(paths: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Medians of every case, format, temperature and reader."""
    import hf_sharing as here  # by this name ranks find the functions

    results: dict[str, Any] = {}
    for case, (ranks, mesh) in CASES.items():
        pool = RankPool(max_ranks=ranks)
        turns: dict[str, list[Any]] = {}
        for _ in range(rounds):
            for name, path in paths.items():
                for cache in ("warm", "cold") if name == "bfloat16" else ("warm",):
                    first = None
                    for how in ("send", "read", "map")[: 3 if name == "bfloat16" else 2]:
                        if cache == "cold":
                            drop_cache(path)
                        seen = pool.run(here.turn, ranks, how, path, mesh)
                        sums = [rank.pop("checksum") for rank in seen]
                        first = first or sums
                        assert sums == first, f"{case} {name} {how}: other numbers"
                        turns.setdefault(f"{case}/{name}/{cache}/{how}", []).append(seen)
        pool.close()
        for key, seen in turns.items():
            results[key] = {
                "seconds": median(max(rank["seconds"] for rank in one) for one in seen),
                "cpu_seconds_all_ranks": median(sum(rank["cpu_seconds"] for rank in one) for one in seen),
                "kernel_bytes": max(sum(rank["kernel_bytes"] for rank in one) for one in seen),
                "scratch_mib_worst_rank": max(rank["scratch_bytes"] for one in seen for rank in one) / MIB,
                "seconds_rounds": [max(rank["seconds"] for rank in one) for one in seen],
            }
            r = results[key]
            print(
                f"{key:48}{r['seconds']:7.2f} s {r['cpu_seconds_all_ranks']:7.2f} CPU s "
                f"{r['kernel_bytes'] / 1e9:6.2f} GB {r['scratch_mib_worst_rank']:7.1f} MiB"
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small checkpoint and one round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "hf_sharing.json")
    parser.add_argument("--tmp", type=Path, help="where the checkpoints are made (default: the system's)")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sys.path.insert(0, str(HERE))
    root = Path(tempfile.mkdtemp(prefix="automoe-hf-sharing-", dir=args.tmp))
    try:
        paths = hf_load.write_checkpoints(root, hf_load.shape(args.quick))
        report = {
            "what": __doc__.splitlines()[0],
            "commit": commit("../automoe/hf", "hf_sharing.py"),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg(),
            "python": platform.python_version(),
            "torch": version("torch"),
            "rounds": args.rounds,
            "checkpoint_bytes": {k: sum(f.stat().st_size for f in p.glob("*.safetensors")) for k, p in paths.items()},
            "results": measure(paths, 1 if args.quick else args.rounds),
        }
    finally:
        shutil.rmtree(root)
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
