"""``train.compile`` on a GPU, with the kernels that inductor makes there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from device_models import relative, rows, small

from automoe.comm.tokens import StepBatch
from automoe.config.schema import Config
from tests.support.gpu import one_rank
from tests.support.trajectories import run_trajectory


@pytest.fixture
def gpu() -> Iterator[str]:
    """On the CPU tests/parallel/test_compile.py does this, since inductor takes its time there."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with one_rank("cuda"), torch._dynamo.config.patch(error_on_recompile=False):
        torch.compiler.reset()
        yield "cuda"
    torch.set_float32_matmul_precision(before)


def settled_after_one_step(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    torch._dynamo.config.error_on_recompile = step > 0
    return rows(config, step, dp_rank, dp_size)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_the_first_compiled_step_is_the_eager_one(gpu: str, family: str) -> None:
    config = small(family, "float32")
    config = replace(config, train=replace(config.train, micro_batch_size=config.train.global_batch_size))
    eager = run_trajectory(config, rows, 1, record=True, device=gpu)
    config = replace(config, train=replace(config.train, compile=True))
    compiled = run_trajectory(config, rows, 1, forced=eager.choices, device=gpu)
    assert abs(compiled.losses[0] - eager.losses[0]) <= 1e-5 * eager.losses[0]
    for name, gradient in eager.gradients[0].items():
        assert relative(compiled.gradients[0][name], gradient) <= 1e-4, name


@pytest.mark.gpu
def test_other_numbers_of_tokens_compile_nothing(gpu: str) -> None:
    config = small("deepseek_v3", "bfloat16")
    config = replace(config, train=replace(config.train, compile=True))
    run = run_trajectory(config, settled_after_one_step, 3, device=gpu)
    counts = run.expert_counts
    assert not torch.equal(counts[0], counts[1]) and not torch.equal(counts[1], counts[2])
    assert all(torch.tensor(run.losses).isfinite())
