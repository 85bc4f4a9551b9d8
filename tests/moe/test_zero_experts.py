"""Experts without weights: identities give their token, zeros nothing, and neither is dispatched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig, RouterConfig
from automoe.model.backend import BackendConfig
from automoe.model.block import Latent
from automoe.model.decoder import Decoder
from automoe.moe.layer import MoE
from automoe.moe.router import Router
from automoe.passes.trace import training_pass
from automoe.training.stats import StepStats, update_balance_state
from tests.support.class_models import AllInFloat64

pytestmark = pytest.mark.usefixtures("trains")

B, S, H, E, Z, K, WIDTH = 2, 12, 16, 6, 4, 3, 8
# As LongCat-Flash: a softmax over all experts, a bias that selects, weights that do not sum to one.
LONGCAT = RouterConfig(norm_topk_prob=False, routed_scaling_factor=6.0, expert_bias=True, num_zero_experts=Z)


def make_layer(router: RouterConfig = LONGCAT, latent: int = 0, **moe: Any) -> MoE:
    model = ModelConfig(
        hidden_size=H, num_experts=E, num_experts_per_token=K, moe_intermediate_size=WIDTH, router=router,
        moe_latent_size=latent,
    )  # fmt: skip
    backend = BackendConfig()
    moe = {"experts": "loop"} | moe
    layer = MoE(model, MoEConfig(**moe), 0, None, backend, Latent(model, backend)).to(torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    if layer.router.expert_bias is not None:
        layer.router.expert_bias.copy_(torch.randn(E + Z, generator=generator) / 10)
    return layer


def make_rows(padding: int = 0) -> Tokens:
    index = torch.arange(S).expand(B, S)
    doc_ids = torch.zeros(B, S, dtype=torch.int64)
    if padding:
        doc_ids[-1, -padding:] = -1
    return Tokens(index, index, doc_ids, torch.tensor(B * S - padding))


def hidden_states() -> torch.Tensor:
    return torch.randn(B, S, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64).requires_grad_()


def run(layer: Any, x: torch.Tensor, *rows: Tokens) -> list[torch.Tensor]:
    """Output, gradient of the input and of every parameter, by a sum that weighs every element differently."""
    y = layer(x, *rows)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *layer.parameters()])]


def test_output_and_gradients_are_those_of_longcat_flash_in_transformers() -> None:
    """Its class has gates and ups of identity experts too, which nothing reads: their gradient is zero."""
    from transformers import LongcatFlashConfig
    from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMoE

    sizes = dict(n_routed_experts=E, zero_expert_num=Z, moe_topk=K, expert_ffn_hidden_size=WIDTH, hidden_size=H)
    theirs = LongcatFlashMoE(LongcatFlashConfig(routed_scaling_factor=6.0, **sizes)).to(torch.float64)
    ours = make_layer()
    with torch.no_grad():
        theirs.router.classifier.weight.copy_(ours.router.weight)
        theirs.router.e_score_correction_bias.copy_(ours.router.expert_bias)
        theirs.experts.gate_up_proj.normal_()[:E] = ours.experts.gate_up_proj.flatten(1, 2)
        theirs.experts.down_proj.copy_(ours.experts.down_proj)
    with AllInFloat64():
        y, x_grad, gate_up, down, router = run(theirs, hidden_states())
    expected = [y, x_grad, router, gate_up[:E].view_as(ours.experts.gate_up_proj), down]
    got = run(ours, hidden_states(), make_rows())
    for mine, reference in zip(got, expected, strict=True):
        assert (mine - reference).norm() < 1e-12 * reference.norm()
    assert not gate_up[E:].any() and gate_up[:E].any()
    zeros = (ours.router(hidden_states(), make_rows()).topk_expert_ids >= E).sum(-1)
    assert set(zeros.flatten().tolist()) == {1, 2}, "tokens with fewer experts, each another number"


@pytest.mark.parametrize("zero_expert_type", ["identity", "zero"])
@pytest.mark.parametrize("latent", [0, 5])
def test_a_token_gets_its_experts_and_its_share_of_itself(zero_expert_type: Any, latent: int) -> None:
    """One token and one choice at a time; experts on a latent pass on what they read of it."""
    layer = make_layer(replace(LONGCAT, zero_expert_type=zero_expert_type), latent)
    x = hidden_states()
    routing = layer.router(x, make_rows())
    read = layer.latent(x)
    rows = []
    for token, ids, weights in zip(
        read.flatten(0, 1), routing.topk_expert_ids.flatten(0, 1), routing.topk_probs.flatten(0, 1), strict=True
    ):
        row = torch.zeros_like(token)
        for expert, weight in zip(ids.tolist(), weights, strict=True):
            if expert < E:
                gate, up = layer.experts.gate_up_proj[expert] @ token
                row = row + weight * (layer.experts.down_proj[expert] @ (gate * gate.sigmoid() * up))
            elif zero_expert_type == "identity":
                row = row + weight * token
        rows.append(row)
    expected = layer.latent.post_expert_proj(torch.stack(rows).view_as(read))
    got, wanted = run(layer, x, make_rows()), expected
    torch.testing.assert_close(got[0], wanted, rtol=1e-12, atol=1e-12)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=wanted.dtype).view_as(wanted)
    gradients = torch.autograd.grad((wanted * weights).sum(), [x, *layer.parameters()])
    for mine, reference in zip(got[1:], gradients, strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("experts", ["loop", "grouped_mm"])
def test_tokens_that_choose_zero_experts_alone_train_the_router_and_leave_no_gradient_out(experts: str) -> None:
    layer = make_layer(experts=experts).to(torch.float32)
    layer.router.expert_bias[E:] = 10.0
    x = hidden_states().to(torch.float32)
    routing = layer.router(x, make_rows())
    assert (routing.topk_expert_ids >= E).all()
    y, _, router, gate_up, down = run(layer, x, make_rows())
    torch.testing.assert_close(y, routing.topk_probs.sum(-1, keepdim=True) * x)
    assert router.any() and gate_up.shape == layer.experts.gate_up_proj.shape and not gate_up.any() and not down.any()


@pytest.mark.parametrize("gradient", ["input", "router"])
def test_gradients_of_a_share_are_those_of_float32_in_bfloat16(gradient: str) -> None:
    """Of tokens that choose identities alone, with all numbers rounded to bfloat16: only the share has a gradient."""
    wide = make_layer().to(torch.bfloat16).to(torch.float64)
    wide.router.expert_bias[E:] = 10.0
    narrow = make_layer().to(torch.bfloat16)
    narrow.router.weight.data = wide.router.weight.data.float()
    narrow.router.expert_bias = wide.router.expert_bias.float()
    x = hidden_states().detach().to(torch.bfloat16)
    weights = torch.linspace(-1, 1, x.numel()).view_as(x).to(torch.bfloat16)
    found = []
    for layer in (wide, narrow):
        start = x.to(layer.experts.down_proj.dtype).requires_grad_()
        y = layer(start, make_rows())
        wanted = start if gradient == "input" else layer.router.weight
        found.append(torch.autograd.grad((y.double() * weights.double()).sum(), wanted)[0].double())
    exact, got = found
    assert (got - exact).norm() < (4e-3 if gradient == "input" else 1e-5) * exact.norm()


def test_biases_move_towards_the_share_of_an_even_load_and_those_of_zero_experts_stay() -> None:
    """b_i += rate * sign(K_e / (K E) - share_i), K_e = K E / (E + Z) experts a token on average (arXiv 2509.01322)."""
    sizes = dict(num_layers=2, intermediate_size=24, shared_intermediate_size=24, vocab_size=32, moe_shortcut=True)
    experts = dict(num_experts=E, num_experts_per_token=K, moe_intermediate_size=WIDTH, hidden_size=H, first_k_dense=0)
    part = Decoder(ModelConfig(family="longcat_flash", router=LONGCAT, **sizes, **experts), MoEConfig())
    router = part.layers["0"].mlp.router
    before = torch.linspace(-1, 1, E + Z)
    router.expert_bias.copy_(before)
    counts = torch.tensor([[12.0, 8, 9, 11, 10, 0, 25, 5, 10, 10]], dtype=torch.float64)
    update_balance_state(StepStats(0.0, {}, counts, [0.0], torch.stack((counts, counts), 1)), [part], 0.25)
    target = (K * E / (E + Z)) / (K * E)
    expected = before.clone()
    expected[:E] += 0.25 * torch.sign(target - counts[0, :E] / counts.sum()).float()
    assert torch.equal(router.expert_bias, expected) and (expected[:E] != before[:E]).sum() == 5


def test_losses_and_counts_are_those_of_as_many_experts_that_compute() -> None:
    coefs = dict(seq_balance_coef=0.3, micro_batch_balance_coef=0.2, z_loss_coef=0.1)
    router, rows = make_layer(**coefs).router, make_rows(padding=5)
    model = ModelConfig(
        hidden_size=H, num_experts=E + Z, num_experts_per_token=K, router=replace(LONGCAT, num_zero_experts=0)
    )
    other = Router(model, MoEConfig(**coefs), 0)
    other.load_state_dict(router.state_dict())
    other.weight.data = router.weight.data
    with training_pass():
        other(hidden_states(), rows)
    with training_pass():
        routing = router(hidden_states(), rows)
    counts = torch.zeros(E + Z, dtype=torch.float64)
    for ids in routing.topk_expert_ids[rows.valid].tolist():
        counts[ids] += 1
    assert torch.equal(router.load.totals, other.load.totals)
    loads = router.load.views(router.load.totals)
    assert torch.equal(loads.experts[0], counts) and counts[E:].sum() > 0
    assert router.load_fractions.shape == (E + Z,) and router.weight.shape == (E + Z, H)
    shares = (hidden_states() @ router.weight.T).softmax(-1)[rows.valid]
    f = loads.experts[1] / loads.experts[1].sum()
    assert loads.losses[2].item() == pytest.approx(0.2 * (E + Z) * (f @ shares.mean(0)).item(), rel=1e-12)
