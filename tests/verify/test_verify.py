"""``automoe verify``: quiet about a right mesh, and precise about a wrong one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import pytest

import automoe.parallel.fp8
import automoe.parallel.parallelize
import automoe.verify.run
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from automoe.config.validate import validate
from automoe.errors import EXIT_WRONG
from automoe.launch import hardware
from automoe.parallel.fsdp import fsdp_modules
from automoe.verify import main
from automoe.verify.pool import RankPool
from automoe.verify.run import EXIT_DIFFERENT, EXIT_FAILED, make_runnable, passes, tolerances, verify_pass
from automoe.verify.trajectory import Trajectory, run_trajectory
from tests.support.configurations import quick_config
from tests.support.imported import ImportedRanks


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of seconds: a tiny text, a tiny model, two ranks."""
    text = tmp_path_factory.mktemp("verify") / "text.txt"
    text.write_text("".join(f"line {i}: {i * i} and so on\n" for i in range(400)))
    return [
        "data=text",
        f"data.path={text}",
        "model.num_layers=2",
        "model.hidden_size=32",
        "mesh.pp=1",
        "mesh.ep=2",
        "launch.num_ranks=2",
        "train.seq_len=32",
        "train.global_batch_size=4",
        "train.micro_batch_size=1",
    ]


def halved_expert_gradients(*args: Any, **options: Any) -> Trajectory:
    """A rank that divides the gradients of its experts by two."""

    def apply(model, meshes, parallel, dtype, original=automoe.parallel.parallelize.apply_data_parallel):
        original(model, meshes, parallel, dtype)
        for module in fsdp_modules(model):
            if hasattr(module, "down_proj"):
                module.set_gradient_divide_factor(2.0)

    with patch.object(automoe.parallel.parallelize, "apply_data_parallel", apply):
        return run_trajectory(*args, **options)


def louder(config: Any, *rest: Any, **options: Any) -> Trajectory:
    """A rank whose loss is five percent too high."""
    seen = run_trajectory(config, *rest, **options)
    seen.losses = [1.05 * loss for loss in seen.losses]
    return seen


def every_rank_raises(*_: Any, **__: Any) -> Trajectory:
    raise RuntimeError("out of paper")


def test_both_dtypes_of_a_right_mesh_are_equal(ranks: RankPool, small: list[str]) -> None:
    config, shape, cuts = make_runnable(quick_config(overrides=small))
    assert shape.describe("moe") == "ep2" and cuts == []
    exact, own = (verify_pass(each, shape, ranks) for each in passes(config))
    assert (exact.config.train.dtype, exact.config.moe.experts, exact.forced) == ("float64", "loop", False)
    assert (own.config.train.dtype, own.config.moe.experts, own.forced) == ("float32", "grouped_mm", True)
    for result in (exact, own):
        assert not result.different, str(result.different[0])
        kinds = [c.kind for c in result.compared]
        assert {"loss", "gradient norm", "gradient", "expert counts"} <= set(kinds)
        assert kinds.count("gradient") > 20


def test_the_reference_stays_where_more_ranks_start_for_the_mesh(ranks: ImportedRanks, small: list[str]) -> None:
    """Such a pool begins with four ranks, and ends them for eight."""
    ranks.shrink()
    each, shape, _ = make_runnable(quick_config(overrides=[*small, "mesh.dp_shard=8", "train.global_batch_size=8"]))
    result = verify_pass(passes(each)[0], shape, ranks)
    assert shape.world_size == 8 and result.compared and not result.different


@pytest.mark.exhaustive
def test_a_dense_model_has_no_routing_to_force(ranks: RankPool, small: list[str]) -> None:
    dense = [
        "model=small_llama",
        *small,
        "model.first_k_dense=2",
        "model.attention.num_heads=4",
        "mesh.ep=1",
        "mesh.tp=2",
    ]
    config, shape, cuts = make_runnable(quick_config(overrides=dense))
    assert cuts == []
    for each in passes(config):
        result = verify_pass(each, shape, ranks)
        assert not result.forced and not result.different
        kinds = [c.kind for c in result.compared]
        assert kinds.count("gradient") > 10
        assert ("updated parameter" in kinds) == (each.train.dtype == "float64")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [0, 1], ids=["float64", "float32"])
