"""Speeds of the machine that the planner assumes: ``conf/cluster`` and ``constants.toml``.

``constants.toml`` has constants that no data sheet states. For each it gives the value known before
any comparison with runs, the value fitted in the comparison, and the source. Units are FLOP, bytes
and seconds.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import log2
from pathlib import Path

from automoe.config.facts import ELEMENT_BYTES
from automoe.config.schema import Config

# Speeds of an unknown machine: matmuls and memory of one CPU core, and a loopback link. Plans for
# such a machine are marked as uncalibrated.
NOMINAL_FLOPS = 5e10
NOMINAL_MEMORY = 1e10
NOMINAL_LINK = 1e9
# Share of peak FLOP/s by intensity on Hopper GPUs, for cluster files without a gemm_curve.
HOPPER_CURVE = (0.17, 0.31, 0.48, 0.61, 0.70, 0.75, 0.78)


@dataclass(frozen=True)
class Constants:
    """Constants of the time model; ``constants.toml`` describes each.

    Attributes:
        gemm, grouped, attention, memory, on_node, off_node: shares of the nominal speed that
            matmuls, grouped matmuls, attention, memory, and links within and between nodes reach.
        fp8: share of the speed-up of 8-bit matmuls that scaling leaves.
        overlap: share of computation behind which communication can run.
        latency: seconds that a collective takes besides its bytes.
        host_layer: seconds in which the host launches an MoE layer's kernels, per pass.
        imbalance: expert rows of the busiest rank, as a multiple of the mean.
        step: fixed seconds of a step.
    """

    gemm: float
    grouped: float
    attention: float
    memory: float
    fp8: float
    on_node: float
    off_node: float
    overlap: float
    latency: float
    host_layer: float
    imbalance: float
    step: float

    @classmethod
    @lru_cache(maxsize=2)
    def load(cls, which: str = "value") -> Constants:
        """Load ``constants.toml``; ``which``: ``value`` (after the fit) or ``prior`` (before it)."""
        table = tomllib.loads((Path(__file__).parent / "constants.toml").read_text())
        return cls(**{field.name: table[field.name][which] for field in fields(cls)})


@dataclass(frozen=True)
class Machine:
    """Speeds of one GPU and its links, as the time model uses them.

    Attributes:
        constants: constants of the time model.
        peak: nominal FLOP/s of matmuls (``cluster.peak_flops``); ``curve`` has the shares of it
            that matmuls reach, at FLOPs per byte that double from point to point, beginning with 2
            ** ``first``.
        fp8: speed-up of 8-bit matmuls; 1 without them.
        memory, on_node, off_node: bytes/s of memory, and of links within and between nodes, as
            reached in training steps.
        gpus_per_node: GPUs per node.
        number_bytes: bytes of an activation element.
        calibrated: whether the cluster's configuration has a peak and a measured curve.
        links: {collective with size and stride of its group, such as ``all_gather 8x1``: (latency
            in s, bytes/s)}, as measured.
    """

    constants: Constants
    peak: float
    curve: tuple[float, ...]
    first: float  # log2 of the FLOPs per byte at the curve's first point
    # Speed-up of matmuls in 8 bits, after the cost of scaling; 1: no 8-bit matmuls.
    fp8: float
    memory: float
    on_node: float
    off_node: float
    gpus_per_node: int
    number_bytes: int  # bytes of one activation element
    calibrated: bool
    # ``cluster.links``: latency in seconds and bytes/s, by ``link_name``
    links: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, constants: Constants | None = None) -> Machine:
        """Return the speeds of ``config.cluster``; without ``constants``, by ``constants.toml``."""
        cluster = config.cluster
        gain = (
            cluster.peak_flops_fp8 / cluster.peak_flops
            if cluster.peak_flops and cluster.peak_flops_fp8
            else 1.0
        )
        link = cluster.intra_node_bandwidth or NOMINAL_LINK
        constants = replace(constants or Constants.load(), **cluster.constants)
        return cls(
            constants=constants,
            peak=cluster.peak_flops or NOMINAL_FLOPS,
            curve=tuple(cluster.gemm_curve) or HOPPER_CURVE,
            first=log2(cluster.gemm_curve_from),
            fp8=1 + constants.fp8 * (gain - 1) if config.train.fp8 != "off" else 1.0,
            memory=constants.memory * (cluster.memory_bandwidth or NOMINAL_MEMORY),
            on_node=constants.on_node * link,
            off_node=constants.off_node * (cluster.inter_node_bandwidth or link),
            gpus_per_node=cluster.gpus_per_node,
            number_bytes=ELEMENT_BYTES[config.train.dtype],
            calibrated=bool(cluster.peak_flops and cluster.gemm_curve),
            links=cluster.links,
        )

    def gemm(self, m: float, n: float, k: float, groups: float = 1) -> float:
        """Return the seconds of a matmul [m, k] x [k, n], or of a grouped matmul with ``groups`` of these.

        The speed follows the machine's curve over FLOPs per byte: matmuls with a small dim are
        slower.
        """
        flops = 2.0 * m * n * k
        moved = self.number_bytes * (m * k + k * n + m * n)
        if not flops:
            return 0.0
        place = min(max(log2(flops / moved) - self.first, 0.0), len(self.curve) - 1.0)
        below = min(int(place), len(self.curve) - 2)
        share = self.curve[below] + (place - below) * (self.curve[below + 1] - self.curve[below])
        speed = (
            self.peak
            * self.fp8
            * share
            * self.constants.gemm
            * (self.constants.grouped if groups > 1 else 1.0)
        )
        # Below the curve's first point a matmul takes the time of its memory traffic.
        return groups * max(flops / speed, moved / self.memory)

    def attention(self, flops: float) -> float:
        """Return the seconds of ``flops`` FLOPs of attention, whose matmuls never run in 8 bits."""
        return flops / (self.peak * self.curve[-1] * self.constants.gemm * self.constants.attention)

    def cast(self, numbers: float) -> float:
        """Return the seconds to cast ``numbers`` elements to FP8 twice, by rows and by columns.

        Matmuls of the forward and the backward pass need scales along different dims. The result is
        0 if FP8 is off or ``cluster.peak_flops_fp8`` is unknown.
        """
        return self.pass_over((self.number_bytes + 2.0) * numbers) if self.fp8 > 1 else 0.0

    def pass_over(self, num_bytes: float) -> float:
        """Return the seconds to read or write ``num_bytes`` bytes of GPU memory."""
        return num_bytes / self.memory
