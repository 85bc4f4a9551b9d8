"""What becomes of measured speeds: a cluster file, and predictions on it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from automoe import plan
from automoe.config.batch import plan_batch
from automoe.config.compose import compose_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.rules import DELAYS, SPEEDS, number_rows
from automoe.config.schema import ClusterConfig, Config, MeshConfig
from automoe.config.shipped import load_file
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.planner.calibrate import (
    CPU_RANKS,
    SIZES,
    Bench,
    Links,
    _attention,
    _experts,
    _text,
    cluster_values,
    fit_link,
    group_shapes,
    measure_links,
    usual,
)
from automoe.planner.communication import Group, all_to_all, gather, link_name, send
from automoe.planner.layer_time import layer_time
from automoe.planner.machine import Constants, Machine
from automoe.planner.place import Place
from automoe.planner.time import MEASURED_BAND, step_time
from automoe.verify.pool import RankPool

ROOT = Path(__file__).parents[2]
BENCH = Bench.of("cpu", 1)
CURVE = [0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0]
KNOWN = {"gemm": 0.8, "memory": 0.8, "grouped": 0.5, "attention": 0.6, "latency": 1e-3}
LINK = 2e9
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "send")


def measured() -> tuple[dict[str, Any], list[Links]]:
    """What a machine of ``KNOWN`` constants would be measured to do."""
    cluster = ClusterConfig(
        "", "cpu", peak_flops=1e11, memory_bandwidth=2e10, gemm_curve=CURVE, gemm_curve_from=4.0, constants=KNOWN
    )
    config = replace(usual(BENCH, 2), cluster=cluster)
    mesh, n = resolve_mesh(MeshConfig(), 1), BENCH.expert
    slow = Machine.of(config, Constants.load())
    alone = replace(slow, memory=2e10, constants=replace(slow.constants, gemm=1.0))
    passes = alone.pass_over(5 * 4 * 8 * n * n)
    layer = layer_time(Place(config, mesh, slow, plan_batch(config, mesh)), 0, frozenset())
    seen = {"gpu": "cpu", "peak": 1e11, "curve": CURVE, "memory": 2e10, "memory_bytes": 0, "step": 0.01}
    seen |= {"attention": 0.6 * 1e11, "experts": alone.gemm(n, 2 * n, n, 8) + alone.gemm(n, n, n, 8) + passes}
    seen |= {"host_layer": 0.002, "layer": 2 * 0.002 + sum(half.seconds for half in layer)}
    took = {sent: KNOWN["latency"] + sent / LINK for sent in (1e3, 1e5, 3e6)}
    return seen, [{link_name(kind, *shape): took for kind in KINDS for shape in group_shapes(4)}] * 4


@pytest.mark.parametrize("timed", [_attention, _experts])
def test_what_one_rank_times_runs(timed: Callable[..., float]) -> None:
    assert timed(replace(BENCH, seq=8, expert=16), torch.device("cpu"), torch.float32) > 0


def test_what_was_measured_is_what_the_model_then_takes() -> None:
    values = cluster_values(BENCH, *measured(), "mine", 0)
    found = values["constants"]
    for name, value in (KNOWN | {"host_layer": 0.002, "step": 0.01, "overlap": 0.0, "on_node": 1.0}).items():
        assert found[name] == pytest.approx(value, rel=0.01), name
    assert values["intra_node_bandwidth"] == pytest.approx(LINK)
    assert len(values["links"]) == len(KINDS) * len(group_shapes(4))
    assert all(link == pytest.approx([KNOWN["latency"], LINK], rel=1e-3) for link in values["links"].values())
    text = _text(values, BENCH, "cpu")
    assert text.startswith("# Measured by automoe plan calibrate=true on 2") and "torch" in text and "1 thread" in text
    read = yaml.safe_load(text)
    assert read.keys() == values.keys() and ClusterConfig(**read).gemm_curve == CURVE
    assert all(type(read[key]) is type(value) for key, value in values.items()), "as the schema has them"


def calibrated(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "cluster").mkdir(exist_ok=True)
    values = cluster_values(BENCH, *measured(), "mine", 0)
    (tmp_path / "cluster" / "mine.yaml").write_text(_text(values | {"cores": 2}, BENCH, "cpu"))
    return compose_config("config", ["cluster=mine", *overrides], str(tmp_path))


def test_ranks_that_share_cores_are_not_faster_than_all_cores(tmp_path: Path) -> None:
    config = calibrated(tmp_path)
    time = step_time(config, validate(config, 4))
    own = compose_config("config", ["cluster=mine", "cluster.cores=0"], str(tmp_path))
    alone = step_time(own, validate(own, 4))
    assert time.busy / 2 == pytest.approx(time.seconds) and alone.seconds < 0.7 * time.seconds and alone.busy == 0
    parts = time.compute + sum(time.communication.values()) + time.bubble + time.other
    assert parts == pytest.approx(time.seconds) and time.spread == MEASURED_BAND


@pytest.mark.parametrize(("name", "factor"), [("latency", 3), ("host_layer", 3), ("gemm", 0.5), ("step", 9)])
def test_constants_of_a_cluster_are_in_place_of_those_that_ship(tmp_path: Path, name: str, factor: float) -> None:
    config = calibrated(tmp_path)
    constants = config.cluster.constants
    other = replace(config, cluster=replace(config.cluster, constants=constants | {name: factor * constants[name]}))
    shape = validate(config, 4)
    assert step_time(other, shape).busy > 1.03 * step_time(config, shape).busy


def test_constants_that_may_be_given_are_those_that_there_are() -> None:
    assert {*SPEEDS, *DELAYS} == {field.name for field in fields(Constants)}
    for given, rule in (({"speed": 1.0}, "its keys are gemm, grouped"), ({"gemm": 0.0}, "gemm, grouped, attention")):
        config = Config(cluster=ClusterConfig(constants=given))
        with pytest.raises(ConfigError, match=rule):
            check_rows(config, number_rows(config))


def test_another_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "measured_cpu.yaml").write_text("mine")
    assert plan.main(["calibrate=true", f"out={tmp_path}"]) == 2
    assert "measured_cpu.yaml exists" in capsys.readouterr().err
    assert plan.main(["calibrate=true", "world=4"]) == 2 and CPU_RANKS >= 2


def test_group_shapes_are_those_of_mesh_axes() -> None:
    assert group_shapes(8) == [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]
    assert group_shapes(6) == [(2, 1), (2, 3), (3, 1), (3, 2), (6, 1)] and group_shapes(1) == []
    for mesh in (
        MeshConfig(pp=2, dp_shard=1, tp=2, ep=2),
        MeshConfig(dp_shard=2, cp=2, ep=4),
        MeshConfig(pp=4, dp_shard=1),
    ):
        shape = resolve_mesh(mesh, 4)
        axes = [(view, axis, size) for view in ("default", "moe") for axis, size in shape.active_axes(view)]
        assert {(size, shape.stride(view, axis)) for view, axis, size in axes} <= set(group_shapes(4))


def test_a_link_is_the_line_through_what_was_measured() -> None:
    assert fit_link({1e3: 2e-3 + 1e-6, 1e6: 2e-3 + 1e-3, 1e7: 2e-3 + 1e-2}) == pytest.approx([2e-3, 1e9])
    noisy = fit_link({1e3: 2.1e-3, 1e6: 2.8e-3, 1e7: 12.5e-3})
    assert noisy == pytest.approx([2e-3, 1e9], rel=0.1)
    assert fit_link({1e3: 1.0, 1e6: 0.5})[0] >= 0 < fit_link({1e3: 1.0, 1e6: 0.5})[1] <= 1e24


@pytest.mark.exhaustive
def test_every_group_is_probed_over_gloo(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective in each shape of group at each size, on every rank; the file that comes of it is read again."""
    found = ranks.run(measure_links, 4, replace(BENCH, threads=1))
    for links in found:
        assert {*links} == {link_name(kind, *shape) for kind in KINDS for shape in group_shapes(4)}
        for name, seconds in links.items():
            size = int(name.split()[1][0])
            share = 1 if name.startswith("send") else 1 - 1 / size
            assert list(seconds) == [num_bytes * share for num_bytes in SIZES["cpu"]]
            assert min(seconds.values()) > 0
    values = cluster_values(BENCH, measured()[0], found, "mine", 0)
    config = Config(cluster=ClusterConfig(**yaml.safe_load(_text(values, BENCH, "cpu"))))
    check_rows(config, number_rows(config))


