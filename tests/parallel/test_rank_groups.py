"""Groups computed without ranks are the groups that the DeviceMeshes build."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from automoe.comm.process_groups import connect_process_groups
from automoe.config.mesh_shape import DEFAULT_AXES, MOE_AXES, resolve_mesh
from automoe.config.schema import MeshConfig
from automoe.interop.torch_private import process_groups
from automoe.parallel.dispatchers import node_levels
from automoe.parallel.mesh import build_meshes
from automoe.planner.reserve import process_groups as planned_groups
from automoe.verify.fake_world import fake_world
from automoe.verify.pool import RankPool
from tests.support.configurations import quick_config

# Axes as large as the world, of which those of dispatch have a communicator of their own.
ALONE = [dict(dp_shard=8, ep=8), dict(dp_shard=1, tp=8, etp=8), dict(dp_shard=2, cp=4, ep=8)]
ALONE += [dict(dp_shard=1, cp=8, ep=8)]
ALONE += [dict(dp_replicate=8, dp_shard=1), dict(pp=8, dp_shard=1)]
MESHES = [
    dict(pp=2, dp_shard=2, cp=2, ep=4),
    dict(pp=2, dp_shard=2, tp=2, ep=2, etp=2),
    dict(dp_replicate=2, dp_shard=2, tp=2, ep_replicate=2, ep=2),
]


def axis_groups(mesh: dict[str, int]) -> dict[str, list[int]]:
    """This rank's group on every axis larger than one, as the DeviceMeshes have it."""
    meshes = build_meshes(resolve_mesh(MeshConfig(**mesh), None), torch.device("cpu"))
    groups = {axis: meshes.group(axis) for axis in dict.fromkeys(DEFAULT_AXES + MOE_AXES)}
    return {axis: dist.get_process_group_ranks(group) for axis, group in groups.items() if group is not None}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_groups_equal_the_device_meshes(ranks: RankPool, mesh: dict[str, int]) -> None:
    shape = resolve_mesh(MeshConfig(**mesh), None)
    for rank, built in enumerate(ranks.run(axis_groups, 8, mesh)):
        assert built, "a mesh of eight ranks has an axis larger than one"
        for axis, group in built.items():
            view = "default" if axis in DEFAULT_AXES else "moe"
            assert [g for g in shape.groups(view, axis) if rank in g] == [group]


