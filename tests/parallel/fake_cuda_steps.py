"""Optimizer steps on a GPU that computes nothing; print JSON. In a process of its own: see ``tests.support.fake_cuda``.

python fake_cuda_steps.py CASE ...   ``faults`` shows that what would fail on a GPU fails here
"""

from __future__ import annotations

# isort: off
from tests.support.cuda_device import SHIM as SHIM  # before torch
# isort: on

import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, MoEConfig, TrainConfig
from automoe.model import attention
from automoe.optim.adamw import build_optimizer
from automoe.parallel.fake_world import fake_world
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.pool import leave_world
from tests.support.fake_cuda import Launch, fake_cuda, traced_launches
from tests.support.gpu import conf_model, resource_usage

DEVICE = torch.device("cuda", 0)
SEQ_LEN, ROWS, MICRO_ROWS = 32, 4, 2
TRITON: dict[str, Any] = dict(moe={"experts": "triton"}, kernels={"rope": "triton"})
WIDE = {"hidden_size": 256, "moe_intermediate_size": 128}  # whole tiles of 8-bit scales


def step_of(name: str, mesh: dict[str, int] | None = None, layers: int = 2, **parts: Any) -> Config:
    """A step of the first layers of a small model, in bfloat16 unless ``parts`` say otherwise."""
    config = Config(
        mesh=MeshConfig(**({"dp_shard": 1} | (mesh or {}))),
        model=replace(conf_model(name), num_layers=layers),
        moe=MoEConfig(seq_balance_coef=0.1, global_balance_coef=0.1, micro_batch_balance_coef=0.1, z_loss_coef=0.1),
        train=TrainConfig(seq_len=SEQ_LEN, global_batch_size=ROWS, micro_batch_size=MICRO_ROWS, dtype="bfloat16"),
    )
    for part, value in parts.items():
        config = replace(config, **{part: replace(getattr(config, part), **value)})
    return config


# No pipelines: stages tell each other what they send, and in a fake world nobody answers.
CASES = {
    "dsv3": step_of("small_dsv3"),
    "triton": step_of("small_dsv3", optim={"master_weights": "stochastic"}, **TRITON),
    "triton_float32": step_of("small_dsv3", train={"dtype": "float32"}, **TRITON),
    "gpt_oss": step_of("small_gpt_oss", **TRITON),
    "qwen3_next": step_of("small_qwen3_next", layers=4, data={"document_mask": False}),
    "without_fsdp": step_of(
        "small_dsv3", optim={"master_weights": "stochastic", "moments": "bfloat16"}, train={"micro_batch_size": ROWS}
    ),
    "flash": step_of("small_qwen3_moe", kernels={"attention": "flash"}, data={"document_mask": False}),
    "blockwise": step_of("small_dsv3", train={"fp8": "blockwise"}, model=WIDE),
    "delayed_tp2": step_of("small_dsv3", dict(tp=2, ep=2), train={"fp8": "delayed"}, model=WIDE),
    "recomputed": step_of("small_dsv3", parallel={"recompute": ["layernorm", "mla_up_proj", "moe"]}),
    "dropping_cp2": step_of("small_dsv3", dict(cp=2, ep=2), moe={"capacity_factor": 1.0}),
    "ulysses_cp2": step_of("small_dsv3", dict(cp=2, ep=2), parallel={"context": "ulysses"}, **TRITON),
    "qwen3_next_cp2": step_of("small_qwen3_next", dict(cp=2, ep=2), layers=4),
    "fused": step_of("small_dsv3", dict(dp_shard=2), parallel={"expert_wgrad": "fused"}),
    "etp_hsdp": step_of("small_qwen3_moe", dict(dp_replicate=2, dp_shard=2, ep=2, etp=2)),
}


@dataclass(frozen=True)
class Traced:
    """What one step of one rank came to."""

    num_reads: int  # by the host, of tensors on the device
    without_gradient: list[str]
    elsewhere: list[str]  # parameters and moments that are not on the device
    dtypes: list[str]  # of the parameters
    kernels: dict[str, int]  # launched ones: bytes that a thread spills
    shared: int  # most bytes of shared memory of a kernel


