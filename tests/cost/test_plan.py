"""The plan as a whole: what it says of fitting, and that every way of asking says the same."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from automoe.config.compose import compose_config, list_options
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.validate import validate
from automoe.cost.activations import at_load
from automoe.cost.plan import TIGHT, Plan, gib, make_plan
from automoe.observe.plan_view import print_plan
from automoe.plan import main
from automoe.shipped import load_file
from tests.support.sampling import one_in


def plan_of(name: str, *overrides: str) -> Plan:
    config = compose_config(name, list(overrides))
    return make_plan(config, validate(config, config.launch.num_ranks))


@pytest.mark.parametrize("name", list_options())
def test_every_primary_has_a_plan_that_adds_up(name: str) -> None:
    plan, without_adapters = plan_of(name), plan_of(name, "lora.rank=0")
    assert sum(rank.params for rank in without_adapters.ranks) == plan.params.total
    config = compose_config(name)
    assert sorted(layer for rank in plan.ranks for layer in rank.layers) == list(range(config.model.num_layers))
    assert plan.heaviest.peak == max(rank.peak for rank in plan.ranks)
    time = plan.time
    parts = [time.compute, time.bubble, time.other, *time.communication.values()]
    assert min(parts) >= 0 and time.seconds == pytest.approx(sum(parts))
    assert time.tokens_per_second == pytest.approx(plan.batch.tokens_per_step / time.seconds)
    assert time.band[0] < time.tokens_per_second < time.band[1]
    cluster = config.cluster
    assert time.calibrated == bool(cluster.gemm_curve) and (time.mfu is None) == (not cluster.peak_flops)
    if time.mfu is not None and time.mfu_full_attention is not None:
        assert 0 < time.mfu < time.mfu_full_attention < 1
    assert plan.warnings == []  # fits the cluster that it names, and keeps it busy


DOCS = Path(__file__).parents[2] / "docs"
write_plan = load_file(DOCS / "write_plan.py")
FLAGSHIPS = write_plan.FLAGSHIPS


@pytest.mark.parametrize("name", one_in(4, FLAGSHIPS))
def test_the_table_of_recomputation_is_what_plans_say(name: str) -> None:
    assert write_plan.row(name) in (DOCS / "plan.md").read_text().splitlines(keepends=True), "run: make docs-config"


def test_the_table_of_recomputation_has_every_flagship() -> None:
    table = (DOCS / "plan.md").read_text().split(write_plan.BEGIN)[1].split(write_plan.END)[0].splitlines()
    assert [line.split("`")[1] for line in table[2:]] == FLAGSHIPS
    assert {"dsv3_671b", "kimi_k2_1t_a32b", "gpt_oss_120b", "glm45_355b_a32b"} < set(FLAGSHIPS)


@pytest.mark.parametrize("mesh", ["tuned", "first"])
@pytest.mark.parametrize("name", FLAGSHIPS)
def test_flagships_leave_a_tenth_of_the_memory_at_even_load_and_at_twice(name: str, mesh: str) -> None:
    config = compose_config(name, [f"mesh={mesh}_{name}"])
    shape = validate(config, None)
    plan, train = make_plan(config, shape), config.train

    assert max(plan.heaviest.peak, plan.uneven_peak) <= 0.9 * config.cluster.memory_bytes
    assert train.seq_len == 4096 and shape.cp == 1, "rows of 4,096 tokens are not cut"
    assert shape.tp * shape.etp <= config.cluster.gpus_per_node
    interleaved = config.parallel.schedule == "Interleaved1F1B"
    assert interleaved == (mesh == "tuned" and 1 < shape.pp <= config.model.num_layers / 2)
    if mesh == "first":
        assert config.parallel.recompute == "full" and shape.tp == 1
    else:
        first = plan_of(name, f"mesh=first_{name}")
        assert plan.time.tokens_per_second > first.time.tokens_per_second, "tuned for nothing"
        assert plan.mesh.world_size == first.mesh.world_size and plan.uneven_peak > first.uneven_peak
    assert config.checkpoint.every_minutes and config.checkpoint.async_save
    moe = config.moe
    assert moe.seq_balance_coef + moe.global_balance_coef + moe.micro_batch_balance_coef > 0


def test_twice_the_even_load_is_what_ranks_send_and_capacity_lets_through() -> None:
    def rows(*overrides: str) -> float:
        plan = plan_of("mixtral_8x7b", *overrides)
        assert (plan.uneven_peak > plan.heaviest.peak) == (plan.uneven_ranks != plan.ranks)
        config = compose_config("mixtral_8x7b", list(overrides))
        uneven = at_load(plan.batch, 2.0, config, plan.mesh)
        return uneven.expert_rows_per_rank / plan.batch.expert_rows_per_rank

    assert rows() == 2.0
    assert rows("mesh.ep=1", "mesh.ep_shard=16") == 1.0, "without ep a rank computes its own tokens"
    assert rows("moe.capacity_factor=1.25") == 1.25
    assert rows("moe.capacity_factor=0.5") == 1.0


def test_a_rank_that_does_not_fit_is_named_with_what_would_help() -> None:
    plan = plan_of("moonlight_16b_a3b", "train.micro_batch_size=8")
    (warning,) = plan.warnings
    assert "does not fit" in warning
    assert "every rank needs" in warning
    assert "79.2 GiB that h100_sxm has" in warning
    smaller = plan_of("moonlight_16b_a3b", "train.micro_batch_size=4")
    assert f"train.micro_batch_size=4 ({smaller.heaviest.peak / 2**30:.1f} GiB)" in warning


def test_whole_layers_are_the_remedy_where_parts_are_recomputed_already() -> None:
    (warning,) = plan_of("dsv3_671b", "parallel.recompute=[moe]").warnings
    assert "parallel.recompute=full" in warning and "parallel.recompute=moe" not in warning


def test_the_page_on_adapters_says_what_the_plan_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text()
    commands = [line.split()[2:] for line in page.splitlines() if line.startswith("automoe plan ")]
    for words, limit in zip(commands, (79, 24, 45, 140), strict=True):
        plan = plan_of(words[1], *words[2:])
        assert f"needs {plan.heaviest.peak / 2**30:.0f} of {limit} GiB" in page and plan.warnings == []


def test_a_plan_that_fits_at_even_load_alone_says_what_helps() -> None:
    lists = ("[layernorm]", "[layernorm,moe]")
    plan, mended = (plan_of("gpt_oss_120b", f"parallel.recompute={names}") for names in lists)
    assert mended.warnings == [] and plan.heaviest.peak < 85e9 * TIGHT < 85e9 < plan.uneven_peak
    (warning,) = plan.warnings
    assert warning.startswith(
        f"a rank whose experts get twice their even share of tokens needs {gib(plan.uneven_peak)}"
    )
    assert f"does not fit. Single changes that need less: parallel.recompute={lists[1]}" in warning
    assert f"({gib(mended.uneven_peak)})" in warning


def test_no_limit_no_verdict() -> None:
    assert plan_of("moonlight_16b_a3b", "train.micro_batch_size=8", "cluster=laptop").warnings == []


def test_an_idle_pipeline_is_named() -> None:
    mesh = ["mesh=first_mixtral_8x22b"]
    plan = plan_of("mixtral_8x22b", *mesh, "train.global_batch_size=128", "cluster=laptop")
    assert plan.bubble == pytest.approx(7 / (8 + 7), rel=0.03)  # simulated, with what stages do not share evenly
    assert f"idles {plan.bubble:.0%} of a step: 8 micro-batches over mesh.pp=8" in plan.warnings[0]


def test_print_shows_both_meshes_and_the_heaviest_rank() -> None:
    mesh = ["mesh=first_dsv3_671b", "mesh.ep=64"]
    config = compose_config("dsv3_671b", mesh)
    file = io.StringIO()
    plan = print_plan(config, resolve_mesh(config.mesh, None), Console(file=file))
    text = file.getvalue()
    for needle in (
        "default mesh: pp16 x dp_shard64 = 1,024 ranks",
        "moe mesh: pp16 x ep64 = 1,024 ranks",
        "671.03 B",
        "37.55 B",
        f"heaviest, pp rank {plan.heaviest.pp_rank}",
        f"{plan.heaviest.peak / 2**30:.1f} GiB",
        f"{plan.uneven_peak / 2**30:.1f} GiB",
        "where experts get twice their even share",
    ):
        assert needle in text
    assert max(map(len, text.splitlines())) <= 100


def test_json_says_what_the_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "qwen3_30b_a3b", "--json", "mesh.ep=8"]) == 0
    said = json.loads(capsys.readouterr().out)
    plan = plan_of("qwen3_30b_a3b", "mesh.ep=8")
    assert said["mesh"]["ep_shard"] == 2
    assert said["params"]["total"] == plan.params.total
    assert said["bytes_per_rank"][0]["peak"] == plan.heaviest.peak
    assert said == json.loads(json.dumps(plan.to_dict()))


def test_a_wrong_mesh_is_an_error_with_its_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh.ep=3"]) == 2
    assert "error: mesh.ep=3: both meshes hold the same ranks" in capsys.readouterr().err


def test_a_plan_imports_no_torch() -> None:
    code = "import sys; from automoe.plan import main; main([]); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
