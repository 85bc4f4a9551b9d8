"""The gated delta rule against its recurrence, token by token, and the causal convolution against torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from automoe.comm.tokens import MicroBatch
from automoe.config.schema import AttentionConfig, ModelConfig, MoEConfig
from automoe.kernels.delta_rule import CHUNK, UNIT_EPS, causal_conv, gated_delta_rule
from automoe.model.decoder import Decoder
from automoe.model.init import default_dtype, initialize

B, G, N, DK, DV = 2, 2, 6, 5, 7


def inputs(size: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(B, size, G, DK), normal(B, size, G, DK), normal(B, size, N, DV)
    # Decays from almost none to almost all within a token.
    log_decay, beta = -normal(B, size, N).mul(2).exp(), normal(B, size, N).sigmoid()
    return [x.to(dtype).requires_grad_() for x in (q, k, v, log_decay, beta)]


def recurrent(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """S <- exp(g) S, S <- S + beta k (v - S^T k)^T, o = S^T q."""
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + UNIT_EPS).sqrt() for x in (q, k))
    state, outputs = torch.zeros(B, N, DK, DV, dtype=v.dtype), []
    key_head = torch.arange(N) // (N // G)
    for t in range(v.shape[1]):
        query, key = q[:, t, key_head] * DK**-0.5, k[:, t, key_head]
        state = log_decay[:, t].exp()[..., None, None] * state
        missing = v[:, t] - torch.einsum("bnkv,bnk->bnv", state, key)
        state = state + torch.einsum("bnk,bnv->bnkv", key, beta[:, t, :, None] * missing)
        outputs.append(torch.einsum("bnkv,bnk->bnv", state, query))
    return torch.stack(outputs, dim=1)


def outputs_and_gradients(function, args: list[torch.Tensor]) -> list[torch.Tensor]:
    out = function(*args)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, args, upstream)]


@pytest.mark.parametrize(("size", "chunk"), [(1, 4), (4, 4), (13, 4), (16, 4), (13, 64), (70, 64)])
def test_chunks_compute_the_recurrence(size: int, chunk: int) -> None:
    expected = outputs_and_gradients(recurrent, inputs(size))
    got = outputs_and_gradients(lambda *args: gated_delta_rule(*args, chunk=chunk), inputs(size))
    names = ("out", "q", "k", "v", "log_decay", "beta")
    for name, mine, theirs in zip(names, got, expected, strict=True):
        error = (mine - theirs).norm()
        assert error <= 1e-11 * (theirs.norm() + 1e-9), f"{name}: {error / theirs.norm():.1e}"


def test_narrow_numbers_are_computed_wide() -> None:
    expected = recurrent(*inputs(40))
    got = gated_delta_rule(*inputs(40, torch.bfloat16))
    assert got.dtype == torch.bfloat16
    assert (got.double() - expected).norm() < 0.02 * expected.norm()


def test_a_position_changes_nothing_before_it() -> None:
    args = [x.detach() for x in inputs(20)]
    before = gated_delta_rule(*args, chunk=8)
    for x in args:
        x[:, 11] *= 0.5
    after = gated_delta_rule(*args, chunk=8)
    assert torch.equal(before[:, :11], after[:, :11])
    assert not torch.allclose(before[:, 11:], after[:, 11:])


@pytest.mark.parametrize("width", [1, 3, 4])
def test_the_convolution_is_torchs_with_zeros_in_front(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 1, width, generator=generator, dtype=torch.float64)
    wanted = F.conv1d(x.transpose(1, 2), weight, padding=width - 1, groups=6)[..., :9].transpose(1, 2)
    torch.testing.assert_close(causal_conv(x, weight), wanted, rtol=1e-12, atol=1e-12)


def test_a_convolution_sees_its_own_document_alone() -> None:
    x, weight = torch.randn(1, 11, 3, dtype=torch.float64), torch.randn(3, 1, 4, dtype=torch.float64)
    doc_ids = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 2, 2, -1, -1]])
    parts = [causal_conv(part, weight) for part in x.split((5, 1, 3, 2), dim=1)]
    torch.testing.assert_close(causal_conv(x, weight, doc_ids), torch.cat(parts, dim=1), rtol=0, atol=1e-14)


@pytest.mark.parametrize("split", [False, True])
def test_packed_documents_are_computed_as_documents_alone(split: bool) -> None:
    """Logits, loss and every gradient; a document of one token, and one longer than a chunk."""
    attention = AttentionConfig(
        num_heads=2, num_kv_heads=1, head_dim=8, qk_norm=True, output_gate=True, full_attention_interval=2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=6, linear_value_head_dim=4,
        linear_split_projections=split,
    )  # fmt: skip
    config = ModelConfig(
        family="qwen3_next", vocab_size=50, hidden_size=16, num_layers=2, num_experts=4, moe_intermediate_size=8,
        attention=attention,
    )  # fmt: skip
    with default_dtype(torch.float64):
        model = Decoder(config, MoEConfig(experts="loop"))
    initialize(model, 0.5, 3)
    sizes = (CHUNK + 9, 1, 2, 30, 6)
    tokens = torch.randint(50, (1, sum(sizes)), generator=torch.Generator().manual_seed(4))
    doc_ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[None]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    with torch.no_grad():
        packed = model.eval()(batch=MicroBatch(tokens, positions=positions, doc_ids=doc_ids))
        alone = torch.cat([model(part) for part in tokens.split(sizes, dim=1)], dim=1)
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    weights = torch.randn(packed.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = []
    for given in ([(tokens, positions, doc_ids, weights)], list(zip(
        *(one.split(sizes, dim=1) for one in (tokens, positions, torch.zeros_like(doc_ids), weights)), strict=True
    ))):  # fmt: skip
        model.zero_grad()
        for ids, places, docs, weight in given:
            (model(batch=MicroBatch(ids, positions=places, doc_ids=docs)) * weight).sum().backward()
        found.append({name: one.grad.clone() for name, one in model.named_parameters()})
    for name, grad in found[0].items():
        assert (grad - found[1][name]).norm() <= 1e-10 * found[1][name].norm(), name
