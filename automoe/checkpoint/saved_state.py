"""Tensors and counters of a ``TrainState`` that a checkpoint stores."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch

from automoe.comm.local_shard import local_shard
from automoe.optim.ema import KEY
from automoe.training.state import TrainState


def tensors_of(state: TrainState, frozen: bool = True) -> dict[str, torch.Tensor]:
    """Return this rank's tensors that a checkpoint holds, by their names in it.

    The names are ``model.NAME`` and ``optimizer.KEY.NAME``, with NAME that of a parameter in the
    full model. The tensors are parameters, saved buffers, and the optimizer's state of each
    parameter: moments or momentum, step counts, and weight averages. If two pipeline stages
    of this rank hold a copy of a parameter, the first copy is returned.

    Args:
        frozen: True to include frozen parameters.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in _named(state, frozen):
        tensors.setdefault(name, tensor)
    return tensors


@torch.no_grad()
def fill_copies(state: TrainState) -> None:
    """Copy each tensor's values to its copies in later pipeline stages of this rank.

    V-shaped schedules put the embedding and a tied head on one rank.
    """
    first: dict[str, torch.Tensor] = {}
    for name, tensor in _named(state):
        if name in first:
            tensor.copy_(first[name])
        first.setdefault(name, tensor)


def _named(state: TrainState, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    for part in state.model_parts.values():
        parameters = dict(part.named_parameters())
        left_out = {n for n, p in parameters.items() if not (frozen or p.requires_grad)}
        for name, tensor in part.state_dict().items():
            if name not in left_out:
                yield f"model.{name}", tensor
        for name, parameter in parameters.items():
            for key, tensor in state.optimizer.state.get(parameter, {}).items():
                yield f"optimizer.{key}.{name}", tensor


def not_finite(state: TrainState) -> list[str]:
    """Return the names of this rank's tensors that have a non-finite value.

    Each tensor is read once, on its own device. Integers and 8-bit codes are not checked.
    """
    names = []
    for name, tensor in tensors_of(state).items():
        shard = local_shard(tensor.detach())
        # Codes of 8 bits are left out: they are computed anew from the weights.
        if shard.is_floating_point() and shard.element_size() > 1 and shard.numel():
            # A sum may overflow, and a mask would be as large as the tensor.
            if not torch.stack(torch.aminmax(shard)).isfinite().all():
                names.append(name)
    return names


def optional_names(state: TrainState) -> set[str]:
    """Return tensor names that a checkpoint may lack: weight averages and optional buffers.

    A module lists such buffers in its attribute ``optional_state``.
    """
    return {
        f"model.{name}.{buffer}"
        for part in state.model_parts.values()
        for name, module in part.named_modules()
        for buffer in getattr(module, "optional_state", ())
    } | {name for name, _, _ in _averages(state)}


def begin_averages(state: TrainState, absent: Collection[str]) -> bool:
    """Set each weight average that a checkpoint lacks to its weight, from which averaging starts.

    Args:
        absent: names of tensors that the loaded checkpoint lacks.

    Returns:
        True if any average was missing.
    """
    begun = [pair for name, *pair in _averages(state) if name in absent]
    with torch.no_grad():
        for average, parameter in begun:
            average.copy_(parameter)
    return bool(begun)


def _averages(state: TrainState) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name in a checkpoint, average, parameter) of each weight average of this rank."""
    moments = state.optimizer.state
    for part in state.model_parts.values():
        for name, parameter in part.named_parameters():
            if KEY in moments.get(parameter, {}):
                yield f"optimizer.{KEY}.{name}", moments[parameter][KEY], parameter


def counters_of(state: TrainState) -> dict[str, Any]:
    """Return the state's values other than tensors, as plain JSON, equal on every rank.

    These are the numbers of steps, of tokens and of consecutive skipped steps up to now, recent
    losses, and the loader's state.
    """
    return {
        "step": state.step,
        "tokens": state.tokens,
        "skipped": state.skipped,
        "recent_losses": list(state.recent_losses),  # JSON keeps a float to the bit
        "loader": None if state.loader is None else state.loader.state_dict(),
    }


def load_counters(state: TrainState, counters: dict[str, Any]) -> None:
    """Restore into ``state`` the counters that ``counters_of`` returned.

    Raises:
        DataError: the data changed since the checkpoint.
    """
    if state.loader is not None:
        state.loader.load_state_dict(counters["loader"])
    state.step = counters["step"]
    state.tokens = counters["tokens"]
    state.skipped = counters["skipped"]
    state.recent_losses = list(counters["recent_losses"])
