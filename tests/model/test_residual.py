"""Residuals and norms of outputs against modules of transformers in float64, and their arithmetic by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from automoe.config.schema import ModelConfig
from automoe.kernels.hyper_connections import doubly_stochastic, stream_logits
from automoe.model.init import default_dtype
from automoe.model.norm import OutputNorm
from automoe.model.residual import HyperConnection, HyperHead, ResidualGate, residual_of
from tests.support.class_models import AllInFloat64
from tests.support.releases import needs

HIDDEN = 12


def relative(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).norm().item() / theirs.norm().item()


@pytest.mark.parametrize(("streams", "iterations", "eps"), [(4, 20, 1e-6), (3, 2, 1e-2), (1, 1, 1e-6)])
def test_streams_are_collapsed_spread_and_mixed_as_in_transformers(streams: int, iterations: int, eps: float) -> None:
    """Every output and every gradient to 1e-13."""
    from transformers import AutoConfig
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    sizes = dict(hidden_size=HIDDEN, hc_mult=streams, hc_sinkhorn_iters=iterations, hc_eps=eps)
    hf = AutoConfig.for_model("deepseek_v4", **sizes, rms_norm_eps=1e-4)
    model = ModelConfig(**sizes, norm_eps=1e-4)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    with default_dtype(torch.float64), AllInFloat64():
        pairs = [
            (HyperConnection(model, None), theirs.DeepseekV4HyperConnection(hf)),
            (HyperHead(model, None), theirs.DeepseekV4HyperHead(hf)),
        ]
        for mine, other in pairs:
            for (name, ours), (named, wanted) in zip(mine.named_parameters(), other.named_parameters(), strict=True):
                assert name == named
                wanted.data = ours.data = draw(*ours.shape)
        x, out = draw(2, 5, streams * HIDDEN), draw(2, 5, HIDDEN)
        results = []
        for ours in (True, False):
            connection, head = (pair[not ours] for pair in pairs)
            given = [one.clone().requires_grad_() for one in (x, out)]
            if ours:
                h, post, comb = connection(given[0])
                mixed = connection.join(given[0], given[1], post, comb)
                last = head(mixed)
            else:
                apart = given[0].unflatten(-1, (streams, HIDDEN))
                post, comb, h = connection(apart)
                mixed = post.unsqueeze(-1) * given[1].unsqueeze(-2) + comb.transpose(-1, -2) @ apart
                last = head(mixed)
                mixed = mixed.flatten(-2)
            (h.sin().sum() + mixed.cos().sum() + last.sin().sum()).backward()
            weights = [weight.grad for module in (connection, head) for weight in module.parameters()]
            results.append([h, mixed, last, *(one.grad for one in given), *weights])
    for ours, wanted in zip(*results, strict=True):
        assert relative(ours, wanted) < 1e-13 or (wanted.norm() < 1e-12 and ours.norm() < 1e-12)


@pytest.mark.parametrize("iterations", [1, 2, 7])
def test_rows_and_columns_of_the_mixing_matrix_are_scaled_in_turn(iterations: int) -> None:
    """As written out by autograd; after many turns all sums are one."""
    logits = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    wanted = logits.exp() / logits.exp().sum(-1, keepdim=True) + 0.01
    wanted = wanted / (wanted.sum(-2, keepdim=True) + 0.01)
    for _ in range(iterations - 1):
        wanted = wanted / (wanted.sum(-1, keepdim=True) + 0.01)
        wanted = wanted / (wanted.sum(-2, keepdim=True) + 0.01)
    found = doubly_stochastic(logits, iterations, 0.01)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=0)
    weight = torch.randn(3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    gradients = [torch.autograd.grad((one * weight).sum(), logits)[0] for one in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
    settled = doubly_stochastic(logits.detach(), 200, 0.0)
    for dim in (-1, -2):
        torch.testing.assert_close(settled.sum(dim), torch.ones(3, 4, dtype=torch.float64), rtol=1e-12, atol=0)


def test_bfloat16_streams_are_kept_once_and_multiplied_in_float32() -> None:
    x = torch.randn(64, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(4)).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        found = stream_logits(x, weight, 1e-6)
    assert not [one for one in kept if one.numel() >= x.numel() and one.dtype != torch.bfloat16]
    wide = x.detach().double()
    wanted = (wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()) @ weight.detach().double().T
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@needs("muse_spark_text")
@pytest.mark.parametrize("temperature", [0.3, 2.0])
def test_gates_weight_residual_and_output_as_in_transformers(temperature: float) -> None:
    """Sum and every gradient to 1e-14, with gates so large that the residual has its least weight."""
    from transformers import AutoConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkResidualGate

    hf = AutoConfig.for_model(
        "muse_spark_text", hidden_size=HIDDEN, num_attention_heads=1, residual_gate_temperature=temperature
    )
    model = ModelConfig(hidden_size=HIDDEN, residual_gate_temperature=temperature)
    generator = torch.Generator().manual_seed(5)
    x, out = (torch.randn(2, 5, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    results = []
    with default_dtype(torch.float64):
        for kind in (residual_of(model, None), MuseSparkResidualGate(hf)):
            kind.gate.data = torch.linspace(-4, 4, HIDDEN)
            given = [one.clone().requires_grad_() for one in (x, out)]
            if isinstance(kind, ResidualGate):
                read, *weights = kind(given[0])
                assert read is given[0]
                found = kind.join(*given, *weights)
            else:
                found = kind(*given)
            found.sin().sum().backward()
            results.append([found, kind.gate.grad, *(one.grad for one in given)])
    for ours, wanted in zip(*results, strict=True):
        assert relative(ours, wanted) < 1e-14
    least = results[0][2].abs() / results[0][0].cos().abs()
    assert temperature > 1 or least[..., -1].max() < 0.04  # the root of 1e-3


@needs("muse_spark_text")
@pytest.mark.parametrize("eps", [1e-8, 0.3])
def test_a_norm_of_outputs_scales_first(eps: float) -> None:
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkTextInputScaledRMSNorm

    generator = torch.Generator().manual_seed(6)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((7, HIDDEN), (HIDDEN,)))
    results = []
    with default_dtype(torch.float64), AllInFloat64():
        for norm in (OutputNorm(eps, HIDDEN), MuseSparkTextInputScaledRMSNorm(HIDDEN, eps)):
            norm.weight.data, given = weight.clone(), x.clone().requires_grad_()
            found = norm(given)
            found.sin().sum().backward()
            results.append((found, norm.weight.grad, given.grad))
    for ours, wanted in zip(*results, strict=True):
        assert relative(ours, wanted) < 1e-13
    torch.testing.assert_close(results[0][0], OutputNorm(eps)(x * (1 + weight)))  # without a weight
    assert OutputNorm(None, HIDDEN)(x) is x
