"""What a checkpoint costs, compared with a raw write with fsync and with plain torch.distributed.checkpoint.

    make bench-checkpoint

Contenders take turns in every round, on the same ranks, state and disk; files are dropped from the page cache
before they are read. Each save is loaded into a state of zeros and compared to the bit before its time counts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from measuring import commit
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

from automoe.checkpoint.store import CheckpointStore
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import AttentionConfig, CheckpointConfig, Config, MeshConfig, ModelConfig, TrainConfig
from automoe.data.loader import Loader
from automoe.observe.environment import describe_environment
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.training.state import TrainState

HERE = Path(__file__).parent
WORK = 384  # side of the matrices that stand for a training step
SLACK_BYTES = 32 << 20  # of memory that a save may take besides: buffers, plans, the allocator's pages


def config(hidden: int, layers: int, ranks: int, folder: Path) -> Config:
    """A Mixtral-shaped model over ``ranks`` expert-parallel ranks, float32 with AdamW: 12 bytes a parameter."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text("words " * 10_000)
    model = ModelConfig(
        family="mixtral",
        vocab_size=8192,
        hidden_size=hidden,
        num_layers=layers,
        num_experts=8,
        moe_intermediate_size=2 * hidden,
        attention=AttentionConfig(num_heads=8, num_kv_heads=8, head_dim=hidden // 8),
    )
    return Config(
        mesh=MeshConfig(dp_shard=ranks, ep=ranks),
        model=model,
        train=TrainConfig(seq_len=64, global_batch_size=8, val_every=0),
        data=DataConfig(kind="text", path=str(text), val_fraction=0.0),
        checkpoint=CheckpointConfig(every=1, keep=1),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def measure(settings: Config, folder: Path, rounds: int) -> dict[str, Any]:
    """This rank's seconds, CPU seconds and memory of every contender in every round."""
    device = torch.device("cpu")
    meshes = build_meshes(resolve_mesh(settings.mesh, None), device)
    parts = build_parts(settings, meshes)
    materialize(parts, settings, device)
    loader = Loader(settings, meshes.dp_rank, meshes.shape.dp, cache_dir=folder / f"data{dist.get_rank()}")
    state = TrainState(parts, build_optimizer(parts.values(), settings.optim), loader)
    tensors = state.tensors()
    for name, tensor in tensors.items():
        if name.startswith("optimizer.exp"):
            local(tensor).uniform_()
    return Bench(settings, folder, state).run(rounds)


class Bench:
    """The contenders over one state; every rank calls every method."""

    def __init__(self, settings: Config, folder: Path, state: TrainState) -> None:
        self.settings, self.folder, self.state = settings, folder, state
        self.tensors = {name: local(tensor) for name, tensor in state.tensors().items()}
        self.expected = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.rank, self.bytes = dist.get_rank(), sum(t.nbytes for t in self.tensors.values())
        self.seconds: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.memory: dict[str, list[int]] = {}
        self.step = 0

    def run(self, rounds: int) -> dict[str, Any]:
        background = dist.new_group(backend="gloo")
        for _ in range(rounds):
            self.clock("raw_write", self.raw_write)
            self.clock("memory_copy", lambda: [tensor.clone() for tensor in self.tensors.values()])
            self.clock("hash", self.hash_all)
            self.clock("plain_save", lambda: self.plain_save(self.fresh("plain")))
            self.check("plain_load", lambda: dcp.load(self.state.tensors(), checkpoint_id=self.folder / "plain"))
            self.ours(async_save=False)
            self.ours(async_save=True)
            self.steps_beside(background)
        return {
            "seconds": self.seconds,
            "cpu": self.cpu,
            "memory": self.memory,
            "bytes": self.bytes,
            "largest_tensor": max(tensor.nbytes for tensor in self.tensors.values()),
        }

    def clock(self, name: str, action: Callable[[], Any]) -> None:
        """Run ``action`` on all ranks at once; keep its wall and CPU seconds and the memory that it took."""
        if self.rank == 0:
            os.sync()  # what the contender before has left for the disk to do is not this one's
        with peak_memory() as peak:
            dist.barrier()
            wall, cpu = time.perf_counter(), cpu_seconds()
            action()
            self.seconds.setdefault(name, []).append(time.perf_counter() - wall)
            self.cpu.setdefault(name, []).append(cpu_seconds() - cpu)
        self.memory.setdefault(name, []).append(peak[0])
        dist.barrier()

    def check(self, name: str, load: Callable[[], Any]) -> None:
        """Time a load from the disk into zeros, and compare what came with what was saved."""
        for tensor in self.tensors.values():
            tensor.zero_()
        drop_from_cache(self.folder)
        self.clock(name, load)
        for key, tensor in self.tensors.items():
            if not torch.equal(tensor, self.expected[key]):
                raise SystemExit(f"{name}: {key} is not what was saved. Nothing was written.")

    def fresh(self, name: str) -> Path:
        target = self.folder / name
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
        dist.barrier()
        return target

    def raw_write(self) -> None:
        path = self.folder / f"raw{self.rank}"
        with open(path, "wb", buffering=0) as file:
            for tensor in self.tensors.values():
                view = memoryview(tensor.contiguous().view(-1).numpy()).cast("B")
                while view:
                    view = view[file.write(view) :]
            os.fsync(file.fileno())
        path.unlink()

    def hash_all(self) -> None:
        digest = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            digest.update(memoryview(tensor.contiguous().view(-1).numpy()).cast("B"))

    def plain_save(self, target: Path) -> None:
        dcp.save(self.state.tensors(), checkpoint_id=target)

    def ours(self, async_save: bool) -> None:
        run_dir = self.fresh("ours")
        self.state.step = self.step = self.step + 1
        checkpoint = replace(self.settings.checkpoint, async_save=async_save)
        settings = replace(self.settings, checkpoint=checkpoint)
        store = CheckpointStore(settings, resolve_mesh(settings.mesh, None), run_dir)
        if async_save:
            begin = lambda: store.save(self.state)  # noqa: E731
            self.clock("async_begin_first", begin)
            self.clock("async_rest", lambda: store.poll(wait=True))
            self.state.step = self.step = self.step + 1
            self.clock("async_begin", begin)
            store.poll(wait=True)
        else:
            self.clock("save", lambda: store.save(self.state))
            self.check("load", lambda: store.load_latest(self.state))

    def steps_beside(self, background: dist.ProcessGroup) -> None:
        """Matrix products for as long as a save takes, alone and during saves in the background."""
        self.seconds.setdefault("product_alone", []).append(products(seconds=2.0)[0])
        for name, kind in (("thread", AsyncCheckpointerType.THREAD), ("process", AsyncCheckpointerType.PROCESS)):
            target = self.fresh(f"plain_{name}")
            dist.barrier()
            wall, cpu = time.perf_counter(), cpu_seconds()
            future: Any = dcp.async_save(
                self.state.tensors(), checkpoint_id=target, async_checkpointer_type=kind, process_group=background
            )
            self.seconds.setdefault(f"plain_{name}_begin", []).append(time.perf_counter() - wall)
            during, work = products(until=future.done)
            self.seconds.setdefault(f"product_during_{name}", []).append(during)
            future.result()
            self.seconds.setdefault(f"plain_{name}_total", []).append(time.perf_counter() - wall)
            self.cpu.setdefault(f"plain_{name}", []).append(cpu_seconds() - cpu - work)
            dist.barrier()


def products(seconds: float = 0.0, until: Callable[[], bool] | None = None) -> tuple[float, float]:
    """Multiply matrices for ``seconds``, or ``until`` something is over: mean seconds of one, CPU seconds of all."""
    a, b = torch.rand(WORK, WORK), torch.rand(WORK, WORK)
    started, cpu, count = time.perf_counter(), time.thread_time(), 0
    while not count or (time.perf_counter() - started < seconds if until is None else not until()):
        a @ b
        count += 1
    return (time.perf_counter() - started) / count, time.thread_time() - cpu


def cpu_seconds() -> float:
    """Of this process and its children, living ones included, in user and system mode."""
    total = time.process_time()
    ticks = os.sysconf("SC_CLK_TCK")
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()
            total += (int(fields[11]) + int(fields[12])) / ticks
    times = os.times()
    return total + times.children_user + times.children_system


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Bytes of resident memory above what is in use now, at the highest; filled in at the end."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that is free and resident would hide what is taken
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    peak = [0]
    yield peak
    peak[0] = max(0, resident("VmHWM") - before)


def resident(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure_rank(folder: Path, hidden: int, layers: int, rounds: int) -> None:
    """Time the contenders as one rank that torchrun started, and write what was measured to ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    settings = config(hidden, layers, size, folder / f"data{rank}")
    found = measure(settings, folder, rounds)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(size: int, hidden: int, layers: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """What ``size`` ranks measured."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    command += [str(HERE / "checkpoint.py"), f"--as-rank={folder}"]
    command += [f"--hidden={hidden}", f"--layers={layers}", f"--rounds={rounds}"]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr[-6000:]}\nNothing was written.")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def summarize(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One table from all ranks: a round takes as long as its slowest rank; CPU seconds are summed."""
    total = sum(rank["bytes"] for rank in ranks)

    def seconds(name: str) -> dict[str, Any]:
        rounds = [max(times) for times in zip(*(rank["seconds"][name] for rank in ranks), strict=True)]
        return {"seconds": median(rounds), "gb_per_s": total / 1e9 / median(rounds), "rounds": rounds}

    def cpu(name: str) -> float:
        return median(sum(times) for times in zip(*(rank["cpu"][name] for rank in ranks), strict=True))

    def async_over_plain(kind: str) -> dict[str, float]:
        alone = median(value for rank in ranks for value in rank["seconds"]["product_alone"])
        slowed = median(value for rank in ranks for value in rank["seconds"][f"product_during_{kind}"])
        return {
            "blocks_s": seconds(f"plain_{kind}_begin")["seconds"],
            "total_s": seconds(f"plain_{kind}_total")["seconds"],
            "cpu_s": cpu(f"plain_{kind}"),
            "products_slowed_by": slowed / alone,
        }

    names = ("raw_write", "plain_save", "save", "plain_load", "load", "memory_copy")
    memory = {
        name: max(max(rank["memory"][name]) for rank in ranks)
        for name in ("save", "load", "plain_save", "plain_load", "async_begin_first", "async_rest")
    }
    return {
        "state_bytes": total,
        "state_bytes_a_rank": [rank["bytes"] for rank in ranks],
        "largest_tensor_bytes": max(rank["largest_tensor"] for rank in ranks),
        "rates": {name: seconds(name) for name in names},
        "save_over_raw_write": seconds("save")["seconds"] / seconds("raw_write")["seconds"],
        "save_over_plain": seconds("save")["seconds"] / seconds("plain_save")["seconds"],
        "load_over_plain": seconds("load")["seconds"] / seconds("plain_load")["seconds"],
        "blocked": {
            "save_s": seconds("save")["seconds"],
            "async_first_s": seconds("async_begin_first")["seconds"],
            "async_s": seconds("async_begin")["seconds"],
            "memory_copy_s": seconds("memory_copy")["seconds"],
        },
        "cpu_seconds": {
            "hash": cpu("hash"),
            "raw_write": cpu("raw_write"),
            "plain_save": cpu("plain_save"),
            "save": cpu("save"),
            "async_save": cpu("async_begin_first") + cpu("async_rest"),
            "plain_load": cpu("plain_load"),
            "load": cpu("load"),
        },
        "memory_above_state_bytes": memory,
        "async_of_plain_dcp": {kind: async_over_plain(kind) for kind in ("thread", "process")},
    }


def check_memory(result: dict[str, Any]) -> None:
    """The promises: one tensor above the state for a save, one copy of it for one in the background."""
    largest, copy = result["largest_tensor_bytes"], max(result["state_bytes_a_rank"])
    memory = result["memory_above_state_bytes"]
    for name, allowed in (("save", largest), ("async_begin_first", copy), ("async_rest", largest)):
        if memory[name] > allowed + SLACK_BYTES:
            raise SystemExit(
                f"{name} took {memory[name] / 1e6:.0f} MB above the state, and {(allowed + SLACK_BYTES) / 1e6:.0f} are "
                "allowed. Nothing was written."
            )


def print_table(report: dict[str, Any]) -> None:
    result = report["results"]
    print(f"state {result['state_bytes'] / 1e9:.2f} GB over {report['ranks']} ranks")
    for name, rate in result["rates"].items():
        print(f"  {name:<12} {rate['seconds']:8.2f} s {rate['gb_per_s']:7.2f} GB/s")
    print("  seconds the loop stands still:", {k: round(v, 3) for k, v in result["blocked"].items()})
    print("  CPU seconds, all ranks:", {k: round(v, 2) for k, v in result["cpu_seconds"].items()})
    print("  MB above the state:", {k: v // 1_000_000 for k, v in result["memory_above_state_bytes"].items()})
    print(f"  largest tensor: {result['largest_tensor_bytes'] / 1e6:.0f} MB")
    for kind, cost in result["async_of_plain_dcp"].items():
        print(f"  plain async by {kind}:", {k: round(v, 3) for k, v in cost.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small state, one round: checks the script, not speed")
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (default 2)")
    parser.add_argument("--hidden", type=int, default=512, help="hidden size (default 512)")
    parser.add_argument("--layers", type=int, default=3, help="layers (default 3)")
    parser.add_argument("--dir", type=Path, default=None, help="disk to write to (default: the temporary folder's)")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "checkpoint.json", help="where the JSON goes")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)  # a rank: its folder
    args = parser.parse_args()
    if args.as_rank:
        measure_rank(args.as_rank, args.hidden, args.layers, args.rounds)
        return
    hidden, layers, rounds = (64, 2, 1) if args.quick else (args.hidden, args.layers, args.rounds)
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        ranks = run_ranks(args.ranks, hidden, layers, rounds, Path(folder))
    result = summarize(ranks)
    check_memory(result)
    report = {
        "what": "saving and loading the training state, compared with a raw write and plain torch.distributed.checkpoint",
        "quick": args.quick,
        "commit": commit(),
        "environment": describe_environment(),
        "load_average_before": load_before,
        "ranks": args.ranks,
        "rounds": rounds,
        "results": result,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print_table(report)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
