"""Simulation of pipeline schedules, action by action, to find when a step ends.

The orders of actions are those that the trainer runs (``config.pipeline``). An action starts when
its rank is free and its input has arrived. An entry of two actions runs both at the same time, so
that the all-to-all of one overlaps with the computation of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from automoe.config.pipeline import (
    ALL_FORWARDS_FIRST,
    IN_ROUNDS,
    Entry,
    pipeline_order,
    rank_of_stage,
)
from automoe.config.v_schedules import Action

# Share of an all-to-all that the computation of another micro-batch hides: 93%, less the 20% that
# matmuls lose to the multiprocessors that send (both from Megatron-Core's report on DeepSeek-V3).
HIDDEN = 0.93 - 0.20
GRAIN = 60
KINDS = "FBIW"  # of actions
# An action's input: number of the action that it waits for (0: none), of the stage to which the
# result is sent (behind the last: nothing is sent), and of its seconds, by kind and stage.
Input = tuple[int, int, int]
STEADY_ROUNDS = 2  # number of rounds of pp micro-batches after which all rounds are alike


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in a pipeline stage, for the simulation of a schedule.

    Attributes:
        forward, backward: seconds of the passes, with the communication that nothing hides.
        all_to_all: how many of these seconds are all-to-alls, in both passes together.
        halves: seconds of the two halves of a backward pass that a schedule splits: gradients of
            inputs, and of weights; None: half of ``backward`` each.
        received: number of hidden states that come from the previous stage (more than one with
            multi-token prediction).
    """

    forward: float
    backward: float
    all_to_all: float = 0.0  # all-to-alls of both passes together
    # The backward pass in halves, for gradients of the input and of the weights; None: even halves.
    # The first stage has no input: its second half is the whole backward pass.
    halves: tuple[float, float] | None = None
    received: int = 1  # hidden states from the previous stage

    @property
    def work(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Span:
    """One simulated action, with start and end in seconds from the start of the step.

    ``rank`` is the pipeline rank, ``stage`` the stage's number in the model. ``kind`` is F
    (forward), B (backward), or I and W: a backward pass for inputs, then for weights.
    """

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


def simulate(
    schedule: str,
    stages: tuple[StageTimes, ...],
    pp: int,
    num_micro_batches: int,
    border: float = 0.0,
    overlap: bool = False,
    spans: list[Span] | None = None,
) -> float:
    """Simulate a pipeline schedule, and return the seconds from its first start to its last end.

    Args:
        schedule: name of the schedule, such as ``1F1B``.
        stages: times of all stages, in the order of the model.
        pp: number of pipeline ranks.
        border: seconds to send one hidden state or its gradient between two ranks.
        overlap: True if a forward and a backward pass run at the same time and hide each other's
            all-to-alls.
        spans: list to which every action is appended; each rank's actions are in order.
    """
    where = [rank_of_stage(stage, pp, schedule) for stage in range(len(stages))]
    # seconds to send activations to stage i, or gradients from it; what stays on a rank takes none
    wait = [border * s.received * (where[i] != where[i - 1]) for i, s in enumerate(stages)] + [0.0]
    halves = [s.halves or (s.backward / 2, s.backward / 2) for s in stages]
    halves[0] = 0.0, stages[0].backward
    cost = [s.forward for s in stages] + [s.backward for s in stages]
    cost += [inputs for inputs, _ in halves] + [weights for _, weights in halves]
    saved = [HIDDEN * s.all_to_all / 2 for s in stages] * len(KINDS)
    ends = [0.0]  # of the step's begin and of each action
    clock = [0.0] * pp
    for rank, entry, (needed, late, which), other in _steps(
        schedule, pp, len(stages) // pp, num_micro_batches, overlap
    ):
        ready = ends[needed] + wait[late]
        if ready < clock[rank]:
            ready = clock[rank]
        seconds = cost[which]
        if other:
            needed, late, second = other
            there = ends[needed] + wait[late]
            if ready < there:
                ready = there
            seconds += cost[second]
            hidden, half = saved[which] + saved[second], seconds / 2
            seconds -= hidden if hidden < half else half
            ends.append(ready + seconds)
        clock[rank] = now = ready + seconds
        ends.append(now)
        if spans is not None:
            spans += [Span(rank, *action, ready, now) for action in entry]
    return max(clock)


@lru_cache(maxsize=64)
def _steps(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, overlap: bool
) -> list[tuple[int, Entry, Input, Input | None]]:
    """Return the entries of all pipeline ranks, each listed after those that compute its inputs.

    An entry is one action (kind of pass, stage, micro-batch), or two that run at the same time: with
    ``overlap``, a forward and a backward pass. Kinds: F forward, B backward, I and W backward for
    inputs or weights alone.

    Returns:
        A tuple per entry: rank, entry, input of its first action, input of its second one or None.
        An input has three numbers: that of the action that computes it (actions count from 1 in the
        order of this list; 0: none does); the later of the two stages between which it is sent; and
        kind and stage of the action that reads it, as (index of the kind in ``FBIW``) * stages + stage.
    """
    ranks = pipeline_order(schedule, pp, stages_per_rank, num_micro_batches, overlap)
    num_stages = pp * stages_per_rank
    done = dict[Action, int]()
    number = 0
    passes = {"F": "F", "B": "B", "I": "B", "W": "B"}

    def input_of(action: Action) -> Input | None:
        kind, stage, index = action
        which = KINDS.index(kind) * num_stages + stage
        if kind == "W" or (kind == "F" and stage == 0):
            return 0, num_stages if kind == "W" else 0, which
        before = stage - 1 if kind == "F" else stage + 1
        loss = before == num_stages  # which follows the last forward pass
        needed = done.get(("F", stage, index) if loss else (passes[kind], before, index))
        return None if needed is None else (needed, max(stage, before), which)

    steps = list[tuple[int, Entry, Input, Input | None]]()
    at = [0] * pp
    left = sum(map(len, ranks))
    while len(steps) < left:
        before = len(steps)
        for rank, entries in enumerate(ranks):
            while at[rank] < len(entries):
                entry = entries[at[rank]]
                first, *others = map(input_of, entry)
                if first is None or None in others:
                    break
                for kind, stage, index in entry:
                    number += 1
                    done.setdefault((passes[kind], stage, index), number)
                steps.append((rank, entry, first, others[0] if others else None))
                at[rank] += 1
        assert len(steps) > before, (
            f"{schedule} waits for itself: pp={pp}, {num_micro_batches} micro-batches"
        )
    return steps


_simulated = lru_cache(maxsize=50_000)(simulate)


def stretch(
    schedule: str,
    stages: list[StageTimes],
    pp: int,
    num_micro_batches: int,
    border: float = 0.0,
    overlap: bool = False,
) -> float:
    """Return a pipeline step's time relative to the work of its busiest rank; 1: no rank waits.

    With many micro-batches, only the first ones are simulated, and the time of the others is
    extrapolated, unless the order of passes does not repeat. Stage times are rounded to 1/60
    (``GRAIN``) of the largest, so that similar stages share a cached simulation.

    Args:
        schedule: name of the schedule, such as ``1F1B``.
        stages: times of all stages, in the order of the model.
        pp: number of pipeline ranks.
        border: seconds to send one hidden state or its gradient between two ranks.
        overlap: True if a forward and a backward pass run at the same time and hide each other's
            all-to-alls.
    """
    unit = max(stage.work for stage in stages) / GRAIN
    scaled = tuple(
        StageTimes(
            round(s.forward / unit),
            round(s.backward / unit),
            round(s.all_to_all / unit) if overlap else 0,
            s.halves and (round(s.halves[0] / unit), round(s.halves[1] / unit)),
            s.received,
        )
        for s in stages
    )
    near = round(4 * border / unit) / 4
    steady = STEADY_ROUNDS * pp + num_micro_batches % pp
    busy = [0.0] * pp
    for index, stage in enumerate(scaled):
        busy[rank_of_stage(index, pp, schedule)] += stage.work
    odd = schedule in IN_ROUNDS and num_micro_batches % pp
    if schedule in ALL_FORWARDS_FIRST or odd or num_micro_batches <= steady + pp:
        seconds = _simulated(schedule, scaled, pp, num_micro_batches, near, overlap)
    else:
        start, end = (
            _simulated(schedule, scaled, pp, count, near, overlap)
            for count in (steady, steady + pp)
        )
        # With uneven stages, the busiest rank has not caught up after the first rounds; from then
        # on a round takes at least the busiest rank's work.
        a_round = end - start if overlap else max(end - start, pp * max(busy))
        seconds = end + (num_micro_batches - steady - pp) / pp * a_round
    return seconds / (num_micro_batches * max(busy))
