"""Pipeline schedules: which rank holds a stage, and the order in which each rank runs its actions.

The trainer runs these orders and the planner simulates them. Names and orders are those of
torch.distributed.pipelining, or the order is read from a CSV file that torch wrote or can read.
Kinds of actions: F forward, B backward, I and W the two halves of B (gradients of the input and of
the weights). An entry of two actions, a forward and a backward, runs both at the same time.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import zip_longest

from automoe.config.paths import user_path
from automoe.config.v_schedules import Action, dual_pipe_v, zero_bubble_v
from automoe.errors import ConfigError
from automoe.storage.files import read_file

Entry = tuple[Action, ...]
Order = tuple[tuple[Entry, ...], ...]  # entries of every rank

KEY = "parallel.schedule"
SINGLE = ("GPipe", "1F1B")  # one stage per rank
# Stages go down the ranks and up again; the others go round the ranks in turn.
V_SHAPED = {"ZBVZeroBubble": zero_bubble_v, "DualPipeV": dual_pipe_v}
# Micro-batches run in equal rounds of mesh.pp or more.
IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")
NAMES = (*SINGLE, *IN_ROUNDS, "LoopedBFS", *V_SHAPED)
# Every backward pass runs in halves. DualPipeV runs some of its passes so, at the ends of a step.
IN_HALVES = ("InterleavedZeroBubble", "ZBVZeroBubble")
ALL_FORWARDS_FIRST = ("GPipe", "LoopedBFS")
# Orders that run passes in pairs with parallel.overlap_all_to_all.
MERGES = ("Interleaved1F1B", "DualPipeV")
_ACTION = re.compile(r"(\d+)([FIBW])(\d+)")
_PAIR = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


def nearest(schedule: str) -> str:
    """Return the sentence of remedy for an unknown schedule name: the nearest one."""
    same = [name for name in NAMES if schedule.lower() in name.lower()]
    return f"Nearest valid choice: {KEY}={(same or NAMES)[0]}"


def is_csv(schedule: str) -> bool:
    """Return True if ``schedule`` is the path of a file and not a name."""
    return schedule.endswith(".csv")


def merges(schedule: str) -> bool:
    """Return True if the schedule overlaps a forward with a backward pass (``OVERLAP_F_B``)."""
    return schedule in MERGES or _has(schedule, lambda entry: len(entry) == 2)


def runs_halves(schedule: str) -> bool:
    """Return True if some backward passes run in halves."""
    return schedule in (*IN_HALVES, *V_SHAPED) or _has(schedule, lambda entry: entry[0][0] == "I")


def _has(schedule: str, what: Callable[[Entry], bool]) -> bool:
    if not is_csv(schedule):
        return False
    return any(what(entry) for row in read_csv(schedule, _stamp(schedule)) for entry in row)


def rank_of_stage(stage: int, pp: int, schedule: str) -> int:
    """Return the pipeline rank that holds a stage under ``schedule``; 0 if ``pp`` is 1.

    Raises:
        ConfigError: ``schedule`` is a file without the stage, or as ``read_csv``.
    """
    if pp == 1:
        return 0
    if is_csv(schedule):
        placed = _placed(schedule, _stamp(schedule))
        if stage not in placed:
            raise _refused(schedule, f"stage {stage} is in no row")
        return placed[stage]
    turn, place = divmod(stage, pp)
    return pp - 1 - place if schedule in V_SHAPED and turn % 2 else place


def stages_of_ranks(pp: int, stages_per_rank: int, schedule: str) -> list[list[int]]:
    """Return the stages of every pipeline rank in order (``rank_of_stage``)."""
    held: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(pp * stages_per_rank):
        held[rank_of_stage(stage, pp, schedule)].append(stage)
    return held


def pipeline_order(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, merged: bool = False
) -> Order:
    """Return the entries of every rank in the order in which they run.

    If ``pp`` is 1 the schedule has no effect: micro-batches run one after another.

    Args:
        merged: run forward and backward passes in pairs. Interleaved1F1B and the schedules of one
            stage per rank then start one more forward pass before the first backward pass.

    Raises:
        ConfigError: the number of micro-batches does not fit the schedule.
    """
    schedule = "Interleaved1F1B" if pp == 1 else schedule
    stamp = _stamp(schedule) if is_csv(schedule) else 0
    return _ordered(schedule, stamp, pp, stages_per_rank, num_micro_batches, merged)


@lru_cache(maxsize=256)
def _ordered(
    schedule: str, stamp: int, pp: int, stages_per_rank: int, num_micro_batches: int, merged: bool
) -> Order:
    rule = misfit(schedule, pp, stages_per_rank, num_micro_batches)
    if rule:
        raise _refused(schedule, rule, f"Run a multiple of mesh.pp={pp} micro-batches")
    if is_csv(schedule):
        order = read_csv(schedule, stamp)
    elif schedule in V_SHAPED:
        order = tuple(tuple(V_SHAPED[schedule](pp, rank, num_micro_batches)) for rank in range(pp))
    else:
        return tuple(
            tuple(_in_turn(schedule, pp, stages_per_rank, num_micro_batches, rank, merged))
            for rank in range(pp)
        )
    if merged:
        return order
    return tuple(tuple((action,) for entry in entries for action in entry) for entries in order)


def misfit(schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> str:
    """Return the rule of ``schedule`` that these numbers break, or an empty string."""
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
    if is_csv(schedule):
        return _csv_misfit(schedule, pp, stages_per_rank, num_micro_batches)
    return ""


def _in_turn(
    schedule: str, pp: int, stages_per_rank: int, num_micro_batches: int, rank: int, merged: bool
) -> Iterator[Entry]:
    """Yield the entries of a rank whose stages go round the ranks.

    GPipe and LoopedBFS run all forwards first. 1F1B starts ``pp - rank`` forwards, then alternates.
    Interleaved1F1B takes rounds of up to ``pp`` micro-batches through its stages in turn (arXiv
    2104.04473, section 2.2). InterleavedZeroBubble does so, starts fewer forwards, and delays
    each weight half by ``rank`` backward passes (ZB1P of arXiv 2401.10241).
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


