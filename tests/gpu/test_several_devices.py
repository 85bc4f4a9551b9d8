"""One rank against meshes of several devices: over gloo on the CPU, over NCCL with ``make test-gpus``, by the same code.

The order is that in which failures tell most: first whether groups answer at all, then one axis at a time, then what
is built on them. Each mesh is verified as ``automoe verify`` does it: in float64 at 1e-10, on GPUs in float32 too, then in
bfloat16 with the configured kernels, with the one-rank run's routing repeated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_models import small

from automoe.comm.process_groups import connect_process_groups
from automoe.config.batch import plan_batch
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.interop.torch_private import process_groups
from automoe.launch.trial_runs import train, train_and_kill
from automoe.parallel.mesh import build_meshes
from automoe.planner.memory import plan_memory
from automoe.verify.pool import RankPool
from automoe.verify.run import make_runnable, passes, verify_pass
from tests.support.memory import build_trainer, random_batch, take_step

ON_GPUS = pytest.mark.gpus
TIMEOUT = timedelta(seconds=77)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=ON_GPUS)])
def pool(request: pytest.FixtureRequest, ranks: RankPool) -> Iterator[RankPool]:
    """Ranks on the CPU, or one on each GPU; a mesh of more ranks than GPUs is an error of the pool."""
    if request.param == "cpu":
        yield ranks
        return
    made = RankPool(torch.cuda.device_count(), device="cuda")
    yield made
    made.close()


def case(family: str, mesh: dict[str, int], **changes: dict[str, Any]) -> Config:
    """Two micro-batches a data-parallel rank, of synthetic rows; sections of the configuration are changed by name."""
    config = small(family, "bfloat16")
    model = replace(config.model, num_layers=4) if mesh.get("pp", 1) > 1 else config.model
    mesh_config = MeshConfig(**({"dp_shard": 1} | mesh))
    shape = MeshShape.of(mesh_config)
    config = replace(
        config,
        mesh=mesh_config,
        # Random ids have no pattern to learn, and weights as large as ``small``'s would make bfloat16 the subject.
        model=replace(model, initializer_range=0.05),
        train=replace(config.train, global_batch_size=2 * shape.dp * shape.pp, micro_batch_size=1),
        data=DataConfig(kind="benchmark"),
    )
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in changes.items()})


INTERLEAVED = dict(parallel=dict(schedule="Interleaved1F1B", stages_per_rank=2))
NODES = dict(moe=dict(dispatcher="hierarchical"), cluster=dict(gpus_per_node=2))
MESHES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "dp2": ("qwen3_moe", dict(dp_shard=2), {}),
    "ep2": ("qwen3_moe", dict(dp_shard=2, ep=2), {}),
    "dp8, the world group": ("deepseek_v3", dict(dp_shard=8), {}),
    "ep8, the world group": ("deepseek_v3", dict(dp_shard=8, ep=8), {}),
    "tp2 cp2 ep4": ("deepseek_v3", dict(tp=2, cp=2, ep=4), {}),
    "pp2": ("deepseek_v3", dict(pp=2), {}),
    "pp2 dp2 ep2 interleaved": ("deepseek_v3", dict(pp=2, dp_shard=2, ep=2), INTERLEAVED),
    "replicas": ("mixtral", dict(dp_replicate=2, dp_shard=2, ep=2, ep_replicate=2), {}),
    "etp2": ("qwen3_moe", dict(tp=2, etp=2), {}),
    "ep2 etp2": ("qwen3_moe", dict(dp_shard=2, tp=2, ep=2, etp=2), {}),
    "hierarchical": ("qwen3_moe", dict(dp_shard=4, ep=4), NODES),
    "recomputed": ("deepseek_v3", dict(dp_shard=2, ep=2), dict(parallel=dict(recompute=["layernorm", "mla_up_proj", "moe"]))),
    "tensorwise": ("qwen3_moe", dict(dp_shard=2, ep=2), dict(train=dict(fp8="tensorwise"))),
    "delayed": ("qwen3_moe", dict(dp_shard=2, ep=2), dict(train=dict(fp8="delayed"))),
}  # fmt: skip
# The mesh suite runs such meshes on the CPU for every change; here it is enough that this file's code runs.
QUICK = ("ep2",)


def opened(mesh: dict[str, int], device: str) -> list[tuple[str, int, float, float, int, timedelta]]:
    """Of each group of a mesh, opened as a run does it: name, size, sum of ones, sum of ranks, gloo's threads, timeout."""
    shape = resolve_mesh(MeshConfig(**mesh), None)
    build_meshes(shape, torch.device(device), TIMEOUT).stage_group()
    assert int(connect_process_groups().split()[0]) == len(process_groups())
    found = []
    for group in process_groups():
        values = torch.tensor([1.0, dist.get_rank()], device=device)
        dist.all_reduce(values, group=group)
        gloo = group._get_backend(torch.device("cpu")).options
        found.append((group.group_desc, group.size(), *values.tolist(), gloo._threads, gloo._timeout))
    return found


