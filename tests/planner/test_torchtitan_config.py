"""``automoe plan export=torchtitan``: the module that is written, imported by torchtitan and built into its configuration."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from math import isclose
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.model.params import count_params
from automoe.plan import main
from automoe.planner.torchtitan_config import MODELS, titan_module, write_titan
from tests.support.configurations import quick_config

GROUPS = {"pp": "default", "dp_replicate": "default", "cp": "default", "tp": "default", "ep": "moe"}


def planned(name: str, *overrides: str) -> tuple[Any, MeshShape]:
    config = quick_config(name, list(overrides))
    return config, validate(config, config.launch.num_ranks, "cuda")


def titan_config(folder: Path, name: str, *overrides: str) -> Any:
    """What torchtitan's own manager makes of the written file, with the model as its trainer settles it."""
    from torchtitan.config.manager import ConfigManager

    config, mesh = planned(name, *overrides)
    path, command = write_titan(config, mesh, name, f"{folder}/written_{folder.name}.py")
    sys.path.insert(0, str(path.parent))
    try:
        found = ConfigManager().parse_args(command.split("torchtitan.train ")[1].split())
    finally:
        sys.path.remove(str(path.parent))
    found.model_spec.model.update_from_config(config=found)
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dsv3_671b", "qwen3_235b_a22b"])
def test_torchtitan_builds_the_planned_run(name: str, tmp_path: Path) -> None:
    steady = f"mesh=steady_{name}"
    config, mesh = planned(name, steady)
    found = titan_config(tmp_path, name, steady)
    dims = found.parallelism
    sizes = (dims.pipeline_parallel_degree, dims.data_parallel_replicate_degree, dims.data_parallel_shard_degree)
    assert sizes == (mesh.pp, mesh.dp_replicate, mesh.dp_shard)
    sizes = (dims.context_parallel_degree, dims.tensor_parallel_degree, dims.expert_parallel_degree)
    assert sizes == (mesh.cp, mesh.tp, mesh.ep)
    stages = dims.module_fqns_per_model_part
    assert len(stages) == mesh.pp * config.parallel.stages_per_rank
    named = [module for stage in stages for module in stage]
    layers = [f"layers.{i}" for i in range(config.model.num_layers)]
    assert named == ["tok_embeddings", *layers, "norm", "lm_head"]
    training = found.training
    assert training.seq_len == config.train.seq_len and training.steps == config.train.steps
    assert training.global_batch_size == config.train.global_batch_size == training.local_batch_size * mesh.dp
    assert dims.pipeline_parallel_microbatch_size == config.train.micro_batch_size
    assert dims.pipeline_parallel_schedule == config.parallel.schedule
    recomputes = {"dsv3_671b": "FullAC", "qwen3_235b_a22b": "SelectiveAC"}
    assert type(found.activation_checkpoint).__qualname__.startswith(recomputes[name])
    last = found.optimizer.param_groups[-1].optimizer_kwargs
    assert (last["lr"], last["weight_decay"]) == (config.optim.lr, config.optim.weight_decay)
    same_model(config.model, found.model_spec.model)


def same_model(ours: Any, theirs: Any) -> None:
    """Number of parameters, constants that no shape shows, and how the router scores."""
    with torch.device("meta"):
        built = theirs.build()
    counted = sum({id(one): one.numel() for one in built.parameters()}.values())
    assert counted == count_params(ours).total
    rope, last = theirs.layers[-1].attention.rope, theirs.layers[-1]
    assert rope.theta == ours.rope.theta and rope.scaling in (ours.rope.scaling, ours.rope.scaling.removesuffix("3"))
    assert {norm.eps for _, norm, _, _ in theirs.traverse(type(theirs.norm))} == {ours.norm_eps}
    if ours.num_moe_layers:
        router = last.moe.router
        assert (router.score_func, router.top_k) == (ours.router.score, ours.num_experts_per_token)
        assert isclose(router.route_scale, ours.router.routed_scaling_factor)
        assert (last.moe.load_balance_coeff is not None) == ours.router.expert_bias


@pytest.mark.faults
@pytest.mark.parametrize("name", MODELS)
def test_every_model_that_both_have_is_the_same(name: str, tmp_path: Path) -> None:
    overrides = (f"model={name}", "mesh=fsdp", "launch.num_ranks=8", "train.global_batch_size=16", "launch.device=cuda")
    overrides += ("train.seq_len=8192", "train.dtype=bfloat16", "cluster=h100_sxm")
    config, _ = planned("config", *overrides)
    found = titan_config(tmp_path, "config", *overrides)
    same_model(config.model, found.model_spec.model)


@pytest.fixture
def fake_world() -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=32)
    yield 32
    dist.destroy_process_group()


