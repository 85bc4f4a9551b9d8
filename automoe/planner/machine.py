"""The machine that a step is timed on: ``conf/cluster``, and the constants that no data sheet has.

``constants.toml`` holds those, each with what was known before any run was compared, what the comparison made of it,
and its source. Units: FLOP, bytes, seconds.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import log2
from pathlib import Path

from automoe.config.rules_kernels import ELEMENT_BYTES
from automoe.config.schema import Config

# A machine of which nothing is known: one core's products, its memory, a loopback. All of it is called uncalibrated.
NOMINAL_FLOPS, NOMINAL_MEMORY, NOMINAL_LINK = 5e10, 1e10, 1e9
HOPPER_CURVE = (0.17, 0.31, 0.48, 0.61, 0.70, 0.75, 0.78)  # where a cluster has none


@dataclass(frozen=True)
class Constants:
    """Shares and seconds; ``constants.toml`` says what each is."""

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
        """Those of ``constants.toml``: ``value`` after the fit, ``prior`` before it."""
        table = tomllib.loads((Path(__file__).parent / "constants.toml").read_text())
        return cls(**{field.name: table[field.name][which] for field in fields(cls)})


@dataclass(frozen=True)
class Machine:
    """One GPU and its links as a step meets them. Speeds are those reached, not those of the data sheet."""

    constants: Constants
    peak: float
    curve: tuple[float, ...]
    first: float  # log2 of FLOP a byte of the curve's first number
    fp8: float  # how much faster products in 8 bits are, after what casting costs; 1: they are not
    memory: float
    on_node: float
    off_node: float
    gpus_per_node: int
    number_bytes: int  # of an activation
    calibrated: bool

    @classmethod
    def of(cls, config: Config, constants: Constants) -> Machine:
        cluster = config.cluster
        gain = (
            cluster.peak_flops_fp8 / cluster.peak_flops
            if cluster.peak_flops and cluster.peak_flops_fp8
            else 1.0
        )
        link = cluster.intra_node_bandwidth or NOMINAL_LINK
        constants = replace(constants, **cluster.constants) if cluster.constants else constants
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
        )

    def gemm(self, m: float, n: float, k: float, groups: float = 1) -> float:
        """Seconds of ``groups`` products [m, k] x [k, n]. Thin ones move more bytes a FLOP, and are slower."""
        flops, moved = 2.0 * m * n * k, self.number_bytes * (m * k + k * n + m * n)
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
        # Below the curve's first point a product is as fast as it is read.
        return groups * max(flops / speed, moved / self.memory)

    def attention(self, flops: float) -> float:
        """Seconds of attention's products, never in 8 bits."""
        return flops / (self.peak * self.curve[-1] * self.constants.gemm * self.constants.attention)

    def cast(self, numbers: float) -> float:
        """Seconds to write so many numbers in 8 bits, as rows and as columns; 0: nothing is cast."""
        return self.pass_over((self.number_bytes + 2.0) * numbers) if self.fp8 > 1 else 0.0

    def pass_over(self, num_bytes: float) -> float:
        """Seconds to read or write so many bytes of the GPU's own memory."""
        return num_bytes / self.memory
