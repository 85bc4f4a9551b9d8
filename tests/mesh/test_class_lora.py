"""Adapters on classes of transformers without a native family: as peft computes them, on meshes, and exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_cases import SEQ_LEN, batches

from automoe.comm.tokens import MicroBatch
from automoe.config.mesh_shape import MeshShape, resolve_mesh
from automoe.config.rule_engine import check_rows
from automoe.config.schema import Config, LoraConfig, MeshConfig
from automoe.errors import CheckpointError, ConfigError
from automoe.hf.adapter import from_peft
from automoe.hf.peft import WEIGHTS_FILE, gathered_adapters, to_peft
from automoe.hf.read import load_hf
from automoe.hf.write import to_hf
from automoe.launch.rules_adapters import adapter_rows
from automoe.model.causal_lm import CausalLM
from automoe.model.lora import freeze_and_adapt
from automoe.model.params import model_params
from automoe.parallel.parallelize import allocate, build_decoder
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import merge_trajectories, run_trajectory
from tests.support.class_models import AllInFloat64, run_config, save_class

# Shared experts and dense layers beside routed ones; latents; delta nets; weights that do not sum to one.
CLASSES = ["flex_olmo", "dots1", "deepseek_v2", "qwen3_5_moe_text"]
LORA = LoraConfig(rank=4, alpha=6.0)
TOKENS = torch.randint(300, (2, 13), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    class Saved(dict):
        def __missing__(self, model_type: str) -> Path:
            self[model_type] = tmp_path_factory.mktemp(model_type)
            save_class(model_type, self[model_type])
            return self[model_type]

    return Saved()


def lora_config(path: Path, mesh: MeshConfig | None = None, lora: LoraConfig = LORA, **train: Any) -> Config:
    return replace(run_config(path, mesh or MeshConfig(dp_shard=1), **train), lora=lora)


def tuned(path: Path, dtype: torch.dtype = torch.float64, lora: LoraConfig = LORA) -> CausalLM:
    """The class with the weights of its folder and adapters as after training."""
    config = lora_config(path, lora=lora)
    model = build_decoder(replace(config.model, random_weights=False), config.moe, dtype)
    freeze_and_adapt(model, config, dtype, dtype)
    allocate({0: model}, torch.device("cpu"))
    load_hf(model, path)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora." in name:
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


def stored(ours: torch.Tensor, name: str) -> torch.Tensor:
    """An adapter of ours, or its gradient, in peft's layout: stacks of experts side by side."""
    if ours.dim() == 2:
        return ours
    return ours.flatten(0, 1) if ".lora.A" in name else ours.permute(1, 2, 0).flatten(1, 2)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name == "dots1" else pytest.mark.exhaustive) for name in CLASSES]
)
def test_loss_and_gradients_of_adapters_are_those_of_peft(
    saved: dict[str, Path], model_type: str, tmp_path: Path
) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    path = saved[model_type]
    model = tuned(path)
    said = to_peft(model, tmp_path / "adapter", LORA)
    assert "of experts" in said and "of attention" in said
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter"), is_trainable=True).train()
    with AllInFloat64():
        logits = theirs(TOKENS[:, :-1], use_cache=False).logits
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        loss = model(batch=MicroBatch(TOKENS[:, :-1].contiguous(), labels=TOKENS[:, 1:].contiguous())).sum()
        expected.backward()
        loss.backward()
    assert abs(float(loss - expected)) < 1e-12
    grads = {name: one.grad for name, one in theirs.named_parameters() if one.requires_grad}
    mine = {name: stored(one.grad, name) for name, one in model.named_parameters() if one.requires_grad}
    assert len(mine) == len(grads) == len(load_file(tmp_path / "adapter" / WEIGHTS_FILE)) > 20
    both = {name for name in mine if name.endswith(".lora.A13")}
    for name, grad in mine.items():
        module, _, kind = name.rpartition(".lora.")
        # peft wraps the second of two adapted parameters around the first
        inner = ".base_layer" if kind.endswith("13") and f"{module}.lora.A13" in both else ""
        found = grads[f"base_model.model.{module}{inner}.lora_{kind[0]}.default.weight"]
        assert float((grad - found).norm() / found.norm().clamp_min(1e-12)) < 1e-12, name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model_type", "mesh"),
    [
        ("flex_olmo", MeshConfig(dp_shard=4, ep=2, ep_shard=2)),
        pytest.param("dots1", MeshConfig(dp_replicate=2, dp_shard=2, ep=4), marks=pytest.mark.exhaustive),
        pytest.param("deepseek_v2", MeshConfig(dp_shard=4, ep=2, ep_shard=2), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_meshes_train_adapters_as_one_process(
    ranks: RankPool, saved: dict[str, Path], model_type: str, mesh: MeshConfig
) -> None:
    """Three steps, with dropout of features, which must be the same of every expert on every mesh."""
    config = lora_config(saved[model_type], mesh, replace(LORA, dropout=0.25), seq_len=SEQ_LEN)
    one = MeshConfig(dp_shard=1, ep_shard=1)
    alone = replace(config, mesh=one, train=replace(config.train, micro_batch_size=8))
    [expected] = ranks.run(run_trajectory, 1, alone, MeshShape.of(one), batches, 3)
    found = merge_trajectories(ranks.run(run_trajectory, 4, config, resolve_mesh(config.mesh, 4), batches, 3))
    compared = compare_trajectories(found, expected)
    assert not [each for each in compared if not each.within(1e-10)]
    assert sum(each.kind == "gradient" and ".lora." in str(each) for each in compared) > 20


def test_a_merged_export_is_the_adapted_model(saved: dict[str, Path], tmp_path: Path) -> None:
    """``to_hf`` compares the logits of what it wrote, through transformers."""
    model = tuned(saved["flex_olmo"], torch.float32).eval()
    with torch.no_grad():
        before = model(TOKENS)
    written = to_hf(model, tmp_path / "out", tokenizer="byte")
    assert written.logits_error is not None and written.logits_error < 1e-5
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        after = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TOKENS, use_cache=False).logits
    assert float((after - before).norm() / before.norm()) < 1e-5


def test_an_adapter_is_read_back_and_belongs_to_its_base(saved: dict[str, Path], tmp_path: Path) -> None:
    model = tuned(saved["flex_olmo"], torch.float32)
    to_peft(model, tmp_path / "adapter", LORA)
    again = tuned(saved["flex_olmo"], torch.float32)
    for parameter in again.parameters():
        parameter.data.zero_()
    from_peft(again, tmp_path / "adapter", LORA)
    expected = gathered_adapters({0: model})
    assert all(torch.equal(one, expected[name]) for name, one in gathered_adapters({0: again}).items())
    with pytest.raises(CheckpointError, match="belongs to"):
        from_peft(again, tmp_path / "adapter", replace(LORA, alpha=7.0))


def test_what_gets_adapters(saved: dict[str, Path]) -> None:
    """Routers, embedding, head and gates of one number get none."""
    config = lora_config(saved["qwen3_5_moe_text"])
    adapted = {param.name for param in model_params(config.model) if param.spec.lora}
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.self_attn.q_proj.weight"} <= adapted
    assert "model.layers.0.mlp.shared_expert.up_proj.weight" in adapted
    assert not any(
        word in name for name in adapted for word in ("gate.weight", "embed", "lm_head", "shared_expert_gate")
    )


def test_what_cannot_be_adapted_is_refused(saved: dict[str, Path]) -> None:
    config = lora_config(saved["flex_olmo"], lora=replace(LORA, targets=["attention", "w1"]))
    with pytest.raises(ConfigError, match=r"lora\.targets=.*no 'w1': it has .*experts\.down_proj"):
        check_rows(config, adapter_rows(config))
    for model_type in ("jetmoe", "dbrx", "nemotron_h"):
        config = lora_config(saved[model_type])
        with pytest.raises(ConfigError, match=r"lora\.targets.* has .*; adapters are only for stacks gate_up_proj"):
            check_rows(config, adapter_rows(config))
        if model_type != "dbrx":  # its one matrix of queries, keys and values is in no group
            some = replace(config, lora=replace(LORA, targets=["attention"]))
            check_rows(some, adapter_rows(some))


def test_a_layer_that_the_class_does_not_call_is_refused_in_the_first_pass(saved: dict[str, Path]) -> None:
    lora = replace(LORA, targets=["attention"])
    with pytest.raises(ConfigError, match=r"lora\.targets=model\.layers\.0\.mamba\.dt_proj: .* does not call it"):
        tuned(saved["jamba"], lora=lora)(TOKENS)
    tuned(saved["jamba"], lora=replace(lora, targets=["in_proj", "out_proj"]))(TOKENS)


def test_a_layer_whose_weight_is_read_without_a_call_is_refused(saved: dict[str, Path]) -> None:
    model = tuned(saved["flex_olmo"])
    projection = model.get_submodule("model.layers.1.self_attn.o_proj")
    projection.forward = None  # nothing calls it

    class Reads(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, projection.weight)

    model.set_submodule("model.layers.1.self_attn.o_proj", Reads())
    model.add_module("aside", projection)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.self_attn\.o_proj.*does not call it"):
        model(TOKENS)
