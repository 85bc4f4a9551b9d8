"""The floors of the GPU benchmarks: bytes counted as said, and how little a MoE layer keeps."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.gpu import conf_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("gpu_floors")


@pytest.mark.parametrize("experts", ["grouped_mm", "triton"])
@pytest.mark.parametrize("model", ["qwen3_30b_a3b", "moonlight_16b_a3b", "dsv3_671b", "mixtral_8x7b"])
def test_a_layer_keeps_little_beside_its_rows_and_gate_and_up(floors: ModuleType, model: str, experts: str) -> None:
    config = conf_model(model)
    ideal = 2 * config.hidden_size + 4 * config.num_experts_per_token * config.moe_intermediate_size
    assert ideal <= floors.saved_bytes(config, experts) <= 1.03 * ideal


def test_traffic_counts_every_operand_of_an_operator_once(floors: ModuleType) -> None:
    a, b = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((8, 4), (4, 6)))
    at = torch.empty(3, dtype=torch.int64, device="meta")
    for run, expected in (
        (lambda: a @ b, 2 * (32 + 24 + 48)),
        (lambda: a.t().view(4, 8), 0),
        (lambda: torch.empty_like(a), 0),
        (lambda: a.new_zeros(5), 10),
        (lambda: a.mul_(2), 128),
        (lambda: a.index_select(0, at), 24 + 2 * 24),
        (lambda: a[:1].expand(8, 4) + a, 64 + 64 + 64),  # what is expanded has the bytes of what it shows
    ):
        with floors.traffic() as counter:
            run()
        assert counter.bytes == expected


def test_designs_move_what_their_kernels_say(floors: ModuleType) -> None:
    shape = floors.Shape(4096, 256, 128, 8, 4)
    rows, width = 2 * 4096 * 4 * 256, 2 * 4096 * 4 * 128  # bytes of [T K, H] and of [T K, I]
    tokens, weights = rows // 4, 6 * 8 * 256 * 128
    triton, plain, theirs = (floors.design_bytes(name, shape) for name in floors.DESIGNS)
    assert floors.ideal_bytes(shape) == 5 * tokens + 4 * width + 3 * weights
    assert floors.ideal_bytes(shape) < triton < plain < theirs
    # Rows: written and summed in both passes, their gradient gathered and read twice. Width: as the kernels' arguments.
    kernels = 8 * rows + 14 * width + 3 * weights + 6 * tokens
    assert triton == pytest.approx(kernels, rel=0.05)
