"""Dense checkpoints as mixtures of experts: the same logits, the same tensors on every mesh, and less loss after it."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hf_mesh_cases import MESHES, empty_on_mesh, stored
from safetensors.torch import load_file

from automoe import upcycle
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    CheckpointConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    ObserveConfig,
    OptimConfig,
    TrainConfig,
)
from automoe.config.train_schema import LoraConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf import save_plan
from automoe.hf.families.registry import model_config_from_hf
from automoe.hf.read import load_hf
from automoe.hf.upcycle import fill_upcycled, upcycled, upcycled_model
from automoe.hf.write import to_hf, upcycle_hf
from automoe.launch.prepare import check, settle
from automoe.parallel.parallelize import build_decoder
from automoe.training.context import RunContext
from automoe.verify.pool import RankPool
from recipes import pretrain
from recipes import upcycle as upcycle_recipe
from tests.support.chat import save_tokenizer
from tests.support.gpu import one_rank
from tests.support.hf_models import save_small_hf


def logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits


@pytest.mark.parametrize(
    ("name", "dtype", "experts", "top_k", "granularity"),
    [
        ("llama", torch.float32, 4, 2, 1),
        ("llama_plain", torch.float32, 8, 4, 4),
        ("qwen3", torch.bfloat16, 8, 2, 2),
        ("qwen3_tied", torch.float32, 9, 3, 3),
        ("qwen3_tied", torch.bfloat16, 3, 3, 1),
    ],
)
def test_logits_are_the_dense_models(
    name: str, dtype: torch.dtype, experts: int, top_k: int, granularity: int, tmp_path: Path, capsys
) -> None:
    dense = save_small_hf(name, tmp_path / "dense", dtype=dtype, other_sizes={"intermediate_size": 48})
    options = ["--experts", str(experts), "--top-k", str(top_k), "--granularity", str(granularity)]
    assert upcycle.main([str(tmp_path / "dense"), "--out", str(tmp_path / "out"), *options]) == 0
    assert "to the dense model's within" in " ".join(capsys.readouterr().out.split())
    tokens = torch.randint(dense.config.vocab_size, (4, 48), generator=torch.Generator().manual_seed(3))
    before, after = logits(tmp_path / "dense", tokens), logits(tmp_path / "out", tokens)
    assert (after - before).norm() <= 1e-5 * before.norm()
    tensors = stored(tmp_path / "out")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    routers = [tensor for key, tensor in tensors.items() if re.search(r"mlp\.gate\.weight$|moe\.gate\.weight$", key)]
    assert len(routers) == dense.config.num_hidden_layers
    for router in routers:
        copies = router.unflatten(0, (-1, granularity))
        assert torch.equal(copies, copies[:, :1].expand_as(copies))
        assert len({tuple(row.tolist()) for row in router}) == experts // granularity
    assert not torch.equal(routers[0], routers[1])


@torch.no_grad()
def test_where_scores_of_copies_tie_exact_ties_take_whole_ones(tmp_path: Path) -> None:
    save_small_hf("qwen3", tmp_path / "dense", other_sizes={"intermediate_size": 48})
    sizes = {"num_experts": 16, "num_experts_per_token": 8, "moe_intermediate_size": 12}
    mixture, dense_keys = upcycled_model(ModelConfig(hf_path=str(tmp_path / "dense"), upcycle=True, **sizes))
    model = build_decoder(mixture, MoEConfig(experts="loop"), torch.float32)
    model.to_empty(device="cpu")
    load_hf(model, tmp_path / "dense", keys=dense_keys)
    for _, layer in model.moe_layers():
        layer.router.weight[4:].zero_()  # all copies but the first
    tokens = torch.randint(mixture.vocab_size, (2, 24), generator=torch.Generator().manual_seed(3))
    before, after = logits(tmp_path / "dense", tokens), model.eval()(tokens)
    assert (after - before).norm() <= 1e-5 * before.norm()


def test_a_wrong_scale_is_found_before_anything_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small_hf("qwen3", tmp_path / "dense")
    monkeypatch.setattr(
        save_plan,
        "fill_upcycled",
        lambda shard, keys: fill_upcycled(shard, replace(keys, ffn_parts=min(1, keys.ffn_parts))),
    )
    with pytest.raises(CheckpointError, match="its logits are not those of"):
        upcycle_hf(tmp_path / "dense", tmp_path / "out", 8, 4, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["dense"]


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((8, 3, 2), r"num_experts_per_token=3: .* G=2 .* Nearest valid choice: 4"),
        ((9, 2, 2), r"num_experts=9: .* Nearest valid choice: 10"),
        ((8, 2, 7), r"granularity=7: .* width 48.* Nearest valid choice: 6"),
        ((8, 2, 0), r"granularity=0: at least 1"),
        ((4, 8, 1), r"a token cannot choose 8 of 4 experts"),
        ((0, 2, 1), r"num_experts=0"),
    ],
)
def test_sizes_that_would_compute_something_else_are_refused(
    sizes: tuple[int, int, int], says: str, tmp_path: Path
) -> None:
    save_small_hf("qwen3", tmp_path)
    with pytest.raises(ConfigError, match=says):
        upcycled(tmp_path, *sizes)


def test_rounding_that_was_asked_for_is_named_as_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_hf("qwen3", tmp_path / "in", dtype=torch.float32)
    sizes = ["--experts", "4", "--top-k", "2", "--dtype", "bfloat16"]
    assert upcycle.main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), *sizes]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "rounded from float32 to bfloat16: upcycle without --dtype" in said and "granularity" not in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize(
    ("source", "sizes", "says"),
    [
        ("none", ["--experts", "8", "--top-k", "2"], r"DENSE=\S+/none: there is no such folder"),
        ("in", ["--experts", "8", "--top-k", "3", "--granularity", "2"], "--top-k=3: .* G=2"),
        ("in", ["--experts", "9", "--top-k", "2", "--granularity", "2"], "--experts=9: "),
        ("in", ["--experts", "8", "--top-k", "2", "--granularity", "7"], "--granularity=7: "),
    ],
)
def test_the_command_names_its_own_arguments(
    source: str, sizes: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_small_hf("qwen3", tmp_path / "in")
    assert upcycle.main([str(tmp_path / source), "--out", str(tmp_path / "out"), *sizes]) == 2
    assert re.match(f"error: {says}", " ".join(capsys.readouterr().err.split()))


def test_a_mixture_is_not_upcycled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_hf("qwen3_moe", tmp_path / "in")
    assert upcycle.main([str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--experts", "8", "--top-k", "2"]) == 2
    assert "Dense families that have one: llama (to mixtral), qwen3 (to qwen3_moe)" in capsys.readouterr().err


def test_what_is_upcycled_while_loading_is_written_with_the_dense_dtypes(tmp_path: Path) -> None:
    """As a run's export does, by ``keep``: the dense folder says what that is."""
    save_small_hf("qwen3", tmp_path / "dense", dtype=torch.bfloat16)
    asked = ModelConfig(
        hf_path=str(tmp_path / "dense"), upcycle=True, num_experts=4, num_experts_per_token=2, moe_intermediate_size=24
    )
    mixture, dense_keys = upcycled_model(asked, seed=7)
    model = build_decoder(mixture, MoEConfig(experts="loop"), torch.float32)
    model.to_empty(device="cpu")
    load_hf(model, tmp_path / "dense", keys=dense_keys)
    to_hf(model, tmp_path / "out")
    upcycle_hf(tmp_path / "dense", tmp_path / "alone", 4, 2, 2, seed=7)
    ours, alone = stored(tmp_path / "out"), stored(tmp_path / "alone")
    assert ours.keys() == alone.keys()
    for key, tensor in alone.items():
        assert ours[key].dtype == tensor.dtype == torch.bfloat16 and torch.equal(ours[key], tensor), key


