"""Tokens in 8 bits on their way to the experts: every mesh computes what one process emulates.

The emulation rounds what the experts read in float64, without codes, scales or a mesh, and shares nothing with the
package. A row has a whole block of columns and a part of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from mesh_cases import MODELS, ROWS, Case, batches, float32
from mesh_mappings import DUAL_PIPE, FULL, HALVES, INTERLEAVED, LORA, MERGED, NODES, PADDED, PARTS

from automoe.config.schema import Config
from automoe.moe.dispatch import wire
from automoe.moe.experts import GroupedExperts
from automoe.verify.compare import Comparison, compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.trajectories import run_trajectory

WIDE = 136
FP8 = dict(dispatch_dtype="fp8")
DROP = dict(capacity_factor=1.0, drop_scope="sequence")

CASES = [
    Case("deepseek", dict(dp_shard=2, ep=2), rows=2, moe=FP8),
    Case("qwen3", dict(dp_shard=2, ep=2), rows=2, dispatcher="allgather", moe=FP8),
    Case("mixtral", dict(tp=2, etp=2), rows=2, moe=FP8 | DROP),
    Case("qwen3", dict(dp_replicate=2, dp_shard=2, ep=4), rows=1, moe=FP8, **NODES),
    Case("gpt-oss", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, moe=FP8 | PADDED),
    Case("deepseek", dict(dp_shard=2, cp=2, ep=4), rows=2, moe=FP8, gate="one_hot"),
    Case("deepseek", dict(pp=2, dp_shard=2, cp=2, ep=4), rows=1, parallel=INTERLEAVED | FULL, moe=FP8, **NODES),
    Case("deepseek", dict(pp=2, dp_shard=2, tp=2, ep=4), rows=1, parallel=DUAL_PIPE | MERGED, moe=FP8, **NODES),
    Case("deepseek-mtp", dict(pp=2, dp_shard=2, ep=2), rows=1, parallel=INTERLEAVED | MERGED, moe=FP8),
    Case("mixtral", dict(pp=2, dp_shard=2, ep=2, etp=1), rows=1, parallel=HALVES, moe=FP8),
    Case("qwen3", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, parallel=PARTS, moe=FP8),
    Case("qwen2", dict(dp_shard=8, ep=8), rows=1, moe=FP8 | DROP),
    Case("deepseek", dict(dp_shard=2, tp=2, ep=2, etp=2), rows=2, moe=FP8, lora=LORA),
]


def config_of(case: Case) -> Config:
    config = case.config
    return replace(config, model=replace(MODELS[case.family], hidden_size=WIDE))


def emulated(x: torch.Tensor) -> torch.Tensor:
    """Numbers [T, H] as e4m3 codes times a power of two for 128 columns hold them; its gradient is the identity.

    They are float32 before: rounded at once, one in millions would have another code.
    """
    parts = []
    for block in x.detach().float().to(x.dtype).split(128, dim=1):
        largest = block.abs().amax(1, keepdim=True)
        scale = torch.where(largest > 0, torch.exp2(torch.ceil(torch.log2(largest / 448))), 1.0)
        codes = block / scale
        step = torch.exp2(torch.floor(torch.log2(codes.abs().clamp_min(2.0**-6))) - 3)
        parts.append(torch.round(codes / step) * step * scale)
    return torch.cat(parts, dim=1) + (x - x.detach())


def with_emulation(*args: Any, **options: Any) -> Trajectory:
    """``run_trajectory`` of a rank whose experts read emulated rows."""
    forward = GroupedExperts.forward

    def rounded(self: GroupedExperts, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return forward(self, emulated(x), *rest)

    with mock.patch.object(GroupedExperts, "forward", rounded):
        return run_trajectory(*args, **options)


def plain(case: Case) -> Config:
    """The reference of ``case``, whose rows nothing rounds."""
    moe = {key: value for key, value in case.reference.moe.items() if key != "dispatch_dtype"}
    return config_of(replace(case.reference, moe=moe))


def compared(
    ranks: RankPool, case: Case, run: Callable[..., Trajectory] = with_emulation, config: Config | None = None
) -> list[Comparison]:
    """The first step of the case on its mesh, and that of ``run`` on one rank."""
    [expected] = ranks.run(run, 1, config or plain(case), batches, 1)
    got = merge_trajectories(ranks.run(run_trajectory, case.world_size, config_of(case), batches, 1))
    # Adam divides gradients that are almost zero by their size.
    return [c for c in compare_trajectories(got, expected) if c.kind != "updated parameter"]


@pytest.mark.one_in(13)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_mesh_computes_what_one_process_emulates(ranks: RankPool, case: Case) -> None:
    different = [c for c in compared(ranks, case) if not c.within(1e-12)]
    assert not different, different[0]


def test_rounding_is_seen(ranks: RankPool) -> None:
    """On one rank too, so that no mesh has other numbers; and by far more than the tolerance above."""
    case = replace(CASES[0], mesh={}, rows=ROWS)
    assert not [c for c in compared(ranks, case) if not c.within(1e-12)]
    off = {c.kind: c.error for c in compared(ranks, case, run_trajectory)}
    assert 1e-5 < off["loss"] < 0.1 and 1e-3 < off["gradient norm"] < 0.5


KEPT = [
    Case("deepseek", dict(dp_shard=2, ep=2), rows=1, parallel=MERGED | dict(recompute=["layernorm"]), moe=FP8),
    Case("qwen3", dict(dp_shard=4, ep=4), rows=2, moe=FP8, **NODES),
    Case("qwen3", dict(dp_shard=2, ep=2), rows=2, dispatcher="allgather", moe=FP8 | DROP),
    Case("mixtral", dict(tp=2, etp=2), rows=2, moe=FP8, lora=LORA),
]


def keeping_rows(*args: Any, **options: Any) -> Trajectory:
    """``run_trajectory`` of a rank whose experts keep the numbers that they read."""
    with mock.patch.object(wire, "discard", lambda *_: None):
        return run_trajectory(*args, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", KEPT, ids=str)
def test_what_experts_keep_in_8_bits_changes_no_bit(ranks: RankPool, case: Case) -> None:
    """In float32, whose experts are grouped products."""
    config = float32(case)
    config = replace(config, model=replace(config.model, hidden_size=WIDE))
    got, expected = (ranks.run(run, case.world_size, config, batches, 1) for run in (run_trajectory, keeping_rows))
    for one, other in zip(got, expected, strict=True):
        assert not [c for c in compare_trajectories(one, other) if c.error]
