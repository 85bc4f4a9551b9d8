"""Sinks and windows against the softmax written out, in float64; what layers see is what the mask says."""

from __future__ import annotations

import pytest
import torch

from automoe.comm.communicators import Communicator, ProcessGroupCollection
from automoe.comm.tokens import Tokens
from automoe.config.context import gathers_latents
from automoe.config.schema import AttentionConfig, ModelConfig
from automoe.kernels.attention import attend
from automoe.model.attention import AttentionSetup
from automoe.model.attention_masks import QueryBlock, attention_mask, dense_masks
from automoe.model.backend import BackendConfig
from automoe.model.decoder import Decoder
from automoe.model.rows import gather_row, head_tail_index
from tests.support.configurations import quick_config
from tests.support.rows import PartOfRows

B, S, N, G, D = 2, 11, 4, 2, 6


def rows(doc_ids: torch.Tensor | None) -> Tokens:
    index = torch.arange(S).expand(B, S)
    return Tokens(index, index, doc_ids, torch.tensor(B * S))


def written_out(q, k, v, allowed, scale, sinks):
    """exp(score) v over the keys that are allowed, divided by their sum and the sink's."""
    k, v = (x.repeat_interleave(N // G, dim=2) for x in (k, v))
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
    weights = torch.where(allowed, scores.exp(), 0)
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("bnqk,bknd->bqnd", weights / total, v)


def allowed_pairs(doc_ids: torch.Tensor | None, window: int) -> torch.Tensor:
    pairs = torch.zeros(B, 1, S, S, dtype=torch.bool)
    for b in range(B):
        for query in range(S):
            for key in range(query + 1):
                near = not window or query - key < window
                pairs[b, 0, query, key] = near and (doc_ids is None or doc_ids[b, query] == doc_ids[b, key])
    return pairs


DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [-1] * 2])


@pytest.mark.parametrize("doc_ids", [None, DOCUMENTS], ids=["one_document", "documents"])
@pytest.mark.parametrize("window", [0, 1, 4, S + 3])
@pytest.mark.parametrize("dim", [D, 8])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_attention_is_the_softmax_over_what_is_seen(
    doc_ids: torch.Tensor | None, window: int, dim: int, with_sinks: bool
) -> None:
    generator = torch.Generator().manual_seed(window)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    args = [normal(B, S, N, dim), normal(B, S, G, dim), normal(B, S, G, dim)]
    sinks = normal(N) if with_sinks else None
    trained = [*args, sinks] if sinks is not None else args
    mask = attention_mask(rows(doc_ids), window=window)
    assert (mask is None) == (doc_ids is None and not window)
    got = attend(*args, mask, dim**-0.5, sinks)
    wanted = written_out(*args, allowed_pairs(doc_ids, window), dim**-0.5, sinks)
    upstream = torch.linspace(-1, 1, got.numel(), dtype=torch.float64).view(got.shape)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(got, trained, upstream), torch.autograd.grad(wanted, trained, upstream), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [0, 1, 3, 20])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_ranks_that_share_rows_compute_what_is_seen(window: int, with_documents: bool, with_sinks: bool) -> None:
    """Each rank the same 2 P + 1 pairs of chunks, of 4 P; with a window those near the diagonal."""
    length, computed = 12, []
    generator = torch.Generator().manual_seed(window)
    q, k, v = (torch.randn(B, length, n, D, generator=generator, dtype=torch.float64) for n in (N, G, G))
    sinks = torch.randn(N, generator=generator, dtype=torch.float64) if with_sinks else None
    docs = torch.tensor([[0] * 3 + [1] * 9, [0] * 10 + [-1] * 2])
    index = torch.arange(length)
    near = (index <= index[:, None]) & (index > index[:, None] - (window or length))
    allowed = near & (docs[:, None, :] == docs[:, :, None]) if with_documents else near.expand(B, -1, -1)
    wanted = written_out(q, k, v, allowed[:, None], 0.5, sinks)

    def counting(q, k, *others):
        computed.append(q.shape[1] * k.shape[1])
        return attend(q, k, *others)

    interval = 2 if window else 1
    attention = AttentionConfig(num_heads=N, head_dim=D, sliding_window=window, full_attention_interval=interval)
    for rank in range(3):
        mine = head_tail_index(length, 3, rank)
        keys = PartOfRows(rank, 3, docs)
        assert torch.equal(gather_row(docs[:, mine], keys), docs)
        tokens = Tokens(mine.expand(B, -1), mine.expand(B, -1), docs[:, mine] if with_documents else None, index.sum())
        runtime = BackendConfig(
            pg_collection=ProcessGroupCollection(cp=keys, key_gather=keys), attention_kernel=counting
        )
        context = AttentionSetup(ModelConfig(attention=attention), tokens, runtime, torch.float64, range(2))
        got = context.softmax_attention(q[:, mine], k, v, 0.5, window, sinks)
        torch.testing.assert_close(got, wanted[:, mine], rtol=1e-11, atol=1e-12)
        pairs, chunk = sum(computed), length // 6
        assert pairs == 7 * chunk**2 if not window else pairs <= min(2 * chunk * (chunk + window - 1), 7 * chunk**2)
        computed.clear()


def test_latents_are_gathered_where_expanding_them_again_is_cheaper_than_sending_more() -> None:
    """DeepSeek-V3: 512 numbers a token that expand to 256 for each of 128 heads."""
    assert gathers_latents(512, 128 * 256, "cuda", 2)
    assert gathers_latents(512, 128 * 256 // 4, "cuda", 2)
    assert not gathers_latents(512, 128 * 256 // 16, "cuda", 2), "mesh.tp=16"
    assert not gathers_latents(512, 128 * 256, "cpu", 4)
    assert gathers_latents(8, 24, "cpu", 8) and not gathers_latents(24, 24, "cpu", 8)


@pytest.mark.parametrize(
    ("name", "layers", "windows"),
    [("gpt_oss", (0, 2), [64]), ("gpt_oss", (0, 1), [0, 64]), ("qwen3_next", (0, 1, 2), []), ("qwen3_next", (3,), [0])],
)
def test_a_stage_makes_the_masks_that_its_layers_read(name: str, layers: tuple[int, ...], windows: list[int]) -> None:
    """A dense mask of a long row is large: none for a delta net, no causal one beside a window's."""
    made = []

    def masks(tokens: Tokens, keys: Communicator, window: int, always: bool) -> list[QueryBlock]:
        made.append(window)
        return dense_masks(tokens, keys, window, always)

    config = quick_config(overrides=[f"model=small_{name}"])
    stage = Decoder(config.model, config.moe, layers, predicts=False, backend=BackendConfig(masks=masks))
    stage(torch.arange(8).view(1, -1))
    assert sorted(made) == windows
