"""Adapters on a decoder: what is trained, what is frozen, what starts from where."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from automoe.config.rule_engine import check_rows
from automoe.config.schema import Config, LoraConfig, ModelConfig, MoEConfig, ParallelConfig, TrainConfig
from automoe.errors import ConfigError
from automoe.launch.rules_adapters import adapter_rows
from automoe.model.decoder import Decoder
from automoe.model.init import initialize
from automoe.model.lora import fill_adapters, freeze_and_adapt
from automoe.model.params import model_params
from automoe.observe.trained import describe_training
from automoe.parallel.parallelize import build_decoder

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, num_layers=2, first_k_dense=1, intermediate_size=24, num_experts=4,
    moe_intermediate_size=8, num_shared_experts=1,
)  # fmt: skip


def config_with(train: dict | None = None, **lora) -> Config:
    return Config(
        model=MODEL, moe=MoEConfig(experts="loop"), lora=LoraConfig(**lora), train=TrainConfig(**(train or {}))
    )


def built(config: Config, frozen: torch.dtype = torch.float32) -> Decoder:
    part = build_decoder(config.model, config.moe, torch.float32)
    freeze_and_adapt(part, config, torch.float32, frozen)
    part.to_empty(device="cpu")
    for module in part.modules():
        if callable(reset := getattr(module, "reset_buffers", None)):
            reset()
    initialize(part, 0.1, 0)
    fill_adapters(part)
    return part


def trained(part: Decoder) -> set[str]:
    return {name for name, parameter in part.named_parameters() if parameter.requires_grad}


def test_new_adapters_change_nothing_and_alone_are_trained() -> None:
    # Grouped products beside grouped products: ``loop`` multiplies by gate and up apart, which may round otherwise.
    grouped = MoEConfig(experts="grouped_mm")
    plain, part = (built(replace(config, moe=grouped)) for config in (config_with(), config_with(rank=4)))
    tokens = torch.arange(16).view(2, 8)
    assert torch.equal(plain(tokens), part(tokens))
    assert {name for name in trained(part) if ".lora." not in name} == set()
    assert len(trained(part)) == 2 * (7 + 4 + 3 + 2)  # attention and dense FFN; attention, shared and routed experts
    for name, parameter in part.named_parameters():
        if ".lora.A" in name:
            bound = parameter.shape[-1] ** -0.5
            assert 0.8 * bound < parameter.abs().max() <= bound and abs(parameter.mean()) < 0.2 * bound
        elif ".lora.B" in name:
            assert not parameter.any()
    other = built(replace(config_with(rank=4), train=TrainConfig(seed=1)))
    assert not torch.equal(other.layers["0"].self_attn.q_proj.lora.A, part.layers["0"].self_attn.q_proj.lora.A)


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["q_proj", "o_proj"], {"self_attn.q_proj", "self_attn.o_proj"}),
        (["mlp"], {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        (["shared_experts.up_proj", "experts.down_proj"], {"mlp.shared_experts.up_proj", "mlp.experts"}),
    ],
)
def test_targets_by_name(targets: list[str], modules: set[str]) -> None:
    names = trained(built(config_with(rank=4, targets=targets)))
    assert {name.split(".", 2)[2].partition(".lora")[0] for name in names} == modules
    assert not any(".lora.A13" in name for name in names)


def test_what_is_frozen_is_stored_as_it_is_multiplied_and_exceptions_are_trained() -> None:
    part = built(config_with(rank=4, train=dict(trainable=["*.router.weight"])), torch.bfloat16)
    assert {name for name in trained(part) if ".lora." not in name} == {"layers.1.mlp.router.weight"}
    wide = {name for name, parameter in part.named_parameters() if parameter.dtype == torch.float32}
    assert wide == trained(part)
    part = built(config_with(rank=4), torch.bfloat16)  # a frozen router computes in its own precision
    assert part.get_parameter("layers.1.mlp.router.weight").dtype == torch.float32
    part = built(config_with(train=dict(freeze=["layers.*"], trainable=["*norm*"])))
    names = trained(part)
    assert "embed_tokens.weight" in names and "layers.0.input_layernorm.weight" in names
    assert not any("_proj" in name or "experts" in name for name in names)


def test_frozen_experts_get_no_gradient() -> None:
    part = built(replace(config_with(train=dict(freeze=["*.mlp.experts.down_proj"])), moe=MoEConfig()))
    part(torch.arange(16).view(2, 8)).square().sum().backward()
    experts = part.layers["1"].mlp.experts
    assert experts.down_proj.grad is None and experts.gate_up_proj.grad.norm() > 0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (config_with(rank=4, targets=["q_prj"]), "this model has no 'q_prj'"),
        (config_with(rank=4, alpha=0.0), "alpha / rank"),
        (config_with(rank=4, dropout=1.0), "share in"),
        (config_with(rank=4, train=dict(freeze=["*norm*"])), "all of the model is frozen"),
        (config_with(rank=4, train=dict(trainable=["*.down_proj"])), "layers.1.mlp.experts.down_proj has an adapter"),
        (config_with(rank=4, train=dict(fp8="tensorwise")), "train.fp8=off"),
        (config_with(rank=4, train=dict(compile=True)), "train.compile=false"),
        (config_with(train=dict(freeze=["*.routr.*"])), "'*.routr.*' matches no parameter"),
        (config_with(train=dict(freeze=["*"])), "nothing to train"),
        (config_with(train=dict(trainable=["*norm*"])), "exceptions to what is frozen"),
        (replace(config_with(rank=3), moe=MoEConfig()), "3 % 4 = 3.*lora.rank=4"),
        (replace(config_with(rank=4), moe=MoEConfig(experts="triton")), "triton does not multiply by adapters"),
        (config_with(rank=4, export="adapter"), "random weights"),
        (
            replace(config_with(train=dict(freeze=["*.experts.*"])), parallel=ParallelConfig(expert_wgrad="fused")),
            "expert_wgrad=fused: .* none is trained",
        ),
    ],
)
def test_what_cannot_be_is_refused(config: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_rows(config, adapter_rows(config))


def test_a_run_says_what_it_trains() -> None:
    assert describe_training(config_with()) == []
    config = replace(config_with(rank=4), moe=MoEConfig(experts="loop", z_loss_coef=0.5))
    first, second = describe_training(config)
    part = built(config)
    total = sum(param.numel for param in model_params(MODEL))
    count = sum(parameter.numel() for parameter in part.parameters() if parameter.requires_grad)
    assert f"trains {count:,} numbers beside the model's {total:,}" in first
    assert "numbers of the model's" in describe_training(config_with(train=dict(freeze=["*norm*"])))[0]
    assert second == "routers are frozen; balance losses are on (moe.z_loss_coef=0.5)"
    check_rows(config, adapter_rows(config))


def test_a_model_that_does_not_say_how_adapters_are_added_refuses_them() -> None:
    with pytest.raises(ConfigError, match="Decoder does not say how an adapter is added to Embedding. Name other"):
        built(config_with(rank=2)).add_adapter(torch.nn.Embedding(2, 2), torch.nn.Identity())
