"""``moe.overlap_shared_experts`` puts work on another stream and changes no number; without CUDA it does nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from device_models import relative, rows, small

from tests.support.trajectories import run_trajectory


@pytest.mark.parametrize("recompute", [[], ["shared_experts"], "full"], ids=str)
def test_shared_experts_on_their_own_stream(device: torch.device, recompute: list[str] | str) -> None:
    """Two micro-batches, so that weight gradients accumulate on the side stream before FSDP reads them."""
    plain = small("deepseek_v3", "float32")
    assert plain.model.num_shared_experts and plain.train.global_batch_size > plain.train.micro_batch_size
    plain = replace(plain, parallel=replace(plain.parallel, recompute=recompute))
    beside, inline = (
        run_trajectory(
            replace(plain, moe=replace(plain.moe, overlap_shared_experts=overlap)), rows, 1, device=str(device)
        )
        for overlap in (True, False)
    )
    tolerance = 1e-5 if device.type == "cuda" else 0.0  # sums by atomics are not the same twice
    assert beside.losses[0] == pytest.approx(inline.losses[0], rel=tolerance)
    assert beside.gradients[0].keys() == inline.gradients[0].keys()
    for name, gradient in inline.gradients[0].items():
        assert relative(beside.gradients[0][name], gradient) <= tolerance, name