def test_a_wrong_gradient_is_named(ranks: RankPool, small: list[str], number: int) -> None:
    config, shape, _ = make_runnable(quick_config(overrides=[*small, "mesh.ep=1"]))
    result = verify_pass(passes(config)[number], shape, ranks, run=halved_expert_gradients)
    first = result.different[0]
    assert first.kind == "gradient" and first.name == "layers.1.mlp.experts.gate_up_proj"
    assert first.error == pytest.approx(0.5, rel=1e-4)
    assert first.got == pytest.approx(first.expected / 2, rel=1e-2) and len(first.index) == 4
    unnamed = [c for c in result.different if c.kind == "gradient" and "mlp.experts." not in c.name]
    assert not unnamed


def ranks_alone(*args: Any, **options: Any) -> Trajectory:
    """A rank whose 8-bit scales know its own numbers alone."""
    with patch.object(automoe.parallel.fp8, "_max_over", lambda group: lambda largest: largest):
        return run_trajectory(*args, **options)


@pytest.mark.exhaustive
def test_eight_bits_are_held_to_one_rank_in_float64_and_loosened_below(ranks: RankPool, small: list[str]) -> None:
    """Rows that meet in a micro-batch are the same in both runs, of which the mesh has two."""
    eight = [*small, "train.fp8=tensorwise", "mesh.dp_shard=2"]
    config, shape, _ = make_runnable(quick_config(overrides=eight))
    exact, around, own = passes(config)
    result = verify_pass(around, shape, ranks)
    train = result.config.train
    assert (train.dtype, train.fp8, result.config.moe.experts) == ("float64", "tensorwise", "grouped_mm")
    assert (result.tolerance, result.gradient_tolerance) == (1e-10, 1e-10) and not result.different
    assert "updated parameter" in {c.kind for c in result.compared}
    assert verify_pass(around, shape, ranks, run=ranks_alone).different
    result = verify_pass(own, shape, ranks, run=louder)
    assert [c.kind for c in result.different] == ["loss"]
    assert result.different[0].error == pytest.approx(0.05, rel=1e-2)


MLA, GQA = AttentionConfig(kind="mla"), AttentionConfig(num_heads=8, num_kv_heads=2)


@pytest.mark.parametrize(
    "fp8, dtype, attention, mesh, expected",
    [
        ("tensorwise", "float64", GQA, dict(cp=2, tp=2), (1e-10, 1e-10)),
        ("delayed", "float64", MLA, dict(tp=4), (1e-10, 1e-10)),
        ("blockwise", "float64", GQA, dict(tp=2), (1e-10, 1e-5)),
        ("delayed", "float64", MLA, dict(cp=2), (1e-10, 0.25)),
        ("tensorwise", "float64", GQA, dict(tp=4), (1e-10, 1e-10)),
        ("tensorwise", "float32", GQA, dict(tp=2), (0.02, 0.25)),
        ("tensorwise", "bfloat16", GQA, dict(tp=2), (5e-2, 0.5)),
        ("off", "float64", MLA, dict(cp=2), (1e-10, 1e-10)),
        ("off", "float32", MLA, dict(cp=2), (1e-5, 1e-5)),
        ("off", "bfloat16", GQA, dict(tp=4), (5e-2, 5e-2)),
    ],
)
def test_a_tolerance_is_what_the_mode_and_the_mesh_leave(
    fp8: Any, dtype: Any, attention: AttentionConfig, mesh: dict[str, int], expected: tuple[float, float]
) -> None:
    model, train = ModelConfig(attention=attention), TrainConfig(fp8=fp8, dtype=dtype)
    config = Config(mesh=MeshConfig(dp_shard=1, **mesh), model=model, train=train)
    assert tolerances(config, resolve_mesh(config.mesh, None)) == expected


