"""What a recipe is handed: one rank's place in the run, and whether it was asked to stop.

Torch is imported late: signals are handled, and their request kept here, before it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class StopRequest:
    """A flag that signal handlers set and everybody reads.

    No ``threading.Event``: a second signal may interrupt the handler inside ``Event.set``, and
    would wait for ever for the lock that the interrupted call holds.
    """

    requested: bool = False

    def set(self) -> None:
        self.requested = True


@dataclass
class RunContext:
    """Handed to a recipe's ``main(config, shape, context)``.

    ``stop`` is set when this rank is asked to end early (SIGTERM, Ctrl-C). Ranks hear of it at
    different moments, so a loop acts on ``any_rank_stops`` alone: then all leave at the same step.
    A recipe that leaves before its end for that reason sets ``preempted``. ``fell_back`` says which
    checkpoints were given up.
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
        """Whether any rank was asked to stop, the same answer on all of them. A collective over CPU
        memory."""
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(self.stop.requested)], dtype=torch.int32)
        if self.world_size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())