def test_ranks_have_the_same_places_in_both(fake_world: int) -> None:
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims

    for pp, replicas, cp, tp, ep in product((1, 2), (1, 2), (1, 2), (1, 2), (1, 4)):
        etp = tp if ep == 1 else 1
        sizes = MeshConfig(pp=pp, dp_replicate=replicas, cp=cp, tp=tp, ep_replicate=replicas, ep=ep, etp=etp)
        mesh = resolve_mesh(sizes, fake_world)
        dims = ParallelDims.from_config(
            ParallelismConfig(
                pipeline_parallel_degree=pp, data_parallel_replicate_degree=replicas, context_parallel_degree=cp,
                tensor_parallel_degree=tp, expert_parallel_degree=ep, data_parallel_shard_degree=mesh.dp_shard,
            ),
            fake_world,
        )  # fmt: skip
        dims.build_mesh()
        names = GROUPS | {"dp_shard": "default"} | ({"efsdp": "moe"} if ep > 1 else {})
        for axis, view in names.items():
            [mine] = [group for group in mesh.groups(view, "ep_shard" if axis == "efsdp" else axis) if 0 in group]
            # The group of rank 0, which torch says for the rank that this process is.
            assert dims._single_axis_meshes[axis].mesh.tolist() == mine, (axis, mesh)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("mesh.etp=2", "mesh.etp"),
        ("mesh.tp=8", "mesh.tp"),
        ("train.fp8=blockwise", "train.fp8"),
        ("lora.rank=8", "lora.rank"),
        ("moe.gate=zipf", "moe.gate"),
        ("mesh.ep_replicate=2", "mesh.ep_replicate"),
        ("model=mixtral_8x7b", "export"),
        ("model.num_experts_per_token=4", "export"),
    ],
)
def test_what_torchtitan_would_train_otherwise_is_refused(override: str, key: str) -> None:
    config = quick_config("qwen3_30b_a3b", [override, "mesh.dp_shard=-1"])
    with pytest.raises(ConfigError) as error:
        titan_module(config, resolve_mesh(config.mesh, 16), "run")
    assert error.value.key == key


def test_what_it_has_no_setting_for_is_named_in_the_file() -> None:
    given = [
        "moe.capacity_factor=1.5", "moe.seq_balance_coef=0.001", "moe.z_loss_coef=0.01", "moe.dispatcher=hierarchical",
        "parallel.recompute_layers=[0]", "data.document_mask=false", "optim.ema_decay=0.999", "train.spike_factor=5",
        "moe.router_jitter=0.1", "train.val_every=7", "parallel.grad_sync=step", "optim.moments=bfloat16",
        "train.epochs=3",
    ]  # fmt: skip
    config = quick_config("qwen3_30b_a3b", given)
    text = titan_module(config, resolve_mesh(config.mesh, 16), "run").split('"""')[1]
    for override in given:
        assert override.split("=")[0].replace("parallel.grad_sync", "grad_sync") in text, override


def test_a_run_that_saves_nothing_does_so_in_torchtitan(tmp_path: Path) -> None:
    """Its last step is saved, as torchtitan does whenever it reads first weights."""
    (tmp_path / "weights").mkdir()
    config = quick_config("qwen3_30b_a3b", ["checkpoint=none", "train.steps=70"])
    config.model.hf_path = str(tmp_path / "weights")
    text = titan_module(config, resolve_mesh(config.mesh, 16), "run")
    assert "interval=70," in text and "initial_load_path" in text


def test_any_name_of_a_configuration_is_that_of_a_function(tmp_path: Path) -> None:
    config = quick_config("qwen3_30b_a3b")
    for name, function in (("8b_run", "run_8b_run"), ("class", "run_class"), ("a-b", "a_b")):
        path, command = write_titan(config, resolve_mesh(config.mesh, 16), name, str(tmp_path / f"of_{function}.py"))
        compile(path.read_text(), str(path), "exec")
        assert f"def {function}(" in path.read_text() and command.endswith(f"--config {function}")


def test_the_command_writes_it_once_and_says_how_to_take_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-name", "qwen3_30b_a3b", "export=torchtitan", f"out={tmp_path}"]
    assert main(words) == 0 and main(words) == 0
    said = capsys.readouterr().out
    assert "--nnodes 2" in said and "--module torchtitan_qwen3_30b_a3b_16 --config qwen3_30b_a3b" in said
    assert main([*words, "train.steps=7"]) == 2
    assert "exists with other content" in capsys.readouterr().err
    assert main(["export=other"]) == 2 and main(["search=true", "world=8", *words]) == 2
    assert main(["out=here"]) == 2
