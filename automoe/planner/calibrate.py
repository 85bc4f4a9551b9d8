"""``automoe plan calibrate=true``: measure this machine's speeds and write them as a cluster file.

``cluster=NAME`` reads the file. One rank measures matmuls over a range of arithmetic intensities, a pass over
memory, attention, grouped matmuls, and the fixed time of a layer and of a step, in a model so small that its matmuls
take almost no time. All ranks of this machine measure all-gathers, reduce-scatters, all-to-alls and sends of several
sizes in groups of every size and stride that a mesh axis can have. On a GPU, seconds are the time between two CUDA
events. On a CPU, seconds are the CPU time of the rank's threads: it excludes other programs of the machine and
includes gloo's threads.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

from automoe.comm.collectives import DispatchGroup, wait_tensor
from automoe.comm.tokens import StepBatch
from automoe.config.batch import plan_batch
from automoe.config.compose import Arguments
from automoe.config.mesh_shape import ONE_RANK
from automoe.config.schema import (
    AttentionConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from automoe.errors import ConfigError
from automoe.launch.hardware import MAX_CPU_RANKS_PER_CORE, num_cores, resolve_device, visible_gpus
from automoe.launch.prepare import compose
from automoe.moe.experts import ExpertWeights, expert_backend
from automoe.observe.peak_flops import peak_flops
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.planner.communication import link_name
from automoe.planner.layer_time import layer_time
from automoe.planner.machine import Constants, Machine
from automoe.planner.output_file import write_out
from automoe.planner.place import Place
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.pool import RankPool
from automoe.verify.proxy import make_proxy

POINTS = 7  # points of the matmul curve; each has twice the intensity of the previous one
# timings per median; minimum seconds of one timing
ROUNDS = 5
LEAST_S = 0.03
# bytes of the collectives that are timed, the smallest first
SIZES = {"cpu": (1 << 12, 1 << 18, 1 << 22), "cuda": (1 << 12, 1 << 20, 1 << 24, 1 << 28)}
CPU_RANKS = 4  # collectives are measured between so many; between all visible GPUs on CUDA

# Seconds by bytes that a rank sends, by ``link_name``.
Links = dict[str, dict[float, float]]


@dataclass(frozen=True)
class Bench:
    """Device to calibrate, and problems so large that launch overhead is negligible on a GPU.

    ``device`` is cpu or cuda, ``dtype`` a dtype's name in torch, ``threads`` the CPU threads per rank, ``first`` the
    FLOPs per byte of the first timed matmul, ``rows`` the rows of every matmul, ``numbers`` the elements of a tensor in
    the pass over memory, ``seq`` the sequence length of the attention, ``expert`` the rows and width of an expert.
    """

    device: str
    dtype: str
    threads: int
    first: int
    rows: int
    numbers: int
    seq: int
    expert: int

    @classmethod
    def of(cls, device: str, threads: int) -> Bench:
        if device == "cuda":
            return cls(device, "bfloat16", 0, 64, 65_536, 1 << 28, 4096, 4096)
        return cls(device, "float32", threads or num_cores(), 4, 2048, 1 << 18, 256, 128)

    def prepare(self) -> tuple[torch.device, torch.dtype]:
        """Select this rank's GPU, or set its number of CPU threads; return torch's device and dtype."""
        if self.device == "cuda":
            torch.cuda.set_device(dist.get_rank())
            return torch.device("cuda", dist.get_rank()), getattr(torch, self.dtype)
        torch.set_num_threads(self.threads)
        return torch.device("cpu"), getattr(torch, self.dtype)

    def seconds(
        self, work: Callable[[], object], rounds: int = ROUNDS, number: int | None = None
    ) -> float:
        """Return the seconds of one call of ``work``: the median of ``rounds`` timings, after a warm-up call.

        Args:
            number: calls per timing; None: as many as take about 0.03 seconds (``LEAST_S``).
        """
        work()
        if number is None:
            number = max(1, int(LEAST_S / max(self.once(work), 1e-7)))
        return median(self.once(work, number) for _ in range(rounds)) / number

    def once(self, work: Callable[[], object], number: int = 1) -> float:
        """Return the seconds of all ``number`` calls of ``work``: GPU time, or CPU time divided by the threads."""
        if self.device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(number):
                work()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3
        began = time.process_time()
        for _ in range(number):
            work()
        return (time.process_time() - began) / self.threads


def calibrate(folder: Path, args: Arguments) -> int:
    """Measure this machine, write ``FOLDER/cluster/NAME.yaml`` and print the command that reads it.

    NAME is ``measured_cpu`` or ``measured_gpu``. The configuration in ``args`` (the command line)
    gives the kinds of layers to time.

    Returns:
        The exit status, 0.

    Raises:
        ConfigError: a file of this name exists, or the file cannot be written.
    """
    config = compose(args)
    bench = Bench.of(resolve_device(config), config.launch.threads_per_rank)
    gpus = visible_gpus() if bench.device == "cuda" else 0
    ranks = gpus or CPU_RANKS
    path = folder / "cluster" / f"measured_{'cpu' if bench.device == 'cpu' else 'gpu'}.yaml"
    if os.path.lexists(path):
        raise ConfigError("out", str(folder), f"{path} exists", "Remove it, or set out=FOLDER")
    pool = RankPool(max_ranks=ranks)
    print(f"measuring {bench.device}, {bench.dtype}: about half a minute", flush=True)
    alone, *_ = pool.run(measure_alone, 1, bench, config.model, config.cluster.peak_flops)
    links = pool.run(measure_links, ranks, bench) if ranks > 1 else []
    pool.close()
    values = cluster_values(bench, alone, links, path.stem, gpus)
    text = _text(values, bench, alone["gpu"])
    write_out(path, text, str(folder), str(path), "out=FOLDER")
    print(f"{text}\ntake it  automoe plan --config-dir {folder} cluster={path.stem}")
    return 0


def measure_alone(bench: Bench, model: ModelConfig, peak: float) -> dict[str, Any]:
    """Measure the speeds of a single rank, and return them by name.

    Args:
        bench: device, dtype and sizes of the problems.
        model: configuration whose kinds of layers the tiny model of ``host_layer`` has.
        peak: configured FLOP/s of a GPU; 0: looked up by the GPU's name, else measured.

    Returns:
        ``gpu``: name of the GPU, or ``cpu``.
        ``memory_bytes``: memory of the GPU; 0 for a CPU.
        ``peak``: FLOP/s; if measured, those of the fastest matmul.
        ``curve``: shares of ``peak`` that matmuls reach; each has twice the FLOPs per byte of the
            previous one.
        ``memory``: bytes/s of an elementwise product.
        ``attention``: FLOP/s of causal attention.
        ``experts``: seconds of the forward matmuls of 8 experts; hidden size, width and rows of
            each are ``bench.expert``.
        ``layer``: seconds of the forward and backward pass of an MoE layer.
        ``host_layer``: seconds of one pass of a tiny layer.
        ``step``: seconds of a step that do not depend on the number of layers.
    """
    device, dtype = bench.prepare()
    made = partial(torch.randn, device=device, dtype=dtype)
    size = dtype.itemsize
    measured = dict[str, Any]()
    measured["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    speeds = []
    for point in range(POINTS):
        intensity = bench.first * 2**point
        side = round(intensity * size / (1 - intensity * size / (2 * bench.rows)) / 8) * 8
        rows, weight = made(bench.rows, side), made(side, side)
        seconds = bench.seconds(partial(torch.mm, rows, weight))
        speeds.append(2 * bench.rows * side**2 / seconds)
    if device.type == "cuda" and not peak:
        peak = peak_flops(measured["gpu"]) or 0.0
    measured["peak"] = peak if device.type == "cuda" and peak else max(speeds)
    measured["curve"] = [min(speed / measured["peak"], 1.0) for speed in speeds]
    x, y = (made(bench.numbers) for _ in range(2))
    measured["memory"] = 3 * size * bench.numbers / bench.seconds(lambda: x * y)
    measured["attention"] = _attention(bench, device, dtype)
    measured["experts"] = _experts(bench, device, dtype)
    few, more, rest = _steps(bench, device, [tiny(bench, model, layers) for layers in (2, 6)])
    measured["host_layer"] = max(more - few, 0.0) / 4 / 2
    measured["step"] = max(few + rest - 2 * 2 * measured["host_layer"], 0.0)
    few, more, _ = _steps(bench, device, [usual(bench, layers) for layers in (2, 6)])
    measured["layer"] = (more - few) / 4
    measured["memory_bytes"] = (
        torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
    )
    return measured


def _attention(bench: Bench, device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of causal attention, forward and backward, over ``bench.seq`` tokens."""
    heads = 4
    dim = 64
    seq = bench.seq
    q, k, v = (
        torch.randn(2, heads, seq, dim, device=device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    mask = None if device.type == "cuda" else torch.ones(seq, seq, dtype=torch.bool).tril()

    def run() -> None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        y.backward(y)

    seen = seq if mask is not None else seq / 2
    return 3.5 * 2 * 2 * heads * 2 * dim * seq * seen / bench.seconds(run)


def _experts(bench: Bench, device: torch.device, dtype: torch.dtype) -> float:
    """Return the forward seconds of the grouped matmuls (gate, up, down) of 8 experts.

    Hidden size, expert width and the rows of each expert are all ``bench.expert``.
    """
    n = bench.expert
    experts = 8
    x = torch.randn(experts * n, n, device=device, dtype=dtype)
    rows = torch.arange(experts * n, device=device)
    ends = torch.arange(n, experts * n + 1, n, device=device, dtype=torch.int32)
    up = torch.randn(experts, 2, n, n, device=device, dtype=dtype)
    weights = ExpertWeights(up, up[:, 0].contiguous())
    probs = torch.ones(experts * n, device=device)
    run = expert_backend("grouped_mm")
    with torch.no_grad():
        return bench.seconds(lambda: run(x, rows, ends, probs, weights))


def tiny(bench: Bench, model: ModelConfig, layers: int) -> Config:
    """Return a configuration of ``layers`` layers with negligible matmuls: its step time is the host's overhead.

    The configuration has ``model``'s kinds of layers and attention, and the dtype of ``bench``.
    """
    proxy, _ = make_proxy(Config(model=model), ONE_RANK, 256)
    dense = 0 if model.num_moe_layers else layers
    return _config(bench, replace(proxy.model, num_layers=layers, first_k_dense=dense), 8)


def usual(bench: Bench, layers: int) -> Config:
    """Return a configuration of ``layers`` layers: 8 experts of width ``bench.expert``, hidden size twice that."""
    hidden = 2 * bench.expert
    attention = AttentionConfig(num_heads=hidden // 64, num_kv_heads=hidden // 64, head_dim=64)
    model = ModelConfig(
        family="mixtral",
        attention=attention,
        hidden_size=hidden,
        num_layers=layers,
        num_experts=8,
        moe_intermediate_size=bench.expert,
    )
    return _config(bench, model, 2 * bench.seq)


def _config(bench: Bench, model: ModelConfig, seq_len: int) -> Config:
    train = TrainConfig(seq_len=seq_len, global_batch_size=1, micro_batch_size=1)
    train = replace(train, dtype=bench.dtype)  # type: ignore[arg-type]
    return Config(model=model, train=train, moe=MoEConfig(gate="balanced"))


def _steps(bench: Bench, device: torch.device, configs: list[Config]) -> list[float]:
    """Time training steps of ``configs``, in turn, on a row of ``configs[0].train.seq_len`` tokens.

    Returns:
        Median seconds of the forward and backward pass of each configuration, then median seconds of the optimizer's
        update of the first one.
    """
    meshes = build_meshes(ONE_RANK, device)
    runs = []
    for config in configs:
        parts = build_parts(config, meshes)
        materialize(parts, config, device)
        runner = build_runner(parts, meshes, config, device)
        optimizer = build_optimizer(list(parts.values()), config.optim, 0)
        runs.append((config, runner, TrainState(parts, optimizer)))
    index = torch.arange(configs[0].train.seq_len).unsqueeze(0)
    batch = StepBatch(index % 256, index % 256, index, torch.zeros_like(index), 0, 0)

    def step(config: Config, runner: Any, state: TrainState) -> tuple[float, float]:
        made = []

        def forward() -> None:
            inputs, trained = prepare_inputs(batch, meshes, config, device)
            losses = forward_backward(state, runner, inputs, config)
            made.extend((state, losses, trained, meshes, config))

        return bench.once(forward), bench.once(lambda: optimizer_step(*made))

    turns = [[step(*run) for run in runs] for _ in range(2 + 2 * ROUNDS)]
    turns = turns[2:]  # The first two turns allocate and compile.
    firsts = [median(first for first, _ in times) for times in zip(*turns, strict=True)]
    return [*firsts, median(times[0][1] for times in turns)]


def group_shapes(ranks: int) -> list[tuple[int, int]]:
    """Return (size, stride) of every kind of group that a mesh axis can have on ``ranks`` ranks."""
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [
        (size, stride) for size in sizes[1:] for stride in sizes if ranks % (size * stride) == 0
    ]


def measure_links(bench: Bench) -> Links:
    """Return {name such as ``all_gather 8x1``: {bytes that this rank sends: seconds}}. Collective.

    The name has the size and stride of a group; all such groups communicate at the same time, as those of a mesh
    axis do.
    """
    device, _ = bench.prepare()
    rank = dist.get_rank()
    backend = "nccl" if device.type == "cuda" else "gloo"
    measured = {}
    for size, stride in group_shapes(dist.get_world_size()):
        first = rank - rank // stride % size * stride
        ranks = list(range(first, first + size * stride, stride))
        group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        for num_bytes in SIZES[device.type]:
            for kind, (sent, work) in _collectives(group, device, num_bytes).items():
                dist.barrier()
                seconds = bench.seconds(
                    work, number=16 if num_bytes == SIZES[device.type][0] else 4
                )
                measured.setdefault(link_name(kind, size, stride), {})[sent] = seconds
    return measured


def _collectives(
    group: dist.ProcessGroup, device: torch.device, num_bytes: int
) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return {collective: (bytes that a rank sends, function that runs it once and waits)}.

    ``num_bytes`` is the size of the whole tensor, which is gathered, reduced, exchanged or sent.
    """
    size = dist.get_world_size(group)
    here = dist.get_rank(group)
    dispatch = DispatchGroup(group)
    part = torch.ones(num_bytes // 4 // size, device=device)
    whole = part.repeat(size)
    received = torch.empty_like(whole)
    splits = [len(part)] * size

    def send() -> None:
        peers = (here + 1) % size, (here - 1) % size
        ends = zip((dist.isend, dist.irecv), (whole, received), peers, strict=True)
        ops = [dist.P2POp(op, x, group=group, group_peer=peer) for op, x, peer in ends]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    sent = 4.0 * len(part) * (size - 1)
    return {
        "all_gather": (sent, lambda: wait_tensor(dispatch.all_gather(part))),
        "reduce_scatter": (sent, lambda: wait_tensor(dispatch.reduce_scatter(whole))),
        "all_to_all": (sent, lambda: wait_tensor(dispatch.all_to_all(whole, splits, splits))),
        "send": (4.0 * len(whole), send),
    }


def fit_link(seconds: dict[float, float]) -> list[float]:
    """Fit seconds = latency + bytes / bandwidth, and return [latency in s, bandwidth in bytes/s].

    Each point counts by its relative error, so that small messages count as much as large ones.

    Args:
        seconds: measured seconds, by number of bytes that a rank sends.
    """
    slope, intercept = np.polyfit(
        [*seconds], [*seconds.values()], 1, w=[1 / took for took in seconds.values()]
    )
    return [max(float(intercept), 0.0), 1 / max(float(slope), 1e-15)]


def cluster_values(
    bench: Bench, alone: dict[str, Any], links: list[Links], name: str, gpus: int
) -> dict[str, Any]:
    """Return the content of a cluster file: measured fields of ``ClusterConfig`` by name, and ``constants``.

    The latter are those fields of ``Constants`` that were measured: shares of nominal speeds, and seconds.

    Args:
        bench, alone: device and sizes that ``measure_alone`` measured, and its result.
        links: result of ``measure_links`` of each rank; empty for one rank.
        name: name of the cluster; ``gpus``: GPUs of this machine, 0 for a CPU.
    """
    cpu = bench.device == "cpu"
    constants = Constants.load()
    values = {
        "name": name,
        "gpu": alone["gpu"],
        "peak_flops": alone["peak"],
        "memory_bandwidth": alone["memory"],
        "memory_bytes": alone["memory_bytes"],
        "gpus_per_node": gpus or MAX_CPU_RANKS_PER_CORE * num_cores(),
        "cores": num_cores() if cpu else 0,
        "gemm_curve": list(map(_rounded, alone["curve"])),
        "gemm_curve_from": float(bench.first),
    }
    shares = {"host_layer": alone["host_layer"], "step": alone["step"]}
    # On a CPU the cores that communicate also compute, so nothing overlaps.
    shares |= {"overlap": 0.0} if cpu else {}
    if links:
        taken = {
            name: {sent: mean(rank[name][sent] for rank in links) for sent in sizes}
            for name, sizes in links[0].items()
        }
        fitted = {name: fit_link(seconds) for name, seconds in taken.items()}
        values["links"] = {name: [_rounded(x, 4) for x in link] for name, link in fitted.items()}
        values["intra_node_bandwidth"] = median(speed for _, speed in fitted.values())
        shares |= {"on_node": 1.0, "latency": median(delay for delay, _ in fitted.values())}
    shares["attention"] = alone["attention"] / (alone["peak"] * alone["curve"][-1])
    # The constants are ratios: time that the model predicts at these speeds, over measured time.
    config = replace(usual(bench, 2), cluster=ClusterConfig(**values))
    machine = Machine.of(
        config, replace(constants, gemm=1.0, grouped=1.0, memory=1.0, attention=shares["attention"])
    )
    n = bench.expert
    products = machine.gemm(n, 2 * n, n, 8) + machine.gemm(n, n, n, 8)
    # Each expert's rows are gathered, then go through the activation.
    passes = machine.pass_over(5 * machine.number_bytes * 8 * n * n)
    shares["grouped"] = products / max(alone["experts"] - passes, products / 1.5)
    machine = replace(machine, constants=replace(machine.constants, grouped=shares["grouped"]))
    place = Place(config, ONE_RANK, machine, plan_batch(config, ONE_RANK))
    layer = layer_time(place, 0, frozenset())
    said = sum(half.seconds for half in layer)
    host = 2 * alone["host_layer"] * cpu  # a GPU computes while its host launches
    shares["gemm"] = shares["memory"] = min(said / max(alone["layer"] - host, said / 10), 1.0)
    return {**values, "constants": {key: _rounded(share) for key, share in sorted(shares.items())}}


def _rounded(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def _text(values: dict[str, Any], bench: Bench, gpu: str) -> str:
    """Return a cluster file's YAML: a comment on versions, ``gpu`` (a name, or cpu) and ``bench``, then ``values``."""
    threads = f", {bench.threads} thread{'s' * (bench.threads > 1)} a rank" if bench.threads else ""
    with_what = f"automoe {version('automoe')}, torch {version('torch')}, Python {platform.python_version()}"
    if gpu == "cpu":
        info = Path("/proc/cpuinfo")  # platform names the architecture alone on Linux
        match = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
        gpu = match[1].strip() if match else platform.processor() or platform.machine()
    lines = [
        f"# Measured by automoe plan calibrate=true on {datetime.date.today()}: {with_what},",
        f"# {gpu}, {num_cores()} cores{threads}, {bench.dtype}.",
    ]
    rounded = {
        key: _rounded(value, 4) if isinstance(value, float) else value
        for key, value in values.items()
    }
    text = yaml.safe_dump(rounded, sort_keys=False, default_flow_style=None, width=1000)
    return "\n".join([*lines, text])