def trace(config: Config, rank: int) -> Traced:
    """Two steps, as ``recipes.pretrain`` takes them, and a validation batch; facts of the second."""
    shape = resolve_mesh(config.mesh, None)
    with fake_cuda() as gpu, traced_launches() as launches, fake_world(rank, shape.world_size):
        meshes = build_meshes(shape, DEVICE)
        parts = build_parts(config, meshes)
        materialize(parts, config, DEVICE)
        runner = build_runner(parts, meshes, config, DEVICE)
        optimizer = build_optimizer(list(parts.values()), config.optim)
        state = TrainState(parts, optimizer)
        named = [pair for part in parts.values() for pair in part.named_parameters()]
        batch = rows(config, shape.dp)
        for _ in range(2):
            gpu.reads.clear()
            inputs, trained = prepare_inputs(batch, meshes, config, DEVICE)
            stats = forward_backward(state, runner, inputs, config)
            missing = [name for name, parameter in named if parameter.grad is None]
            update = optimizer_step(state, stats, trained, meshes, config)
            assert not update.skipped
        num_reads = len(gpu.reads)
        runner.evaluate(prepare_inputs(batch, meshes, config, DEVICE)[0])
        held = {name: [parameter, *optimizer.state[parameter].values()] for name, parameter in named}
        elsewhere = [name for name, tensors in held.items() if any(not t.is_cuda for t in tensors)]
        dtypes = sorted({str(parameter.dtype) for _, parameter in named})
    leave_world([])
    kernels, shared = resources(launches)
    return Traced(num_reads, missing, elsewhere, dtypes, kernels, shared)


def rows(config: Config, dp_size: int) -> StepBatch:
    num_rows = ROWS // dp_size if ROWS % dp_size == 0 else 1
    tokens = torch.randint(config.model.vocab_size, (num_rows, SEQ_LEN))
    index = torch.arange(SEQ_LEN).expand_as(tokens)
    return StepBatch(tokens, tokens, index, (index >= SEQ_LEN // 2).long(), 0, 0)


def resources(launches: list[Launch]) -> tuple[dict[str, int], int]:
    spilled: dict[str, int] = {}
    for launch in launches:
        _, stack = resource_usage(launch.compiled)
        spilled[launch.kernel] = max(stack, spilled.get(launch.kernel, 0))
    return spilled, max((launch.compiled.metadata.shared for launch in launches), default=0)


@triton.jit
def copy_one(source, target):
    tl.store(target, tl.load(source))


def faults() -> dict[str, str]:
    """What is wrong on a GPU, and the error it gets here."""
    angles = attention.rotary_cos_sin

    def angles_on_the_cpu(*args: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones(x.shape) for x in angles(*args))

    def from_the_cpu(grid: tuple[int, ...], target: torch.Tensor) -> None:
        copy_one[grid](torch.zeros(1), target)

    def refused(work: Any) -> str:
        try:
            work()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    found = {}
    with patch.object(attention, "rotary_cos_sin", angles_on_the_cpu):
        found["a tensor made on the CPU"] = refused(lambda: trace(CASES["flash"], 0))
    leave_world([])
    with fake_cuda() as gpu, traced_launches():
        x = torch.zeros(8, device=DEVICE)
        found["a pointer to the CPU"] = refused(lambda: from_the_cpu((1,), x))
        found["an empty grid"] = refused(lambda: copy_one[(0,)](x, x))
        found["no index of floats"] = refused(lambda: x[x])
        with torch.cuda.stream(torch.cuda.Stream()) as side:
            assert torch.cuda.current_stream() == side
        assert not gpu.reads and float(x.sum()) == 1 and gpu.reads == [()]
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    report: dict[str, Any] = {}
    for name in sys.argv[1:]:
        if name == "faults":
            report[name] = faults()
            continue
        last = resolve_mesh(CASES[name].mesh, None).world_size - 1
        report[name] = asdict(trace(CASES[name], last))
    print(json.dumps(report))
