"""Tiny models of transformers, whole and with their experts over ranks, compared in logits and in every gradient."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

_SIZES = dict(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=24,
    num_experts_per_tok=3,
)
_FAMILIES = {
    "qwen3_moe": dict(num_experts=8, moe_intermediate_size=24, norm_topk_prob=True),
    "mixtral": dict(num_local_experts=8),
    "gpt_oss": dict(num_local_experts=8, sliding_window=8),
    "deepseek_v3": dict(
        n_routed_experts=8,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
}
EXPERTS = "model.layers.*.mlp.experts"  # in all of these families


def tiny_model(family: str) -> nn.Module:
    """A model with random weights in float64, the same in every process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SIZES | _FAMILIES[family])
    config._attn_implementation = config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).double()
    for name, parameter in model.named_parameters():
        if "experts" in name:  # biases are zeros at first
            nn.init.normal_(parameter, std=0.1)
    return model


def logits_and_gradients(model: nn.Module, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
    logits = model(rows, use_cache=False).logits
    (logits.square().sum() / num_tokens).backward()
    return logits.detach()


def worst_difference(model: nn.Module, whole: nn.Module) -> float:
    """Run ``model``, whose experts are sharded, on this rank's rows, and ``whole`` on the rows of all ranks.

    Returns the largest difference of logits, and of gradients relative to the largest number of each.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.randint(97, (size * 2, 17), generator=torch.Generator().manual_seed(1))
    mine = slice(2 * rank, 2 * rank + 2)
    expected = logits_and_gradients(whole := copy.deepcopy(whole), rows, rows.numel())
    worst = (logits_and_gradients(model, rows[mine], rows.numel()) - expected[mine]).abs().max()
    wanted = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if isinstance(grad, DTensor):
            holders = dist.get_world_size() // grad.device_mesh.size()
            grad = grad.full_tensor()
        else:
            holders = dist.get_world_size()
        if holders > 1:  # ranks without a part in the mesh have other rows; all ranks of a mesh have the same tensor
            grad = grad.clone()
            dist.all_reduce(grad)
            grad = grad * holders / dist.get_world_size()
        worst = max(worst, (grad - wanted[name].grad).abs().max() / wanted[name].grad.abs().max())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()
