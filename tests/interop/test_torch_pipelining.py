"""Each part of torch's pipelining that the package changes is there and means what it takes it for (``test_torch_private.py``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, schedules

from automoe.config.pipeline import pipeline_order, stages_of_ranks
from automoe.errors import DataError
from automoe.interop import torch_pipelining
from automoe.verify.pool import RankPool

pytestmark = pytest.mark.usefixtures("release")
CPU = torch.device("cpu")


def test_interleaved_schedules_start_sends_one_by_one() -> None:
    for kind, one_by_one in ((ScheduleInterleaved1F1B, True), (Schedule1F1B, False)):
        assert torch_pipelining.starts_sends_one_by_one(kind.__new__(kind)) is one_by_one


class Layer(nn.Module):
    """tanh(x W), and of a pass that trains on the last stage its mean square."""

    def __init__(self, stage: int, last: bool) -> None:
        super().__init__()
        torch.manual_seed(stage)
        self.weight, self.last = nn.Parameter(torch.randn(4, 4, dtype=torch.float64)), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(x @ self.weight)
        return out.square().mean().reshape(1) if self.last and self.training else out


def pipeline(kind: str, stages_per_rank: int) -> tuple[list[list[float]], int, set[str], int, int]:
    """An evaluation and two steps on two ranks.

    Returns gradients by stage, waits, devices of buffers, most real ones at once, and gathered stages of a step.
    """
    torch_pipelining.unshard_every_stage_once()
    num_stages, rows, micro_batches = 2 * stages_per_rank, 2, 4
    torch.set_default_dtype(torch.float64)
    group = dist.new_group()
    hidden = torch.empty(rows, 4, device="meta", requires_grad=True)
    stages, most, waited = [], 0, []
    for number in stages_of_ranks(2, stages_per_rank, schedule_of(kind))[dist.get_rank()]:
        layer, last = Layer(number, number == num_stages - 1), number == num_stages - 1
        out = torch.empty(1, device="meta", requires_grad=True) if last else hidden
        given = hidden.detach() if number == 0 else hidden
        make = torch_pipelining.BufferlessStage
        stages.append(make(layer, number, num_stages, CPU, input_args=given, output_args=out, group=group))
    infos = lambda: [  # noqa: E731
        info.buffer
        for stage in stages
        for each in (stage.args_recv_info, stage.grad_recv_info)
        for chunk in each.values()
        for info in chunk
        if getattr(info, "buffer", None) is not None
    ]

    def wait(works: list[dist.Work]) -> None:
        nonlocal most
        most = max(most, sum(buffer.device == CPU for buffer in infos()))
        waited.extend(works)
        for work in works:
            work.wait()

    options: Any = dict(n_microbatches=micro_batches, loss_fn=lambda loss, _: loss.sum(), scale_grads=False)
    pairs: list[None] = []

    def run_both(backward, forward) -> Any:
        pairs.append(backward())
        return forward()

    if kind == "1F1B":
        run: Any = Schedule1F1B(stages[0], **options)
    else:
        order = pipeline_order(schedule_of(kind), 2, stages_per_rank, micro_batches, kind == "merged")
        run = torch_pipelining.ordered_schedule(stages, order, run_both, **options)
    torch.manual_seed(9)
    x, target = torch.randn(rows * micro_batches, 4), torch.zeros(micro_batches)
    first, last = any(stage.is_first for stage in stages), any(stage.is_last for stage in stages)
    with torch_pipelining.replaced_waits(wait):
        assert schedules._wait_batch_p2p is wait
        torch_pipelining.wait_as_schedules_do([])
        for step in (run.eval, run.step, run.step):
            for stage in stages:
                stage.submod.train(step == run.step)
            step(*([x] if first else []), **({"target": target, "losses": []} if last else {}))
    assert schedules._wait_batch_p2p is not wait and isinstance(stages[0], PipelineStage)
    # of each stage and micro-batch but those that warm up
    assert kind != "merged" or len(pairs) == 3 * (micro_batches * stages_per_rank - 3 - 2 * (1 - dist.get_rank()))
    gradients = [stage.submod.weight.grad.flatten().tolist() for stage in stages]
    actions = getattr(run, "pipeline_order_with_comms", {dist.get_rank(): []})[dist.get_rank()]
    gathered = sum(action.computation_type.name == "UNSHARD" for action in actions)
    return gradients, len(waited), {buffer.device.type for buffer in infos()}, most, gathered


def schedule_of(kind: str) -> str:
    return "Interleaved1F1B" if kind == "merged" else kind


@pytest.mark.parametrize(
    ("kind", "stages_per_rank"),
    [
        ("1F1B", 1),
        ("Interleaved1F1B", 2),
        ("Interleaved1F1B", 5),
        ("merged", 2),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 2),
    ],
)
def test_a_pipeline_keeps_no_buffers_and_waits_as_we_say(ranks: RankPool, kind: str, stages_per_rank: int) -> None:
    layers = [Layer(number, number == 2 * stages_per_rank - 1) for number in range(2 * stages_per_rank)]
    torch.manual_seed(9)
    x = torch.randn(8, 4, dtype=torch.float64)
    for _ in range(2):
        for rows in x.split(2):
            for layer in layers:
                rows = layer(rows)
            rows.sum().backward()
    for rank, (gradients, waited, devices, most, gathered) in enumerate(ranks.run(pipeline, 2, kind, stages_per_rank)):
        mine = [layers[stage].weight.grad for stage in stages_of_ranks(2, stages_per_rank, schedule_of(kind))[rank]]
        for found, expected in zip(gradients, mine, strict=True):
            assert expected is not None and found == pytest.approx(expected.flatten().tolist(), rel=1e-12)
        assert waited > 0 and devices <= {"meta"}
        assert gathered == (kind != "1F1B") * stages_per_rank, "torch's own keeps three at most"
        received = 4 * stages_per_rank * 2 - (rank == 0) * 4 - (rank == 1) * 4
        assert 0 < most < received, "torch's own stage has all of them at once"


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, fails: str) -> torch.Tensor:
        if fails == "forward":
            raise DataError("no such row")
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        raise DataError("no such row") from KeyError("row 7")


class FailingLayer(Layer):
    fails = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Failing.apply(super().forward(x), self.fails)


def a_failing_step(fails: str) -> tuple[str, str, str]:
    layer = FailingLayer(0, True).double()
    layer.fails = fails
    x = torch.ones(2, 4, dtype=torch.float64)
    loss = torch.empty(1, device="meta", dtype=torch.float64, requires_grad=True)
    stage = torch_pipelining.BufferlessStage(layer, 0, 1, CPU, input_args=x, output_args=loss)
    run = Schedule1F1B(stage, n_microbatches=1, loss_fn=lambda loss, _: loss.sum())
    with pytest.raises(DataError) as raised, torch_pipelining.errors_of_stages():
        run.step(x, target=torch.zeros(1))
    return str(raised.value), str(raised.value.__cause__), raised.traceback[-1].name


@pytest.mark.parametrize(("fails", "cause"), [("forward", "None"), ("backward", "'row 7'")])
def test_a_stage_raises_its_own_error(ranks: RankPool, fails: str, cause: str) -> None:
    assert ranks.run(a_failing_step, 1, fails) == [("no such row", cause, fails)]


def test_other_errors_stay() -> None:
    with pytest.raises(RuntimeError, match="mine"), torch_pipelining.errors_of_stages():
        raise RuntimeError("mine") from KeyError("theirs")
