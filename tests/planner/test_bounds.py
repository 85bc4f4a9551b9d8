"""Bounds by which a mesh search leaves out candidates: none is faster or smaller than its bounds say."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import mesh_rows
from automoe.planner import search as search_module
from automoe.planner.bounds import WAITING
from automoe.planner.candidate import Candidate, changed
from automoe.planner.reserve import standing_reserve
from automoe.planner.search import Queue, Search, mesh_shapes, search
from tests.support.configurations import quick_config

CASES = {
    "experts alone": ["qwen3_30b_a3b"],
    "latents and modules": [
        "dsv3_671b",
        "model=moonlight_16b_a3b",
        "model.num_mtp_layers=1",
        "model.family=deepseek_v3",
    ],
    "muon": ["kimi_k2_1t_a32b", "model=moonlight_16b_a3b", "optim.algorithm=muon"],
    "narrow state": [
        "moonlight_16b_a3b",
        "optim.master_weights=stochastic",
        "optim.moments=bfloat16",
        "train.fp8=tensorwise",
    ],
    "adapters": ["qwen3_30b_a3b", "lora.rank=8", "model.tie_embeddings=true"],
    "processors": ["config", "cluster=laptop"],
}


def queue_of(words: list[str], world: int, device: str) -> Queue:
    """Return the queue of a search without a limit of memory."""
    name, *others = words
    config = quick_config(name, ["launch.num_ranks=null", "train.global_batch_size=64", *others])
    constants = {"step": 0.0}  # fixed seconds of a step, as a machine's own file may set them
    cluster = replace(config.cluster, memory_bytes=None, constants=constants)
    config = replace(config, mesh=MeshConfig(), cluster=cluster)
    return Queue(config, mesh_shapes(config, world), device, (), Search(world))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_no_candidate_is_faster_or_smaller_than_its_bounds(name: str) -> None:
    """Nor faster than those of its mesh, with and without recomputation; drawn from all that a search tries."""
    queue = queue_of(CASES[name], 8, "cpu" if name == "processors" else "cuda")
    draw = random.Random(1)
    meshes = queue.left[0][sorted(draw.sample(range(len(queue.left[0])), 40))]
    (columns,) = queue._columns(meshes)
    known = {(row["item"], row["rung"]): row["bound"] for row in columns}
    plain = [family._replace(dispatcher="deepep", dispatch_dtype="auto") for family in columns["item"]]
    of_mesh = dict(zip(meshes["item"], meshes["bound"], strict=True))
    assert set(plain) <= set(of_mesh)
    checked = np.zeros(3, int)  # candidates on one pipeline rank, on two, on more
    rows = [row for waiting in queue._candidates(columns) for row in draw.sample([*waiting], 1)]
    draw.shuffle(rows)
    for bound, least, *settings in rows:
        one = queue._candidate(*settings)
        if one is None or checked[min(one.mesh.pp, 3) - 1] == 8:
            continue
        if any(broken for _, broken, _, _ in mesh_rows(one.config, one.mesh, queue.device)):
            continue
        rung, family = settings[1:]
        mesh = family._replace(dispatcher="deepep", dispatch_dtype="auto")
        speed = one.speed * (1 - 1e-9)
        assert speed <= bound and speed <= known[family, rung] and speed <= of_mesh[mesh], one
        assert least + standing_reserve(one.config, one.mesh) <= one.needed * (1 + 1e-9), one
        checked[min(one.mesh.pp, 3) - 1] += 1
    assert checked.sum() > 12


def test_of_equally_fast_candidates_the_plainest_wins() -> None:
    """Where nothing but a host's launches takes time, recomputation and what hides no all-to-all buy nothing."""
    config = quick_config("config", ["cluster=h100_sxm", "launch.num_ranks=null", "train.global_batch_size=32"])
    free = dict.fromkeys(["intra_node_bandwidth", "inter_node_bandwidth", "memory_bandwidth", "peak_flops"], 1e30)
    config = replace(config, mesh=MeshConfig(), cluster=replace(config.cluster, **free, memory_bytes=1e30))
    queue = Queue(config, mesh_shapes(config, 4, ["mesh.tp", "mesh.cp", "mesh.pp"]), "cuda", (), Search(4))
    shape = next(shape for shapes in queue.shapes.values() for shape in shapes.values() if shape.ep == 4)
    plain = Candidate(changed(config, mesh=vars(shape), parallel={"recompute": []}), shape)
    others = [
        plain.with_recompute(["layernorm", "core_attn"]),
        plain.changed(moe={"dispatch_dtype": "fp8"}),
        plain.with_recompute(["core_attn"]),
    ]
    timed = np.array(
        [(one.speed * (1 + 1e-15), 0.0, 0, 0, one) for one in others] + [(plain.speed, 0.0, 0, 0, plain)], WAITING
    )
    assert max(timed["bound"]) < min(timed["bound"]) * (1 + 1e-9)
    queue.left = [timed[:0], timed[:0], timed[:0], timed, timed[:0]]
    assert queue.look() and not queue.look()
    assert queue.result.found == [plain]


def test_equally_fast_candidates_beyond_the_list_bound_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "TOP", 1)
    config = replace(quick_config("config", ["cluster=h100_sxm", "launch.num_ranks=null"]), mesh=MeshConfig())
    queue = Queue(config, mesh_shapes(config, 4, ["mesh.tp", "mesh.cp"]), "cuda", (), Search(4))
    shapes = [shape for shapes in queue.shapes.values() for shape in shapes.values() if shape.pp == 1][:2]
    candidates = [Candidate(changed(config, mesh=vars(shape)), shape) for shape in shapes]
    timed = np.array([(7.0, 0.0, 0, 0, candidate) for candidate in candidates], WAITING)
    queue.left = [timed[:0], timed[:0], timed[:0], timed, timed[:0]]
    assert queue.look() and len(queue.result.found) == 1
    assert queue.highest() == [0, 0, 0, 0, 7.0]


def test_a_miss_by_what_the_driver_takes_is_told_too() -> None:
    config = replace(quick_config("config", ["cluster=h100_sxm", "launch.num_ranks=null"]), mesh=MeshConfig())
    config = replace(config, cluster=replace(config.cluster, memory_bytes=0.8 * 2**30))
    result = search(config, 4, "cuda")
    assert not result.found and not result.num_timed and result.missed


def test_where_nothing_fits_a_near_miss_is_told() -> None:
    """It is not timed: its memory alone says that it does not fit."""
    config: Config = replace(quick_config("mixtral_8x22b", ["launch.num_ranks=null"]), mesh=MeshConfig())
    result = search(config, 2, "cuda")
    assert not result.found and result.num_timed == 0
    assert result.missed and min(one.needed for one in result.missed) > (config.cluster.memory_bytes or 0)
