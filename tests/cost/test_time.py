"""The predicted time of a step: parts that add up, what makes a step slower, and published runs."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from automoe.config.compose import compose_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import ClusterConfig, Config
from automoe.cost.machine import Constants
from automoe.cost.time import BAND, StepTime, step_time
from automoe.plan import main
from benchmarks.published import Run, mean_error, ordered, runs, winners

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("*.yaml"))
RESULT = json.loads((ROOT / "benchmarks" / "results" / "published_runs.json").read_text())


@lru_cache(maxsize=16)
def primary(name: str) -> Config:
    return compose_config(name, [])


def time_of(name: str, settings: dict[str, Any] | None = None, cluster: str = "h100_sxm") -> StepTime:
    """Of a primary with these keys, on another cluster."""
    config = deepcopy(primary(name))
    assert cluster in CLUSTERS
    values = yaml.safe_load((ROOT / "conf" / "cluster" / f"{cluster}.yaml").read_text())
    config.cluster = ClusterConfig(
        **{key: float(v) if type(v) is str and "e+" in v else v for key, v in values.items()}
    )
    for key, value in (settings or {}).items():
        group, last = key.split(".")
        assert hasattr(getattr(config, group), last), key
        setattr(getattr(config, group), last, value)
    return step_time(config, resolve_mesh(config.mesh, config.launch.num_ranks))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_says_whether_its_products_were_measured(cluster: str) -> None:
    found = time_of("qwen3_30b_a3b", cluster=cluster)
    assert found.calibrated == (cluster in ("h100_sxm", "h200"))
    width = found.band[1] / found.tokens_per_second - 1
    assert width == pytest.approx(BAND) if found.calibrated else width > BAND


def test_faster_hardware_makes_a_faster_step() -> None:
    order = ["a100_sxm", "h100_sxm", "b200", "b300"]
    speeds = [time_of("dsv3_671b", cluster=name).tokens_per_second for name in order]
    assert speeds == sorted(speeds)
    links = [time_of("dsv3_671b", {"mesh.ep": 64, "cluster.inter_node_bandwidth": x}) for x in (25e9, 50e9)]
    assert links[0].communication["ep"] > 1.8 * links[1].communication["ep"]
    assert links[0].compute == links[1].compute
    # Experts of a rack of 72 are one fast network apart.
    assert (
        time_of("dsv3_671b", {"mesh.ep": 64}, cluster="gb200_nvl72").communication["ep"]
        < 0.2 * links[1].communication["ep"]
    )


def test_what_a_configuration_chooses_costs_what_it_should() -> None:
    even = {"parallel.recompute": [], "moe.gate": "balanced", "mesh.ep": 16}
    plain = time_of("qwen3_30b_a3b", even)

    def times(**settings: Any) -> StepTime:
        """With these keys, ``__`` for a point."""
        return time_of("qwen3_30b_a3b", even | {key.replace("__", "."): value for key, value in settings.items()})

    def more(**settings: Any) -> float:
        return times(**settings).compute / plain.compute

    again = {name: more(parallel__recompute=[name]) for name in ("layernorm", "core_attn", "moe")}
    assert 1 < again["layernorm"] < again["core_attn"] < again["moe"] < more(parallel__recompute="full") < 1.4
    sent = plain.communication["ep"]
    assert times(parallel__recompute=["moe"]).communication["ep"] == pytest.approx(1.25 * sent)
    assert more(train__fp8="blockwise") < 0.95
    assert more(data__document_mask=False) < 1, "a mask leaves nothing out"
    assert more(moe__gate="learned") > 1 and times(moe__gate="learned").communication["ep"] > sent
    assert times(mesh__ep=8).communication["ep"] < 0.5 * sent, "in one node"
    once = times(moe__dispatcher="hierarchical").communication["ep"]
    assert times(moe__dispatcher="deepep").communication["ep"] < once < sent
    assert times(moe__dispatcher="allgather").traffic["ep"] == pytest.approx(16 / 8 * plain.traffic["ep"], rel=0.01)
    freed = times(parallel__reshard="micro_batch", parallel__grad_sync="micro_batch")
    assert freed.traffic["fsdp"] > 10 * plain.traffic["fsdp"]
    frozen = more(lora__rank=16, lora__targets=["attention"])
    assert frozen < 0.9, "frozen weights have no gradients"


def test_long_rows_are_shared_by_chunks() -> None:
    def attention(cp: int) -> float:
        long = {"train.seq_len": 65536, "train.global_batch_size": 64, "parallel.recompute": [], "mesh.cp": cp}
        return time_of("qwen3_30b_a3b", long | {"moe.gate": "balanced"}).compute

    # Whole matrices on one rank; 2 cp + 1 of 4 cp pairs of chunks on several: 0.56 of it with cp=4, 0.53 with 8.
    assert 0.5 < 4 * attention(4) / attention(1) < 0.7 and 2 * attention(8) < attention(4)
    assert time_of("dsv3_671b", {"mesh.cp": 2, "mesh.dp_shard": 32}).communication["cp"] > 0


def test_constants_are_few_and_say_where_they_are_from() -> None:
    text = (ROOT / "automoe" / "cost" / "constants.toml").read_text()
    assert text.count("\nprior = ") == text.count("\nvalue = ") == text.count("\nsource = ") <= 12
    assert Constants.load("prior") != Constants.load()


FITTED = [run for run in runs() if run.fit]


def test_published_runs_are_reproduced_as_the_results_say() -> None:
    for which, key in (("prior", "priors alone"), ("value", "fitted")):
        constants = Constants.load(which)
        assert mean_error(FITTED, constants) == pytest.approx(RESULT[key]["mean_absolute_error"], abs=1e-6)
        right, pairs = ordered(runs(), constants)
        assert [right, pairs] == RESULT[key]["pairs_ordered_rightly"] and right >= 0.95 * pairs
    assert all(winners(FITTED).values()) and len(winners(FITTED)) == 6
    assert mean_error(FITTED, Constants.load("prior")) <= 0.15
    assert mean_error(FITTED) <= 0.08
    left_out = RESULT["leave one model out"]
    assert left_out["mean_absolute_error"] <= 0.13 and max(left_out["by_model"].values()) <= 0.20
    assert len(left_out["by_model"]) == 7


def test_runs_that_nothing_was_fitted_to_are_within_the_band() -> None:
    held = [run for run in runs() if not run.fit]
    assert len(held) >= 3 and all(abs(run.error()) < BAND for run in held)


def test_the_page_says_what_the_results_say() -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    fitted, left_out = RESULT["fitted"], RESULT["leave one model out"]
    for number, text in (
        (RESULT["priors alone"]["mean_absolute_error"], "| constants as known without the runs | {:.1%} |"),
        (fitted["mean_absolute_error"], "| fitted | {:.1%} |"),
        (left_out["mean_absolute_error"], "| each model by constants fitted to the others | {:.1%} |"),
        (max(left_out["by_model"].values()), "Mixtral-8x22B-G8T8, {:.1%}"),
        (fitted["mean_absolute_error_of_runs_not_fitted_to"], "| runs not fitted to | {:.1%} |"),
    ):
        assert text.format(number) in page
    assert "{} of {} pairs".format(*fitted["pairs_ordered_rightly"]) in page


def test_published_runs_are_those_of_their_sources() -> None:
    def of(model: str, name: str) -> Run:
        return next(run for run in runs() if (run.model, run.name) == (model, name))

    assert len(runs()) >= 21
    # 487.7 TFLOPS and 250.7 GFLOP a token; 250 TFLOPS and 1,002 tokens per second.
    assert of("mixtral_8x22b", "folded").tokens_per_second == pytest.approx(487.7e3 / 250.7, rel=0.01)
    assert of("dsv3_671b", "automodel").tokens_per_second == pytest.approx(1002, rel=0.01)
    assert of("qwen3_30b_a3b", "automodel").tokens_per_second == pytest.approx(12040, rel=0.01)
    folded = of("mixtral_8x22b_g8t8", "folded")
    assert (folded.mesh.dp_shard, folded.mesh.ep, folded.config.train.global_batch_size) == (4, 8, 256)


def test_the_plan_prints_the_step_and_its_doubts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "qwen3_30b_a3b", "cluster=b200"]) == 0
    text = capsys.readouterr().out
    lines = text[text.index("time of a step") :].splitlines()
    assert lines[0].strip() == "time of a step, predicted, uncalibrated (no cluster.gemm_curve)"
    found = time_of("qwen3_30b_a3b", cluster="b200")
    assert any(line.startswith("step") and f"{found.tokens_per_second:,.0f} tokens/s" in line for line in lines)
    assert f"{found.mfu:.1%}" in text and f"{found.mfu_full_attention:.1%} with all" in text
    assert f"{found.traffic['ep'] / 2**30:,.1f} GiB" in text
    assert max(map(len, lines)) <= 80