# CSV files ----------------------------------------------------------------------------------------


def _refused(path: str, rule: str, remedy: str = "") -> ConfigError:
    return ConfigError(KEY, path, rule, remedy or "Correct the file, or name " + ", ".join(NAMES))


def _stamp(path: str) -> int:
    """Return the time of the file's last change, which is a part of the caches' keys."""
    try:
        return os.stat(user_path(KEY, path)).st_mtime_ns
    except OSError as error:
        raise _refused(
            path, f"it cannot be read ({error.strerror}; looked from {os.getcwd()})"
        ) from None


@lru_cache(maxsize=8)
def read_csv(path: str, stamp: int) -> Order:
    """Return the order in a file that torch's schedules write with ``_dump_csv``: a row per rank.

    An action is written ``2F0``: stage, kind, micro-batch. ``(0F4;3B1)OVERLAP_F_B`` is a pair; an
    empty field is nothing.

    Raises:
        ConfigError: a field is no action of a computation.
    """
    try:
        text = read_file(user_path(KEY, path)).decode()
        rows = [[field.strip() for field in row] for row in csv.reader(text.splitlines())]
    except (OSError, ValueError, csv.Error) as error:
        raise _refused(path, f"it cannot be read: {error}") from None
    return tuple(tuple(_entry(path, field) for field in row if field) for row in rows)


def _entry(path: str, field: str) -> Entry:
    parts = pair.groups() if (pair := _PAIR.fullmatch(field)) else (field,)
    found = [_ACTION.fullmatch(part.strip()) for part in parts]
    if not all(found) or (pair and [match[2] for match in found if match] != ["F", "B"]):
        raise _refused(
            path,
            f"{field!r} is not a computation: 2F0 is the forward pass of stage 2 and micro-batch 0; B is backward, "
            "I and W its halves, (0F4;3B1)OVERLAP_F_B a pair. automoe adds sends, receives and gathers itself",
            "Write it without them (torch's compute_only format)",
        )
    return tuple((match[2], int(match[1]), int(match[3])) for match in found if match)


@lru_cache(maxsize=8)
def _placed(path: str, stamp: int) -> dict[int, int]:
    """Return {stage: rank} of a file."""
    placed: dict[int, int] = {}
    for rank, entries in enumerate(read_csv(path, stamp)):
        for entry in entries:
            for _, stage, _ in entry:
                if placed.setdefault(stage, rank) != rank:
                    raise _refused(
                        path, f"stage {stage} is in the rows of ranks {placed[stage]} and {rank}"
                    )
    return placed


def _csv_misfit(path: str, pp: int, stages_per_rank: int, num_micro_batches: int) -> str:
    order = read_csv(path, _stamp(path))
    if len(order) != pp:
        return f"it has {len(order)} rows, and mesh.pp={pp}"
    num_stages = pp * stages_per_rank
    held = stages_of_ranks(pp, stages_per_rank, path)
    if (
        any(len(stages) != stages_per_rank for stages in held)
        or len(_placed(path, _stamp(path))) != num_stages
    ):
        return f"its ranks hold stages {held}, and parallel.stages_per_rank={stages_per_rank}"
    actions = [action for entries in order for entry in entries for action in entry]
    seen = set(actions)
    for stage in range(num_stages):
        for index in range(num_micro_batches):
            backward = [kind for kind in "BIW" if (kind, stage, index) in seen]
            if ("F", stage, index) not in seen or backward not in (["B"], ["I", "W"]):
                return (
                    f"stage {stage} does not have one F and one B (or one I and one W) of micro-batch {index}, and a "
                    f"data-parallel rank has {num_micro_batches} a step"
                )
    if len(actions) > len(seen) or any(index >= num_micro_batches for _, _, index in actions):
        return (
            f"it has an action twice, or of a nonexistent micro-batch: a data-parallel rank has {num_micro_batches} "
            "a step"
        )
    return _stuck(order, num_stages)


def _stuck(order: Order, num_stages: int) -> str:
    """Simulate the order; return which ranks wait for each other, or an empty string."""
    done: set[Action] = set()
    left = [list(reversed(entries)) for entries in order]

    def is_ready(action: Action) -> bool:
        kind, stage, index = action
        if kind == "F":
            return stage == 0 or ("F", stage - 1, index) in done
        if kind == "W":
            return ("I", stage, index) in done
        after = stage + 1
        came = after == num_stages or bool({("B", after, index), ("I", after, index)} & done)
        return came and ("F", stage, index) in done

    moved = True
    while moved:
        moved = False
        for entries in left:
            while entries and all(map(is_ready, entries[-1])):
                done.update(entries.pop())
                moved = True
    waiting = [f"rank {rank} before {entries[-1]}" for rank, entries in enumerate(left) if entries]
    return f"it deadlocks: {', '.join(waiting)}" if waiting else ""
