"""Seconds and bytes of every collective, from where the ranks of its group really are.

A group is the ranks start + i * stride, i < size. Ranks fill nodes in order, so stride and size say how many of a
group share a node. A collective over nodes leaves a node through the adapters of all of the group's ranks there.
"""

from __future__ import annotations

from dataclasses import dataclass

from automoe.planner.machine import Machine


@dataclass(frozen=True)
class Group:
    """``size`` ranks, of which about ``size / nodes`` share each of ``nodes`` nodes."""

    size: int
    nodes: int

    @classmethod
    def of(cls, size: int, stride: int, gpus_per_node: int) -> Group:
        """The group of rank 0; those of other ranks lie alike where nodes divide by the mesh's axes."""
        if size * stride <= gpus_per_node:
            return cls(size, 1)
        if stride >= gpus_per_node:
            return cls(size, size)
        return cls(size, -(-size * stride // gpus_per_node))

    @property
    def off_node(self) -> float:
        """Share of what a rank sends evenly to all that leaves its node."""
        return 1 - 1 / self.nodes

    @property
    def on_node(self) -> float:
        """Share that goes to others in its node."""
        return 1 - 1 / self.size - self.off_node


@dataclass(frozen=True)
class Cost:
    """Seconds of a collective on a rank, the bytes that the rank sends, and those of them that leave its node."""

    seconds: float = 0.0
    bytes: float = 0.0
    off_node: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.seconds + other.seconds, self.bytes + other.bytes, self.off_node + other.off_node
        )

    def __mul__(self, times: float) -> Cost:
        return Cost(times * self.seconds, times * self.bytes, times * self.off_node)

    def seen(self, seconds: float) -> Cost:
        """The same bytes, of which ``seconds`` show."""
        return Cost(seconds, self.bytes, self.off_node)


NOTHING = Cost()


def gather(machine: Machine, group: Group, whole: float) -> Cost:
    """All-gather to ``whole`` bytes on every rank, or reduce-scatter of as many: across nodes, then within them."""
    if group.size == 1 or not whole:
        return NOTHING
    per_node = group.size / group.nodes
    sent = whole * (1 - 1 / group.size)
    across = whole * group.off_node / per_node
    within = sent / machine.on_node if per_node > 1 else 0.0
    return Cost(across / machine.off_node + within + machine.constants.latency, sent, across)


def reduce_all(machine: Machine, group: Group, whole: float) -> Cost:
    """All-reduce: a reduce-scatter and an all-gather."""
    return gather(machine, group, whole) * 2


def all_to_all(machine: Machine, group: Group, sent: float) -> Cost:
    """Every rank sends ``sent`` bytes evenly to all of its group, itself included."""
    if group.size == 1 or not sent:
        return NOTHING
    across, within = sent * group.off_node, sent * group.on_node
    seconds = across / machine.off_node + within / machine.on_node + machine.constants.latency
    return Cost(seconds, across + within, across)


def dispatch_once(
    machine: Machine,
    group: Group,
    token: float,
    top_k: int,
    most_nodes: int = 0,
    together: bool = True,
) -> Cost:
    """The same for rows of tokens that cross to a node once, and there to a rank once.

    Args:
        token: bytes of one copy of all tokens.
        top_k: experts that a token goes to.
        most_nodes: routing is limited to the experts of so many nodes; 0: it is not.
        together: both networks work at the same time (DeepEP); else it is two collectives, one after the other.
    """
    if group.size == 1 or not token:
        return NOTHING
    per_node = group.size / group.nodes
    across = token * distinct(top_k, min(group.nodes, most_nodes or group.nodes)) * group.off_node
    within = token * distinct(top_k, group.size) * (1 - 1 / per_node)
    parts = across / machine.off_node, within / machine.on_node
    calls = 1 if together else (across > 0) + (within > 0)
    seconds = (max(parts) if together else sum(parts)) + calls * machine.constants.latency
    return Cost(seconds, across + within, across)


def exchange_sizes(machine: Machine, together: bool = False) -> Cost:
    """How many rows come from whom: a collective of a few bytes, and the host's wait, after which it launches anew.

    Args:
        together: the sizes come with the rows, and the host waits for these.
    """
    return Cost((1 if together else 2) * machine.constants.latency)


def distinct(top_k: int, places: int) -> float:
    """Places among ``places`` equal ones that ``top_k`` draws hit, on average."""
    return places * (1 - (1 - 1 / places) ** top_k)


def send(machine: Machine, group: Group, num_bytes: float) -> Cost:
    """From one pipeline rank to the next."""
    if group.size == 1:
        return NOTHING
    link = machine.on_node if group.nodes == 1 else machine.off_node
    return Cost(
        num_bytes / link + machine.constants.latency, num_bytes, num_bytes * (group.nodes > 1)
    )
