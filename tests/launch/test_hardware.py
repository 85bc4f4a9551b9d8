from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from automoe.config.compose import compose_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    Config,
    KernelsConfig,
    LaunchConfig,
    MeshConfig,
    MoEConfig,
    ObserveConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from automoe.errors import BackendError
from automoe.launch import hardware
from tests.support.command import ROOT


@pytest.fixture
def cuda_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)


@pytest.fixture
def eight_gpus(cuda_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver directory like that of a machine with eight GPUs."""
    for i in range(8):
        (tmp_path / f"0000:{i:02x}:00.0").mkdir()
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(hardware, "DEVICES", tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(None, 8), ("0,1,2", 3), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-a, GPU-b", 2), ("6,7,8,0", 2)]
    + [("0,1,0", 0), ("GPU-a,GPU-a", 0), ("0,-1,0", 1), ("MIG-a,MIG-b", 1), ("MIG-a", 1), ("MIG-a,MIG-a", 0)]
    + [
        ("MIG-a,MIG-b,", 1),
        ("MIG-a,MIG-b,-1", 1),
        ("0,9,0", 0),
        ("0,9", 1),
        ("0,GPU-a", 1),
        ("GPU-a,0", 1),
        ("0,00", 0),
    ],
)
@pytest.mark.usefixtures("eight_gpus")
def test_visible_gpus_follow_the_driver_and_the_variable(chosen: str | None, count: int) -> None:
    assert hardware.visible_gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_gpus_are_found_by_their_devices_where_the_driver_has_no_folder(
    cuda_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "none")
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert hardware.visible_gpus({}) == 2
    assert hardware.visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert hardware.cpu_note(Config()) is None
    (tmp_path / "driver").mkdir()
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "driver")  # there, and empty
    assert hardware.visible_gpus({}) == 2


def test_a_preset_without_a_gpu_has_no_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``expand_preset`` then asks for launch.num_ranks."""
    monkeypatch.setattr(hardware, "visible_gpus", lambda: 0)
    assert hardware.default_num_ranks(Config(mesh=MeshConfig(preset="fsdp")), "cuda") is None


@pytest.mark.usefixtures("eight_gpus")
def test_ranks_fill_the_gpus_in_whole_meshes() -> None:
    config = Config(mesh=MeshConfig(pp=3))
    assert hardware.resolve_device(config) == "cuda"
    assert hardware.default_num_ranks(config, "cuda") == 6
    assert hardware.default_num_ranks(Config(mesh=MeshConfig(ep=16)), "cuda") == 16, "one whole mesh at least"
    assert hardware.default_num_ranks(Config(launch=LaunchConfig(num_ranks=5)), "cuda") == 5
    preset = Config(mesh=MeshConfig(preset="fsdp"))
    assert hardware.default_num_ranks(preset, "cuda") == hardware.visible_gpus() == 8
    assert hardware.missing_hardware(resolve_mesh(MeshConfig(), 8), "cuda") is None
    missing = hardware.missing_hardware(resolve_mesh(MeshConfig(), 16), "cuda")
    assert missing == "16 CUDA ranks need 16 GPUs, and this machine has 8"


@pytest.mark.usefixtures("eight_gpus")
def test_gpus_that_the_installed_torch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: False)
    assert hardware.resolve_device(Config()) == "cpu"
    missing = hardware.missing_hardware(resolve_mesh(MeshConfig(), 8), "cuda")
    assert missing is not None and "need a CUDA build of torch" in missing


def test_a_cuda_build_that_sees_no_driver_says_why_it_trains_on_the_cpu(
    cuda_torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "none")
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    note = hardware.cpu_note(Config())
    assert note is not None and f"neither in {tmp_path}/none nor as {tmp_path}/nvidia0" in note
    assert hardware.cpu_note(Config(launch=LaunchConfig(device="cpu"))) is None, "asked for"
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: False)
    assert hardware.cpu_note(Config()) is None, "a CPU build could not use one"


@pytest.mark.usefixtures("eight_gpus")
def test_gpus_that_are_seen_or_hidden_on_purpose_need_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.cpu_note(Config()) is None


def test_the_build_of_torch_is_known_without_importing_it() -> None:
    import torch

    assert hardware.torch_has_cuda() == (torch.version.cuda is not None)


def test_a_machine_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "NVIDIA_DRIVER", tmp_path / "none")
    assert hardware.visible_gpus() == 0
    assert hardware.resolve_device(compose_config()) == "cpu"
    limit = hardware.MAX_CPU_RANKS_PER_CORE * hardware.num_cores()
    assert hardware.missing_hardware(resolve_mesh(MeshConfig(), limit), "cpu") is None
    many = resolve_mesh(MeshConfig(), limit + 1)
    assert f"at most {limit}" in (said := str(hardware.missing_hardware(many, "cpu")))
    # The remedy is carried out: who names the number gets it.
    [number] = re.findall(r"launch\.num_ranks=(\d+)", said)
    assert hardware.missing_hardware(many, "cpu", int(number)) is None
    assert hardware.missing_hardware(many, "cpu", limit) is not None


LAUNCHING_TRITON = pytest.mark.parametrize(
    ("chosen", "key", "instead"),
    [
        (Config(kernels=KernelsConfig(rope="triton")), "kernels.rope=triton", "kernels.rope=torch"),
        (Config(moe=MoEConfig(experts="triton")), "moe.experts=triton", "moe.experts=grouped_mm"),
        (Config(train=TrainConfig(fp8="blockwise")), "train.fp8=blockwise", "train.fp8=off"),
        (
            Config(optim=OptimConfig(master_weights="stochastic")),
            "optim.master_weights=stochastic",
            "optim.master_weights=float32",
        ),
        (Config(), "launch.device=cuda", "launch.device=cpu"),
    ],
    ids=["rope", "experts", "fp8", "optimizer", "norms"],
)


