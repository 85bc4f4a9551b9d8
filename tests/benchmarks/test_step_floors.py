"""What a step should take on one GPU: every operation and byte that is counted, and what follows for the milestone."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from automoe.model.flops import train_flops_per_token
from tests.support.gpu import conf_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def floors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("step_floors")


@pytest.mark.parametrize("name", ["small_dsv3", "small_qwen3_moe"])
def test_the_parts_have_all_operations_of_a_step(floors: ModuleType, name: str) -> None:
    model = conf_model(name)
    case = import_module("step_trainers").Case(model, model.num_layers, 1, rows=2, least_rows=2, seq_len=64)
    parts = floors.step_parts(case.config(model.num_layers, model.num_experts, 2))
    expected = train_flops_per_token(model, 64).causal * 2 * 64
    assert sum(part.flops for part in parts) == pytest.approx(expected, rel=1e-12)
    assert all(part.flops > 0 or part.bytes > 0 for part in parts)


def test_element_wise_passes_are_counted_and_products_are_not(floors: ModuleType) -> None:
    a, b = (torch.empty(8, 8, dtype=torch.bfloat16, device="meta") for _ in range(2))
    with floors.traffic(floors.Elementwise) as counter:
        (a @ b).mul_(2)
        a.scatter_add_(1, torch.empty(8, 1, dtype=torch.int64, device="meta"), b[:, :1])
        torch.mul(a, b, out=a)
    assert counter.bytes == 2 * 128 + 64 + 2 * 16 + 16 + 3 * 128


def test_the_loss_fused_makes_8_bytes_a_logit_of_26(floors: ModuleType) -> None:
    model = replace(conf_model("small_dsv3"), vocab_size=8192)
    case = import_module("step_trainers").Case(model, 2, 1, rows=2, least_rows=2, seq_len=256)
    config = case.config(2, model.num_experts, 2)
    compiled = replace(config, train=replace(config.train, compile=True))
    saved = floors.elementwise_bytes(config) - floors.elementwise_bytes(compiled)
    assert saved == pytest.approx(18 * 512 * model.vocab_size, rel=0.02)


def test_the_milestone_is_within_reach_of_the_slice_that_an_h200_holds(floors: ModuleType) -> None:
    """40% MFU, if the assumed rates are reached: what moves weights and logits does not make it impossible."""
    config, _ = floors.cases()["DeepSeek-V3 slice"].slice_for(floors.MEMORY["H200"])
    parts = floors.step_parts(config)
    assert 0.40 < floors.predicted_mfu(parts, "H200") < 0.55
    by_name = {part.name: part.seconds("H200") for part in parts}
    assert by_name["AdamW"] + by_name["gradient norm, clipping"] < 0.1 * sum(by_name.values())
