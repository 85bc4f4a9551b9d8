"""The Triton kernels, in the interpreter where there is no GPU, against the float64 loop; and that they compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from automoe.errors import BackendError
from automoe.kernels import launches, tiling
from automoe.kernels.tiling import row_tiles, tile_height
from automoe.moe.experts import expert_backend, loop_experts
from tests.support.experts import flat


def arguments(
    counts: list[int], tokens: int, hidden: int, width: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    rows, experts = sum(counts), len(counts)
    return [
        normal(tokens, hidden),
        torch.randint(max(tokens, 1), (rows,), generator=generator),
        torch.tensor(counts).cumsum(0).int(),
        torch.rand(rows, generator=generator).requires_grad_(),
        normal(experts, 2, width, hidden),
        normal(experts, hidden, width),
    ]


def run(function, args: list[torch.Tensor]) -> list[torch.Tensor]:
    """Output and the gradients of all that is trained."""
    out = flat(function)(*args)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out.dtype)
    trained = [arg for arg in args if arg.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, trained, upstream)]


def in_float64(args: list[torch.Tensor]) -> list[torch.Tensor]:
    return [arg.detach().double().requires_grad_() if arg.requires_grad else arg for arg in args]


@settings(max_examples=6)
@given(
    counts=st.lists(st.sampled_from([0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=5),
    tokens=st.integers(1, 30),
    hidden=st.sampled_from([7, 12, 20, 36, 41]),
    width=st.sampled_from([1, 4, 16, 19, 40]),
    biased=st.booleans(),
)
def test_any_shape_and_any_load_equals_the_loop(counts, tokens, hidden, width, biased) -> None:
    args = arguments(counts, tokens, hidden, width)
    if biased:
        args += [torch.randn(len(counts), 2, width).requires_grad_()]
        args += [torch.randn(len(counts), hidden).requires_grad_()]
    for got, expected in zip(run(expert_backend("triton"), args), run(loop_experts, in_float64(args)), strict=True):
        assert (got.double() - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_run_repeats_bit_for_bit(dtype: torch.dtype) -> None:
    args = arguments([5, 0, 33, 2], 11, 24, 20, dtype)
    first, second = run(expert_backend("triton"), args), run(expert_backend("triton"), args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.exhaustive
def test_copies_by_the_accelerator_and_by_threads_give_the_same_numbers(monkeypatch) -> None:
    args = arguments([5, 0, 33, 2], 11, 24, 20)
    described = MagicMock(side_effect=launches._described)
    monkeypatch.setattr(launches, "_described", described)
    first = run(expert_backend("triton"), args)
    assert described.call_count == 7  # the weights of four products, the rows of the three that do not gather
    monkeypatch.setattr(tiling, "_INTERPRETED", replace(tiling._INTERPRETED, tma=False))
    second = run(expert_backend("triton"), args)
    assert described.call_count == 7
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.exhaustive
def test_arguments_may_lie_in_memory_in_any_way() -> None:
    args = arguments([5, 0, 33, 2], 11, 24, 20)
    expected = run(expert_backend("triton"), args)
    args = [arg.detach() for arg in args]
    for at, arg in enumerate(args):
        apart = torch.stack((arg, arg), dim=-1)[..., 0]
        args[at] = apart.requires_grad_(arg.is_floating_point())
        assert not apart.is_contiguous()
    got = run(expert_backend("triton"), args)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_one_expert_cut_from_many_is_described_by_its_shape() -> None:
    x, gather_idx, offsets, probs, gate_up_proj, down_proj = (arg.detach() for arg in arguments([9], 4, 8, 1))
    wide = torch.zeros(129).as_strided((1, 8, 1), (129, 1, 1)).copy_(down_proj)
    expected = flat(expert_backend("loop"))(x, gather_idx, offsets, probs, gate_up_proj, down_proj)
    got = flat(expert_backend("triton"))(x, gather_idx, offsets, probs, gate_up_proj, wide)
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_rows_past_the_last_offset_reach_no_weight_and_no_token() -> None:
    args = arguments([3, 0, 17], 9, 16, 8)
    expected = run(expert_backend("triton"), args)
    longer = list(args)
    longer[1] = torch.cat((args[1], torch.zeros(6, dtype=torch.int64)))
    longer[3] = torch.cat((args[3].detach(), torch.full((6,), torch.nan))).requires_grad_()
    out = flat(expert_backend("triton"))(*longer)
    upstream = torch.randn((20, 16), generator=torch.Generator().manual_seed(0))
    upstream = torch.cat((upstream, torch.full((6, 16), torch.nan)))
    grad_x, grad_probs, *grad_weights = torch.autograd.grad(out, [arg for arg in longer if arg.requires_grad], upstream)
    got = [out[:20].detach(), grad_x, grad_probs[:20], *grad_weights]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_gate_and_up_are_all_that_is_kept_besides_the_arguments() -> None:
    """2TH + 4TKI bytes with the tokens themselves: 28 KiB a token for Qwen3-30B-A3B in bfloat16."""
    args = arguments([16, 8, 8], 8, 32, 24, torch.bfloat16)
    given_storage = {arg.untyped_storage().data_ptr() for arg in args}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in given_storage:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        flat(expert_backend("triton"))(*args)
    assert sum(saved.values()) == 32 * 2 * 24 * 2  # rows x (gate, up) x width x bytes


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.sampled_from([16, 32]))
def test_tiles_cover_every_row_once_and_never_cross_an_expert(counts: list[int], height: int) -> None:
    offsets = torch.tensor(counts).cumsum(0)
    tiles = row_tiles(offsets, sum(counts), height)
    covered = []
    for expert, first in zip(tiles.expert.tolist(), tiles.first_row.tolist(), strict=True):
        if expert < len(counts):
            covered += [(row, expert) for row in range(first, min(first + height, int(offsets[expert])))]
    assert covered == [(row, e) for row, e in enumerate(e for e, n in enumerate(counts) for _ in range(n))]


def test_tiles_are_as_high_as_experts_are_busy() -> None:
    assert [tile_height(rows, 128) for rows in (0, 128, 128 * 17, 128 * 100, 128 * 4096)] == [
        16, 16, 32, 128, 128,
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_every_kernel_compiles_for_hopper_without_spilling() -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    made = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    for name, facts in json.loads(made.stdout).items():
        assert facts["spilled"] == 0, (name, facts)
        assert facts["shared"] <= 227 * 1024, (name, facts)
        # Hopper's matrix instructions take 64 rows; tiles of fewer run on Ampere's. None multiplies float32 in full.
        without = name.startswith(("sum", "rope", "quantize", "adamw")) or name.endswith(("16 rows", "float32"))
        assert facts["matrix_units"] or without, (name, facts)
        assert facts["exact"] or not name.startswith("adamw"), (name, facts)


def test_a_gpu_without_room_for_the_blocks_is_told_what_serves_it(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, fine in (((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of=capability: of)
        if fine:
            expert_backend("triton")
            continue
        with pytest.raises(BackendError, match=rf"capabilities 9 and 10.*\({capability[0]}.*grouped_mm"):
            expert_backend("triton")


@pytest.mark.exhaustive
def test_a_model_on_the_cpu_is_told_where_the_kernels_run() -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    code = (
        "import torch; from automoe.moe.experts import ExpertWeights, expert_backend; x = torch.ones(1, 16);"
        "expert_backend('triton')(x, torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.int32),"
        "torch.ones(1), ExpertWeights(torch.ones(1, 2, 16, 16), torch.ones(1, 16, 16)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "BackendError: moe.experts=triton needs a CUDA device" in ended.stderr
    assert "moe.experts=grouped_mm" in ended.stderr
