"""When a pipeline's step ends on GPUs, from the order in which its ranks really started what they do.

NCCL runs the sends and receives of a group one after the other, in the order in which a rank started them (unbatched, in
groups that are bound to their device). Each begins when both its ranks have come to it and ends ``border`` later. A rank
starts one when its computation before it has ended, and computes when what it needs has arrived.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from unittest.mock import patch

from automoe.comm.tokens import StepBatch
from automoe.config.facts import SENDS_KEPT
from automoe.config.schema import Config
from automoe.parallel.pipeline import Stage
from tests.support.trajectories import run_trajectory


@dataclass(frozen=True)
class Event:
    """A computation (``F``, ``B``), or a send or receive of its result by the stage of another rank."""

    kind: str  # F, B, send F, recv F, send B, recv B
    stage: int
    micro_batch: int
    group: str = ""


def events_of_a_step(config: Config, batches) -> list[Event]:
    """What this rank starts in a training step, in order."""
    log: list[Event] = []
    methods = {
        "forward_one_chunk": "F",
        "backward_one_chunk": "B",
        "get_fwd_send_ops": "send F",
        "get_fwd_recv_ops": "recv F",
        "get_bwd_send_ops": "send B",
        "get_bwd_recv_ops": "recv B",
    }
    at_neighbour = Stage._with_neighbour
    groups: list[str] = []

    def with_neighbour(self, which, ops):
        made = at_neighbour(self, which, ops)
        groups.extend(op.group.group_name for op in made)
        return made

    def logging(name: str, kind: str):
        original = getattr(Stage, name)

        def call(self, micro_batch, *args, **kwargs):
            groups.clear()
            result = original(self, micro_batch, *args, **kwargs)
            if len(kind) == 1 or groups:
                log.append(Event(kind, self.stage_index, micro_batch, *groups))
            return result

        return patch.object(Stage, name, call)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Stage, "_with_neighbour", with_neighbour))
        for name, kind in methods.items():
            stack.enter_context(logging(name, kind))
        run_trajectory(config, batches, 1, keep_tensors=False)
    return log


def batches(config: Config, step: int, dp_rank: int, dp_size: int) -> StepBatch:
    import torch

    tokens = torch.zeros(config.train.global_batch_size // dp_size, config.train.seq_len, dtype=torch.int64)
    index = torch.arange(config.train.seq_len).expand_as(tokens)
    return StepBatch(tokens, tokens, index, tokens, 0, 0)


class Run:
    """A simulated step of the ranks' events."""

    def __init__(self, events: list[list[Event]], forward: float, backward: float, border: float) -> None:
        self.events, self.border = events, border
        self.seconds = {"F": forward, "B": backward}
        self.last = max(event.stage for rank in events for event in rank)
        self.arrived: dict[tuple[str, int, int], float] = {}  # when a result has come to the stage that needs it
        self.queues: dict[tuple[str, int], list[tuple[tuple[str, int, int], float]]] = defaultdict(list)
        self.free: dict[tuple[str, int], float] = defaultdict(float)
        self.peers: dict[str, set[int]] = defaultdict(set)
        for rank, mine in enumerate(events):
            for event in mine:
                self.peers[event.group].add(rank)

    def result(self, event: Event) -> tuple[str, int, int]:
        """Of a send or receive: pass, receiving stage, micro-batch."""
        way, kind = event.kind.split()
        step = 0 if way == "recv" else 1 if kind == "F" else -1
        return kind, event.stage + step, event.micro_batch

    def match(self) -> None:
        """Run every transfer that is the next one of its group on two ranks."""
        found = True
        while found:
            found = False
            for (group, rank), queue in list(self.queues.items()):
                for other in self.peers[group] - {rank}:
                    theirs = self.queues[group, other]
                    if queue and theirs and queue[0][0] == theirs[0][0]:
                        (name, mine), (_, yours) = queue.pop(0), theirs.pop(0)
                        end = max(mine, yours, self.free[group, rank], self.free[group, other]) + self.border
                        self.free[group, rank] = self.free[group, other] = self.arrived[name] = end
                        found = True

    def end(self) -> float:
        """Seconds of the step."""
        clock, at = [0.0] * len(self.events), [0] * len(self.events)
        sent: dict[tuple[int, str, int], list[tuple[str, int, int]]] = defaultdict(list)
        own = [{event.stage for event in mine} for mine in self.events]
        while any(place < len(mine) for place, mine in zip(at, self.events, strict=True)):
            before = list(at)
            for rank, mine in enumerate(self.events):
                while at[rank] < len(mine):
                    event = mine[at[rank]]
                    if event.group:
                        kept = sent[rank, event.kind, event.stage]
                        late = kept[-SENDS_KEPT - 1] if "send" in event.kind and len(kept) > SENDS_KEPT else None
                        if late is not None and late not in self.arrived:
                            break
                        clock[rank] = max(clock[rank], self.arrived[late] if late else 0.0)
                        kept.append(self.result(event))
                        self.queues[event.group, rank].append((self.result(event), clock[rank]))
                        self.match()
                    else:
                        name = event.kind, event.stage, event.micro_batch
                        first = event.stage == (0 if event.kind == "F" else self.last)
                        if not first and name not in self.arrived:
                            break
                        clock[rank] = max(clock[rank], self.arrived.get(name, 0.0)) + self.seconds[event.kind]
                        following = event.stage + (1 if event.kind == "F" else -1)
                        if following in own[rank]:
                            self.arrived[event.kind, following, event.micro_batch] = clock[rank]
                    at[rank] += 1
            assert at != before, "the ranks wait for one another"
        return max(clock)
