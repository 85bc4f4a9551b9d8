"""State of a training run at one step, as one object that names its own tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from automoe.comm.local_shard import local_shard
from automoe.model.causal_lm import CausalLM
from automoe.optim.ema import KEY


class Resumable(Protocol):
    """What a state asks of a loader: its position in the data, as plain JSON."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class TrainState:
    """Model parts, optimizer, loader and counters of this rank.

    Attributes:
        model_parts: this rank's pipeline stages, {stage number: part}; names inside are global.
        loader: None if batches come from elsewhere; their position is then the caller's to save.
        step: optimizer steps done (skipped ones included).
        tokens: tokens with a label trained so far, over all ranks.
        skipped: number of consecutive skipped steps.
        recent_losses: losses that the next step's loss is compared with
            (``automoe.training.step``).
    """

    model_parts: dict[int, CausalLM]
    optimizer: torch.optim.Optimizer
    loader: Resumable | None = None
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    recent_losses: list[float] = field(default_factory=list)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return this rank's parameters in a fixed order."""
        return [parameter for part in self.model_parts.values() for parameter in part.parameters()]

    def tensors(self, frozen: bool = True) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by global name.

        These are parameters, saved buffers, AdamW's moments and step counts, and averages. If two
        stages of this rank hold a copy of a parameter, the first copy is returned.

        Args:
            frozen: True to include frozen parameters.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self._named(frozen):
            tensors.setdefault(name, tensor)
        return tensors

    @torch.no_grad()
    def fill_copies(self) -> None:
        """Copy the values of ``tensors`` to the copies that later stages of this rank hold.

        V-shaped schedules put the embedding and a tied head on one rank.
        """
        first: dict[str, torch.Tensor] = {}
        for name, tensor in self._named():
            if name in first:
                tensor.copy_(first[name])
            first.setdefault(name, tensor)

    def _named(self, frozen: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        for part in self.model_parts.values():
            parameters = dict(part.named_parameters())
            left_out = {n for n, p in parameters.items() if not (frozen or p.requires_grad)}
            for name, tensor in part.state_dict().items():
                if name not in left_out:
                    yield f"model.{name}", tensor
            for name, parameter in parameters.items():
                for key, tensor in self.optimizer.state.get(parameter, {}).items():
                    yield f"optimizer.{key}.{name}", tensor

    def not_finite(self) -> list[str]:
        """Return the names of this rank's tensors that have a non-finite value.

        Each tensor is read once, on its own device.
        """
        found = []
        for name, tensor in self.tensors().items():
            shard = local_shard(tensor.detach())
            # Codes of 8 bits are left out: they are computed anew from the weights.
            if shard.is_floating_point() and shard.element_size() > 1 and shard.numel():
                # A sum may overflow, and a mask would be as large as the tensor.
                if not torch.stack(torch.aminmax(shard)).isfinite().all():
                    found.append(name)
        return found

    def optional(self) -> set[str]:
        """Return names that a checkpoint may lack: modules' ``optional_state`` and averages."""
        return {
            f"model.{name}.{buffer}"
            for part in self.model_parts.values()
            for name, module in part.named_modules()
            for buffer in getattr(module, "optional_state", ())
        } | {name for name, _, _ in self._averages()}

    def begin_averages(self, absent: Collection[str]) -> bool:
        """Start the averages named in ``absent`` from the weights; return True if any exists."""
        begun = [pair for name, *pair in self._averages() if name in absent]
        with torch.no_grad():
            for average, parameter in begun:
                average.copy_(parameter)
        return bool(begun)

    def _averages(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yield (name in a checkpoint, average, parameter) of each average of this rank."""
        state = self.optimizer.state
        for part in self.model_parts.values():
            for name, parameter in part.named_parameters():
                if KEY in state.get(parameter, {}):
                    yield f"optimizer.{KEY}.{name}", state[parameter][KEY], parameter

    def counters(self) -> dict[str, Any]:
        """Return the state's values other than tensors, as plain JSON, equal on every rank."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "recent_losses": list(self.recent_losses),  # JSON keeps a float to the bit
            "loader": None if self.loader is None else self.loader.state_dict(),
        }

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Restore the result of ``counters``.

        Raises:
            DataError: the data changed since the checkpoint.
        """
        if self.loader is not None:
            self.loader.load_state_dict(counters["loader"])
        self.step = counters["step"]
        self.tokens = counters["tokens"]
        self.skipped = counters["skipped"]
        self.recent_losses = list(counters.get("recent_losses", []))  # checkpoints of 0.1 lack it
