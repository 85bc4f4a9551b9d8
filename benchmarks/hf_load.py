"""Loading a HuggingFace checkpoint onto a mesh: bytes, scratch memory, seconds, and other readers in the same run.

A DeepSeek-V3-shaped checkpoint of over a gigabyte, in bfloat16 and in block-FP8, is made in a temporary directory
and read by four ranks into float32 parameters, as training does. Contenders take turns, round by round, each time in
new processes; the files are in the page cache. Each contender first reads a small checkpoint of the same kind, untimed: what it
imports it has then, and a turn in which a module is imported is an error. Bytes are those that the kernel counts for a process
(rchar of /proc/self/io) and those that the reader counts itself; scratch is the peak of resident memory
above what was resident with all parameters in place.

    python benchmarks/hf_load.py             # some ten minutes; writes benchmarks/results/hf_load.json
    python benchmarks/hf_load.py --quick     # a small checkpoint, one round: checks the script itself
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measuring import commit, cpu_model

from automoe.comm.agreement import Ranks
from automoe.config.compose import compose_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, ModelConfig
from automoe.hf.catalog import check_catalog, open_catalog
from automoe.hf.families.registry import family_of, model_config_from_hf
from automoe.hf.files import file_names, header_bytes, split, stored_as, write_files, write_index
from automoe.hf.folder import write_settings
from automoe.hf.keys import hf_tensors, is_quantized, our_tensors, quantization_config
from automoe.hf.read import Reader, load_hf
from automoe.hf.save_plan import Transfer, plan_writes, unread_shards
from automoe.hf.shards import local_shards
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts
from automoe.verify.pool import RankPool

HERE = Path(__file__).resolve().parent
RANKS = 4
MESHES = {
    "ep4": MeshConfig(dp_shard=4, ep=4),
    "ep2_ep_shard2": MeshConfig(dp_shard=4, ep=2, ep_shard=2),
    "pp2_ep2": MeshConfig(pp=2, dp_shard=2, ep=2),
}
SMALL = "small"  # folder of the checkpoints that are read before the clock starts
MIB = 1 << 20


# Checkpoints --------------------------------------------------------------------------------------


def shape(small: bool) -> ModelConfig:
    """DeepSeek-V3 with its ranks and head dims (576 rows of keys and values), narrower and shallower."""
    config = compose_config("config", ["model=dsv3_671b"]).model
    config.num_layers, config.first_k_dense, config.num_experts = (2, 1, 8) if small else (6, 1, 64)
    config.hidden_size, config.moe_intermediate_size = (256, 128) if small else (1024, 512)
    config.intermediate_size, config.vocab_size = 4 * config.hidden_size, 8192
    config.attention.num_heads = config.attention.num_kv_heads = 8
    config.router.num_groups, config.router.topk_groups = 4, 2
    config.num_experts_per_token = 4
    return config


def write_checkpoints(root: Path, config: ModelConfig) -> dict[str, Path]:
    """The same numbers in bfloat16 and in block-FP8, in files of an eighth."""
    bf16, fp8 = root / "bfloat16", root / "fp8"
    bf16.mkdir(parents=True)
    fp8.mkdir()
    tensors = hf_tensors(config, family_of(config).keys)
    dtypes = {key: torch.float32 if key.endswith("bias") else torch.bfloat16 for key in tensors}
    items = {key: stored_as(size, dtypes[key]) for key, size in tensors.items()}
    limit = sum(stored.num_bytes for stored in items.values()) // 8 + MIB
    bins = split(items.items(), limit)
    names = file_names(len(bins))
    generator = torch.Generator().manual_seed(0)
    tensors = (
        (torch.randn(size, generator=generator) * size[-1] ** -0.5).to(dtypes[key]) for key, size in tensors.items()
    )
    write_files([(bf16 / name, one) for name, one in zip(names, bins, strict=True)], ((one,) for one in tensors))
    write_index(bf16, bins, torch.bfloat16)
    write_settings(bf16, config, torch.bfloat16, None)
    catalog, keys = check_catalog(bf16, config), family_of(config).keys
    plan = plan_writes(unread_shards(config), config, keys, encoding="fp8", source=catalog)
    Transfer(plan, Ranks(alone=True), catalog).write(fp8, limit // 2)
    write_settings(fp8, config, torch.bfloat16, None, quantization_config(config, keys, "fp8"))
    return {"bfloat16": bf16, "fp8": fp8}


def write_headers(folder: Path) -> int:
    """DeepSeek-V3's own index with the headers of all its files, whose data are holes; returns its entries."""
    config = compose_config("config", ["model=dsv3_671b"]).model
    keys = family_of(config).keys

    items = [
        (
            piece.key,
            stored_as(piece.shape, torch.bfloat16, "fp8" if is_quantized(name, piece, keys, "fp8") else "plain"),
        )
        for name, size in our_tensors(config)
        for piece in keys.pieces(name, size)
    ]
    bins = split(items, 4 << 30)
    names = file_names(len(bins))
    folder.mkdir()
    for name, one in zip(names, bins, strict=True):
        header = header_bytes(one)
        (folder / name).write_bytes(header)
        os.truncate(folder / name, len(header) + sum(stored.total_bytes for stored in one.values()))
    write_settings(folder, config, torch.bfloat16, None, quantization_config(config, keys, "fp8"))
    return write_index(folder, bins, torch.bfloat16).num_tensors


