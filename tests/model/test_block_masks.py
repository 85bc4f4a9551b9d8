"""FlexAttention by document borders against the dense mask: the blocks that are listed, scores, and whole steps in float64.

Torch's FlexAttention refuses gradients on the CPU, though its uncompiled form has them there: the refusal is lifted.
That form reads the mask and not the lists of blocks, so these are compared by themselves.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import flex_attention

import automoe.parallel.choices
from automoe.comm.communicators import SINGLE_RANK
from automoe.comm.tokens import IGNORE, StepBatch, Tokens
from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import (
    AttentionConfig,
    Config,
    KernelsConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    TrainConfig,
)
from automoe.kernels.attention import attend, attend_in_blocks
from automoe.model import attention_masks
from automoe.model.attention_masks import block_masks, dense_masks
from automoe.model.rows import head_tail_index
from automoe.parallel.compile import compiled
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.rows import PartOfRows
from tests.support.trajectories import run_trajectory

BLOCK = 4


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """[B, q, k] bool of blocks that are listed, of counts [B, 1, q] and indices [B, 1, q, k]."""
    found = torch.zeros(indices.shape, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, counts.shape)):
        at = tuple(place.tolist())
        found[at][indices[at][: counts[at]].long()] = True
    return found[:, 0]


def blocks_of(dense: torch.Tensor, every: bool) -> torch.Tensor:
    """[B, q, k] bool of a mask [B, 1, Q, K]: blocks of which some pair is seen, or every one and none is padding."""
    _, _, queries, keys = dense.shape
    padded = torch.nn.functional.pad(dense[:, 0], (0, -keys % BLOCK, 0, -queries % BLOCK))
    blocks = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).transpose(2, 3).flatten(3)
    return blocks.all(3) if every else blocks.any(3)


@given(
    lengths=st.lists(st.integers(1, 15), max_size=6),
    with_documents=st.booleans(),
    window=st.sampled_from([0, 0, 1, 3, 9, 40]),
    num_ranks=st.sampled_from([1, 1, 2, 3]),
    data=st.data(),
)
def test_the_blocks_are_those_of_the_dense_mask(
    lengths: list[int], with_documents: bool, window: int, num_ranks: int, data: Any
) -> None:
    """Of rows of 36 positions: documents, and padding behind them; forward and transposed for the backward pass."""
    length = 36
    ids = [number for number, size in enumerate(lengths) for _ in range(size)][:length]
    docs = torch.tensor([ids + [-1] * (length - len(ids)), [0] * length])
    rank = data.draw(st.integers(0, num_ranks - 1))
    keys = PartOfRows(rank, num_ranks, docs) if num_ranks > 1 else SINGLE_RANK
    mine = head_tail_index(length, num_ranks, rank) if num_ranks > 1 else torch.arange(length)
    index = mine.expand(2, -1)
    tokens = Tokens(index, index, docs[:, mine] if with_documents else None, torch.tensor(2 * length))
    with patch.object(attention_masks, "BLOCK", BLOCK):
        got = block_masks(tokens, keys, window)
    everything = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    for mine, theirs in zip(got, dense_masks(tokens, keys, window, True), strict=True):
        assert mine[:2] == theirs[:2]
        dense = everything if theirs.mask is None else theirs.mask
        mask, places = mine.mask, [torch.arange(n) for n in dense.shape]
        assert mask.shape == dense.shape and mask.BLOCK_SIZE == (BLOCK, BLOCK)
        b, _, q, k = torch.meshgrid(*places, indexing="ij")
        assert torch.equal(mask.mask_mod(b, None, q, k), dense)
        some, full = blocks_of(dense, False), blocks_of(dense, True)
        assert torch.equal(listed(mask.kv_num_blocks, mask.kv_indices), some & ~full)
        assert torch.equal(listed(mask.full_kv_num_blocks, mask.full_kv_indices), full)
        assert torch.equal(listed(mask.q_num_blocks, mask.q_indices), (some & ~full).transpose(1, 2))
        assert torch.equal(listed(mask.full_q_num_blocks, mask.full_q_indices), full.transpose(1, 2))


def trains_on_the_cpu() -> ExitStack:
    stack = ExitStack()
    stack.enter_context(patch.object(flex_attention, "_validate_device", lambda *heads: None))
    stack.enter_context(patch.object(automoe.parallel.choices, "compiled", lambda fn: fn))
    return stack


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dims", [(24, 16), (16, 16)], ids=["mla", "gqa"])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_scores_and_gradients_are_those_of_the_dense_mask(dims: tuple[int, int], with_sinks: bool) -> None:
    length, window = 20, 7 if with_sinks else 0
    generator = torch.Generator().manual_seed(0)
    docs = torch.tensor([[0] * 3 + [1] * 11 + [-1] * 6, [0] * length])
    index = torch.arange(length).expand(2, length)
    tokens = Tokens(index, index, docs, torch.tensor(2 * length))
    shapes = ((2, length, 4, dims[0]), (2, length, 2, dims[0]), (2, length, 2, dims[1]), (4,))[: 3 + with_sinks]
    args = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    upstream = torch.randn(2, length, 4, dims[1], generator=generator, dtype=torch.float64)
    results = []
    for fn, masks in ((attend_in_blocks, block_masks), (attend, dense_masks)):
        with trains_on_the_cpu():
            out = fn(*args[:3], masks(tokens, SINGLE_RANK, window, False)[0].mask, 0.3, *args[3:])
            results.append([out, *torch.autograd.grad(out, args, upstream)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.exhaustive
def test_compiled_code_reads_the_lists_and_serves_all_micro_batches() -> None:
    """One graph for other documents and windows; a block that is not listed is not read. The CPU compiles the forward pass."""
    length, generator = 300, torch.Generator().manual_seed(0)
    index = torch.arange(length).expand(1, length)
    args = [torch.randn(1, length, heads, 32, generator=generator) for heads in (4, 2, 2)]
    fn = compiled(attend_in_blocks)
    torch._dynamo.utils.counters.clear()
    for border, window in ((100, 0), (201, 0), (200, 45)):
        tokens = Tokens(index, index, (index >= border).long(), torch.tensor(length))
        with torch.no_grad():
            mask = block_masks(tokens, SINGLE_RANK, window)[0].mask
            expected = attend(*args, dense_masks(tokens, SINGLE_RANK, window, True)[0].mask, 0.3)
            torch.testing.assert_close(fn(*args, mask, 0.3, None), expected, rtol=1e-4, atol=1e-5)
            mask.kv_num_blocks[:, :, 1] -= 1
            assert not torch.allclose(fn(*args, mask, 0.3, None), expected, atol=1e-2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


MLA = AttentionConfig(
    kind="mla",
    num_heads=4,
    num_kv_heads=4,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
WINDOWS = AttentionConfig(
    num_heads=4, num_kv_heads=2, head_dim=16, sinks=True, sliding_window=5, full_attention_interval=2
)
GQA = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True)
FAMILIES = {"deepseek_v3": MLA, "gpt_oss": WINDOWS, "qwen3_moe": GQA}
CASES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "mla": ("deepseek_v3", {}, {}),
    "sinks and windows": ("gpt_oss", {}, {}),
    "mla, cp2, recomputed": ("deepseek_v3", dict(cp=2, ep=2), dict(recompute=["core_attn"])),
    "sinks and windows, cp2 tp2": ("gpt_oss", dict(cp=2, tp=2), {}),
    "gqa, cp2 pp2": ("qwen3_moe", dict(cp=2, pp=2), {}),
    "gqa, dp2, recomputed": ("qwen3_moe", dict(dp_shard=2), dict(recompute="full")),
}


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    """Three documents a row at random borders, and padding in one row."""
    rows, length = config.train.global_batch_size, config.train.seq_len
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(48, (rows, length + 1), generator=generator)
    borders = torch.randint(1, length, (rows, 2), generator=generator).sort(1).values
    index = torch.arange(length).expand(rows, length)
    doc_ids = (index[:, :, None] >= borders[:, None]).sum(2)
    begins = torch.nn.functional.pad(borders, (1, 0)).gather(1, doc_ids)
    labels = tokens[:, 1:].clone()
    doc_ids[1, -3:], labels[1, -4:] = -1, IGNORE
    mine = slice(dp_rank * rows // dp_size, (dp_rank + 1) * rows // dp_size)
    return StepBatch(tokens[mine, :-1], labels[mine], (index - begins)[mine], doc_ids[mine], 0, 0)


def in_blocks(config: Config) -> Trajectory:
    with trains_on_the_cpu():
        return run_trajectory(replace(config, kernels=KernelsConfig(attention="flex")), batches, 2)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", list(CASES))
def test_whole_steps_are_those_of_the_dense_mask(ranks: RankPool, name: str) -> None:
    """Losses, every gradient and every updated weight."""
    family, mesh, parallel = CASES[name]
    config = Config(
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=ModelConfig(
            family=family,  # type: ignore[arg-type]
            vocab_size=48,
            hidden_size=32,
            num_layers=2,
            num_experts=4,
            num_experts_per_token=2,
            moe_intermediate_size=16,
            initializer_range=0.2,
            attention=FAMILIES[family],
        ),
        moe=MoEConfig(experts="loop"),
        train=TrainConfig(seq_len=24, global_batch_size=4, micro_batch_size=2, dtype="float64"),
    )
    config = replace(config, parallel=replace(config.parallel, **parallel))
    world = MeshShape.of(config.mesh).world_size
    expected = merge_trajectories(ranks.run(run_trajectory, world, config, batches, 2))
    got = merge_trajectories(ranks.run(in_blocks, world, config))
    compared = compare_trajectories(got, expected)
    assert {"loss", "gradient"} <= {one.kind for one in compared}
    assert max(one.error for one in compared) < 1e-12, max(compared, key=lambda one: one.error)