def load_upcycled(dense: Path, mixture: Path, mesh: MeshConfig, out: Path) -> None:
    parts, _, _ = empty_on_mesh(mixture, mesh)
    load_hf(parts, dense, keys=upcycled(dense, 8, 4, 2, seed=5)[1])
    to_hf(parts, out, verify=False)


@pytest.mark.parametrize("mesh", ["tp2_dp2_ep2_etp2", "pp2_ep2_ep_shard2"])
@pytest.mark.exhaustive
def test_ranks_make_the_same_tensors(mesh: str, tmp_path: Path, ranks: RankPool) -> None:
    save_small_hf("qwen3", tmp_path / "dense")
    upcycle_hf(tmp_path / "dense", tmp_path / "alone", 8, 4, 2, seed=5)
    shape = MESHES[mesh]
    world_size = resolve_mesh(shape, None).world_size
    ranks.run(load_upcycled, world_size, tmp_path / "dense", tmp_path / "alone", shape, tmp_path / "ranks")
    alone, together = stored(tmp_path / "alone"), stored(tmp_path / "ranks")
    assert alone.keys() == together.keys()
    for key, tensor in alone.items():
        assert torch.equal(together[key], tensor), key


def test_a_command_line_names_experts_and_the_checkpoint_the_rest(tmp_path: Path) -> None:
    save_small_hf("llama", tmp_path)
    model = ModelConfig(hf_path=str(tmp_path), upcycle=True, num_experts=8, moe_intermediate_size=24)
    said = ["data.kind=stdlib"]
    settled = settle(Config(model=model), [*said, "model.num_experts=8", "model.moe_intermediate_size=24"]).model
    assert (settled.family, settled.num_experts, settled.moe_intermediate_size) == ("mixtral", 8, 24)
    assert settled.hidden_size == 32 and settled.upcycle and settled.hf_path == str(tmp_path)
    # Ties go to whole copies where a copy has several experts, unless the command line says otherwise.
    assert settled.router.exact_ties
    for width, asked in ((24, False), (48, True), (48, False)):
        whole = replace(model, moe_intermediate_size=width, router=replace(model.router, exact_ties=asked))
        typed = [*said, f"model.router.exact_ties={asked}"]
        assert settle(Config(model=whole), typed).model.router.exact_ties == asked
    assert not settle(Config(model=replace(model, moe_intermediate_size=48)), said).model.router.exact_ties
    # So may they beside any checkpoint.
    plain = ModelConfig(hf_path=str(tmp_path), router=replace(model.router, exact_ties=True))
    assert settle(Config(model=plain), [*said, "model.router.exact_ties=true"]).model.router.exact_ties
    with pytest.raises(ConfigError, match=r"48 % 20 = 8\. Set model.moe_intermediate_size=48"):
        settle(Config(model=replace(model, moe_intermediate_size=20)), said)
    with pytest.raises(ConfigError, match="has model.hidden_size=32 and not 64"):
        settle(Config(model=replace(model, hidden_size=64)), [*said, "model.hidden_size=64"])