# What ranks do --------------------------------------------------------------------------------------


def kernel_bytes() -> int:
    """Bytes that this process has asked files and pipes for."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def resident(field: str) -> int:
    """``VmRSS`` or, since ``clear_refs``, ``VmHWM`` of this process, in bytes."""
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def measured(action: Callable[[], Any]) -> dict[str, Any]:
    """``action`` between two barriers: seconds, CPU seconds, bytes and peak memory of this rank."""
    if dist.is_initialized():
        dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    modules = set(sys.modules)
    before, read, cpu, start = resident("VmRSS"), kernel_bytes(), time.process_time(), time.perf_counter()
    result = action()
    cpu, read, peak = time.process_time() - cpu, kernel_bytes() - read, resident("VmHWM")
    if dist.is_initialized():
        dist.barrier()
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": cpu,
        "kernel_bytes": read,
        "scratch_bytes": max(0, peak - before),
        "imported": sorted(set(sys.modules) - modules),
        "result": result,
    }


def parts_on(path: Path, mesh: str, allocate: bool = True) -> dict[int, Any]:
    """This rank's stages in float32, every page of their parameters resident."""
    torch.set_num_threads(1)
    config = Config(mesh=MESHES[mesh], model=model_config_from_hf(path))
    config.train.dtype = "float32"
    parts = build_parts(config, build_meshes(resolve_mesh(MESHES[mesh], None), torch.device("cpu")))
    if allocate:
        for part in parts.values():
            part.to_empty(device="cpu")
            with torch.no_grad():
                for parameter in part.parameters():
                    parameter.fill_(1.0)
    return parts


def ours(path: Path, mesh: str) -> dict[str, Any]:
    parts = parts_on(path, mesh)
    seen = measured(lambda: load_hf(parts, path))
    return seen | {
        "bytes_read": seen.pop("result").bytes_read / RANKS,
        "parameter_bytes": sum(s.local.nbytes for s in local_shards(parts)),
        "checksum": checksum(parts),
    }


def torch_reader(path: Path, mesh: str) -> dict[str, Any]:
    """torch's reader for the same shards: HuggingFace's names over views of the same parameters."""
    import logging
    import warnings

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
    from torch.distributed.tensor import DTensor, Shard

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    parts = parts_on(path, mesh)
    keys = family_of(next(iter(parts.values())).config).keys
    tensors: dict[str, torch.Tensor] = {}
    for shard in local_shards(parts):
        pieces = keys.pieces(shard.name, tuple(shard.tensor.shape))
        if len(pieces) == 1:
            tensors[pieces[0].key] = shard.tensor
            continue
        for piece in pieces:
            if (found := piece.overlap(shard.start, tuple(shard.local.shape))) is None:
                continue
            view = piece.in_stored_order(shard.local[found[1]])
            if tuple(view.shape) != piece.shape:
                rows = shard.tensor.device_mesh["ep_shard"]
                view = DTensor.from_local(
                    view, rows, [Shard(0)], run_check=False, shape=torch.Size(piece.shape), stride=view.stride()
                )
            tensors[piece.key] = view
    if path.name == "fp8":
        reader = QuantizedHuggingFaceStorageReader(str(path), target_dtype=torch.float32)
    else:
        reader = HuggingFaceStorageReader(str(path))
    seen = measured(lambda: dcp.load(tensors, storage_reader=reader))
    seen.pop("result")
    return seen | {"checksum": checksum(parts)}