def test_measured_links_are_in_place_of_the_clusters_speeds() -> None:
    """In groups of their size and stride within a node; each kind has its own."""
    links = {f"{kind} 4x2": [1e-3 * number, 1e9 * number] for number, kind in enumerate(KINDS, 1)}
    cluster = ClusterConfig("", "cpu", intra_node_bandwidth=5e9, inter_node_bandwidth=1e9, gpus_per_node=8)
    plain, here = (Machine.of(Config(cluster=replace(cluster, links=found)), Constants.load()) for found in ({}, links))
    group = Group.of(4, 2, 8)
    assert gather(here, group, 4e8).seconds == pytest.approx(1e-3 + 3e8 / 1e9)
    assert gather(here, group, 4e8, "reduce_scatter").seconds == pytest.approx(2e-3 + 3e8 / 2e9)
    assert all_to_all(here, group, 4e8).seconds == pytest.approx(3e-3 + 3e8 / 3e9)
    assert send(here, group, 4e8).seconds == pytest.approx(4e-3 + 4e8 / 4e9)
    for other in (Group.of(4, 1, 8), Group.of(2, 2, 8), Group.of(4, 2, 4)):
        for cost in (gather, all_to_all, send):
            assert cost(here, other, 4e8) == cost(plain, other, 4e8)
            assert cost(here, group, 4e8).bytes == cost(plain, group, 4e8).bytes


