"""Predicted seconds and bytes of every collective, from the placement of its ranks on nodes.

A process group consists of the ranks start + i * stride with i < size. Ranks fill nodes in order,
so stride and size determine how many ranks of a group share a node. A collective across nodes uses
the network adapters of all its ranks on a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from automoe.planner.machine import Machine


@dataclass(frozen=True)
class Group:
    """Placement of a process group: ``size`` ranks over ``nodes`` nodes, ``stride`` apart.

    Every node has ``size / nodes`` of them.
    """

    size: int
    nodes: int
    stride: int = 1

    @classmethod
    def of(cls, size: int, stride: int, gpus_per_node: int) -> Group:
        """Return the placement of ``size`` ranks that are ``stride`` apart, from rank 0 on.

        All groups of an axis have this placement if ``gpus_per_node``, the ranks of a node, is
        divisible by the mesh axes.
        """
        return cls(size, min(size, -(-size * stride // gpus_per_node)), stride)

    @property
    def off_node(self) -> float:
        """Share of a rank's bytes that goes to other nodes, if they are split evenly over the group."""
        return 1 - 1 / self.nodes

    @property
    def on_node(self) -> float:
        """Share of a rank's bytes that goes to other ranks of its node, if they are split evenly over the group."""
        return 1 - 1 / self.size - self.off_node


@dataclass(frozen=True)
class Cost:
    """Cost of a collective for one rank: seconds, bytes sent, and bytes sent to other nodes."""

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
        """Return a copy with equal bytes whose seconds are ``seconds``: those that no computation hides."""
        return Cost(seconds, self.bytes, self.off_node)


NOTHING = Cost()


def link_name(kind: str, size: int, stride: int) -> str:
    """Return a collective's key in ``cluster.links``: ``all_gather 8x1`` has size 8, stride 1.

    Args:
        kind: name of the collective: all_gather, reduce_scatter, all_to_all or send.
        size, stride: number of ranks of the group, and their distance.
    """
    return f"{kind} {size}x{stride}"


def measured(machine: Machine, group: Group, kind: str, sent: float) -> Cost | None:
    """Return a collective's cost by the measurements in ``cluster.links``.

    The result is None if these lack a group of this size and stride, or if the group spans nodes.

    Args:
        kind: name of the collective, such as ``all_gather``.
        sent: bytes that a rank sends.
    """
    link = machine.links.get(link_name(kind, group.size, group.stride))
    if link is None or group.nodes > 1:
        return None
    return Cost(link[0] + sent / link[1], sent)


def gather(machine: Machine, group: Group, whole: float, kind: str = "all_gather") -> Cost:
    """Return the cost of an all-gather or reduce-scatter over ``group``.

    Across nodes it has two phases: between ranks with the same index on their nodes, and within
    nodes.

    Args:
        whole: bytes of the gathered (or not yet reduced) tensor on a rank.
        kind: ``all_gather`` or ``reduce_scatter``, which differ only where ``cluster.links`` has
            measurements.
    """
    if group.size == 1 or not whole:
        return NOTHING
    per_node = group.size / group.nodes
    sent = whole * (1 - 1 / group.size)
    if (cost := measured(machine, group, kind, sent)) is not None:
        return cost
    across = whole * group.off_node / per_node
    within = sent / machine.on_node if per_node > 1 else 0.0
    return Cost(across / machine.off_node + within + machine.constants.latency, sent, across)


def all_to_all(machine: Machine, group: Group, sent: float) -> Cost:
    """Return the cost of an all-to-all in which each rank splits ``sent`` bytes evenly.

    The bytes that a rank keeps for itself are part of ``sent`` and cost nothing.
    """
    if group.size == 1 or not sent:
        return NOTHING
    across = sent * group.off_node
    within = sent * group.on_node
    if (cost := measured(machine, group, "all_to_all", within)) is not None:
        return cost
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
    """Return the cost of a token dispatch that sends a token once to each node, and to each rank.

    A node or rank gets the token only if one of the token's experts is there.

    Args:
        token: bytes of one copy of all the rank's tokens.
        top_k: experts per token.
        most_nodes: largest number of nodes whose experts a token may choose; 0: no limit.
        together: True if transfers across and within nodes overlap (DeepEP); False if they are two
            collectives, one after the other.
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
    """Return the cost of exchanging the numbers of rows that ranks will receive.

    It is a collective of a few bytes; the host waits for its result and then launches kernels
    again.

    Args:
        together: True if the sizes arrive with the rows, so that the host waits only once.
    """
    return Cost((1 if together else 2) * machine.constants.latency)


def distinct(top_k: int, places: int) -> float:
    """Return how many different ``places`` are hit, on average, by ``top_k`` independent draws.

    Each draw is uniform over all places.
    """
    return places * (1 - (1 - 1 / places) ** top_k)


def send(machine: Machine, group: Group, num_bytes: float) -> Cost:
    """Return the cost of sending ``num_bytes`` to the next rank of ``group``, the pipeline ranks."""
    if group.size == 1:
        return NOTHING
    if (cost := measured(machine, group, "send", num_bytes)) is not None:
        return cost
    link = machine.on_node if group.nodes == 1 else machine.off_node
    return Cost(
        num_bytes / link + machine.constants.latency, num_bytes, num_bytes * (group.nodes > 1)
    )
