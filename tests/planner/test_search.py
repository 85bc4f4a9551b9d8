"""The search over meshes: what it enumerates, that its best is the best, and that its preset is what it found."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from automoe import plan
from automoe.config.batch import plan_batch
from automoe.config.compose import compose_config, list_options
from automoe.config.mesh_shape import DEFAULT_AXES, MOE_AXES, MeshShape, resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.config.validate import mesh_rows, validate
from automoe.errors import ConfigError
from automoe.launch import hardware
from automoe.model.params import count_params
from automoe.planner import search as search_module
from automoe.planner import search_command
from automoe.planner.activations import UNEVEN, at_load
from automoe.planner.candidate import LADDER
from automoe.planner.memory import plan_memory
from automoe.planner.reserve import needed
from automoe.planner.search import Search, mesh_shapes, search
from automoe.planner.search_command import Question, _find, least_ranks
from automoe.planner.time import step_time
from tests.support.configurations import quick_config

WORLD = 8


@pytest.fixture(scope="module")
def config() -> Config:
    found = quick_config("config", ["cluster=h100_sxm", "launch.num_ranks=null", "train.global_batch_size=32"])
    return replace(found, mesh=MeshConfig())


FIXED = ("train.micro_batch_size", "mesh.etp", "mesh.cp")


@pytest.fixture(scope="module")
def whole(config: Config) -> Search:
    """A search of four ranks to its end."""
    return search(config, 4, "cuda", FIXED)


def legal(config: Config, shape: MeshShape) -> bool:
    on_mesh = replace(config, mesh=MeshConfig(**vars(shape)))
    return not any(broken for _, broken, _, _ in mesh_rows(on_mesh, shape, "cpu"))


def test_meshes_are_those_that_validation_takes(config: Config) -> None:
    """Held against every product of the nine axes; replicas aside, and tp and etp within a node."""
    plain = replace(config, parallel=replace(config.parallel, schedule="1F1B", stages_per_rank=1, recompute=[]))
    axes = list(dict.fromkeys(DEFAULT_AXES + MOE_AXES))
    expected = set()
    for sizes in itertools.product(*([1] if axis.endswith("replicate") else [1, 2, 4, 8] for axis in axes)):
        shape = MeshShape(**dict(zip(axes, sizes, strict=True)))
        if {prod(shape.sizes("default")), prod(shape.sizes("moe"))} != {WORLD}:
            continue
        mesh = MeshConfig(**vars(shape))
        try:
            shape = validate(replace(plain, mesh=mesh, launch=replace(plain.launch, num_ranks=None)), WORLD, "cpu")
        except ConfigError:
            continue
        expected.add(shape)
    assert {shape for shape in mesh_shapes(plain, WORLD) if legal(plain, shape)} == expected
    assert len(expected) > 40


def test_axes_that_are_typed_stay(config: Config) -> None:
    fixed = replace(config, mesh=replace(config.mesh, tp=2, ep=4, dp_replicate=2))
    shapes = list(mesh_shapes(fixed, WORLD, ["mesh.tp", "mesh.ep", "mesh.dp_replicate"]))
    assert shapes and all((one.tp, one.ep, one.dp_replicate) == (2, 4, 2) for one in shapes)
    assert all(one.world_size == WORLD for one in shapes)


@pytest.mark.exhaustive
def test_the_best_is_the_best_of_all(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every legal run of a small space with every rung of recomputation, planned one by one, under a tight limit."""
    monkeypatch.setattr(search_module, "ROWS", ())
    monkeypatch.setattr(search_module, "STAGES", (2,))
    monkeypatch.setattr(search_module, "BALANCED", 0)
    monkeypatch.setattr(search_module, "BATCHES", (20, 20, 1, 1))
    values = {"moe.dispatcher": ("alltoall",), "moe.dispatch_dtype": ("auto",), "parallel.context": ("gather",)}
    monkeypatch.setattr(search_module, "LEVERS", search_module.LEVERS | values)
    few = replace(config, train=replace(config.train, micro_batch_size=2))
    fixed = ["mesh.tp", "mesh.etp", "train.micro_batch_size"]
    few = replace(few, mesh=MeshConfig(tp=1, etp=1))
    peaks: list[float] = []
    for limit in (0.0, None):
        if limit is None:
            limit = sorted(peaks)[len(peaks) // 3]
        limited = replace(few, cluster=replace(few.cluster, memory_bytes=limit))
        best: dict[MeshShape, float] = {}
        for shape in mesh_shapes(limited, 4, fixed):
            mesh = MeshConfig(**vars(shape))
            for settings, grads in itertools.product(
                search_module.layouts(limited, shape.pp, fixed), ("autograd", "fused")
            ):
                parallel = replace(limited.parallel, **settings, expert_wgrad=grads, recompute=[])
                one = replace(limited, mesh=mesh, parallel=parallel)
                if any(broken for _, broken, _, _ in mesh_rows(one, shape, "cpu")):
                    continue
                for names in search_module.ladder(one, ()):
                    run = replace(one, parallel=replace(parallel, recompute=names))
                    load = at_load(plan_batch(run, shape), UNEVEN, run, shape)
                    peaks.append(needed(run, shape, plan_memory(run, shape, load)))
                    if not limit or peaks[-1] <= limit:
                        best[shape] = max(best.get(shape, 0.0), step_time(run, shape).tokens_per_second)
        found = search(limited, 4, "cpu", fixed)
        fastest = sorted(best.values(), reverse=True)[: search_module.TOP]
        assert [one.speed for one in found.found] == pytest.approx(fastest, rel=1e-12)
        assert all(best[one.mesh] == one.speed for one in found.found)
        assert found.rest <= found.found[-1].speed
    assert found.too_large > 0


def test_a_search_ends_where_candidates_tie(config: Config) -> None:
    """Without bytes and products, only what a host launches takes time: nearly all meshes are equally fast."""
    free = dict.fromkeys(["intra_node_bandwidth", "inter_node_bandwidth", "memory_bandwidth", "peak_flops"], 1e30)
    tied = replace(config, cluster=replace(config.cluster, **free, memory_bytes=1e30))
    found = search(tied, 8, "cuda", ["train.micro_batch_size", "mesh.etp", "mesh.tp"])
    speeds = [one.speed for one in found.found]
    assert len(speeds) == search_module.TOP and speeds[5] == pytest.approx(speeds[0], rel=1e-6)
    assert found.num_timed < 1000


def test_a_search_that_gets_no_further_ends_and_says_what_it_left(
    config: Config, whole: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many candidates without a result as it has patience for, with a bound of the others."""
    monkeypatch.setattr(search_module, "PATIENCE", 1)
    hasty = search(config, 4, "cuda", FIXED)
    assert hasty.found and hasty.num_timed < whole.num_timed
    assert max(hasty.rest, hasty.found[0].speed) >= whole.found[0].speed


SEARCHES = """
import os, sys
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, sorted(cores)[: int(sys.argv[1])])
os.register_at_fork(before=lambda: print("another process"))
from automoe import plan
for words in (
    ["qwen3_30b_a3b", "world=16", "mesh.pp=1"],
    ["mixtral_8x22b", "world=64", "mesh.pp=8", "mesh.tp=1", "mesh.cp=1"],
    ["moonlight_16b_a3b", "world=32", "mesh.pp=1", "mesh.tp=1", "mesh.cp=1"],
):
    name, *others = words
    plan.main(["--config-name", name, *others, "mesh.etp=1", "train.micro_batch_size=1", "search=true", f"out={sys.argv[2]}"])
"""


def test_neither_cores_nor_hashes_change_what_is_printed(tmp_path: Path) -> None:
    """Winners, their order and all counts of three models; strings hash differently in each process."""
    printed = []
    for cores, seed in ((1, "1"), (64, "8")):
        command = [sys.executable, "-c", SEARCHES, str(cores), str(tmp_path)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        printed.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout)
    assert printed[0] == printed[1]
    assert printed[0].count("candidates were timed") == 3 and printed[0].count("take it") == 3
    assert "another process" not in printed[0]


@pytest.mark.parametrize("levers", [{}, {"overlap_all_to_all": False, "expert_wgrad": "delayed"}], ids=str)
def test_a_lever_of_the_file_that_a_mesh_cannot_have_hides_no_mesh(levers: dict[str, Any]) -> None:
    """dsv3_671b overlaps all-to-alls, for which eight ranks with a row each have too few micro-batches."""
    words = ["model=moonlight_16b_a3b", "cluster=h200", "train.global_batch_size=8", "launch.num_ranks=null"]
    config = replace(quick_config("dsv3_671b", [*words, "train.micro_batch_size=1"]), mesh=MeshConfig())
    assert config.parallel.overlap_all_to_all
    config = replace(config, parallel=replace(config.parallel, **levers))
    fixed = ["train.micro_batch_size", "moe.dispatch_dtype", *(f"mesh.{axis}" for axis in ("tp", "etp", "pp", "cp"))]
    found = search(config, 8, "cuda", fixed).found
    assert (found[0].mesh.dp_shard, found[0].config.parallel.overlap_all_to_all) == (8, False)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "world"), [("qwen3_30b_a3b", 16), ("moonlight_16b_a3b", 8)])
def test_no_run_that_is_drawn_is_faster_than_what_was_found(name: str, world: int) -> None:
    """From all settings that a search tries, on GPUs, with their memory: each is no faster than its mesh or the last."""
    config = replace(quick_config(name, ["launch.num_ranks=null"]), mesh=MeshConfig())
    found = search(config, world, "cuda").found
    speeds = {one.mesh: one.speed for one in found}
    draw = random.Random(world)
    shapes = list(mesh_shapes(config, world))
    fitting = 0
    while fitting < 20:
        shape = draw.choice(shapes)
        settings = draw.choice([*search_module.layouts(config, shape.pp, ())])
        values = {key: draw.choice(search_module.tried(config, (), key)) for key in search_module.LEVERS}
        values["train.micro_batch_size"] = draw.choice(search_module.ROWS)
        run = replace(config, mesh=MeshConfig(**vars(shape)), parallel=replace(config.parallel, **settings))
        for key, value in values.items():
            section, field = key.split(".")
            if key != "parallel.overlap_all_to_all":
                run = replace(run, **{section: replace(getattr(run, section), **{field: value})})
        again = draw.choice(search_module.ladder(run, ()))
        run = replace(run, parallel=replace(run.parallel, recompute=again, recompute_layers=None))
        if any(broken for _, broken, _, _ in mesh_rows(run, shape, "cuda")):
            continue
        one = search_module.Candidate(run, shape)
        if one.fits:
            fitting += 1
            assert one.speed <= speeds.get(shape, found[-1].speed) * (1 + 1e-9), (shape, values, settings)


FLAGSHIPS = [name.removeprefix("tuned_") for name in list_options("mesh") if name.startswith("tuned_")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", FLAGSHIPS)
def test_the_winner_is_as_fast_as_every_shipped_mesh(name: str) -> None:
    """And ``tuned_`` is the winner itself."""
    plain = compose_config(name)
    world = validate(plain, None, "cuda").world_size
    winner = search(replace(compose_config(name, [f"mesh=first_{name}"]), mesh=MeshConfig()), world, "cuda").found[0]
    speeds = {}
    for mesh in [one for one in list_options("mesh") if name in one]:
        try:
            config = compose_config(name, [f"mesh={mesh}"])
            one = search_module.Candidate(config, validate(config, None, "cuda"))
        except ConfigError:  # of another number of layers
            continue
        if one.mesh.world_size == world and one.fits:
            speeds[mesh] = one.speed
    assert speeds[f"tuned_{name}"] == pytest.approx(winner.speed, rel=1e-9)
    assert f"first_{name}" in speeds and winner.speed >= max(speeds.values()) * (1 - 1e-9)


def test_layers_leave_the_busiest_rank_while_that_is_faster(config: Config) -> None:
    """The head is as long as layers: its rank has fewer of them."""
    heavy = replace(config, model=replace(config.model, vocab_size=2**18, num_layers=8))
    shape = resolve_mesh(MeshConfig(pp=2, dp_shard=2, ep=2), None)
    for schedule, stages in (("1F1B", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)):
        parallel = replace(heavy.parallel, schedule=schedule, stages_per_rank=stages, recompute=[])
        plain = search_module.Candidate(replace(heavy, mesh=MeshConfig(**vars(shape)), parallel=parallel), shape)
        better = search_module.balanced(plain, "cpu")
        sizes = better.config.parallel.layers_per_stage
        assert sizes is not None and sum(sizes) == 8 and len(set(sizes)) > 1, (schedule, sizes)
        assert better.speed > plain.speed
        assert search_module.balanced(plain, "cpu", ["parallel.schedule"]) is plain


def test_the_ladder_only_takes_time(config: Config) -> None:
    """On which the order of the search stands."""
    shape = next(iter(mesh_shapes(config, 1)))
    for names in search_module.ladder(config, ()):
        again = replace(config, parallel=replace(config.parallel, recompute=names))
        none = replace(config, parallel=replace(config.parallel, recompute=[]))
        assert step_time(again, shape).seconds >= (1 - 1e-12) * step_time(none, shape).seconds
    assert set(LADDER) >= {name for names in search_module.ladder(config, ()) for name in names if len(name) > 4}


def test_the_preset_is_what_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[Search] = []

    def once(*args: Any, **options: Any) -> Search:
        searches[:] = searches or [search(*args, **options)]
        return searches[0]

    monkeypatch.setattr(search_command, "search", once)  # what is written of it is asked for three times
    words = ["--config-name", "qwen3_30b_a3b", "train.micro_batch_size=2", "parallel.recompute=full", "mesh.tp=1"]
    words += ["mesh.cp=1", "mesh.etp=1", "mesh.pp=2"]
    assert plan.main([*words, "search=true", "world=16", f"out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    command = re.search(r"automoe train (.*)", printed)
    assert command is not None
    typed = command[1].split()
    composed = compose_config("qwen3_30b_a3b", [word for word in typed[4:]], str(tmp_path))
    shape = validate(composed, 16, "cuda")
    assert (shape.world_size, shape.pp, composed.parallel.recompute, composed.train.micro_batch_size) == (
        *(16, 2, "full", 2),
    )
    speed = step_time(composed, shape).tokens_per_second
    assert f" 1  {speed:,.0f} tokens/s" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 100
    # The same again is no other file; another one is not overwritten.
    assert plan.main([*words, "search=true", "world=16", f"out={tmp_path}"]) == 0
    (file,) = (tmp_path / "mesh").iterdir()
    file.write_text("mesh: {}\n")
    assert plan.main([*words, "search=true", "world=16", f"out={tmp_path}"]) == 2
    assert file.read_text() == "mesh: {}\n"


@pytest.mark.parametrize(("installed", "said"), [("2.11.0+cpu", True), ("2.13.0", False)])
def test_a_schedule_that_this_torch_refuses_is_found_with_a_note(
    installed: str, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may be for another machine; ``automoe train`` refuses the mesh here in the same words."""
    monkeypatch.setattr(hardware, "version", lambda package: installed)
    words = ["model=small_qwen3", "cluster=h100_sxm", "mesh.pp=2", "parallel.schedule=DualPipeV", "--json"]
    words += ["parallel.stages_per_rank=2", "train.micro_batch_size=1", "parallel.recompute=[]"]
    assert plan.main([*words, "search=true", "world=2", f"out={tmp_path}"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["found"][0]["parallel"]["schedule"] == "DualPipeV"
    note = "parallel.schedule=DualPipeV runs backward passes in halves, which torch 2.11.0+cpu cannot do"
    assert printed.err.count(note) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["search=true"], "Add world=1024"),
        (["search=fewest_gpus", "world=8"], "Leave world= out"),
        (["search=best", "world=8"], "the searches are true, fewest_gpus, longest_context, largest_batch"),
        (["search=true", "world=0"], "a number of ranks"),
        (["world=8"], "Add search=true"),
        (["search=true", "world=8", "mesh=ep2"], "Leave mesh= out"),
        (
            ["search=true", "world=8", "optim.moments=bfloat16", "train.dtype=float32"],
            "Set optim.moments=float32, or train.dtype=bfloat16",
        ),
    ],
)
def test_questions_that_cannot_be_asked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.exhaustive
def test_where_nothing_fits_the_status_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-name", "mixtral_8x22b", "search=true", "world=2", f"out={tmp_path}"]
    assert plan.main(words) == 1
    printed = capsys.readouterr().out
    assert "nothing fits" in printed
    assert printed.count("candidates were timed") == 1
    assert plan.main([*words, "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"found": []}
    assert "nothing fits" in printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_the_largest_micro_batch_is_the_last_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config-name", "qwen3_30b_a3b", "mesh.pp=1", "mesh.tp=1", "mesh.cp=1", "mesh.ep=8", "mesh.etp=1"]
    words += ["parallel.recompute=full", "parallel.reshard=micro_batch"]
    assert plan.main([*words, "search=largest_batch", "world=16", f"out={tmp_path}"]) == 0
    command = re.search(r"automoe train (.*)", capsys.readouterr().out)
    assert command is not None
    composed = compose_config("qwen3_30b_a3b", command[1].split()[4:], str(tmp_path))
    size = composed.train.micro_batch_size
    assert size > 1
    for factor in (1, 2):
        train = replace(composed.train, micro_batch_size=factor * size)
        larger = replace(composed, train=train)
        shape = validate(larger, 16, "cuda")
        ranks = plan_memory(larger, shape, at_load(plan_batch(larger, shape), UNEVEN, larger, shape))
        assert (needed(larger, shape, ranks) <= (larger.cluster.memory_bytes or 0)) == (factor == 1)


def test_a_place_that_cannot_be_written_is_named_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to("gone")
    for words in (["search=true", "world=1"], ["calibrate=true"]):
        for place in ("file", "nowhere"):
            assert plan.main([*words, f"out={tmp_path / place}"]) == 2
            told = capsys.readouterr()
            assert f"{place} is not a directory" in " ".join(told.err.split()) and not told.out


def test_where_no_mesh_passes_the_rules_that_are_broken_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config-name", "mixtral_8x22b", "search=true", "world=7", "mesh.tp=7", f"out={tmp_path}"]
    assert plan.main(words) == 1 and not any(tmp_path.iterdir())
    said = " ".join(capsys.readouterr().out.split())
    assert "each mesh of these ranks breaks a rule" in said and "0 candidates were timed; refused by a rule:" in said
    assert "model.num_experts" in said


def test_every_configuration_takes_a_mesh_that_was_found(tmp_path: Path) -> None:
    """Also those that set sizes of a mesh themselves: what is named wins over them."""
    for name in [name for name in list_options() if name.endswith(("_sft", "_8b", "_20b", "_80b_a3b"))]:
        sizes = {axis: 2 + number for number, axis in enumerate(search_module.AXES)}
        preset = tmp_path / "mesh" / "found.yaml"
        preset.parent.mkdir(exist_ok=True)
        preset.write_text(json.dumps(sizes))
        mesh = compose_config(name, ["mesh=found"], str(tmp_path)).mesh
        assert {axis: getattr(mesh, axis) for axis in sizes} == sizes, name


@pytest.mark.exhaustive
def test_the_preset_of_a_configuration_with_a_mesh_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``llama3_8b`` and the recipes set sizes; those that the search does not want are set back to 1."""
    words = ["--config-name", "qwen3_30b_a3b_sft", "lora.rank=16", "optim.master_weights=float32"]
    words.append("optim.moments=float32")
    assert plan.main([*words, "search=true", "world=1", f"out={tmp_path}"]) == 0
    command = re.search(r"automoe train (.*)", capsys.readouterr().out)
    assert command is not None
    composed = compose_config("qwen3_30b_a3b_sft", command[1].split()[4:], str(tmp_path))
    assert validate(composed, 1, "cuda").world_size == 1


def test_ranks_that_weights_and_moments_fill_are_not_looked_at() -> None:
    config, seen = quick_config("dsv3_671b"), list[int]()

    def look(one: Config, world: int) -> Search:
        seen.append(world)
        found: list[Any] = [one] * (world >= 256)
        return Search(world, found=found)

    _find(Question("fewest_gpus", None, None), config, look)
    assert seen == [128, 256]
    state = 12 * count_params(config.model).total
    assert least_ranks(config) == pytest.approx(state / config.cluster.memory_bytes, rel=1e-3)
    assert 64 < least_ranks(config) < 128 and least_ranks(quick_config("config")) == 1


def test_rows_in_8_bits_are_tried_where_there_are_8_bit_products() -> None:
    for cluster, values in (("a100_sxm", ["auto"]), ("h100_sxm", ["auto", "fp8"])):
        config = compose_config("qwen3_30b_a3b", [f"cluster={cluster}"])
        assert search_module.tried(config, (), "moe.dispatch_dtype") == values


def test_a_search_in_a_folder_of_your_own_is_taken_by_the_command_that_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With words that a shell would split."""
    folder = tmp_path / "my own"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "defaults:\n  - base\n  - model: small_qwen3_moe\n  - data: stdlib\n  - mesh: fsdp\n  - _self_\n"
    )
    words = ["--config-dir", str(folder), "--config-name", "mine", "launch.device=cpu", 'observe.samples=["x = ", "b"]']
    words += ["mesh.tp=1", "mesh.cp=1", "mesh.etp=1", "parallel.schedule=1F1B", "parallel.stages_per_rank=1"]
    assert plan.main([*words, "search=true", "world=2"]) == 0, capsys.readouterr().err
    [line] = [line for line in " ".join(capsys.readouterr().out.split("\n")).split("automoe train ")[1:]]
    typed = shlex.split(line)[: shlex.split(line).index('observe.samples=["x = ", "b"]') + 1]
    assert typed[:4] == ["--config-name", "mine", "--config-dir", str(folder)] and typed[4] == "mesh=found_mine_2"
    assert compose_config("mine", typed[4:], str(folder)).model.family == "qwen3_moe"
    assert plan.main([*words, "search=true", "world=2", f"out={tmp_path}/other"]) == 2
    assert "a command reads one folder of configurations" in " ".join(capsys.readouterr().err.split())
