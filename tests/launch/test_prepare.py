"""Overrides that contradict something else."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from automoe.config.compose import Arguments, compose_config
from automoe.config.schema import MeshConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.launch.from_python import composed
from automoe.launch.prepare import check, check_here, check_num_ranks, compose
from tests.support.releases import NO_DTENSORS, needs

MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 264, "hidden_size": 32}
MIXTRAL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 16}
MIXTRAL |= {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["launch.num_ranks=4", "mesh.pp=1", "mesh.dp_shard=2"], "the mesh holds pp*dp_replicate*dp_shard*cp*tp"),
        (["launch.num_ranks=4", "mesh=fsdp", "mesh.dp_shard=2"], "[1, 1, 2, 1, 1]: 2 ranks"),
        (["launch.num_ranks=4", "mesh.pp=1"], None),
        (["launch.num_ranks=null", "mesh.dp_shard=2"], None),
        (["mesh.pp=1", "mesh.dp_shard=1"], None),  # conf/config.yaml has a number, which nobody typed
    ],
)
def test_a_number_of_ranks_that_the_mesh_has_not(overrides: list[str], says: str | None) -> None:
    if says is None:
        compose(Arguments(overrides=overrides))
        return
    with pytest.raises(ConfigError, match="launch.num_ranks=4: ") as caught:
        compose(Arguments(overrides=overrides))
    assert says in caught.value.rule and "set it to 2" in caught.value.remedy


def test_an_axis_below_one_is_named_before_a_product_of_it() -> None:
    config = compose(Arguments(overrides=["launch.num_ranks=4", "mesh.pp=-1"]))
    with pytest.raises(ConfigError, match=r"mesh\.pp=-1: an axis has at least 1 rank"):
        check_here(config)


def test_a_number_of_ranks_that_torchrun_has_not() -> None:
    config = compose_config(overrides=["launch.num_ranks=4"])
    check_num_ranks(config, [], 2, "torchrun")
    with pytest.raises(ConfigError, match="launch.num_ranks=4: torchrun: 2 ranks"):
        check_num_ranks(config, ["launch.num_ranks=4"], 2, "torchrun")


def test_a_folder_in_the_place_of_the_export_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").touch()
    words = [f"run_dir={tmp_path}", "launch.device=cpu"]
    with pytest.raises(CheckpointError, match="hf is not a checkpoint directory"):
        check_here(compose(Arguments(overrides=words)))
    check_here(compose(Arguments(overrides=[*words, "checkpoint.export_hf=false"])))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "hf").symlink_to("gone")
    with pytest.raises(CheckpointError, match="linked/hf is not a checkpoint directory"):
        check_here(compose(Arguments(overrides=[f"run_dir={tmp_path}/linked", "launch.device=cpu"])))
    words[0] = f"run_dir='{tmp_path}/a\udcff'"
    with pytest.raises(CheckpointError, match="hf is not UTF-8, and safetensors opens no such path"):
        check_here(compose(Arguments(overrides=words)))
    check_here(compose(Arguments(overrides=[*words, "checkpoint.export_hf=false"])))


PRESET = """\
defaults:
  - base
  - model: small_dsv3
  - data: stdlib
  - _self_
mesh: {preset: folded_5d, tp: 1, ep: 1}
launch: {device: cpu, num_ranks: 8}
"""


@pytest.mark.parametrize("said_in", ["words", "folder of groups", "dictionary", "Config"])
def test_an_axis_that_was_named_stays_beside_a_preset_also_at_its_default(said_in: str, tmp_path: Path) -> None:
    """The preset takes tp 2 and ep 4 for 8 ranks, where nobody named them."""
    words = ["mesh=folded_5d", "launch.device=cpu", "launch.num_ranks=8"]
    sizes = {"tp": 1, "ep": 1}
    if said_in == "words":
        config = compose(Arguments(overrides=[*words, "mesh.tp=1", "mesh.ep=1"]))
    elif said_in == "folder of groups":
        (tmp_path / "mine.yaml").write_text(PRESET)
        config = compose(Arguments("mine", str(tmp_path)))
    elif said_in == "dictionary":
        mesh = sizes | {"preset": "folded_5d", "pp": 2}  # conf/config.yaml has pp 2 and ep 2
        config = composed({"mesh": mesh, "launch": {"device": "cpu", "num_ranks": 8}}, "config", None)
    else:
        mine = compose(Arguments(overrides=words))
        config = composed(replace(mine, mesh=MeshConfig(preset="folded_5d", **sizes)), "config", None)
    shape = check(config, 8, "cpu")
    assert (shape.pp, shape.tp, shape.ep, shape.world_size) == (2, 1, 1, 8)
    plain = check(compose(Arguments(overrides=words)), 8, "cpu")
    assert (plain.pp, plain.tp, plain.ep, plain.world_size) == (2, 2, 4, 8)


def test_rules_see_the_axes_that_a_preset_makes() -> None:
    words = ["mesh=coupled_5d", "launch.num_ranks=16", "launch.device=cpu", "optim.qk_clip=100", "model=small_mixtral"]
    words += ["parallel.context=ring", "train.seq_len=64", "train.global_batch_size=16"]
    with pytest.raises(ConfigError, match="optim.qk_clip=100.0: no rank of a ring has all keys"):
        check(compose(Arguments(overrides=words)), 16, "cpu")


@needs(NO_DTENSORS)
def test_a_start_from_a_checkpoint_is_settled_without_dtensors(tmp_path: Path) -> None:
    """Ranks alone need them: importing them, and sympy, took a second of each start."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    code = (
        "import sys; from automoe.launch.prepare import compose; from automoe.config.compose import Arguments; "
        "print(compose(Arguments(overrides=sys.argv[1:])).model.family); "
        "print([name for name in ('torch.distributed.tensor', 'sympy') if name in sys.modules])"
    )
    words = [sys.executable, "-c", code, f"model.hf_path={tmp_path}", "data=stdlib"]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert out.splitlines() == ["mixtral", "[]"]


def test_a_model_of_another_family_or_size_than_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    checkpoint = f"model.hf_path={tmp_path}"
    assert compose(Arguments(overrides=[checkpoint, "data=stdlib"])).model.family == "mixtral"
    with pytest.raises(ConfigError, match="data.kind=stdlib, by default: the demonstration .* data=stdlib to train on"):
        compose(Arguments(overrides=[checkpoint]))
    compose(Arguments(overrides=[checkpoint, "data=jsonl", "data.path=texts.jsonl"]))
    with pytest.raises(ConfigError, match="model=small_qwen3_moe: .* model.family=mixtral and not qwen3_moe"):
        compose(Arguments(overrides=["model=small_qwen3_moe", checkpoint]))
    with pytest.raises(ConfigError, match="model=mixtral_8x7b: .* model.num_layers=2 and not 32, model.hidden_size=32"):
        compose(Arguments(overrides=["model=mixtral_8x7b", checkpoint]))
