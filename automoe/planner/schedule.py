"""Simulation of pipeline schedules, action by action, to find when a step ends.

The orders of actions are those of torch.distributed.pipelining. An action starts when its rank is
free and its input has arrived. Kinds of actions: F forward, B backward, I and W the two halves of B
(gradients of the input and of the weights). A tuple of two actions runs both at the same time, so
that the all-to-all of one overlaps with the computation of the other (DualPipeV, and 1F1B with
overlap).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from automoe.planner.memory import rank_actions

Action = tuple[str, int, int]  # (kind, stage, micro-batch)
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
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
    make = {"ZBVZeroBubble": _zbv, "DualPipeV": _dual_pipe_v}.get(schedule)
    if make:
        return tuple(tuple(make(pp, rank, num_micro_batches, overlap)) for rank in range(pp))
    return tuple(
        tuple(_in_turn(schedule, pp, stages_per_rank, num_micro_batches, r, overlap))
        for r in range(pp)
    )


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
    if not overlap:
        yield from ((action,) for action in forwards[:ahead])
        for index, backward in enumerate(backwards):
            yield (backward,)
            if ahead + index < len(forwards):
                yield (forwards[ahead + index],)
        return
    yield from ((action,) for action in forwards[:ahead])
    yield from zip(forwards[ahead:], backwards, strict=False)
    yield from ((action,) for action in backwards[len(forwards) - ahead :])


class _Order:
    """Growing list of one rank's actions that numbers the micro-batches of each kind and stage."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages = stages
        self.made: list[tuple[Action, ...]] = []
        self.counts: dict[tuple[str, int], int] = {}
        # Weight halves (W) that may run at any time: (stage, micro-batch).
        self.waiting: list[tuple[int, int]] = []

    def _next(self, kind: str, chunk: int) -> Action:
        counted = "F" if kind == "F" else "B"
        index = self.counts[counted, chunk] = self.counts.get((counted, chunk), -1) + 1
        if kind == "I":
            self.waiting.append((self.stages[chunk], index))
        return kind, self.stages[chunk], index

    def add(self, *what: str) -> None:
        """Append one entry per word: ``F0`` is a forward of the rank's stage 0, ``F0+B1`` is a
        pair.

        The word ``W`` stands for the oldest weight half that has not run.
        """
        for word in what:
            if word == "W":
                if self.waiting:
                    self.made.append((("W", *self.waiting.pop(0)),))
            else:
                self.made.append(
                    tuple(self._next(part[0], int(part[1])) for part in word.split("+"))
                )


def _zbv(pp: int, rank: int, num_micro_batches: int, overlap: bool) -> list[tuple[Action, ...]]:
    """Return the actions of the V-shaped zero-bubble schedule (arXiv 2401.10241, section 6)."""
    total = max(2 * pp - 1, num_micro_batches)
    order = _Order((rank, 2 * pp - 1 - rank))
    order.add(
        *["F0"] * (2 * (pp - rank) - 1), *["F1", "F0"] * rank, *["F1", "I1", "W"] * (pp - rank)
    )
    forwards = 2 * (pp - rank) - 1 + rank
    for index in range(pp, total):
        order.add(*["F0"] * (forwards + index - pp < total), "I0", "W", "F1", "I1", "W")
    done = total - pp
    order.add(*["I0", "I1"] * rank, *["I0", "W"] * (total - done - rank), *["W"] * 2 * total)
    return [entry for entry in order.made if entry[0][2] < num_micro_batches]


def _dual_pipe_v(
    pp: int, rank: int, num_micro_batches: int, overlap: bool
) -> list[tuple[Action, ...]]:
    """Return the actions of DualPipe cut in half (DeepSeek-V3, section 3.2.1).

    Without ``overlap`` the actions of a pair run one after the other.
    """
    order = _Order((rank, 2 * pp - 1 - rank))
    later = pp - rank - 1
    both = (lambda f, b: [f"{f}+{b}"]) if overlap else (lambda f, b: [f, b])
    order.add(*["F0"] * 2 * later, *["F0", "F1"] * (rank + 1), *["I1", "W", "F1"] * later)
    for index in range(num_micro_batches - 2 * pp + rank + 1):
        first = ["F0", "B1"] if index == 0 and rank == pp - 1 else both("F0", "B1")
        order.add(*first, *both("F1", "B0"))
    order.add(*["B1", *both("F1", "B0")] * later)
    halves = False
    for index in range(rank + 1):
        for chunk, parity in ((1, 1), (0, 0)):
            halves = halves or (index == (rank + 1) // 2 and rank % 2 == parity)
            order.add(f"{'I' if halves else 'B'}{chunk}")
    order.add(*["W", "I0" if halves else "B0"] * later, *["W"] * (rank + 1))
    return order.made


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
    clock = [0.0] * pp
    at = [0] * pp
    last = len(stages) - 1
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
                    if kind == "F":
                        arrived = 0.0 if stage == 0 else forward[stage - 1].get(index)
                        late = wait[stage]
                    elif kind == "W":
                        arrived = 0.0
                        late = 0.0
                    else:
                        arrived = (
                            forward[stage].get(index)
                            if stage == last
                            else backward[stage + 1].get(index)
                        )
                        late = 0.0 if stage == last else wait[stage + 1]
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


@lru_cache(maxsize=50_000)
def _rounds(
    schedule: str,
    stages: tuple[StageTimes, ...],
    pp: int,
    counts: tuple[int, ...],
    border: float,
    overlap: bool,
) -> tuple[float, ...]:
    return tuple(simulate(schedule, stages, pp, count, border, overlap) for count in counts)


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
    unit = max(stage.forward + stage.backward for stage in stages) / GRAIN
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
        busy[rank_of(index, schedule, pp)] += stage.forward + stage.backward
    odd = schedule == "Interleaved1F1B" and num_micro_batches % pp
    if schedule == "GPipe" or odd or num_micro_batches <= steady + pp:
        (seconds,) = _rounds(schedule, scaled, pp, (num_micro_batches,), near, overlap)
    else:
        start, end = _rounds(schedule, scaled, pp, (steady, steady + pp), near, overlap)
        # With uneven stages, the busiest rank has not caught up after the first rounds; from then
        # on a round takes at least the busiest rank's work.
        a_round = end - start if overlap else max(end - start, pp * max(busy))
        seconds = end + (num_micro_batches - steady - pp) / pp * a_round
    return seconds / (num_micro_batches * max(busy))
