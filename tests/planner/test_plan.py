"""The plan as a whole: what it says of fitting, and that every way of asking says the same."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from automoe.config.batch import plan_batch
from automoe.config.compose import key_of, list_options
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.shipped import load_file, shipped_folder
from automoe.config.validate import validate
from automoe.plan import main
from automoe.planner.activations import at_load
from automoe.planner.memory import plan_memory
from automoe.planner.plan import SHOWN, Plan, make_plan
from automoe.planner.remedies import gib
from automoe.planner.reserve import ALL_TO_ALL_PEER, COMMUNICATOR, NETWORK, Reserve, needed
from automoe.planner.views.plan_view import print_plan
from tests.support.configurations import quick_config


@cache
def plan_of(name: str, *overrides: str) -> Plan:
    config = quick_config(name, list(overrides))
    if getattr(config.recipe_args, "teacher", None):
        config.recipe_args.teacher = None  # which another run makes
    return make_plan(config, validate(config, config.launch.num_ranks))


def test_the_load_at_which_experts_fill_the_memory_is_said() -> None:
    config = quick_config("llama3_8x70b")
    shape = validate(config, None)
    plan, limit = make_plan(config, shape), config.cluster.memory_bytes
    assert plan.full_at is not None and 2 < plan.full_at < 2.5
    for load, full in ((plan.full_at - 0.01, False), (plan.full_at + 0.01, True)):
        ranks = plan_memory(config, shape, at_load(plan_batch(config, shape), load, config, shape))
        assert (needed(config, shape, ranks) > limit) == full
    (said,) = plan.warnings
    assert f"a rank gets {plan.full_at:.1f} times its even share" in said
    # Bounded, or with room, nothing is said; one rank has no other's tokens to hold.
    assert plan_of("llama3_8x70b", "moe.capacity_factor=2").full_at is None
    assert plan_of("dsv3_671b", "mesh=steady_dsv3_671b").full_at > 4
    assert plan_of("dsv3_671b").full_at > 1.5 and plan_of("llama3_8b").full_at is None


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", list_options())
def test_every_primary_has_a_plan_that_adds_up(name: str) -> None:
    plan, without_adapters = plan_of(name), plan_of(name, "lora.rank=0")
    assert sum(rank.params for rank in without_adapters.ranks) == plan.params.total
    config = quick_config(name)
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
    # It fits the cluster that it names, and keeps it busy; of one mesh a router must learn early to spread its tokens.
    if name == "dsv3_671b":  # its default is the fastest that fits, whose warnings are said
        plan = plan_of(name, "mesh=steady_dsv3_671b")
    assert [text[:31] for text in plan.warnings] == ["buffers of the experts are full"] * (name == "llama3_8x70b")


DOCS = Path(__file__).parents[2] / "docs"
write_plan = load_file(DOCS / "write_plan.py")
FLAGSHIPS = write_plan.FLAGSHIPS


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", FLAGSHIPS, ids=str)
def test_the_table_of_recomputation_is_what_plans_say(name: str) -> None:
    assert write_plan.row(name) in (DOCS / "plan.md").read_text().splitlines(keepends=True), "run: make docs-config"


def test_the_table_of_recomputation_has_every_flagship() -> None:
    table = (DOCS / "plan.md").read_text().split(write_plan.BEGIN)[1].split(write_plan.END)[0].splitlines()
    assert [line.split("`")[1] for line in table[2:]] == FLAGSHIPS
    assert {"dsv3_671b", "kimi_k2_1t_a32b", "gpt_oss_120b", "glm45_355b_a32b"} < set(FLAGSHIPS)


@pytest.mark.exhaustive
def test_answers_are_what_plans_say() -> None:
    page = (DOCS / "plan.md").read_text()
    for question in write_plan.QUESTIONS:
        if "search=" in question.words:
            assert f"automoe plan {question.words}\n" in page
        else:
            assert write_plan.entry(question) in page, "run: make docs-config"


@pytest.mark.exhaustive
@pytest.mark.parametrize("question", [q for q in write_plan.QUESTIONS if "search=" in q.words], ids=lambda q: q.text)
def test_answers_are_what_searches_say(question: Any) -> None:
    assert write_plan.entry(question) in (DOCS / "plan.md").read_text(), "run: make docs-config"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh", ["tuned", "steady", "first"])
@pytest.mark.parametrize("name", FLAGSHIPS)
def test_flagships_fit_with_their_reserve_at_even_load_and_at_twice(name: str, mesh: str) -> None:
    config = quick_config(name, [f"mesh={mesh}_{name}"])
    shape = validate(config, None)
    plan, train = make_plan(config, shape), config.train

    assert plan.needed <= plan.uneven_needed <= config.cluster.memory_bytes
    assert mesh == "tuned" or plan.uneven_peak <= 0.9 * config.cluster.memory_bytes, "10% to spare"
    assert plan.needed == plan.heaviest.peak + plan.reserve.total
    assert train.seq_len == 4096 and (mesh == "tuned" or shape.cp == 1), "rows of 4,096 tokens are not cut"
    assert shape.tp * shape.etp <= config.cluster.gpus_per_node
    interleaved = config.parallel.schedule == "Interleaved1F1B"
    assert mesh == "tuned" or interleaved == (mesh == "steady" and 1 < shape.pp <= config.model.num_layers / 2)
    if mesh == "first":
        assert config.parallel.recompute == "full" and shape.tp == 1
    else:
        first = plan_of(name, f"mesh=first_{name}")
        assert plan.time.tokens_per_second > first.time.tokens_per_second, "tuned for nothing"
        assert plan.mesh.world_size == first.mesh.world_size and plan.uneven_peak > first.uneven_peak
    assert config.checkpoint.every_minutes and config.checkpoint.async_save
    moe = config.moe
    # arXiv 2412.19437 and 2508.06471 over a row; 2505.09388 over the batch; Mixtral's config.json over a micro-batch.
    over_a_row = {"dsv3_671b": 1e-4, "kimi_k2_1t_a32b": 1e-4, "glm45_355b_a32b": 1e-4}.get(name, 0)
    over_a_micro_batch = 1e-3 * (name == "mixtral_8x22b")
    over_the_batch = 0 if over_a_row or over_a_micro_batch else 1e-3
    assert (moe.seq_balance_coef, moe.global_balance_coef) == (over_a_row, over_the_batch)
    assert moe.micro_batch_balance_coef == over_a_micro_batch
    assert moe.bias_update_rate == 1e-3


def test_twice_the_even_load_is_what_ranks_send_and_capacity_lets_through() -> None:
    def rows(*overrides: str) -> float:
        plan = plan_of("mixtral_8x7b", *overrides)
        assert (plan.uneven_peak > plan.heaviest.peak) == (plan.uneven_ranks != plan.ranks)
        config = quick_config("mixtral_8x7b", list(overrides))
        uneven = at_load(plan.batch, 2.0, config, plan.mesh)
        return uneven.expert_rows_per_rank / plan.batch.expert_rows_per_rank

    assert rows() == 2.0
    assert rows("mesh.ep=1", "mesh.ep_shard=16") == 1.0, "without ep a rank computes its own tokens"
    assert rows("moe.capacity_factor=1.25") == 1.25
    assert rows("moe.capacity_factor=0.5") == 1.0


def test_a_rank_that_does_not_fit_is_named_with_what_would_help() -> None:
    plan = plan_of("moonlight_16b_a3b", "train.micro_batch_size=8")
    (warning,) = plan.warnings
    assert "every rank needs" in warning and "79.2 GiB that h100_sxm has: does not fit" in warning
    singles = plan.single_changes
    shown = sorted(singles, key=lambda one: one.needed > 85e9)[:SHOWN]
    assert "; ".join(map(str, shown)) in warning and str(plan.combination) in warning
    assert singles == sorted(singles, key=lambda one: -one.tokens_per_second)
    assert {key_of(one.changes[0]) for one in singles} >= {
        *("train.micro_batch_size", "parallel.recompute", "parallel.reshard", "mesh.dp_shard")
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("moonlight_16b_a3b", ["train.micro_batch_size=8"]),
        ("gpt_oss_120b", ["parallel.recompute=[layernorm]"]),
        ("qwen3_30b_a3b", ["mesh.dp_shard=8", "mesh.ep=8"]),
    ],
)
def test_remedies_are_what_a_plan_of_them_says(name: str, overrides: list[str]) -> None:
    plan = plan_of(name, *overrides)
    best = plan.combination
    assert best is not None and best.needed <= 85e9 < plan.uneven_needed
    for one in (best, plan.single_changes[0]):
        mended = plan_of(name, *overrides, *one.changes)
        assert mended.uneven_needed == pytest.approx(one.needed)
        assert mended.time.tokens_per_second == pytest.approx(one.tokens_per_second)
        assert one.slower == pytest.approx(1 - one.tokens_per_second / plan.time.tokens_per_second)
    # Nothing single that fits is faster than what was found among all combinations.
    assert all(one.tokens_per_second <= best.tokens_per_second for one in plan.single_changes if one.needed <= 85e9)


def test_where_no_combination_fits_the_plan_says_so() -> None:
    (warning,) = plan_of("moonlight_16b_a3b", "cluster.memory_bytes=10e9").warnings
    assert "No combination of changes on these ranks fits" in warning and "search=true" in warning


def test_the_page_on_adapters_says_what_the_plan_says() -> None:
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text()
    commands = [line.split()[2:] for line in page.splitlines() if line.startswith("automoe plan ")]
    for words, limit in zip(commands, (79, 24, 45, 140), strict=True):
        plan = plan_of(words[1], *words[2:])
        assert f"needs {plan.heaviest.peak / 2**30:.0f} of {limit} GiB" in page and plan.warnings == []


def test_a_plan_that_fits_at_even_load_alone_says_what_helps() -> None:
    plan = plan_of("gpt_oss_120b", "parallel.recompute=[layernorm]")
    limit = (plan.needed + plan.uneven_needed) / 2
    plan = plan_of("gpt_oss_120b", "parallel.recompute=[layernorm]", f"cluster.memory_bytes={limit}")
    (warning,) = plan.warnings
    assert warning.startswith(
        f"a rank whose experts get twice their even share of tokens needs {gib(plan.uneven_needed)}"
    )
    assert plan.combination is not None and "parallel.recompute=[layernorm,moe]" in warning


def test_the_reserve_is_contexts_communicators_and_fragmentation() -> None:
    def held(*overrides: str) -> Reserve:
        return plan_of("mixtral_8x7b", *overrides).reserve

    assert held("cluster=laptop").total == 0
    one = [f"mesh.{axis}=1" for axis in ("pp", "dp_shard", "cp", "tp", "ep_shard", "ep", "etp")]
    alone = held(*one)
    assert alone.communicators == 0 and alone.context == 534 * 2**20
    plan = plan_of("mixtral_8x7b", *one)
    rank = plan.heaviest
    assert alone.fragmentation == 0.05 * (rank.peak - rank.weights - rank.moments - rank.inputs)
    # The world, which is dp_shard too, and of experts ep; then channels of the all-to-all to seven GPUs of the node.
    eight = (*one, "mesh.dp_shard=8", "mesh.ep=8")
    assert held(*eight).communicators == 2 * COMMUNICATOR + 7 * ALL_TO_ALL_PEER
    assert held(*eight, "moe.dispatcher=allgather").communicators == 2 * COMMUNICATOR
    two_nodes = held(*one, "mesh.dp_shard=16", "mesh.ep=2", "mesh.ep_shard=8")
    assert two_nodes.communicators == pytest.approx(3 * COMMUNICATOR + ALL_TO_ALL_PEER + NETWORK)
    # In a node of eight, ranks of ep that are two apart are four.
    etp = held(*one, "mesh.dp_shard=8", "mesh.ep=4", "mesh.etp=2")
    assert etp.communicators == pytest.approx(3 * COMMUNICATOR + 4 * ALL_TO_ALL_PEER)


def test_a_plan_that_the_reserve_alone_breaks_is_warned_of() -> None:
    fits = plan_of("moonlight_16b_a3b")
    limit = f"cluster.memory_bytes={(fits.uneven_peak + fits.uneven_needed) / 2}"
    (warning,) = plan_of("moonlight_16b_a3b", limit).warnings
    assert "leaves too little for the reserve" in warning and "does not fit" not in warning


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("moe.dispatcher=deepep", "DeepEP's own buffers"),
        ("moe.experts=te", "gathered rows"),
        ("kernels.norm=te", "transformer-engine's workspaces"),
        ("train.fp8=blockwise", "codes of the product at work"),
    ],
)
def test_what_is_not_modelled_is_marked(override: str, said: str) -> None:
    plan = plan_of("mixtral_8x7b", override)
    assert said in " ".join(plan.not_modelled) and plan.to_dict()["not_modelled"] == plan.not_modelled
    file = io.StringIO()
    config = quick_config("mixtral_8x7b", [override])
    print_plan(config, resolve_mesh(config.mesh, None), Console(file=file, width=200))
    assert "not modelled" in file.getvalue() and said in file.getvalue()
    assert plan_of("mixtral_8x7b").not_modelled == []


def test_what_reinforcement_learning_holds_besides_is_marked() -> None:
    lines = plan_of("grpo_small", "recipe_args.kl=0.001").not_modelled
    assert any("a whole copy of the model on every rank" in line for line in lines)
    assert any("recipe_args.kl: the first weights" in line for line in lines)
    other = [
        "recipe_args.sampler=vllm",
        "recipe_args.engine=http://a:1",
        "recipe_args.kl=0",
        "recipe_args.replay=false",
    ]
    assert plan_of("grpo_small", *other).not_modelled == [
        "recipe_args.sampler=vllm: the engine, and the time of answers"
    ]


@pytest.mark.parametrize("name", sorted(path.stem for path in shipped_folder("conf").glob("[!_]*.yaml")))
def test_experts_that_begin_from_random_weights_are_balanced(name: str) -> None:
    """By a loss or by biases: without either a few of them get all tokens."""
    config = quick_config(name)
    moe = config.moe
    losses = moe.seq_balance_coef, moe.global_balance_coef, moe.micro_batch_balance_coef
    pretrains = config.recipe == "pretrain" and config.data.kind == "text" and not config.lora.rank
    assert not (pretrains and config.model.num_moe_layers) or config.model.router.expert_bias or any(losses)


def test_stages_at_the_ends_send_in_one_direction() -> None:
    """Two stages: a hidden state there and a gradient back, 4 * 512 tokens of 192 numbers of 4 bytes each."""
    plan = plan_of("config")
    assert plan.mesh.pp == 2 and plan.time.traffic["pp"] == 4 * 512 * 192 * 4


def test_brackets_of_a_pattern_are_shown() -> None:
    config = quick_config("mixtral_8x7b", ['train.freeze=["*.[qkv]_proj.*", "*[/x]*"]'])
    file = io.StringIO()
    print_plan(config, resolve_mesh(config.mesh, None), Console(file=file, width=200))
    assert "*.[qkv]_proj.*" in file.getvalue() and "*[/x]*" in file.getvalue()


def test_no_limit_no_verdict() -> None:
    assert plan_of("moonlight_16b_a3b", "train.micro_batch_size=8", "cluster=laptop").warnings == []


def test_rows_of_128k_fit_over_the_ranks_of_a_node() -> None:
    name, experiment = "qwen3_30b_a3b", "experiment=rows_128k_qwen3_30b_a3b"
    alone = ("data.document_mask=false", "kernels.attention=sdpa")
    packed, single = (plan_of(name, experiment, *more) for more in ((), alone))
    for plan in (packed, single):
        assert plan.mesh.world_size == 64 and plan.mesh.cp == plan.mesh.ep == 8 and plan.warnings == []
        assert plan.uneven_needed < 0.85 * 85e9 and plan.time.off_node.get("cp", 0.0) == 0.0
    assert single.time.seconds < 0.75 * packed.time.seconds
    file = io.StringIO()
    config = quick_config(name, [experiment])
    print_plan(config, resolve_mesh(config.mesh, None), Console(file=file, width=200))
    assert "ulysses: heads for positions of whole rows" in file.getvalue()
    # Gathered keys need a mask of the rank's queries and all keys.
    masked = plan_of(name, experiment, *alone, "parallel.context=gather")
    assert masked.needed > 4 * single.needed


def test_an_idle_pipeline_is_named() -> None:
    mesh = ["mesh=first_mixtral_8x22b"]
    plan = plan_of("mixtral_8x22b", *mesh, "train.global_batch_size=128", "cluster=laptop")
    assert plan.bubble == pytest.approx(7 / (8 + 7), rel=0.03)  # simulated, with what stages do not share evenly
    assert f"idles {plan.bubble:.0%} of a step: 8 micro-batches over mesh.pp=8" in plan.warnings[0]


def test_speeds_that_a_cluster_file_lacks_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    lacking = ("cluster.memory_bandwidth=0", "cluster.intra_node_bandwidth=0")
    (said,) = plan_of("moonlight_16b_a3b", *lacking).warnings
    assert "h100_sxm has no memory_bandwidth, intra_node_bandwidth, and" in said
    assert main(["--config-name", "moonlight_16b_a3b", *lacking, "search=true", "world=8"]) == 2
    assert "a search ranks by time" in (err := capsys.readouterr().err) and "memory_bandwidth" in err
    assert plan_of("moonlight_16b_a3b", "cluster=laptop").warnings == []


def test_what_slows_a_step_is_said() -> None:
    near, far = (
        plan_of("dsv3_671b", "mesh=steady_dsv3_671b", f"mesh.ep={ep}", f"mesh.ep_shard={64 // ep}") for ep in (8, 64)
    )
    assert near.warnings == [] and near.time.off_node.get("ep", 0.0) == 0.0
    (said,) = [text for text in far.warnings if "leave the node" in text]
    assert f"ep takes {far.time.communication['ep'] / far.time.seconds:.0%} of the step" in said
    assert said.endswith("or send one copy a node with moe.dispatcher=hierarchical")
    sent_once = plan_of("dsv3_671b", "mesh=overlap_dsv3_671b").warnings
    assert "experts' tokens leave" in sent_once[-1] and sent_once[-1].endswith("GPUs of a node")
    assert plan_of("gpt_oss_120b").warnings == []
    uneven = plan_of("gpt_oss_120b", "parallel.layers_per_stage=null")
    (said,) = uneven.warnings
    usual = sorted(uneven.time.by_rank)[1:3]
    more = uneven.time.by_rank[-1] / (sum(usual) / 2) - 1
    assert f"pp rank 3, which has the head, is busy {more:.0%} longer" in said


def test_print_shows_both_meshes_and_the_heaviest_rank() -> None:
    mesh = ["mesh=first_dsv3_671b", "mesh.ep=64"]
    config = quick_config("dsv3_671b", mesh)
    file = io.StringIO()
    plan = print_plan(config, resolve_mesh(config.mesh, None), Console(file=file))
    text = file.getvalue()
    for needle in (
        "default mesh: pp16 x dp_shard64 = 1,024 ranks",
        "moe mesh: pp16 x ep64 = 1,024 ranks",
        "671B",
        "37.6B active",
        f"heaviest, pp rank {plan.heaviest.pp_rank}",
        f"{plan.heaviest.peak / 2**30:.1f} GiB",
        f"{plan.uneven_peak / 2**30:.1f} GiB",
        "if experts get twice their even share",
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


@pytest.mark.exhaustive
def test_the_page_of_merged_passes_says_what_plans_say() -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallelism.md").read_text()
    mesh = "mesh=overlap_dsv3_671b"
    tp2 = [mesh, "mesh.pp=8", "mesh.tp=2", "moe.dispatch_dtype=auto", "parallel.schedule=Interleaved1F1B"]
    wide = [
        *tp2,
        "mesh.pp=4",
        "mesh.dp_shard=64",
        "mesh.ep=256",
        "parallel.stages_per_rank=4",
        "moe.dispatcher=alltoall",
    ]
    fp8 = [mesh, "train.fp8=blockwise"]
    for start, overrides in (
        ("| `steady_dsv3_671b`:", ["mesh=steady_dsv3_671b"]),
        ("| pp4 x cp2 x tp2, ep256,", wide),
        ("| pp8 x cp2 x tp2, ep64,", tp2),
        ("| the same, `expert_wgrad=delayed`", [*tp2, "parallel.expert_wgrad=delayed"]),
        ("| `overlap_dsv3_671b`:", [mesh]),
        ("| the same, `train.fp8=blockwise`", fp8),
        ("| the same, `moe.dispatcher=deepep`", [*fp8, "moe.dispatcher=deepep"]),
        ("| with `hierarchical` and 15,360 rows", [*fp8, "train.global_batch_size=15360"]),
        ("| `overlap_dsv3_671b_mtp", ["experiment=dsv3_recipe", f"{mesh}_mtp", "train.fp8=blockwise"]),
    ):
        plan = plan_of("dsv3_671b", *overrides)
        [row] = [line for line in page.splitlines() if line.startswith(start)]
        most = plan.uneven_needed / 2**30
        sent = plan.time.communication["ep"]
        figures = f"| {most:.1f} GiB | {sent:.1f} s | {plan.time.seconds:.1f} s | {plan.time.mfu:.1%} |"
        assert row.endswith(figures), (row, figures)
