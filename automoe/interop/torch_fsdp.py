"""Private parts of torch's FSDP, for torch 2.11 to 2.15: states of units, and their gradients."""

from __future__ import annotations

from typing import Any

import torch


def parameter_groups(state: Any) -> list[Any]:
    """Return FSDP's groups of parameters, given the state of an FSDP unit (``fully_shard.state``).

    Torch 2.11: ``_fsdp_param_group``; 2.13 to 2.15: ``_fsdp_param_groups``.
    """
    param_group = getattr(state, "_fsdp_param_group", None)
    return getattr(state, "_fsdp_param_groups", [param_group] if param_group else [])


def forget_pass(root: Any) -> None:
    """Free what passes left in a model: whole weights, unreduced gradients, gathers under way.

    ``root`` is the model's root, a unit of FSDP; a model without FSDP is left alone.

    After an error torch's state is that of the middle of a pass: weights are whole, or those of a
    prefetch that the next pass would compute with, and gradients of earlier micro-batches wait for
    the reduction. Torch 2.13 to 2.15: ``_reset_iter_state`` of its state, which leaves gradients in
    place (``_unsharded_param.grad`` and, to 2.14, ``unsharded_accumulated_grad``). 2.11 has the
    same fields, and nothing that resets them.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not isinstance(root, FSDPModule):
        return
    state = fully_shard.state(root)  # type: ignore[attr-defined]
    states = state._state_ctx.all_states
    if not states:  # before the first pass
        return
    groups = [group for each in states for group in parameter_groups(each)]
    # The root's public method, reset_iter_state, would import torch._dynamo for seconds.
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        for holder in (*states, *groups):
            holder._training_state = type(holder._training_state).IDLE
        for group in groups:
            group.finalize_backward()  # waits, and drops what was gathered
            group._to_sharded()
        state._comm_ctx.post_forward_order.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
    for parameter in (parameter for group in groups for parameter in group.fsdp_params):
        if (whole := getattr(parameter, "_unsharded_param", None)) is not None:
            whole.grad = None
        if not hasattr(type(parameter), "unsharded_accumulated_grad"):
            parameter.unsharded_accumulated_grad = None


def gradient_sum(unit: Any, name: str) -> torch.Tensor:
    """Return the unreduced gradient sum of a parameter of an FSDP unit.

    ``unit`` is a module that ``fully_shard`` wrapped, ``name`` the parameter's name in its own
    module. The sum has the shape of the unsharded parameter and the dtype of the reduction; if
    there is none yet, zeros are stored as the sum. FSDP makes it in the first backward pass, from
    the gradient that autograd returned, without public access. The unit's state has
    ``_fsdp_param_group`` in 2.11, ``_fsdp_param_groups`` in 2.13 to 2.15. Their ``fsdp_params``
    have ``unsharded_param``, ``_module_info.param_name`` and, to 2.14,
    ``unsharded_accumulated_grad`` and ``reduce_dtype``. In 2.15 the sum is ``unsharded_param.grad``
    in ``unsharded_grad_dtype``, to which autograd itself adds, and ``unsharded_accumulated_grad``
    is a read-only property.
    """
    from torch.distributed.fsdp import fully_shard

    groups = parameter_groups(fully_shard.state(unit))  # type: ignore[attr-defined]
    fsdp_params = (each for group in groups for each in group.fsdp_params)
    parameter = next(each for each in fsdp_params if each._module_info.param_name == name)
    whole = parameter.unsharded_param
    holder, key, dtype = parameter, "unsharded_accumulated_grad", parameter.reduce_dtype
    if hasattr(type(parameter), key):
        holder, key, dtype = whole, "grad", parameter.unsharded_grad_dtype
    if getattr(holder, key) is None:
        setattr(holder, key, torch.zeros_like(whole, dtype=dtype, requires_grad=False))
    return getattr(holder, key)