def checksum(parts: dict[int, Any]) -> dict[str, float]:
    """Sum of every local shard, to find contenders that did not read the same numbers."""
    return {shard.name: float(shard.local.double().sum()) for shard in local_shards(parts)}


def raw_read(path: Path, mesh: str) -> dict[str, Any]:
    """Every rank its quarter of every file, in order, into one buffer."""
    buffer = memoryview(bytearray(8 * MIB))

    def read() -> int:
        total = 0
        for file in sorted(path.glob("*.safetensors")):
            size = file.stat().st_size
            at, end = (size * (dist.get_rank() + i) // RANKS for i in (0, 1))
            handle = os.open(file, os.O_RDONLY)
            while at < end:
                count = os.preadv(handle, [buffer[: min(len(buffer), end - at)]], at)
                at, total = at + count, total + count
            os.close(handle)
        return total

    seen = measured(read)
    return seen | {"bytes_read": seen.pop("result")}


def transformers_whole(path: Path, mesh: str) -> dict[str, Any]:
    """The whole model in one process; parameters are part of its memory, and are taken off."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    models = []

    def load() -> None:
        models.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True))

    seen = measured(load)
    seen.pop("result")
    own = sum(p.nbytes for p in models[0].parameters())
    return seen | {"parameter_bytes": own, "scratch_bytes": max(0, seen["scratch_bytes"] - own)}


def read_index(path: Path, mesh: str) -> dict[str, Any]:
    """All that comes before the first byte of a tensor, for DeepSeek-V3 on four ranks."""
    parts = parts_on(path, mesh, allocate=False)

    def plan() -> tuple[float, int]:
        start = time.process_time()
        catalog = open_catalog(path, next(iter(parts.values())).config)
        opened = time.process_time() - start
        return opened, len(Reader(catalog).plan(local_shards(parts)))

    seen = measured(plan)
    opened, ranges = seen.pop("result")
    return seen | {"headers_cpu_seconds": opened, "ranges": ranges}


# Runs -----------------------------------------------------------------------------------------------


def run(contender: Callable[..., dict[str, Any]], path: Path, mesh: str = "", ranks: int = RANKS) -> Any:
    """One turn in new processes: what every rank measured, or why there is nothing."""
    pool = RankPool(max_ranks=ranks)
    try:
        pool.run(contender, ranks, path.parent / SMALL / path.name, mesh)
        turn = pool.run(contender, ranks, path, mesh)
        if any(imported := [rank["imported"] for rank in turn]):
            raise SystemExit(f"{contender.__name__} imported modules while it was timed: {imported}")
        print(f"  {contender.__name__} {path.name} {mesh}: {max(rank['seconds'] for rank in turn):.2f} s")
        return turn
    except Exception as error:  # a contender that cannot is a result
        if contender in (ours, raw_read, read_index):
            raise
        return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    finally:
        pool.close()


def differing(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """Shards whose sums are not ours."""
    return sorted(
        {
            name
            for one, other in zip(ours, theirs, strict=True)
            for name, value in one["checksum"].items()
            if value != other["checksum"].get(name)
        }
    )


def combine(turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over turns of: the slowest rank's seconds, all ranks' CPU seconds, bytes; worst scratch of any."""
    result: dict[str, Any] = {
        "seconds": median(max(rank["seconds"] for rank in turn) for turn in turns),
        "cpu_seconds_all_ranks": median(sum(rank["cpu_seconds"] for rank in turn) for turn in turns),
        "cpu_seconds_worst_rank": max(rank["cpu_seconds"] for turn in turns for rank in turn),
        "kernel_bytes": max(sum(rank["kernel_bytes"] for rank in turn) for turn in turns),
        "scratch_mib_worst_rank": max(rank["scratch_bytes"] for turn in turns for rank in turn) / MIB,
        "seconds_rounds": [max(rank["seconds"] for rank in turn) for turn in turns],
        "cpu_seconds_rounds": [sum(rank["cpu_seconds"] for rank in turn) for turn in turns],
    }
    for key in ("bytes_read", "parameter_bytes"):
        if key in turns[0][0]:
            result[key] = sum(rank[key] for rank in turns[0])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small checkpoint and one round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default 3)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "hf_load.json")
    parser.add_argument("--tmp", type=Path, help="where the checkpoints are made (default: the system's)")
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)
    sys.path.insert(0, str(HERE))  # ranks import this file
    root = Path(tempfile.mkdtemp(prefix="automoe-hf-load-", dir=args.tmp))
    try:
        report = measure(root, args.quick, 1 if args.quick else args.rounds)
    finally:
        shutil.rmtree(root)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {args.out}")