def test_the_command_says_equal(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(small) == 0
    out = capsys.readouterr().out
    assert "float64" in out and "float32" in out and "proxy" not in out
    verdict = out[out.index("EQUAL  all ") :].splitlines()
    assert verdict[0].endswith(" numbers and tensors of the mesh are those of the reference")
    assert verdict[1:] == [
        "  mesh       default dp_shard2; moe ep2; 2 CPU ranks",
        "  reference  one rank in both views",
    ]


@pytest.mark.exhaustive
def test_the_command_names_the_first_difference(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automoe.verify.run, "verify_pass", partial(verify_pass, run=halved_expert_gradients))
    assert main([*small, "mesh.ep=1", "train.dtype=float64", "moe.experts=loop"]) == EXIT_DIFFERENT
    out = capsys.readouterr().out
    assert "first difference step 0 gradient of layers.1.mlp.experts.gate_up_proj: relative error 5.00e-01" in out
    assert "DIFFERENT" in out and "EQUAL" not in out


@pytest.mark.exhaustive
def test_ranks_that_raise_are_reported(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automoe.verify.run, "verify_pass", partial(verify_pass, run=every_rank_raises))
    assert main(small) == EXIT_FAILED
    assert "out of paper" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_large_configuration_is_verified_by_its_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    # Its balance loss is of micro-batches, which one rank does not have.
    options = ["mesh=first_mixtral_8x22b", "mesh.pp=1", "moe.micro_batch_balance_coef=0"]
    assert main(["--config-name", "mixtral_8x22b", *options]) == 0
    out = capsys.readouterr().out
    assert "this is its proxy" in out and "mesh.dp_shard" in out
    assert "bfloat16" in out and "EQUAL" in out


def test_what_cannot_run_on_a_cpu_is_said() -> None:
    overrides = ["parallel.context=ring", "data.document_mask=false", "launch.device=cuda", "mesh.cp=2"]
    config, _, cuts = make_runnable(quick_config("qwen3_30b_a3b", [*overrides, "moe.dispatcher=deepep"]))
    assert config.parallel.context == "ring" and config.moe.dispatcher == "alltoall"
    assert ("moe.dispatcher", "deepep", "alltoall") in cuts
    config, _, cuts = make_runnable(
        quick_config("qwen3_30b_a3b", ["launch.device=cuda", "kernels.attention=cudnn", "kernels.norm=te"])
    )
    assert ("kernels.norm", "te", "torch") in cuts
    assert config.kernels.attention == "sdpa" and ("kernels.attention", "cudnn", "sdpa") in cuts


def test_what_an_older_torch_cannot_run_is_said_before_ranks_start(
    small: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("automoe.launch.hardware.version", lambda package: "2.11.0")
    halves = [
        "model.num_layers=4",
        "mesh.pp=2",
        "mesh.ep=1",
        "parallel.schedule=ZBVZeroBubble",
        "parallel.stages_per_rank=2",
    ]
    assert main([*small, *halves, "launch.num_ranks=2", "launch.device=cpu"]) == 2
    assert "torch 2.11.0 cannot do with this model's operations. Install torch 2.13 or later" in capsys.readouterr().err


def test_gpus_that_are_not_there_are_told(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Only the command line asks for GPUs: configurations for clusters name them too, and run here on the CPU."""
    with patch.object(hardware, "_present_gpus", lambda: 0):
        assert main([*small, "launch.device=cuda"]) == EXIT_WRONG
    told = capsys.readouterr()
    assert told.err.startswith("error: launch.device=cuda verifies with a GPU a rank: 2 CUDA ranks need 2 GPUs, and")
    assert "this machine has 0; torch 2." in told.err and told.err.count("\n") == 1 and not told.out
    with patch.object(hardware, "_present_gpus", lambda: 1), patch.object(hardware, "torch_has_cuda", lambda: True):
        assert main([*small, "launch.device=cuda", "mesh.ep=2", "mesh.dp_shard=4", "launch.num_ranks=4"]) == EXIT_WRONG
    assert "4 CUDA ranks need 4 GPUs, and this machine has 1" in capsys.readouterr().err
    assert quick_config("qwen3_30b_a3b").launch.device == "cuda"
    config, _, _ = make_runnable(quick_config("qwen3_30b_a3b", ["data=benchmark"]))
    assert config.launch.device == "cpu"


def for_gpus(overrides: list[str]) -> tuple[Config, MeshShape, list[tuple[str, object, object]]]:
    """What runs with ``launch.device=cuda`` where there are GPUs enough."""
    with patch.object(automoe.verify.run, "missing_hardware", lambda *_: None):
        with patch.object(automoe.verify.run, "check_backends", lambda *_: None):
            return make_runnable(quick_config(overrides=[*overrides, "launch.device=cuda"]), device="cuda")


@pytest.mark.exhaustive
def test_gpus_run_torch_in_float64_and_float32_and_the_configuration_in_its_own(
    ranks: RankPool, small: list[str]
) -> None:
    own = ["train.dtype=bfloat16", "moe.dispatcher=deepep", "kernels.attention=cudnn", "data.document_mask=false"]
    config, shape, cuts = for_gpus(
        [*small, *own, "kernels.norm=te", "moe.experts=triton", "kernels.rope=triton", "kernels.loss=triton"]
    )
    assert cuts == []
    exact, single, last = passes(config)
    assert last is config and (last.moe.dispatcher, last.kernels.attention) == ("deepep", "cudnn")
    for each, dtype in ((exact, "float64"), (single, "float32")):
        validate(each, None, "cuda")
        assert (each.train.dtype, each.moe.dispatcher, each.moe.experts) == (dtype, "alltoall", "loop")
        assert each.kernels == KernelsConfig()
        result = verify_pass(each, shape, ranks)  # over gloo, by the code that runs over NCCL
        assert result.forced == (dtype == "float32") and not result.different, result.different[0]
        assert result.tolerance == automoe.verify.run.TOLERANCES[dtype]


def test_norms_of_small_outputs_are_compared_in_float64_alone() -> None:
    """On one rank float32 moves gradients of this model by 3e-5, and the tolerance of two ways to sum is 1e-5."""
    runs = passes(quick_config(overrides=["model=small_muse", "checkpoint.export_hf=false"]))
    assert [each.train.dtype for each in runs] == ["float64"]


@pytest.mark.parametrize(
    "changed, expected",
    [
        (["train.dtype=float32"], ["float64", "float32"]),
        (["train.dtype=float64", "moe.experts=loop"], ["float64"]),
        (["train.dtype=bfloat16", "train.fp8=delayed"], ["float64", "float32", "bfloat16"]),
        (["train.dtype=bfloat16", "parallel.context=ring", "mesh.cp=2", "data.document_mask=false"], 3 * [""]),
    ],
    ids=str,
)
def test_the_passes_of_gpus(small: list[str], changed: list[str], expected: list[str]) -> None:
    config, _, _ = for_gpus([*small, *changed])
    runs = passes(config)
    assert len(runs) == len(expected) and all(map(str.startswith, [each.train.dtype for each in runs], expected))
    assert runs[-1] is config or config.train.dtype == "float64"
    for each in runs:
        validate(each, None, "cuda")
    assert all(each.train.fp8 == "off" and each.parallel.context == "gather" for each in runs[:-1])


CHOICES = [
    (f"{section}.{name}", value)
    for section, schema, names in (
        ("kernels", KernelsConfig, [field.name for field in fields(KernelsConfig)]),
        ("moe", MoEConfig, ["experts"]),
    )
    for name in names
    for value in get_args(get_type_hints(schema)[name])
]
NEED_CUDA = {
    ("kernels.attention", "cudnn"): "sdpa",
    ("kernels.attention", "flex"): "sdpa",
    ("kernels.attention", "te"): "sdpa",
    ("kernels.norm", "te"): "torch",
    ("moe.experts", "te"): "grouped_mm",
}
NEED_AN_INTERPRETER = {
    ("kernels.rope", "triton"): "torch",
    ("kernels.loss", "triton"): "torch",
    ("moe.experts", "triton"): "grouped_mm",
}


@pytest.fixture(scope="module")
def for_cuda() -> Config:
    """A configuration for GPUs that every kernel can serve there."""
    return quick_config(
        "qwen3_30b_a3b", ["launch.device=cuda", "data.document_mask=false", "mesh.cp=1", "mesh.dp_shard=16"]
    )


@pytest.mark.parametrize("interpreted", [True, False], ids=["interpreted", "not interpreted"])
@pytest.mark.parametrize("key, value", CHOICES)
def test_whatever_a_kernel_is_both_passes_run_here_or_it_is_said(
    key: str, value: str, interpreted: bool, for_cuda: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1" if interpreted else "0")
    section, name = key.split(".")
    changed: Any = replace(getattr(for_cuda, section), **{name: value})
    config, _, cuts = make_runnable(replace(for_cuda, **{section: changed}))
    instead = NEED_CUDA if interpreted else NEED_CUDA | NEED_AN_INTERPRETER
    said = [cut for cut in cuts if cut[0].startswith("kernels.") or cut[0] == "moe.experts"]
    assert said == [(key, value, instead[key, value])] if (key, value) in instead else said == []
    exact, own = passes(config)
    assert (exact.train.dtype, own.train.dtype) == ("float64", "bfloat16")
    for each in (exact, own):
        validate(each, None, "cpu")


@pytest.mark.parametrize(
    "argv",
    [
        ["mesh.ep=3", "launch.num_ranks=4"],
        ["--config-name", "nothing"],
        ["-m"],
        ["moe.capacity_factor=1.25"],
        ["moe.micro_batch_balance_coef=0.01"],
    ],
    ids=str,
)
def test_a_wrong_configuration_is_an_error_of_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == EXIT_WRONG
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1 and not captured.out


def test_help_and_config_errors_do_without_torch() -> None:
    code = (
        "import sys; from automoe.verify import main; "
        "assert main(['--help']) == 0; assert main(['mesh.ep=3', 'launch.num_ranks=4']) == 2; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    assert "--proxy" in done.stdout
