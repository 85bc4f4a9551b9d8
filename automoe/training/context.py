"""Context that a rank passes to its recipe: its place in the run, and its stop request.

Torch is imported inside functions, because signal handlers use ``StopRequest`` before torch is
imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class StopRequest:
    """Flag ``requested``, which signal handlers set and the training loop reads.

    ``threading.Event`` would not do: a second signal may interrupt the handler inside ``Event.set``
    and would wait for ever for the lock that the interrupted call holds.
    """

    requested: bool = False

    def set(self) -> None:
        self.requested = True


@dataclass
class RunContext:
    """A rank's place in the run and its stop request: third argument of a recipe's ``main``.

    Ranks receive a signal at different moments and must leave at the same step, so no loop acts on
    ``stop`` alone. A recipe that trains by an ``automoe.run.run.Run`` reads ``Run.stopping``, on
    which ranks agree in each optimizer step; other loops call ``any_rank_stops``.

    Attributes:
        rank, local_rank: number of this process among all ``world_size``, and on its machine.
        device: the device that it trains on.
        run_dir: directory of the run's records and checkpoints.
        stop: set when this rank receives a request to end early (SIGTERM, Ctrl-C).
        preempted: set by a recipe that leaves early because of a stop request.
        fell_back: a text for each time that the run went back to an older checkpoint.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    run_dir: Path
    stop: StopRequest = field(default_factory=StopRequest)
    preempted: bool = False
    fell_back: list[str] = field(default_factory=list)

    def any_rank_stops(self) -> bool:
        """Return, on every rank, whether any rank was asked to stop. Collective over a CPU group."""
        from automoe.training.stats import max_over_ranks

        if self.world_size == 1:
            return self.stop.requested
        return bool(max_over_ranks({"stop": self.stop.requested})["stop"])