@pytest.mark.parametrize("mesh", [dict(dp_shard=2, ep=2), dict(pp=2, dp_shard=2, cp=2, ep=4)], ids=str)
def test_every_group_answers(pool: RankPool, mesh: dict[str, int]) -> None:
    shape = resolve_mesh(MeshConfig(**mesh), None)
    for found in pool.run(opened, shape.world_size, mesh, pool.device):
        assert {"default_pg", "mesh_ep"} <= {name for name, *_ in found}
        for name, size, ones, ranks, threads, timeout in found:
            assert ones == size and ranks >= size * (size - 1) / 2, name
            if name not in ("default_pg", "mesh_fsdp"):  # torch makes the latter, whose gloo half nothing uses
                assert (threads, timeout) == (1, TIMEOUT), name


def check_mesh(pool: RankPool, config: Config) -> None:
    here, shape, cuts = make_runnable(config, device=pool.device)
    assert not cuts, cuts
    for each in passes(here):
        result = verify_pass(each, shape, pool)
        assert {"loss", "gradient", "gradient norm"} <= {one.kind for one in result.compared}
        assert not result.different, f"{each.train.dtype}: {result.different[0]}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in MESHES]
)
def test_a_mesh_trains_like_one_rank(pool: RankPool, name: str) -> None:
    family, mesh, changes = MESHES[name]
    check_mesh(pool, case(family, mesh, **changes))


@ON_GPUS
def test_compiled_code_trains_like_one_rank() -> None:
    """On the CPU it takes minutes to compile, and ``tests/parallel/test_compile.py`` has it for smaller models."""
    pool = RankPool(torch.cuda.device_count(), device="cuda")
    check_mesh(pool, case("qwen3_moe", dict(dp_shard=2, ep=2), train=dict(compile=True)))
    pool.close()


@ON_GPUS
def test_documents_in_blocks_train_like_one_rank() -> None:
    """``tests/model/test_block_masks.py`` has it on the CPU, in float64."""
    pool = RankPool(torch.cuda.device_count(), device="cuda")
    check_mesh(pool, case("deepseek_v3", dict(cp=2, ep=2), kernels=dict(attention="flex")))
    pool.close()


KILLED = (
    "train.steps=8 train.seq_len=64 train.global_batch_size=8 train.micro_batch_size=1 train.val_every=0 moe.experts=loop "
    "data.max_bytes=1000000 checkpoint.export_hf=false checkpoint.every=2 observe.report=false launch.num_ranks=8"
)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.faults), pytest.param("cuda", marks=ON_GPUS)])
def test_a_killed_run_goes_on_on_another_mesh(device: str, tmp_path: Path) -> None:
    """The losses of the run that nobody killed, in float32."""
    words = [*KILLED.split(), f"launch.device={device}"]
    first = [*words, "mesh.pp=1", "mesh.dp_shard=8", "mesh.ep=8"]
    other = [*words, "mesh.pp=2", "mesh.dp_shard=2", "mesh.tp=2", "mesh.ep=4"]
    whole = train(tmp_path / "whole", first)
    train_and_kill(tmp_path / "killed", first, 5)
    resumed = train(tmp_path / "killed", other)
    assert [record["step"] for record in resumed] == [record["step"] for record in whole]
    for record, expected in zip(resumed, whole, strict=True):
        assert record["loss"] == pytest.approx(expected["loss"], rel=1e-4), record["step"]


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is None, reason="DeepEP is not built here")
@ON_GPUS
def test_deepep_trains_like_one_rank() -> None:
    pool = RankPool(torch.cuda.device_count(), device="cuda")
    check_mesh(pool, case("qwen3_moe", dict(dp_shard=8, ep=8), moe=dict(dispatcher="deepep")))
    pool.close()


def peak_of_a_step(config: Config) -> int:
    """Most bytes in torch's allocator of this GPU during the second training step."""
    trainer = build_trainer(config, "cuda")
    for step in range(2):
        torch.cuda.reset_peak_memory_stats()
        take_step(trainer, random_batch(config, step, trainer.meshes.dp_rank, trainer.meshes.shape.dp))
    return torch.cuda.max_memory_allocated()


@ON_GPUS
@pytest.mark.parametrize("name", ["dp8, the world group", "ep8, the world group", "pp2 dp2 ep2 interleaved"])
def test_the_peak_is_the_plans(name: str) -> None:
    """Of models large enough that what cuBLAS and NCCL hold is little; the CPU's is in ``test_measured_memory``."""
    family, mesh, changes = MESHES[name]
    config = case(family, mesh, **changes)
    model = replace(config.model, hidden_size=1024, moe_intermediate_size=512, intermediate_size=2048)
    moe = replace(config.moe, gate="balanced")
    cluster = replace(config.cluster, gpu="NVIDIA H100 80GB HBM3")
    config = replace(config, model=model, moe=moe, cluster=cluster, train=replace(config.train, seq_len=2048))
    shape = resolve_mesh(config.mesh, None)
    planned = plan_memory(config, shape, plan_batch(config, shape))
    pool = RankPool(torch.cuda.device_count(), device="cuda")
    measured = pool.run(peak_of_a_step, shape.world_size, config)
    pool.close()
    per_stage = shape.world_size // shape.pp
    off = [planned[rank // per_stage].peak / most - 1 for rank, most in enumerate(measured)]
    assert max(map(abs, off)) < 0.1, off
