"""The runner of pipeline stages under torch's schedules, and the choice of a rank's runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from automoe.comm.tokens import MicroBatch
from automoe.config.facts import SENDS_KEPT
from automoe.config.mesh_shape import stage_layers
from automoe.config.pipeline import SINGLE, pipeline_order, rank_of_stage
from automoe.config.schema import Config
from automoe.interop.torch_pipelining import (
    BufferlessStage,
    errors_of_stages,
    ordered_schedule,
    replaced_waits,
    starts_sends_one_by_one,
    unshard_every_stage_once,
    wait_as_schedules_do,
)
from automoe.interop.torch_private import gloo_timeout
from automoe.model.causal_lm import CausalLM
from automoe.model.params import num_states
from automoe.parallel.fsdp import COMPUTE_DTYPES
from automoe.parallel.mesh import Meshes
from automoe.parallel.overlap import MERGED_PASSES
from automoe.parallel.runner import SingleStageRunner, StepRunner
from automoe.parallel.shared_gradients import earlier_gradients_added

# The two schedules in which torch batches a send with a receive; all others are orders of actions
# (``config.pipeline``).
SCHEDULES = dict(zip(SINGLE, (ScheduleGPipe, Schedule1F1B), strict=True))

unshard_every_stage_once()  # a pipeline frees unsharded weights only at the end of a step


Neighbours = tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]


class StepShape(NamedTuple):
    """Sizes of a training or validation step on one rank.

    Attributes:
        num_micro_batches: number of micro-batches.
        rows: sequences of a micro-batch.
        positions: positions of a sequence that this rank has (context parallelism).
    """

    num_micro_batches: int
    rows: int
    positions: int


class Stage(BufferlessStage):
    """Pipeline stage that limits the number of its sends in flight.

    Attributes:
        neighbours: groups with the ranks of the previous and of the next stage
            (``Meshes.pipeline_neighbours``). An entry is None if there is no such stage, or if its
            rank is not adjacent in the ring of pipeline ranks; sends and receives then use the
            group of all pipeline ranks. The attribute is set under schedules that start sends one
            by one. Torch would wait for all of them at the end of the step and keep every sent
            tensor alive; instead the stage starts sends itself and waits for each one after
            ``SENDS_KEPT`` more. That is safe, since the peer posts its receives in the order of
            the schedule. The attribute is None under schedules that batch sends with receives in
            the group of all pipeline ranks.
    """

    neighbours: Neighbours | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outputs_sent: deque[list[dist.Work]] = deque()
        self._gradients_sent: deque[list[dist.Work]] = deque()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_neighbour(0, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._with_neighbour(1, super().get_fwd_send_ops(fwd_chunk_id))
        return self._send(ops, self._outputs_sent)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._with_neighbour(1, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        ops = self._with_neighbour(0, super().get_bwd_send_ops(bwd_chunk_id))
        return self._send(ops, self._gradients_sent)

    def _with_neighbour(self, which: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if self.neighbours is not None and (group := self.neighbours[which]) is not None:
            for op in ops:
                op.group, op.group_peer = group, dist.get_group_rank(group, op.peer)
        return ops

    def _send(self, ops: list[dist.P2POp], sent: deque[list[dist.Work]]) -> list[dist.P2POp]:
        if self.neighbours is None:
            return ops
        works = (
            dist.isend(op.tensor, group=op.group, group_dst=op.group_peer, tag=op.tag) for op in ops
        )
        sent.append([work for work in works if work is not None])
        _wait_for_sends(sent, SENDS_KEPT)
        return []

    def finish_sends(self) -> None:
        """Wait for all sends at the end of a step."""
        _wait_for_sends(self._outputs_sent, 0)
        _wait_for_sends(self._gradients_sent, 0)


def _wait_for_sends(sent: deque[list[dist.Work]], num_buffers: int) -> None:
    while len(sent) > num_buffers:
        wait_as_schedules_do(sent.popleft())


def wait_for_ranks(works: list[dist.Work], timeout: timedelta) -> None:
    """Wait for sends or receives.

    The watchdog of hanging ranks recognises this function by name: a rank inside it is waiting for
    its peers.

    Args:
        works: handles of the sends or receives.
        timeout: longest wait for each.
    """
    for work in works:
        work.wait(timeout)


@contextmanager
def receives_in_time(group: dist.ProcessGroup | None, device: torch.device) -> Iterator[None]:
    """Within the context make torch's schedules wait for gloo only as long as ``group``'s current timeout.

    Else they would use the timeout that the group was created with. On CUDA, or if ``group`` is
    None, nothing is replaced: NCCL's watchdog ends late operations, and a wait with a timeout would
    block the host.
    """
    timeout = gloo_timeout(group) if group is not None and device.type == "cpu" else None
    if timeout is None:  # torch's fake groups have none
        yield
        return
    with replaced_waits(lambda works: wait_for_ranks(works, timeout())):
        yield


class PipelineRunner(StepRunner):
    """Runner of this rank's stages under one of torch's pipeline schedules.

    Stages are given the shapes of their inputs and outputs: else torch would infer these by a real
    forward and backward on uninitialised activations, and routers would count their tokens as
    expert loads.
    """

    def __init__(
        self, model_parts: dict[int, CausalLM], meshes: Meshes, config: Config, device: torch.device
    ) -> None:
        super().__init__(model_parts, meshes, config, device)
        self.first = 0 in model_parts
        self.last = meshes.shape.pp * config.parallel.stages_per_rank - 1 in model_parts
        self.meshes = meshes
        self._group = meshes.pipeline_group()
        self._ring = cache(meshes.pipeline_neighbours)  # collective: made once, if it is needed
        train = config.train
        count = train.global_batch_size // meshes.shape.dp // train.micro_batch_size
        positions = train.seq_len // meshes.shape.cp
        self._build_schedule(StepShape(count, train.micro_batch_size, positions))

    def _build_schedule(self, step_shape: StepShape) -> None:
        """Set ``self.stages`` and ``self.schedule`` (torch's) to new ones for steps of these sizes."""
        self._step_shape = step_shape
        self.stages = self._build_stages(step_shape)
        pp, parallel = self.meshes.shape.pp, self.config.parallel
        name, merged = parallel.schedule, parallel.overlap_all_to_all
        num_micro_batches = step_shape.num_micro_batches
        options: dict[str, Any] = dict(
            n_microbatches=num_micro_batches, loss_fn=lambda loss, _: loss.sum(), scale_grads=False
        )
        if name in SCHEDULES and not merged:
            self.schedule = SCHEDULES[name](self.stages[0], **options)
        else:
            order = pipeline_order(name, pp, len(self.stages), num_micro_batches, merged)
            self.schedule = ordered_schedule(self.stages, order, MERGED_PASSES.run, **options)
        if pp > 1 and starts_sends_one_by_one(self.schedule):
            for stage in self.stages:
                stage.neighbours = self._neighbours(stage.stage_index)

    def _build_stages(self, step_shape: StepShape) -> list[Stage]:
        """Return a pipeline stage for each model part of this rank, with inputs and outputs of these sizes."""
        config, shape = self.config, self.meshes.shape
        rows, positions = step_shape.rows, step_shape.positions
        compute = COMPUTE_DTYPES[config.train.dtype]

        def meta(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(
                size, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point
            )

        tokens = meta(rows, positions, dtype=torch.int64)
        hidden = meta(rows, positions // shape.tp, config.model.residual_width, dtype=compute)
        loss = meta(1, dtype=torch.promote_types(compute, torch.float32))
        sent = [
            (hidden,) * num_states(config.model, layers) for layers in stage_layers(config, shape)
        ]
        stages = []
        for stage, part in self.model_parts.items():
            arguments = tokens if stage == 0 else sent[stage - 1]
            returned = loss if stage == len(sent) - 1 else sent[stage]
            stages.append(
                Stage(
                    part,
                    stage,
                    num_stages=len(sent),
                    device=self.device,
                    group=self._group,
                    input_args=arguments,
                    output_args=returned,
                )
            )
        return stages

    def _neighbours(self, stage: int) -> Neighbours:
        """Return two groups of two ranks each: of this one and that of the stage before number ``stage``,
        and of this one and that of the stage after it.

        A group is None if there is no such stage, or if its rank is not adjacent to this rank in
        the ring of pipeline ranks.
        """
        pp = self.meshes.shape.pp
        coordinate = self.meshes.coordinate("pp")
        before, behind = self._ring()
        groups = [((coordinate - 1) % pp, before), ((coordinate + 1) % pp, behind)]

        def group_with(other: int, groups: list[tuple[int, dist.ProcessGroup]]):
            if not 0 <= other < pp * len(self.stages):
                return None
            rank = rank_of_stage(other, pp, self.config.parallel.schedule)
            return next((group for neighbour, group in groups if neighbour == rank), None)

        # Two ranks are neighbours on both sides: the stage before has the first group of the two.
        return group_with(stage - 1, groups), group_with(stage + 1, groups[::-1])

    def _train(self, inputs: MicroBatch) -> Tensor:
        losses: list[Tensor] = []
        self._run("step", inputs, losses)
        MERGED_PASSES.check_nothing_is_deferred()
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        return torch.stack(losses).detach().to(zero).sum() if losses else zero

    @torch.no_grad()
    def _outputs(self, inputs: MicroBatch) -> Tensor | None:
        outputs = self._run("eval", inputs, [])
        for stage in self.stages:  # torch keeps the outputs of all micro-batches
            stage.clear_runtime_states()
        return outputs

    def _run(self, method: str, inputs: MicroBatch, losses: list[Tensor]) -> Tensor | None:
        # With train.rampup_batch_size, steps have fewer micro-batches than validation has, and a
        # session's rows are as long as its samples.
        rows = self.micro_batch_rows
        num_rows, positions = inputs.tokens.shape
        step_shape = StepShape(num_rows // rows, rows, positions)
        if step_shape != self._step_shape:
            self._build_schedule(step_shape)
        parameters = [p for part in self.model_parts.values() for p in part.parameters()]
        with (
            # torch forgets earlier gradients where stages are new or begin or cease to train
            earlier_gradients_added(parameters),
            receives_in_time(self.stages[0].group, self.device),
            errors_of_stages(),
        ):
            run = getattr(self.schedule, method)
            # Torch's schedule hands a positional input to the first stage. It cuts a target into
            # micro-batches by rows, for the loss after the last stage.
            tokens = [inputs.tokens] if self.first else []
            labels = inputs.labels if self.last else None
            losses_or_outputs = run(*tokens, target=labels, losses=losses, batch=inputs)
            for stage in self.stages:
                stage.finish_sends()
        return losses_or_outputs


def build_runner(
    model_parts: dict[int, CausalLM], meshes: Meshes, config: Config, device: torch.device
) -> StepRunner:
    """Return the runner of this rank's stages: without a pipeline, or under torch's schedules.

    Micro-batches whose passes are merged (``parallel.overlap_all_to_all``) need a schedule too.
    """
    if meshes.shape.pp == 1 and not config.parallel.overlap_all_to_all:
        return SingleStageRunner(model_parts, meshes, config, device)
    return PipelineRunner(model_parts, meshes, config, device)