def test_the_recipes_target_is_looked_at_first(tmp_path: Path) -> None:
    """Also with ``checkpoint.export_hf=false``: the mixture is what the recipe is for."""
    save_small_hf("llama", tmp_path / "dense")
    sizes = {"num_experts": 8, "num_experts_per_token": 2, "moe_intermediate_size": 48}
    asked = Config(
        recipe="upcycle",
        run_dir=str(tmp_path / "run"),
        mesh=MeshConfig(dp_shard=1),
        model=ModelConfig(hf_path=str(tmp_path / "dense"), upcycle=True, **sizes),
        data=DataConfig(kind="benchmark"),
        checkpoint=CheckpointConfig(export_hf=False),
    )
    config = settle(asked, ["data.kind=benchmark"])
    check(config, 1, "cpu")
    (tmp_path / "run" / "hf").mkdir(parents=True)
    (tmp_path / "run" / "hf" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="run/hf is not a checkpoint directory"):
        check(config, 1, "cpu")


ADAPTER = LoraConfig(rank=4, export="adapter", targets=["attention"])
LATER = {
    "data without text": {"data": DataConfig(kind="benchmark")},
    "another tokenizer": {"data": DataConfig(tokenizer="byte")},
    "adapters": {"lora": ADAPTER, "moe": MoEConfig(experts="loop")},
    "averages": {"checkpoint": CheckpointConfig(export_ema=True), "optim": OptimConfig(ema_decay=0.9)},
}


