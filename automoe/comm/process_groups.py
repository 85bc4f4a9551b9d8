"""Process groups of this rank: opened together before the first step, with their timeouts."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from automoe.config.facts import SAVES
from automoe.interop.torch_private import process_groups, set_group_timeout

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# Made by DeviceMesh itself. In a world bound to a GPU its gloo half has torch's default options:
# two threads, which can corrupt the heap (``automoe.interop.gloo``). Nothing communicates over it.
_FLATTENED = "mesh_fsdp"
# groups over which tokens are dispatched
_DISPATCH = ("mesh_ep", "mesh_ep_nodes", "mesh_ep_node", "mesh_etp")
_CONTEXT = "mesh_cp"


def connect_process_groups(exchanges_heads: bool = False) -> str:
    """Connect every process group now, by a sum of ones over each of its backends. Collective.

    Backends connect with their first collective, which would otherwise be in the middle of a step
    and use memory that nobody has counted. An all-to-all connects more (1.06 GB a GPU before, 4.34
    after: nccl#1685), so groups that dispatch run one too.

    Args:
        exchanges_heads: True if layers exchange positions for heads over cp, by all-to-alls.

    Returns:
        A text with the number of groups, and the time and GPU memory (outside of torch's allocator)
        that opening them took.

    Raises:
        RuntimeError: a group's sum differs from its number of ranks.
    """
    cuda = torch.cuda.is_initialized()
    exchanging = (*_DISPATCH, _CONTEXT) if exchanges_heads else _DISPATCH
    if cuda:
        torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0] if cuda else 0
    began = time.perf_counter()
    for group in process_groups():
        # such as "cpu:gloo,cuda:nccl"; a world of gloo alone also has "cuda:gloo"
        backends = dist.get_backend_config(group)
        devices = [name for name in ("cpu", "cuda") if f"{name}:{_BACKENDS[name]}" in backends]
        for device in devices:
            if cuda and device == "cpu" and group.group_desc == _FLATTENED:
                continue
            ones = torch.ones(group.size(), device=device)  # on CUDA: the current device
            dist.all_reduce(ones, group=group)
            if group.group_desc in exchanging and device == ("cuda" if cuda else "cpu"):
                dist.all_to_all_single(torch.empty_like(ones), ones, group=group)
            if (total := ones[0].item()) != group.size():
                raise RuntimeError(
                    f"{total:.0f} of the {group.size()} ranks of {group.group_desc} answered"
                )
    seconds = time.perf_counter() - began
    used = max(free - torch.cuda.mem_get_info()[0], 0) if cuda else 0
    memory = f", {used / 2**30:.2f} GiB of the GPU" if used else ""
    return f"{len(process_groups())} process groups open in {seconds:.2f} s{memory}"


def set_collective_timeouts(seconds: float) -> None:
    """Set the timeout of collectives to ``seconds`` from now on, in every process group of this rank.

    Groups on which saves and loads wait (``automoe.comm.agreement.Ranks``) keep their own timeouts.
    """
    for group in process_groups():
        if group.group_desc != SAVES:
            set_group_timeout(timedelta(seconds=seconds), group)
