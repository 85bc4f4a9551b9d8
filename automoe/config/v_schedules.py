"""Orders of the V-shaped schedules: DualPipeV (DeepSeek-V3, section 3.2.1), ZBV (arXiv 2401.10241, section 6).

Stages are numbered down the ranks and then up again, so rank r holds stages r and 2 pp - 1 - r.
"""

from __future__ import annotations

from collections import Counter

Action = tuple[str, int, int]  # (kind, stage, micro-batch)


class _Order:
    """List of one pipeline rank's actions in the order in which they run.

    Actions are added by kind and stage. The first forward of a stage gets micro-batch 0, the
    second micro-batch 1, and so on; backward passes are numbered in the same way.

    Args:
        stages: numbers of the rank's two stages, of which the first one comes earlier in the model.
    """

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages = stages
        self.made: list[tuple[Action, ...]] = []
        self.counts: Counter[tuple[str, int]] = Counter()
        # Weight halves (W) that may run at any time: (stage, micro-batch).
        self.waiting: list[tuple[int, int]] = []

    def _next(self, kind: str, chunk: int) -> Action:
        counted = "F" if kind == "F" else "B"
        index = self.counts[counted, chunk]
        self.counts[counted, chunk] += 1
        if kind == "I":
            self.waiting.append((self.stages[chunk], index))
        return kind, self.stages[chunk], index

    def made_of(self, word: str) -> int:
        """Return how many actions ``word`` (kind, then stage) were added so far.

        ``F0`` are forwards of the rank's first stage, ``B1`` backwards of its second: whole ones,
        and those for inputs alone.
        """
        return self.counts[word[0], int(word[1])]

    def add(self, *actions: str) -> None:
        """Append to ``made``, the rank's order, one entry for each word of ``actions``.

        ``F0`` is the next forward of the rank's first stage (1: second), ``F0+B1`` a forward and a
        backward at the same time. ``I0`` is a backward for the input alone; ``W`` computes the
        weight gradients of the oldest such backward that lacks them, and appends nothing if none
        does.
        """
        for word in actions:
            if word == "W":
                if self.waiting:
                    self.made.append((("W", *self.waiting.pop(0)),))
            else:
                self.made.append(
                    tuple(self._next(part[0], int(part[1])) for part in word.split("+"))
                )


def dual_pipe_v(pp: int, rank: int, num_micro_batches: int) -> list[tuple[Action, ...]]:
    """Return the order in which a rank of ``pp`` runs its actions under DualPipeV.

    This is one half of DualPipe (DeepSeek-V3, section 3.2.1), which feeds micro-batches from both
    ends. An entry has one action (kind, stage, micro-batch), or two that run at the same time.
    Kinds: F forward, B backward, I and W backward for inputs or weights alone.
    """
    order = _Order((rank, 2 * pp - 1 - rank))
    later = pp - rank - 1
    order.add(*["F0"] * 2 * later, *["F0", "F1"] * (rank + 1), *["I1", "W", "F1"] * later)
    for index in range(num_micro_batches - 2 * pp + rank + 1):
        first = ["F0", "B1"] if index == 0 and rank == pp - 1 else ["F0+B1"]
        order.add(*first, "F1+B0")
    order.add(*["B1", "F1+B0"] * later)
    halves = False
    for index in range(rank + 1):
        for chunk, parity in ((1, 1), (0, 0)):
            halves = halves or (index == (rank + 1) // 2 and rank % 2 == parity)
            order.add(f"{'I' if halves else 'B'}{chunk}")
    order.add(*["W", "I0" if halves else "B0"] * later, *["W"] * (rank + 1))
    return order.made


def zero_bubble_v(pp: int, rank: int, num_micro_batches: int) -> list[tuple[Action, ...]]:
    """Return the order in which a rank of ``pp`` runs its actions under ZBV (arXiv 2401.10241).

    Fewer than ``2 pp - 1`` micro-batches run as ``2 pp - 1`` would, without the missing ones. Each
    entry has one action (kind, stage, micro-batch). Kinds: F forward, I and W backward for inputs
    or weights alone.
    """
    order = _Order((rank, 2 * pp - 1 - rank))
    count = max(2 * pp - 1, num_micro_batches)
    order.add(*["F0"] * (2 * (pp - rank) - 1), *["F1", "F0"] * rank)
    order.add(*["F1", "I1", "W"] * (pp - rank))
    while order.made_of("F1") < count:
        order.add(*["F0"] * (order.made_of("F0") < count), "I0", "W", "F1", "I1", "W")
    order.add(*["I0", "I1"] * rank)
    for _ in range(pp - rank):
        order.add("I0")
        # weight halves of the stage on the way down come first
        order.waiting.sort(key=lambda half: half[0] != rank)
        order.add("W")
    order.waiting.sort(key=lambda half: half[0] == rank)
    order.add(*["W"] * len(order.waiting))
    return [entry for entry in order.made if entry[0][2] < num_micro_batches]