def measure(root: Path, quick: bool, rounds: int) -> dict[str, Any]:
    """All turns of all contenders, and their summary."""
    import hf_load as here  # by this name ranks find the functions

    config = shape(quick)
    paths = write_checkpoints(root, config)
    write_checkpoints(root / SMALL, shape(True))
    (root / SMALL / "index").symlink_to("fp8")
    sizes = {name: sum(f.stat().st_size for f in path.glob("*.safetensors")) for name, path in paths.items()}
    largest = max(torch.Size(size).numel() for size in hf_tensors(config, family_of(config).keys).values())
    turns: dict[str, list[Any]] = {}
    for _ in range(rounds):
        for name, path in paths.items():
            turns.setdefault(f"{name}/raw read", []).append(run(here.raw_read, path))
            whole = f"{name}/transformers"
            turns.setdefault(whole, []).append(run(here.transformers_whole, path, ranks=1))
            for mesh in MESHES:
                turns.setdefault(f"{name}/{mesh}/automoe", []).append(run(here.ours, path, mesh))
                turns.setdefault(f"{name}/{mesh}/torch", []).append(run(here.torch_reader, path, mesh))
    entries = write_headers(root / "index")
    indexed = run(here.read_index, root / "index", "ep4")
    results: dict[str, Any] = {}
    for name, seen in turns.items():
        if isinstance(seen[-1], str):
            results[name] = {"failed": seen[-1]}
            print(f"{name:34} {seen[-1][:90]}")
            continue
        results[name] = combine(seen)
        if name.endswith("/torch"):
            wrong = differing(turns[name.replace("/torch", "/automoe")][0], seen[0])
            results[name]["shards_with_other_numbers"] = wrong
        r = results[name]
        print(
            f"{name:34}{r['seconds']:7.2f} s {r['cpu_seconds_all_ranks']:7.2f} CPU s "
            f"{r['kernel_bytes'] / 1e9:6.2f} GB {r['scratch_mib_worst_rank']:7.1f} MiB scratch"
            + (f"  {len(r['shards_with_other_numbers'])} shards differ" if "shards_with_other_numbers" in r else "")
        )
    cpu = [rank["cpu_seconds"] for rank in indexed]
    print(f"index of {entries:,} entries: {max(cpu):.2f} CPU s on the slowest of {RANKS} ranks")
    return {
        "what": "a DeepSeek-V3-shaped checkpoint read by four ranks into float32 parameters, files in the page cache",
        "quick": quick,
        "commit": commit("../automoe/hf", "hf_load.py"),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "safetensors")},
        "rounds": rounds,
        "config": repr(config),
        "checkpoint_bytes": sizes,
        "largest_tensor_mib_float32": 4 * largest / MIB,
        "results": results,
        "index": {
            "entries": entries,
            "cpu_seconds_worst_rank": max(cpu),
            "cpu_seconds": cpu,
            "headers_cpu_seconds": [rank["headers_cpu_seconds"] for rank in indexed],
            "ranges": [rank["ranges"] for rank in indexed],
        },
    }


if __name__ == "__main__":
    main()
