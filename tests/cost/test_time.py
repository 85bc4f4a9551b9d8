"""The predicted time of a step: parts that add up, what makes a step slower, and published runs."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from automoe.config.compose import compose_config, list_options
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.cost.machine import Constants
from automoe.cost.time import BAND, StepTime, step_time
from automoe.plan import main
from benchmarks.published import Run, mean_error, ordered, runs, winners

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted(path.stem for path in (ROOT / "conf" / "cluster").glob("*.yaml"))
RESULT = json.loads((ROOT / "benchmarks" / "results" / "published_runs.json").read_text())


@lru_cache(maxsize=64)
def config_of(name: str, *overrides: str) -> Config:
    return compose_config(name, list(overrides))


def time_of(name: str, *overrides: str) -> StepTime:
    config = config_of(name, *overrides)
    return step_time(config, resolve_mesh(config.mesh, config.launch.num_ranks))


@pytest.mark.parametrize("name", list_options())
def test_every_primary_has_a_step_whose_parts_add_up(name: str) -> None:
    config = config_of(name)
    found = step_time(config, validate(config, config.launch.num_ranks))
    parts = [found.compute, found.bubble, found.other, *found.communication.values()]
    assert min(parts) >= 0 and found.seconds == pytest.approx(sum(parts))
    tokens = config.train.global_batch_size * config.train.seq_len
    assert found.tokens_per_second == pytest.approx(tokens / found.seconds)
    assert found.calibrated == bool(config.cluster.gemm_curve)
    assert found.band[0] < found.tokens_per_second < found.band[1]
    assert (found.mfu is None) == (not config.cluster.peak_flops)
    if found.mfu is not None and found.mfu_full_attention is not None:
        assert 0 < found.mfu < found.mfu_full_attention < 1


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_cluster_says_whether_its_products_were_measured(cluster: str) -> None:
    found = time_of("qwen3_30b_a3b", f"cluster={cluster}")
    assert found.calibrated == (cluster in ("h100_sxm", "h200"))
    width = found.band[1] / found.tokens_per_second - 1
    assert width == pytest.approx(BAND) if found.calibrated else width > BAND


def test_faster_hardware_makes_a_faster_step() -> None:
    order = ["a100_sxm", "h100_sxm", "b200", "b300"]
    speeds = [time_of("dsv3_671b", f"cluster={name}").tokens_per_second for name in order]
    assert speeds == sorted(speeds)
    links = [time_of("dsv3_671b", f"cluster.inter_node_bandwidth={x}") for x in ("25e9", "50e9")]
    assert links[0].communication["ep"] > 1.8 * links[1].communication["ep"]
    assert links[0].compute == links[1].compute
    # Experts of a rack of 72 are one fast network apart.
    assert time_of("dsv3_671b", "cluster=gb200_nvl72").communication["ep"] < 0.2 * links[1].communication["ep"]


def test_what_a_configuration_chooses_costs_what_it_should() -> None:
    name = "qwen3_30b_a3b"
    plain = time_of(name, "parallel.recompute=[]", "moe.gate=balanced")

    def times(*overrides: str) -> StepTime:
        return time_of(name, *{"parallel.recompute=[]": 0, "moe.gate=balanced": 0} | dict.fromkeys(overrides, 0))

    def more(*overrides: str) -> float:
        return times(*overrides).compute / plain.compute

    again = {name: more(f"parallel.recompute=[{name}]") for name in ("layernorm", "core_attn", "moe")}
    assert 1 < again["layernorm"] < again["core_attn"] < again["moe"] < more("parallel.recompute=full") < 1.4
    assert times("parallel.recompute=[moe]").communication["ep"] == pytest.approx(1.25 * plain.communication["ep"])
    assert more("train.fp8=blockwise") < 0.95
    assert more("data.document_mask=false") < 1, "a mask leaves nothing out"
    assert more("moe.gate=learned") > 1 and times("moe.gate=learned").communication["ep"] > plain.communication["ep"]
    assert times("mesh.ep=8").communication["ep"] < 0.5 * plain.communication["ep"], "in one node"
    once = times("moe.dispatcher=hierarchical").communication["ep"]
    assert times("moe.dispatcher=deepep").communication["ep"] < once < plain.communication["ep"]
    assert times("moe.dispatcher=allgather").traffic["ep"] == pytest.approx(16 / 8 * plain.traffic["ep"], rel=0.01)
    freed = times("parallel.reshard=micro_batch", "parallel.grad_sync=micro_batch")
    assert freed.traffic["fsdp"] > 10 * plain.traffic["fsdp"]
    assert times("lora.rank=16", "lora.targets=[attention]").compute < 0.9 * plain.compute, (
        "frozen weights have no gradients"
    )


def test_long_rows_are_shared_by_chunks() -> None:
    def attention(cp: int) -> float:
        long = ["train.seq_len=65536", "train.global_batch_size=64", "parallel.recompute=[]", "moe.gate=balanced"]
        return time_of("qwen3_30b_a3b", *long, f"mesh.cp={cp}", "mesh.ep=16").compute

    # Whole matrices on one rank; 2 cp + 1 of 4 cp pairs of chunks on several: 0.56 of it with cp=4, 0.53 with 8.
    assert 0.5 < 4 * attention(4) / attention(1) < 0.7 and 2 * attention(8) < attention(4)
    assert time_of("dsv3_671b", "mesh.cp=2", "mesh.dp_shard=32").communication["cp"] > 0


def test_constants_are_few_and_say_where_they_are_from() -> None:
    text = (ROOT / "automoe" / "cost" / "constants.toml").read_text()
    assert text.count("\nprior = ") == text.count("\nvalue = ") == text.count("\nsource = ") <= 12
    prior, fitted = Constants.load("prior"), Constants.load()
    assert prior != fitted and fitted == replace(fitted)


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
    found = time_of("qwen3_30b_a3b", "cluster=b200")
    assert any(line.startswith("step") and f"{found.tokens_per_second:,.0f} tokens/s" in line for line in lines)
    assert f"{found.mfu:.1%}" in text and f"{found.mfu_full_attention:.1%} if the masked half" in text
    assert max(map(len, lines)) <= 80
