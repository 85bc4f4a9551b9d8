"""Simulation of pipeline schedules, action by action, to find when a step ends.

The orders of actions are those of torch.distributed.pipelining. An action starts when its rank is
free and its input has arrived. Kinds of actions: F forward, B backward, I and W the two halves of B
(gradients of the input and of the weights). A tuple of two actions runs both at the same time, so
that the all-to-all of one overlaps with the computation of the other (DualPipeV, and 1F1B with
overlap).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest

from automoe.planner.dual_pipe import Action, dual_pipe_v
from automoe.planner.memory import rank_actions

# Schedules that automoe does not run, but that published runs used: name -> function of (pp, rank,
# micro-batches, overlap) that returns the rank's actions. A rank holds two stages in the shape of a
# V.
V_SHAPED = {"DualPipeV": dual_pipe_v}
# Share of an all-to-all that the computation of another micro-batch hides: 93%, less the 20% that
# matmuls lose to the multiprocessors that send (both from Megatron-Core's report on DeepSeek-V3).
HIDDEN = 0.93 - 0.20
GRAIN = 60
STEADY_ROUNDS = 2  # number of rounds of pp micro-batches after which all rounds are alike


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in a stage, collectives included, and of its all-to-alls alone."""

    forward: float
    backward: float
    all_to_all: float = 0.0  # all-to-alls of both passes together

    @property
    def work(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Span:
    """One simulated action, with start and end in seconds from the start of the step."""

    rank: int
    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


def rank_of(stage: int, schedule: str, pp: int) -> int:
    """Return the pipeline rank that holds a stage.

    Stages go round the ranks in turn, or down and up again in V-shaped schedules.
    """
    turn, place = divmod(stage, pp)
    return pp - 1 - place if schedule in V_SHAPED and turn % 2 else place


@lru_cache(maxsize=256)
def all_actions(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, overlap: bool
) -> tuple[tuple[tuple[Action, ...], ...], ...]:
    """Return the ordered actions of every rank; an entry of two actions runs both at the
    same time.
    """
    made: list[Iterable[tuple[Action, ...]]] = []
    for rank in range(pp):
        if schedule in V_SHAPED:
            made.append(V_SHAPED[schedule](pp, rank, num_micro_batches, overlap))
        else:
            made.append(_in_turn(schedule, pp, stages_per_rank, num_micro_batches, rank, overlap))
    return tuple(map(tuple, made))


def _in_turn(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, rank: int, overlap: bool
) -> Iterator[tuple[Action, ...]]:
    forwards: list[Action] = []
    backwards: list[Action] = []
    ahead = 0
    seen = dict[tuple[bool, int], int]()
    # Overlapping pairs deliver activations only at their end, so 1F1B needs more forwards in
    # advance.
    like = "Interleaved1F1B" if overlap else schedule
    for is_forward, local in rank_actions(like, pp, stages_per_rank, num_micro_batches, rank):
        index = seen[is_forward, local] = seen.get((is_forward, local), -1) + 1
        (forwards if is_forward else backwards).append(
            ("F" if is_forward else "B", local * pp + rank, index)
        )
        ahead += is_forward and not backwards
    yield from ((action,) for action in forwards[:ahead])
    for backward, forward in zip_longest(backwards, forwards[ahead:]):
        if forward is None:
            yield (backward,)
        elif overlap:
            yield forward, backward
        else:
            yield (backward,)
            yield (forward,)


def simulate(
    schedule: str,
    stages: tuple[StageTimes, ...],
    pp: int,
    num_micro_batches: int,
    border: float = 0.0,
    overlap: bool = False,
    spans: list[Span] | None = None,
) -> float:
    """Return the seconds from the first action's start to the last action's end.

    Args:
        stages: times of all stages, in the order of the model.
        border: seconds to send activations or gradients between two ranks.
        overlap: paired actions hide their all-to-alls behind each other.
        spans: list that receives every action; each rank's actions are in order.
    """
    ranks = all_actions(schedule, pp, len(stages) // pp, num_micro_batches, overlap)
    where = [rank_of(stage, schedule, pp) for stage in range(len(stages))]
    # seconds to send activations to stage i
    wait = [border * (where[i] != where[i - 1]) for i in range(len(stages))]
    cost = {"F": [s.forward for s in stages], "B": [s.backward for s in stages]}
    cost["I"] = cost["W"] = [s.backward / 2 for s in stages]
    saved = [HIDDEN * s.all_to_all / 2 for s in stages]
    forward, backward = ([dict[int, float]() for _ in stages] for _ in range(2))
    # The results that an action waits for, and the seconds to send them.
    start = dict.fromkeys(range(num_micro_batches), 0.0)
    needs = {"F": [*zip([start, *forward], wait, strict=False)], "W": [(start, 0.0)] * len(stages)}
    needs["B"] = needs["I"] = [*zip(backward[1:], wait[1:], strict=True), (forward[-1], 0.0)]
    clock = [0.0] * pp
    at = [0] * pp
    left = sum(map(len, ranks))
    while left:
        before = left
        for rank, actions in enumerate(ranks):
            now = clock[rank]
            place = at[rank]
            while place < len(actions):
                ready = now
                seconds = 0.0
                for kind, stage, index in actions[place]:
                    results, late = needs[kind][stage]
                    arrived = results.get(index)
                    if arrived is None:
                        break
                    ready = max(ready, arrived + late)
                    seconds += cost[kind][stage]
                else:
                    if len(actions[place]) == 2:
                        seconds = max(
                            seconds - sum(saved[stage] for _, stage, _ in actions[place]),
                            seconds / 2,
                        )
                    now = ready + seconds
                    if spans is not None:
                        spans += [Span(rank, *action, ready, now) for action in actions[place]]
                    for kind, stage, index in actions[place]:
                        (forward if kind == "F" else backward)[stage].setdefault(index, now)
                    place += 1
                    continue
                break
            left -= place - at[rank]
            clock[rank] = now
            at[rank] = place
        assert left < before, (
            f"{schedule} waits for itself: pp={pp}, {num_micro_batches} micro-batches"
        )
    return max(clock)


_simulated = lru_cache(maxsize=50_000)(simulate)


def stretch(
    schedule: str,
    stages: list[StageTimes],
    pp: int,
    num_micro_batches: int,
    border: float = 0.0,
    overlap: bool = False,
) -> float:
    """Return a step's time relative to the work of its busiest rank (``simulate`` with a cache).

    With many micro-batches, only the first rounds are simulated and the repeating rounds are
    extrapolated. All rounds are simulated if Interleaved1F1B has rounds of more than ``pp``
    micro-batches (``pp`` is not a divisor). For the cache, times are rounded to 1/``GRAIN`` of the
    largest stage's time; this changes the waiting time of ranks, not their work.
    """
    unit = max(stage.work for stage in stages) / GRAIN
    scaled = tuple(
        StageTimes(
            round(s.forward / unit),
            round(s.backward / unit),
            round(s.all_to_all / unit) if overlap else 0,
        )
        for s in stages
    )
    near = round(4 * border / unit) / 4
    steady = STEADY_ROUNDS * pp + num_micro_batches % pp
    busy = [0.0] * pp
    for index, stage in enumerate(scaled):
        busy[rank_of(index, schedule, pp)] += stage.work
    odd = schedule == "Interleaved1F1B" and num_micro_batches % pp
    if schedule == "GPipe" or odd or num_micro_batches <= steady + pp:
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