@pytest.mark.parametrize("later", LATER.values(), ids=LATER.keys())
def test_the_recipe_writes_the_mixture_whatever_a_later_training_sets(tmp_path: Path, later: dict[str, Any]) -> None:
    """The dense checkpoint's tokenizer comes along."""
    dense, run_dir = tmp_path / "dense", tmp_path / "run"
    save_small_hf("qwen3", dense, other_sizes={"vocab_size": 304})
    save_tokenizer(dense, "chatml")
    sizes = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 48}
    asked = Config(
        recipe="upcycle",
        run_dir=str(run_dir),
        mesh=MeshConfig(dp_shard=1),
        model=ModelConfig(hf_path=str(dense), upcycle=True, **sizes),
        **({"data": DataConfig()} | later),
    )
    config = settle(asked, ["data.kind=stdlib"])
    check(config, 1, "cpu")
    with one_rank("cpu"):
        upcycle_recipe.main(config, resolve_mesh(config.mesh, 1), RunContext(0, 1, 0, torch.device("cpu"), run_dir))
    assert model_config_from_hf(run_dir / "hf").num_experts == 4 and not (run_dir / "adapter").exists()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (run_dir / "hf" / name).read_bytes() == (dense / name).read_bytes()


@pytest.mark.exhaustive
def test_training_goes_on_below_the_dense_models_loss(tmp_path: Path) -> None:
    """Real text: a dense model trained a little, upcycled with G=1 and 4, and trained on."""

    def run(name: str, model: ModelConfig, steps: int) -> list[dict[str, float]]:
        config = Config(
            run_dir=str(tmp_path / name),
            mesh=MeshConfig(dp_shard=1),
            model=model,
            train=TrainConfig(steps=steps, seq_len=128, global_batch_size=8, micro_batch_size=8, val_every=steps),
            optim=OptimConfig(lr=2e-3, schedule="constant", warmup_steps=5),
            data=DataConfig(tokenizer="byte", max_bytes=800_000, val_fraction=0.3),
            checkpoint=CheckpointConfig(export_hf=True),
            observe=ObserveConfig(report=False),
        )
        (tmp_path / name).mkdir()
        context = RunContext(0, 1, 0, torch.device("cpu"), tmp_path / name)
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(tmp_path)), one_rank("cpu"):
            pretrain.main(config, resolve_mesh(config.mesh, 1), context)
        return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    sizes = {"vocab_size": 264, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
    save_small_hf("qwen3", tmp_path / "first", other_sizes=sizes)
    first = replace(model_config_from_hf(tmp_path / "first"), hf_path=str(tmp_path / "first"))
    dense = run("dense", first, 40)
    for granularity in (1, 4):
        counts = {"num_experts": 4 * granularity, "num_experts_per_token": 2 * granularity}
        asked = ModelConfig(
            hf_path=str(tmp_path / "dense" / "hf"), upcycle=True, moe_intermediate_size=128 // granularity, **counts
        )
        records = run(f"g{granularity}", upcycled_model(asked)[0], 60)
        # The first step meets the dense model's own loss, on rows of the same kind.
        assert abs(records[0]["loss"] - dense[-1]["loss"]) < 0.3
        assert records[-1]["val_loss"] < dense[-1]["val_loss"] - 0.05
        assert load_file(tmp_path / f"g{granularity}" / "hf" / "model.safetensors")
