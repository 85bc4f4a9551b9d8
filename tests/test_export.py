"""``python -m automoe.export``: from what a run left behind to a checkpoint that is proven, or an error."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from automoe.checkpoint.manifest import read_manifest, write_manifest
from automoe.checkpoint.store import CheckpointStore
from automoe.config.data_schema import DataConfig
from automoe.config.frozen import save_config
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig
from automoe.data.loader import Loader
from automoe.errors import CheckpointError
from automoe.export import export_run, main
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.run.weights import export_weights
from automoe.training.state import TrainState
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import whole
from tests.support.configurations import quick_model

MESH = MeshConfig(pp=2, dp_shard=2, ep=2)


def run_config(run_dir: Path) -> Config:
    """A frozen run over a few lines of text."""
    run_dir.mkdir(parents=True)
    text = run_dir / "text.txt"
    text.write_text("All mesh shapes give the same numbers.\n" * 200)
    model = quick_model("small_dsv3")
    model = replace(model, hidden_size=64, moe_intermediate_size=32, intermediate_size=64)
    data = DataConfig(kind="text", path=str(text), val_fraction=0.0)
    config = Config(run_dir=str(run_dir), mesh=MESH, model=model, data=data)
    config.train.seq_len, config.train.val_every = 32, 0
    save_config(config, run_dir)
    return config


def leave(config: Config, run_dir: Path, steps: list[int], export: bool) -> dict[str, torch.Tensor]:
    """Save checkpoints at ``steps``, every one of other weights, or the run's own export; the last weights.

    With ``optim.ema_decay`` also their averages, which are the first weights.
    """
    meshes = build_meshes(resolve_mesh(config.mesh, None), torch.device("cpu"))
    parts = build_parts(config, meshes)
    optimizer = None
    for step in steps or [1, 0]:
        config.train.seed = step
        materialize(parts, config, torch.device("cpu"))
        for part in parts.values():
            for _, layer in part.moe_layers():
                layer.router.expert_bias.fill_(0.125 * (step + 1))
        optimizer = optimizer or build_optimizer(list(parts.values()), config.optim)
        if steps:
            loader = Loader(config, meshes.dp_rank, meshes.shape.dp)
            CheckpointStore(config, meshes.shape, run_dir).save(TrainState(parts, optimizer, loader, step=step))
    named = [pair for part in parts.values() for pair in part.named_parameters()]
    averages = {f"average of {n}": whole(optimizer.state[p]["ema"]) for n, p in named if config.optim.ema_decay}
    if export:
        assert export_weights(config, parts, run_dir, optimizer).averaged == config.checkpoint.export_ema
    return {name: whole(parameter) for name, parameter in named} | averages


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def same_weights(out: Path, ranks_tensors: list[dict[str, torch.Tensor]]) -> None:
    stored = exported(out)
    live = {name: tensor for tensors in ranks_tensors for name, tensor in tensors.items()}
    assert torch.equal(stored["lm_head.weight"], live["lm_head.weight"])
    experts = live["layers.3.mlp.experts.gate_up_proj"]
    assert torch.equal(stored["model.layers.3.mlp.experts.7.up_proj.weight"], experts[7, 1])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_newest_training_checkpoint_is_exported(
    run_dir: Path, tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(run_dir)
    config.optim.ema_decay = 0.5
    save_config(config, run_dir)
    tensors = ranks.run(leave, 4, config, run_dir, [3, 10], export=False)
    assert main([str(run_dir), "--out", str(tmp_path / "out")]) == 0
    assert f"saved {tmp_path / 'out'} " in " ".join(capsys.readouterr().out.split())
    same_weights(tmp_path / "out", tensors)
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step-3", folder / "step-20")
    assert main([str(run_dir), "--out", str(tmp_path / "beside")]) == 0
    assert f"warning: {folder}/step-20 is step 3, as its manifest.json says" in capsys.readouterr().err
    same_weights(tmp_path / "beside", tensors)
    bias = exported(tmp_path / "out")["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert torch.equal(bias, torch.full((16,), 0.125 * 11))

    # Averages that begin with the weights of step 3, and that nothing has moved since.
    assert main([str(run_dir), "--out", str(tmp_path / "averaged"), "--ema"]) == 0
    assert "equal bit for bit to the averaged weights" in " ".join(capsys.readouterr().out.split())
    averages = [{n.removeprefix("average of "): t for n, t in one.items() if "average" in n} for one in tensors]
    same_weights(tmp_path / "averaged", averages)
    assert not torch.equal(
        exported(tmp_path / "averaged")["lm_head.weight"], exported(tmp_path / "out")["lm_head.weight"]
    )
    config.optim.ema_decay = 0.0
    save_config(config, run_dir)
    assert main([str(run_dir), "--out", str(tmp_path / "none"), "--ema"]) == 2
    assert "kept no averages of its weights" in capsys.readouterr().err


def test_run_that_left_an_export_alone(run_dir: Path, tmp_path: Path, ranks: RankPool) -> None:
    config = run_config(run_dir)
    config.optim.ema_decay, config.checkpoint.export_ema = 0.5, True
    tensors = ranks.run(leave, 4, config, run_dir, [], export=True)
    written = export_run(run_dir, tmp_path / "out", dtype="bfloat16")
    assert written.num_files == 1
    stored = exported(tmp_path / "out")
    live = {name: tensor for one in tensors for name, tensor in one.items()}
    assert torch.equal(stored["lm_head.weight"], live["average of lm_head.weight"].bfloat16())
    save_config(config, run_dir)
    with pytest.raises(CheckpointError, match="has no training checkpoint, which would hold averages"):
        export_run(run_dir, tmp_path / "none", ema=True)


@pytest.mark.faults
def test_damaged_checkpoint_is_not_exported(
    run_dir: Path, tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_config(run_dir)
    ranks.run(leave, 4, config, run_dir, [4], export=False)
    victim = max((run_dir / "checkpoints" / "step-4").glob("*.distcp"), key=lambda file: file.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    assert main([str(run_dir), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "step-4 is damaged" in message and victim.name in message
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_from_somebody_else_runs_no_code(
    run_dir: Path, tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(leave, 4, run_config(run_dir), run_dir, [4], export=False)
    step = run_dir / "checkpoints" / "step-4"

    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    index = step / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    metadata.planner_data = Attack()
    index.write_bytes(pickle.dumps(metadata))
    # Whoever writes the files can write the hashes.
    manifest = read_manifest(step)[0]
    files = manifest.pop("files")
    files[".metadata"] = {"bytes": index.stat().st_size, "xxh128": xxhash.xxh3_128(index.read_bytes()).hexdigest()}
    content = {key: value for key, value in manifest.items() if key not in ("format", "sha256")}
    write_manifest(step, content, files)
    assert main([str(run_dir), "--out", str(tmp_path / "out")]) == 2
    assert "names posix.mkdir, which no checkpoint needs" in capsys.readouterr().err
    assert not (tmp_path / "owned").exists() and not (tmp_path / "out").exists()


def test_run_without_weights(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_config(run_dir)
    assert main([str(run_dir), "--out", str(tmp_path / "out")]) == 2
    assert "has no weights" in capsys.readouterr().err
    # An adapter of an earlier start, where this run was to leave none.
    (run_dir / "adapter").mkdir()
    (run_dir / "adapter" / "adapter_config.json").write_text("{}")
    assert main([str(run_dir), "--out", str(tmp_path / "out")]) == 2
    assert "has no weights" in capsys.readouterr().err


def test_what_is_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "it has no config.yaml that can be read" in capsys.readouterr().err


def test_existing_target_is_refused_before_anything_is_read(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_config(run_dir)
    (tmp_path / "out").mkdir()
    assert main([str(run_dir), "--out", str(tmp_path / "out")]) == 2
    assert "exists" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    script = (
        "import sys\nfrom automoe.export import main\n"
        "try: main(['--help'])\nexcept SystemExit as leave: assert leave.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "--out DIR" in out.stdout