def test_a_measured_link_moves_a_plan(tmp_path: Path) -> None:
    config = calibrated(tmp_path, "mesh.pp=1", "mesh.ep=4")
    shape = validate(config, 4)
    links = config.cluster.links
    slow = links | {"all_to_all 4x1": [links["all_to_all 4x1"][0], links["all_to_all 4x1"][1] / 9]}
    other = step_time(replace(config, cluster=replace(config.cluster, links=slow)), shape)
    before = step_time(config, shape)
    assert other.communication["ep"] > 1.5 * before.communication["ep"]
    assert other.communication["fsdp"] == before.communication["fsdp"]


@pytest.mark.parametrize(
    "links",
    [
        {"all_to_all": [0.0, 1e9]},
        {"broadcast 2x1": [0.0, 1e9]},
        {"send 0x1": [0.0, 1e9]},
        {"send 2x1": [1e9]},
        {"send 2x1": [0.0, 0.0]},
        {"send 2x1": [float("nan"), 1e9]},
        {"send 2x1": [-1.0, 1e9]},
    ],
)
def test_links_that_no_calibration_writes_are_refused(links: dict[str, list[float]]) -> None:
    config = Config(cluster=ClusterConfig(links=links))
    with pytest.raises(ConfigError, match=r"cluster\.links"):
        check_rows(config, number_rows(config))


@pytest.mark.exhaustive
def test_measured_steps_are_in_the_order_in_which_they_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the meshes in the results, on the cluster file that was made for them, by the model as it is now."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    bench = load_file(ROOT / "benchmarks" / "plan_correlation.py")
    result = json.loads((ROOT / "benchmarks" / "results" / "plan_correlation.json").read_text())
    measured = {name: [[one] for one in mesh["rounds"]] for name, mesh in result["meshes"].items()}
    assert measured.keys() == bench.CASES.keys() and len(measured) >= 12 and not result["commit"].endswith("+")
    assert {validate(bench.config_of(name), None).world_size for name in measured} == {2, 4, 8}
    found = bench.compare(measured, bench.predicted(result["cluster"]))
    assert found["spearman"] >= 0.8 and found["of_those_in_order"] >= 0.9 * found["pairs_that_differ"]
    speeds = [mesh["predicted"] / mesh["cpu_seconds"] for mesh in found["meshes"].values()]
    assert all(abs(speed - 1) < MEASURED_BAND for speed in speeds), "within the band"
