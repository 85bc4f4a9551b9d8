"""Private parts of torch's pipelining that automoe uses or replaces.

``torch_private`` holds the private parts of the rest of torch.

Each function says what it does, why no public function of torch does it, and which form the private
name has in the releases that were tried: 2.11, 2.13, 2.14 and 2.15.
``tests/interop/test_torch_pipelining.py`` has a test for each that fails when a release removes the
name or changes its meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from automoe.interop.torch_fsdp import parameter_groups

Works = list[dist.Work]
# For every rank, entries of one or two actions (kind, stage, micro-batch).
Order = Sequence[Sequence[tuple[tuple[str, int, int], ...]]]


def unshard_every_stage_once() -> None:
    """Make interleaved schedules keep all stages of a rank unsharded until the end of a step.

    By default torch keeps at most three stages unsharded and all-gathers the others again for every
    round of micro-batches: 39 all-gathers per step for DeepSeek-V3 with 4 stages per rank and 128
    micro-batches, instead of 4. Torch 2.11 to 2.15: schedules look up
    ``schedules._add_unshard_reshard`` in their module, so it can be replaced; they leave its
    argument ``max_active_stages`` at 3, and since 2.15 pass 3.
    """
    add = schedules._add_unshard_reshard

    def keep_all(actions: Any, *_: Any, **__: Any) -> Any:
        return add(actions, max_active_stages=sys.maxsize)

    vars(schedules)["_add_unshard_reshard"] = keep_all


@contextmanager
def errors_of_stages() -> Iterator[None]:
    """Make a pipeline schedule raise a stage's own error, within this context.

    Torch wraps that error in a ``RuntimeError``, whose message is an empty line and a list of
    tensors. Torch 2.11 to 2.15: ``raise RuntimeError(...) from error`` in modules of
    ``torch.distributed.pipelining``.
    """
    cause = None
    try:
        yield
    except RuntimeError as error:
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        name = last.tb_frame.f_globals["__name__"] if last is not None else ""
        cause = error.__cause__ if name.startswith("torch.distributed.pipelining.") else None
        if cause is None:
            raise
    if cause is not None:
        raise cause


def starts_sends_one_by_one(schedule: Any) -> bool:
    """Return True for a pipeline schedule that starts sends singly and waits for all after the step.

    Other schedules batch sends with receives. Torch 2.11 to 2.15: a subclass of
    ``schedules._PipelineScheduleRuntime``, as ``ScheduleInterleaved1F1B`` is.
    """
    return isinstance(schedule, schedules._PipelineScheduleRuntime)


def wait_as_schedules_do(works: Works) -> None:
    """Wait for sends or receives by the function that torch's schedules call.

    Torch 2.11 to 2.15: ``schedules._wait_batch_p2p(works)``, which waits for each of ``works``. It
    is looked up at every call, since ``replaced_waits`` replaces it.
    """
    schedules._wait_batch_p2p(works)


@contextmanager
def replaced_waits(wait: Callable[[Works], None]) -> Iterator[None]:
    """Within this context, make schedules and stages wait for sends and receives by ``wait``.

    Schedules have no argument for ``wait``, and wait with the timeout that a group was made with.
    Torch 2.11 to 2.15: schedules wait in ``schedules._wait_batch_p2p``. Since 2.13, stages also
    agree whether to infer shapes, by blocking ``dist.send`` and ``dist.recv``, whenever an
    evaluation begins and when training goes on after it.
    """
    waits = schedules._wait_batch_p2p
    send = dist.send
    recv = dist.recv
    schedules._wait_batch_p2p = wait
    dist.send = lambda *args, **kwargs: wait([dist.isend(*args, **kwargs)])
    dist.recv = lambda *args, **kwargs: wait([dist.irecv(*args, **kwargs)])
    try:
        yield
    finally:
        schedules._wait_batch_p2p = waits
        dist.send = send
        dist.recv = recv


def ordered_schedule(
    stages: list[PipelineStage],
    order: Order,
    run_both: Callable[[Callable[[], Any], Callable[[], Any]], Any],
    **options: Any,
) -> Any:
    """Return a pipeline schedule that runs the actions of ``order``.

    Torch adds sends, receives and all-gathers. For an entry of two actions ``run_both`` is called
    with the backward and the forward pass, and returns the result of the forward pass.

    Torch 2.11 to 2.15: ``schedules._PipelineScheduleRuntime`` publicly takes an order only as a CSV
    file, and its ``_prepare_schedule_with_comms`` takes actions. ``register_custom_function`` sets
    the function for ``OVERLAP_F_B``, an action that merges two others.

    Args:
        stages: stages of this rank.
        order: for each rank its entries in order. An entry has one action, or a forward and a
            backward that are merged; an action is (kind, stage, micro-batch), with torch's kinds F,
            B (backward), I and W (backward for inputs, for weights).
        run_both: function of a backward and a forward pass that runs both.
        options: further arguments of torch's schedule, such as ``n_microbatches``.
    """
    kinds = schedules._ComputationType
    schedule = schedules._PipelineScheduleRuntime(stages, **options)
    actions = {}
    for rank, entries in enumerate(order):
        actions[rank] = []
        for entry in entries:
            parts = tuple(schedules._Action(stage, kinds(kind), n) for kind, stage, n in entry)
            pair = schedules._Action(-1, kinds.OVERLAP_F_B, None, parts)
            actions[rank].append(parts[0] if len(parts) == 1 else pair)
    schedule.pipeline_order = actions
    schedule._prepare_schedule_with_comms(actions)
    schedule.register_custom_function(kinds.OVERLAP_F_B, partial(_run_merged, run_both))
    schedule.register_custom_function(kinds.BACKWARD_WEIGHT, _run_weight_half)
    return schedule


def _run_weight_half(action: Any, context: Any) -> None:
    """Run the weight half of a split backward pass, and add its gradients to FSDP's accumulator.

    Zero-bubble schedules split a backward pass into gradients of inputs and of weights. After a
    whole backward pass FSDP moves gradients to its accumulator, which has the dtype of the
    reduction. Torch's schedules do not do so after a weight half: gradients of all micro-batches
    would be summed in the dtype of the parameters. Torch 2.11 to 2.14:
    ``accumulate_unsharded_grad_if_needed`` and ``to_accumulated_grad_if_needed`` of FSDP's
    parameters, in 2.11 in one group per state. 2.15 has none: gradients have the dtype of the
    reduction from the start.

    Args:
        action: torch's action: stage and micro-batch.
        context: torch's record of the schedule that runs.
    """
    schedule = context.schedule_ref
    stage = next(
        candidate for candidate in schedule._stages if candidate.stage_index == action.stage_index
    )
    schedule._assert_unsharded(stage)
    schedule.backward_counter[stage.stage_index] += 1
    stage.backward_weight_one_chunk(action.microbatch_index)
    if not isinstance(stage.submod, FSDPModule):
        return
    for state in fully_shard.state(stage.submod)._state_ctx.all_states:  # type: ignore[attr-defined]
        for group in parameter_groups(state):
            for parameter in group.fsdp_params:
                if hasattr(parameter, "to_accumulated_grad_if_needed"):
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()


def _run_merged(run_both: Callable[..., Any], action: Any, context: Any) -> None:
    """Run a merged action: one micro-batch's forward and another's backward by ``run_both``.

    Receives are waited for before, sends started after, as torch does around a single action.

    Args:
        run_both: function of (backward pass, forward pass) that runs both and returns the forward
            pass's result.
        action: torch's action; its ``sub_actions`` are the forward and the backward.
        context: torch's record of the schedule that runs.
    """
    schedule = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    ahead, back = action.sub_actions
    forward_stage = stages[ahead.stage_index]
    backward_stage = stages[back.stage_index]
    here, there = ahead.microbatch_index, back.microbatch_index
    for stage, index, received, from_stage in (
        (forward_stage, here, schedule.fwd_recv_ops, -1),
        (backward_stage, there, schedule.bwd_recv_ops, +1),
    ):
        schedule._assert_unsharded(stage)
        end = stage.is_first if from_stage < 0 else stage.is_last
        if not end and stage.stage_index + from_stage not in stages:
            wait_as_schedules_do(received.pop((stage.stage_index, index)))

    def forward() -> Any:
        output = forward_stage.forward_one_chunk(
            here, context.arg_mbs[here], context.kwarg_mbs[here]
        )
        schedule._maybe_compute_loss(forward_stage, output, context.target_mbs, here)
        return output

    def backward() -> None:
        done = schedule.backward_counter
        done[back.stage_index] += 1
        backward_stage.backward_one_chunk(
            there,
            loss=schedule._maybe_get_loss(backward_stage, there),
            full_backward=True,
            last_backward=done[back.stage_index] == schedule._n_microbatches,
        )

    output = run_both(backward, forward)
    if ahead.stage_index + 1 in stages:
        stages[ahead.stage_index + 1].set_local_fwd_input(output, here)
    if back.stage_index - 1 in stages:
        gradient = backward_stage.get_local_bwd_output(there)
        stages[back.stage_index - 1].set_local_bwd_input(gradient, there)


class BufferlessStage(PipelineStage):
    """Pipeline stage whose receive buffers live only from the receive until their tensor is used.

    PipelineStage makes a buffer for every micro-batch of the step, for inputs and for gradients of
    outputs, and keeps all of them. Here these are on the meta device and take no memory; a real
    buffer is made just before its receive. After the forward pass an input lives as long as the
    backward pass of its micro-batch needs it.

    Torch 2.11 to 2.14: ``_prepare_forward_infra`` and ``_prepare_backward_infra`` (with arguments
    that differ) make the buffers on ``device``, in ``args_recv_info`` and ``grad_recv_info``,
    tuples by micro-batch of objects with ``buffer``. The class overrides the public methods for
    receives, because 2.14 changed the private ``_get_recv_ops`` that they call. 2.15 makes and
    frees buffers as this class does: ``buffer`` is None except from the receive to the use.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the sends and receives with which torch 2.11 connects neighbouring stages.

        Those from this rank to itself are left out.

        V-shaped schedules have two neighbouring stages on one rank, and a gloo rank has no
        connection to itself. Later versions of torch do not connect stages first by default.
        """
        ops = super()._get_init_p2p_neighbors_ops()
        return [op for op in ops if op.group_peer != self.group_rank]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _without_memory(self) -> Iterator[None]:
        device = self.device
        self.device = torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        _move_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    # An evaluation runs the backward actions too, which then do nothing. But torch 2.11 to 2.15
    # asserts that there is a gradient to pass to the previous stage if it is on the same rank.
    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _validate_fwd_outputs(self, outputs: Any) -> None:
        """Leave out a comparison with ``output_args``, which torch 2.11 makes in each forward pass.

        An evaluation may ask the last stage for tokens instead of a loss.
        """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        received = self.args_recv_info[fwd_chunk_id]
        # torch 2.11 decides once, in the first step, and that may be an evaluation
        for info in received:
            buffer = getattr(info, "buffer", None)
            if buffer is not None and buffer.is_floating_point():
                buffer.requires_grad_(self.has_backward)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        _move_buffers(received, torch.device("meta"))
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)
        _move_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), torch.device("meta"))
        if loss is not None:
            # the schedule keeps the loss to the end of the step, and its graph the stage's input
            loss.detach_()


def _move_buffers(recv_infos: tuple[Any, ...], device: torch.device) -> None:
    for info in recv_infos:
        # None for inputs of the first stage, and absent in torch 2.11
        buffer = getattr(info, "buffer", None)
        if buffer is not None:
            info.buffer = torch.empty_like(
                buffer, device=device, requires_grad=buffer.requires_grad
            )
