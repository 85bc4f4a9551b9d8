"""Random numbers that are functions of a name, a seed and an index.

They do not depend on rank, device or order of calls. The generator is counter-based: SplitMix64
(Steele et al. 2014) over the index. Any rank can compute the numbers of any element, so random
values are equal on every mesh.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """Return the int64 with the same bits as ``value``, a 64-bit unsigned integer.

    Torch's int64 product has the same bits as the unsigned product modulo 2^64.
    """
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right by ``bits`` and fill with zeros; torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# Streams of routed experts keep the names that the parameters had before 0.7, so that a seed still
# gives the same first weights.
_STREAM_NAMES = {
    ".experts.gate_up_proj": ".experts.w_gate_up",
    ".experts.down_proj": ".experts.w_down",
    ".experts.gate_up_proj_bias": ".experts.b_gate_up",
    ".experts.down_proj_bias": ".experts.b_down",
}


def stream_key(name: str, seed: int) -> int:
    """Return the int64 key of a stream of random numbers, a hash of ``seed`` and ``name``.

    Names of experts' parameters are first replaced by their names before version 0.7 (``_STREAM_NAMES``).
    """
    for ending, stream in _STREAM_NAMES.items():
        if name.endswith(ending):
            name = name.removesuffix(ending) + stream
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return _signed(int.from_bytes(digest[:8], "little"))


def bits_at(index: Tensor, key: int | Tensor) -> Tensor:
    """Return 64 random bits, as int64, for each element of ``index`` (int64, any shape).

    Args:
        key: key of a random stream (``stream_key``), or a tensor of keys that broadcasts to
            ``index``.
    """
    x = (index + 1) * _signed(GOLDEN_GAMMA) + key
    x = (x ^ _shift_right(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX_2)
    return x ^ _shift_right(x, 31)


def normal_at(index: Tensor, name: str, seed: int) -> Tensor:
    """Return standard normal float64 numbers, each a function of (index, name, seed) alone.

    Args:
        index: int64 of any shape, for example the indices of a parameter's elements; the result has
            the same shape.
        name: name of the random stream, for example of the parameter.
    """
    bits = bits_at(index, stream_key(name, seed))
    # Two 32-bit halves give two uniforms; the half step keeps the logarithm's argument above zero.
    radius = (_shift_right(bits, 32).to(torch.float64) + 0.5) * 2.0**-32
    angle = (bits & 0xFFFFFFFF).to(torch.float64) * (2.0**-32 * 2 * torch.pi)
    return torch.sqrt(-2 * torch.log(radius)) * torch.cos(angle)


def uniform_at(index: Tensor, name: str, seed: int) -> Tensor:
    """Return uniform float64 numbers in (0, 1), each a function of (index, name, seed) alone.

    Args:
        index: int64 of any shape, for example the indices of a parameter's elements; the result has
            the same shape.
        name: name of the random stream, for example of the parameter.
    """
    return uniform_from(bits_at(index, stream_key(name, seed)))


def uniform_from(bits: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Convert 64 random ``bits`` each (int64) to uniform numbers of ``dtype``, strictly between 0 and 1.

    A number is (n + 0.5) / 2^23, with n the upper 23 of the 64 bits. ``dtype`` is float32 or float64, in
    which this is exact; narrower dtypes would round n.
    """
    return (_shift_right(bits, 41).to(dtype) + 0.5) * 2.0**-23
