"""Pipeline schedules: which rank holds a stage, and the order in which each rank runs its actions.

The trainer runs these orders and the planner simulates them. Names and orders are those of
torch.distributed.pipelining.
Kinds of actions: F forward, B backward, I and W the two halves of B (gradients of the input and of
the weights). An entry of two actions, a forward and a backward, runs both at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import zip_longest

from automoe.config.v_schedules import Action, dual_pipe_v, zero_bubble_v
from automoe.errors import ConfigError

Entry = tuple[Action, ...]
Order = tuple[tuple[Entry, ...], ...]  # entries of every rank

KEY = "parallel.schedule"
SINGLE = ("GPipe", "1F1B")  # one stage per rank
# Stages go down the ranks and up again; the others go round the ranks in turn.
V_SHAPED = {"ZBVZeroBubble": zero_bubble_v, "DualPipeV": dual_pipe_v}
# Micro-batches run in equal rounds of mesh.pp or more.
IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
# Every backward pass runs in halves. DualPipeV runs some of its passes so, at the ends of a step.
IN_HALVES = ("InterleavedZeroBubble", "ZBVZeroBubble")
ALL_FORWARDS_FIRST = ("GPipe", "LoopedBFS")
# Orders that run passes in pairs with parallel.overlap_all_to_all.
MERGES = ("Interleaved1F1B", "DualPipeV")


def runs_halves(schedule: str) -> bool:
    """Return True if ``schedule`` splits some or all backward passes into two actions.

    The first computes the gradients of a stage's input, the second, later, those of its weights.
    """
    return schedule in (*IN_HALVES, *V_SHAPED)


def rank_of_stage(stage: int, pp: int, schedule: str) -> int:
    """Return the pipeline rank that holds a stage: stage modulo ``pp``.

    Under the V-shaped schedules (ZBVZeroBubble, DualPipeV) every second run of ``pp`` stages goes
    back from the last rank to the first.
    """
    if pp == 1:
        return 0
    turn, place = divmod(stage, pp)
    return pp - 1 - place if schedule in V_SHAPED and turn % 2 else place


def stages_of_ranks(pp: int, stages_per_rank: int, schedule: str) -> list[list[int]]:
    """Return each pipeline rank's ``stages_per_rank`` stage numbers, ascending (see ``rank_of_stage``)."""
    held: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(pp * stages_per_rank):
        held[rank_of_stage(stage, pp, schedule)].append(stage)
    return held


def pipeline_order(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, merged: bool = False
) -> Order:
    """Return for each pipeline rank its actions in the order in which they run.

    An action is (kind, stage, micro-batch), with kind F, B, I or W: forward, backward, or backward
    for inputs or weights alone. Actions are in entries: an entry has one action, or two that run at
    the same time. If ``pp`` is 1 the schedule has no effect: micro-batches run one after another.

    Args:
        merged: put a forward and a backward pass into one entry where the schedule allows it
            (Interleaved1F1B, DualPipeV, and any with ``pp`` 1).

    Raises:
        ConfigError: the schedule cannot run this number of stages per rank or of micro-batches.
    """
    schedule = "Interleaved1F1B" if pp == 1 else schedule
    return _ordered(schedule, pp, stages_per_rank, num_micro_batches, merged)


@lru_cache(maxsize=256)
def _ordered(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, merged: bool
) -> Order:
    rule = misfit(schedule, pp, stages_per_rank, num_micro_batches)
    if rule:
        raise ConfigError(KEY, schedule, rule, f"Run a multiple of mesh.pp={pp} micro-batches")
    if schedule not in V_SHAPED:
        return tuple(
            tuple(_in_turn(schedule, pp, stages_per_rank, num_micro_batches, rank, merged))
            for rank in range(pp)
        )
    order = tuple(tuple(V_SHAPED[schedule](pp, rank, num_micro_batches)) for rank in range(pp))
    if merged:
        return order
    return tuple(tuple((action,) for entry in entries for action in entry) for entries in order)


def misfit(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> str:
    """Return why ``schedule`` cannot run these stages and micro-batches on ``pp`` ranks; '' if it can."""
    per_rank = f"runs exactly 1 stage a rank; there are {stages_per_rank}"
    if schedule in SINGLE and stages_per_rank != 1:
        return f"{schedule} {per_rank}"
    if schedule in V_SHAPED and stages_per_rank != 2:
        return f"{schedule} runs exactly 2 stages a rank, down the ranks and up again; there are {stages_per_rank}"
    if schedule == "DualPipeV" and num_micro_batches < 2 * pp:
        return (
            f"{schedule} runs at least as many micro-batches as stages, 2 * mesh.pp = {2 * pp}, and "
            f"a data-parallel rank has {num_micro_batches} a step"
        )
    rounds = max(1, num_micro_batches // pp)
    if schedule in IN_ROUNDS and stages_per_rank > 1 and (left := num_micro_batches % rounds):
        return f"{schedule} runs {num_micro_batches} micro-batches in {rounds} equal rounds: {left} are left over"
    return ""


def _in_turn(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, rank: int, merged: bool
) -> Iterator[Entry]:
    """Yield the actions of one rank for schedules in which rank r holds the stages r, r + pp, ...

    An action is (kind, stage, micro-batch), with kind F, B, I or W: forward, backward, or backward
    for inputs or weights alone. An entry, which is yielded, has one action, or two that run
    together. GPipe and LoopedBFS run all forwards first. 1F1B starts ``pp - rank`` forwards, then
    alternates. Interleaved1F1B divides the micro-batches into equal groups, of ``pp`` or more if
    there are as many, and runs a whole group through a stage before the next stage (arXiv
    2104.04473, section 2.2). InterleavedZeroBubble does so too, but starts fewer forwards and
    delays the weight gradients of each backward by ``rank`` backwards (ZB1P of arXiv 2401.10241).

    Args:
        merged: let a forward and a backward pass run at the same time as one entry, where the
            schedule has whole backward passes.
    """
    total = num_micro_batches * stages_per_rank
    size = num_micro_batches // max(1, num_micro_batches // pp)  # micro-batches of a round
    halves = schedule == "InterleavedZeroBubble"
    merged = merged and not halves
    behind = pp - 1 - rank
    if schedule in ALL_FORWARDS_FIRST and not merged:
        size = num_micro_batches
        ahead = total
    elif schedule == "1F1B" and not merged:
        ahead = pp - rank
    else:
        # A pair delivers its activations at its end, so merging needs more forwards in advance.
        ahead = (stages_per_rank - 1) * size + (behind if halves else 2 * behind) + 1
    ahead = min(ahead, total)

    def action(kind: str, index: int) -> Action:
        turn, within = divmod(index, size)
        lap, local = divmod(turn, stages_per_rank)
        if kind != "F":
            local = stages_per_rank - 1 - local
        if kind != "F" and schedule == "LoopedBFS":
            within = size - 1 - within
        return kind, local * pp + rank, lap * size + within

    yield from ((action("F", index),) for index in range(ahead))
    for done, index in zip_longest(range(total), range(ahead, total)):
        entry = [action("I" if halves else "B", done)]
        if index is not None and merged:
            yield action("F", index), entry[0]
            continue
        yield (entry[0],)
        if halves and done >= rank:
            yield (action("W", done - rank),)
        if index is not None:
            yield (action("F", index),)
    if halves:
        yield from ((action("W", index),) for index in range(max(0, total - rank), total))