def test_cores_next_to_a_gpu_want_a_gpu() -> None:
    config = Config(launch=LaunchConfig(numa=True))
    hardware.check_backends(config, resolve_mesh(MeshConfig(), 1), "cuda")
    with pytest.raises(BackendError, match="launch.numa=true .* on cpu. Set it to false"):
        hardware.check_backends(config, resolve_mesh(MeshConfig(), 1), "cpu")


WITHOUT_TRITON = Config(train=TrainConfig(dtype="float64"))  # whose norms are torch's operations


@LAUNCHING_TRITON
def test_a_missing_triton_is_told_before_ranks_start(
    chosen: Config, key: str, instead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_rank, found = resolve_mesh(MeshConfig(), 1), importlib.util.find_spec
    hardware.check_backends(chosen, one_rank, "cuda")
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    with pytest.raises(BackendError, match=f"{key}: the package triton is not .*set {instead}"):
        hardware.check_backends(chosen, one_rank, "cuda")
    hardware.check_backends(WITHOUT_TRITON, one_rank, "cuda")
    if chosen.train.fp8 != "off" or chosen.optim.master_weights == "stochastic":
        hardware.check_backends(chosen, one_rank, "cpu")  # which has torch's operations for both


@LAUNCHING_TRITON
def test_what_triton_compiles_with_is_asked_for_before_ranks_start(
    chosen: Config, key: str, instead: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_rank = resolve_mesh(MeshConfig(), 1)
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(hardware.sysconfig, "get_path", lambda name: str(tmp_path))
        with pytest.raises(BackendError, match=rf"{key} .*there is no {tmp_path}/Python\.h.*or set {instead}"):
            hardware.check_backends(chosen, one_rank, "cuda")
        hardware.check_backends(WITHOUT_TRITON, one_rank, "cuda")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BackendError, match=f"{key} on cuda compiles with gcc or clang.*or set {instead}"):
        hardware.check_backends(chosen, one_rank, "cuda")
    hardware.check_backends(WITHOUT_TRITON, one_rank, "cuda")
    hardware.check_backends(chosen, one_rank, "cpu")  # where Triton is interpreted
    (tmp_path / "clang").touch(mode=0o755)
    hardware.check_backends(chosen, one_rank, "cuda")


def test_a_missing_tracker_is_told_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank = resolve_mesh(MeshConfig(), 1)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(BackendError, match="observe.wandb=offline: the package wandb is not .*pip install wandb"):
        hardware.check_backends(Config(observe=ObserveConfig(wandb="offline")), one_rank, "cpu")
    hardware.check_backends(Config(), one_rank, "cuda")


COMPILED = Config(train=TrainConfig(compile=True))


def refusal(device: str) -> str:
    with pytest.raises(BackendError) as raised:
        hardware.check_backends(COMPILED, resolve_mesh(MeshConfig(), 1), device)
    return str(raised.value)


def test_compilation_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_rank = resolve_mesh(MeshConfig(), 1)
    hardware.check_backends(COMPILED, one_rank, "cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "on cpu compiles with g++, and there is none on the PATH" in refusal("cpu")
    assert "on cuda compiles with gcc or clang" in refusal("cuda")
    hardware.check_backends(Config(), one_rank, "cpu")
    monkeypatch.setenv("CXX", "my-c++ -O1")
    assert "on cpu compiles with my-c++" in refusal("cpu")
    monkeypatch.setenv("CXX", "g++ 'x")
    assert "CXX=g++ 'x is not a command (No closing quotation)" in refusal("cpu")
    monkeypatch.setenv("CXX", "my-c++ -O1")
    (tmp_path / "my-c++").touch(mode=0o755)
    hardware.check_backends(COMPILED, one_rank, "cpu")


def test_compilation_needs_the_headers_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware.sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"there is no {tmp_path}/Python.h" in refusal("cpu")


def test_a_torch_that_nobody_tried_is_said() -> None:
    newest = hardware.NEWEST_TORCH_TRIED
    first, second = newest.split(".")
    assert hardware.torch_note(f"{newest}.3+cu132") is None and hardware.torch_note("2.11.0") is None
    note = hardware.torch_note(f"{first}.{int(second) + 1}.0")
    assert note is not None and "is newer than" in note and "\n" not in note
    for page in ("README.md", "pyproject.toml"):
        assert newest in (ROOT / page).read_text(), f"{page} says what was tried"


@pytest.mark.parametrize(("installed", "refused"), [("2.11.0+cpu", True), ("2.13.0", False)])
def test_halves_of_backward_passes_need_a_newer_torch(
    installed: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "version", lambda package: installed)
    config = Config(mesh=MeshConfig(pp=2), parallel=ParallelConfig(schedule="ZBVZeroBubble", stages_per_rank=2))
    shape = resolve_mesh(config.mesh, 2)
    if refused:
        with pytest.raises(BackendError, match=r"torch 2.11.0\+cpu cannot .* torch 2.13 or later, or set"):
            hardware.check_backends(config, shape, "cpu")
        config = replace(config, parallel=ParallelConfig(schedule="Interleaved1F1B", stages_per_rank=2))
    hardware.check_backends(config, shape, "cpu")
