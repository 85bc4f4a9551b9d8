"""Everything a training run is at one step, as one object that names its own tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from automoe.data.loader import Loader
from automoe.model.decoder import Decoder
from automoe.moe.local_shard import local_shard
from automoe.optim.ema import KEY


@dataclass
class TrainState:
    """Model parts, optimizer, loader and counters of this rank.

    Attributes:
        model_parts: this rank's pipeline stages, {stage number: part}; names inside are global.
        loader: None where batches come from elsewhere; such a state cannot be saved.
        step: optimizer steps done (skipped ones included).
        tokens: tokens trained so far (labels that count), over all ranks.
        skipped: steps in a row that were skipped.
        recent_losses: what the next step's loss is compared with (``automoe.training.step``).
    """

    model_parts: dict[int, Decoder]
    optimizer: torch.optim.Optimizer
    loader: Loader | None = None
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    recent_losses: list[float] = field(default_factory=list)

    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parameters, in a fixed order."""
        return [parameter for part in self.model_parts.values() for parameter in part.parameters()]

    def tensors(self, frozen: bool = True) -> dict[str, torch.Tensor]:
        """Global name -> tensor of this rank: parameters, saved buffers, AdamW's moments and step
        counts, averages.

        Args:
            frozen: parameters that are not trained, too.
        """
        tensors: dict[str, torch.Tensor] = {}
        for part in self.model_parts.values():
            fixed = (
                set()
                if frozen
                else {name for name, p in part.named_parameters() if not p.requires_grad}
            )
            for name, tensor in part.state_dict().items():
                if name not in fixed:
                    tensors[f"model.{name}"] = tensor
            for name, parameter in part.named_parameters():
                for key, tensor in self.optimizer.state.get(parameter, {}).items():
                    tensors[f"optimizer.{key}.{name}"] = tensor
        return tensors

    def not_finite(self) -> list[str]:
        """Names of this rank's tensors in which some number is not finite. Reads each once, where
        it is."""
        shards = {name: local_shard(tensor.detach()) for name, tensor in self.tensors().items()}
        # Neither sums, which may overflow, nor a mask as large as the tensor; codes of 8 bits are
        # made anew.
        shards = {
            n: t
            for n, t in shards.items()
            if t.is_floating_point() and t.element_size() > 1 and t.numel()
        }
        return [
            name for name, t in shards.items() if not torch.stack(torch.aminmax(t)).isfinite().all()
        ]

    def optional(self) -> set[str]:
        """Names of tensors that a checkpoint may lack: what modules list as ``optional_state``,
        averages of weights."""
        return {
            f"model.{name}.{buffer}"
            for part in self.model_parts.values()
            for name, module in part.named_modules()
            for buffer in getattr(module, "optional_state", ())
        } | self._averages().keys()

    def begin_averages(self, absent: Collection[str]) -> bool:
        """Averages with names in ``absent`` begin with the weights as they are; whether there is
        one."""
        begun = {name: pair for name, pair in self._averages().items() if name in absent}
        with torch.no_grad():
            for average, parameter in begun.values():
                average.copy_(parameter)
        return bool(begun)

    def _averages(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Name in a checkpoint -> (average, parameter), of this rank."""
        named = (pair for part in self.model_parts.values() for pair in part.named_parameters())
        state = self.optimizer.state
        return {
            f"optimizer.{KEY}.{name}": (state[p][KEY], p)
            for name, p in named
            if KEY in state.get(p, {})
        }

    def counters(self) -> dict[str, Any]:
        """What is not a tensor, as plain JSON values, equal on every rank."""
        assert self.loader is not None
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "recent_losses": list(self.recent_losses),  # JSON keeps a float to the bit
            "loader": self.loader.state_dict(),
        }

    def load_counters(self, counters: dict[str, Any]) -> None:
        """Undo ``counters``.

        Raises:
            DataError: the data changed since the checkpoint.
        """
        assert self.loader is not None
        self.loader.load_state_dict(counters["loader"])
        self.step, self.tokens, self.skipped = (
            counters[key] for key in ("step", "tokens", "skipped")
        )
        self.recent_losses = list(counters.get("recent_losses", []))  # checkpoints of 0.1 lack it