@pytest.mark.parametrize("rank", [0, 77, 1023])
def test_groups_of_a_thousand_ranks(rank: int) -> None:
    mesh = dict(pp=4, dp_replicate=2, dp_shard=16, cp=2, tp=4, ep=32, etp=2)
    shape = resolve_mesh(MeshConfig(**mesh), None)
    with fake_world(rank, shape.world_size):
        meshes = build_meshes(shape, torch.device("cpu"))
        for axis in ("pp", "dp_shard", "cp", "tp", "ep_shard", "ep", "etp"):
            view = "default" if axis in DEFAULT_AXES else "moe"
            mine = [group for group in shape.groups(view, axis) if rank in group]
            assert mine == [dist.get_process_group_ranks(meshes.group(axis))]
        levels = node_levels(meshes.group("ep"), 8, None)
        across, within = (dist.get_process_group_ranks(group) for group in levels)
        ep = dist.get_process_group_ranks(meshes.group("ep"))
        assert within == [other for other in ep if other // 8 == rank // 8] and len(within) == 4
        assert across == [other for other in ep if other % 8 == rank % 8] and len(across) == 8


FLAGSHIPS = ("dsv3_671b", "kimi_k2_1t_a32b", "qwen3_235b_a22b", "glm45_355b_a32b", "mixtral_8x22b")


@pytest.mark.parametrize("shape", [*FLAGSHIPS, *MESHES, *ALONE], ids=str)
def test_the_plan_counts_the_groups_that_a_rank_is_in(shape: str | dict[str, int]) -> None:
    """Those of one rank apart, which talk to nobody."""
    named = isinstance(shape, str)
    mesh = resolve_mesh(quick_config(shape).mesh if named else MeshConfig(**shape), None)
    with fake_world(mesh.world_size - 1, mesh.world_size):
        build_meshes(mesh, torch.device("cpu"))
        made = [
            (group.group_desc.removeprefix("mesh_").replace("default_pg", "world"), group.size())
            for group in process_groups()
        ]
    assert sorted(one for one in made if one[1] > 1) == sorted(mesh.process_groups())


def groups_of_a_bound_world(mesh: dict[str, int]) -> list[tuple[str, int, int, float]]:
    """Name, size, threads and timeout of the gloo half of every group, in a world that is bound to its device.

    As NCCL's is: torch's DeviceMesh then splits the world's backends, and takes gloo's default options.
    """
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    here = dict(is_available=lambda: True, current_accelerator=lambda *_: torch.device("cuda"))
    with patch.multiple(torch.accelerator, **here):
        meshes = build_meshes(resolve_mesh(MeshConfig(**mesh), None), torch.device("cpu"), timedelta(seconds=77))
        assert meshes.stage_group() is meshes.stage_group()
    options = [group._get_backend(torch.device("cpu")).options for group in process_groups()]
    return [
        (group.group_desc, group.size(), one._threads, one._timeout.total_seconds())
        for group, one in zip(process_groups(), options, strict=True)
    ]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", [dict(pp=2, dp_shard=2, tp=2, ep=2, etp=2), dict(dp_shard=4, ep=4)], ids=str)
def test_groups_of_a_world_bound_to_a_device_have_one_gloo_thread_and_our_timeout(
    ranks: RankPool, mesh: dict[str, int]
) -> None:
    world = resolve_mesh(MeshConfig(**mesh), None).world_size
    for groups in ranks.run(groups_of_a_bound_world, world, mesh):
        assert {threads for _, _, threads, _ in groups} == {1}
        assert {timeout for name, _, _, timeout in groups if name.startswith("mesh_")} == {77.0}
        made = [group[:2] for group in groups]
        assert ("mesh_ep", mesh["ep"]) in made and (("mesh_stage", 4) in made) == (mesh.get("pp", 1) > 1)


def exchanged(mesh: dict[str, int], exchanges_heads: bool = False) -> dict[str, list[str]]:
    """Descriptions of the groups that each collective of ``connect_process_groups`` went over."""
    build_meshes(resolve_mesh(MeshConfig(**mesh), None), torch.device("cpu"))
    found: dict[str, list[str]] = {}

    def noting(name: str) -> Any:
        real = getattr(dist, name)

        def collective(*args: Any, group: dist.ProcessGroup, **options: Any) -> Any:
            found.setdefault(name, []).append(group.group_desc)
            return real(*args, group=group, **options)

        return patch.object(dist, name, collective)

    with noting("all_reduce"), noting("all_to_all_single"):
        connect_process_groups(exchanges_heads)
    return found


@pytest.mark.exhaustive
def test_the_all_to_all_is_warmed_up_where_ep_is_the_world(ranks: RankPool) -> None:
    for mesh, dispatching in ((ALONE[0], ["mesh_ep"]), (ALONE[1], ["mesh_etp"]), (MESHES[1], ["mesh_ep", "mesh_etp"])):
        for found in ranks.run(exchanged, 8, mesh):
            assert found["all_to_all_single"] == dispatching
            assert found["all_reduce"][0] == "default_pg" and set(dispatching) < set(found["all_reduce"])


@pytest.mark.exhaustive
def test_the_all_to_all_of_heads_is_warmed_up(ranks: RankPool) -> None:
    for found in ranks.run(exchanged, 4, dict(cp=2, dp_shard=2, ep=4), True):
        assert found["all_to_all_single"] == ["mesh_cp", "mesh_ep"]


def neighbours(mesh: dict[str, int]) -> list[tuple[list[int], float]]:
    """The ranks of both groups with neighbours, and the sum of ranks over each."""
    meshes = build_meshes(resolve_mesh(MeshConfig(**mesh), None), torch.device("cpu"), timedelta(seconds=60))
    groups = meshes.pipeline_neighbours()
    totals = [torch.tensor(float(dist.get_rank())) for _ in groups]
    works = [dist.all_reduce(total, group=one, async_op=True) for total, one in zip(totals, groups, strict=True)]
    for work in works:
        work.wait()
    assert int(connect_process_groups().split()[0]) == len(process_groups()), (
        "in the order in which all ranks made them"
    )
    return [(dist.get_process_group_ranks(one), total.item()) for one, total in zip(groups, totals, strict=True)]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_pipeline_ranks_have_a_group_with_each_neighbour_of_the_ring(ranks: RankPool, pp: int) -> None:
    """An odd number of ranks too, of which each round leaves one alone."""
    stage = 8 // pp
    for rank, (before, behind) in enumerate(ranks.run(neighbours, stage * pp, dict(pp=pp, dp_shard=stage))):
        expected = [sorted([rank, (rank + step * stage) % (stage * pp)]) for step in (-1, 1)]
        assert [before[0], behind[0]] == expected
        assert [before[1], behind[1]] == [sum(both) for both in expected]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("pp", [2, 4])
def test_the_plan_counts_the_groups_with_neighbours(pp: int) -> None:
    changes = [f"mesh.pp={pp}", "mesh.dp_shard=2", "parallel.schedule=Interleaved1F1B", "parallel.stages_per_rank=2"]
    config = quick_config("config", [*changes, "model.num_layers=8"])
    mesh = resolve_mesh(config.mesh, None)
    with fake_world(0, mesh.world_size):
        meshes = build_meshes(mesh, torch.device("cpu"))
        meshes.pipeline_neighbours()
        made = [
            (group.group_desc.removeprefix("mesh_").replace("default_pg", "world"), group.size())
            for group in process_groups()
        ]
    assert sorted(one for one in made if one[1] > 1) == sorted(planned_groups(config, mesh))
