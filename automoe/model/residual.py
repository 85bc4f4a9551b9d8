"""Residual of a decoder layer: one stream, with or without gates, or several that hyper-connections mix.

All kinds have the interface of ``Residual``. Letters of dimensions: ``automoe.model``; here n
streams side by side, W = n H.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from automoe.config.schema import ModelConfig
from automoe.kernels.hyper_connections import collapse, doubly_stochastic, expand, stream_logits
from automoe.kernels.residual_gate import gate_weights, gated_sum


class Residual:
    """Plain residual: attention or a feed-forward reads x, and x + ``multiplier`` * output is the next x."""

    def __init__(self, multiplier: float) -> None:
        self.multiplier = multiplier

    def __call__(self, x_BsH: Tensor) -> tuple[Tensor, ...]:
        """Return (``x_BsH``,): the block's input, without further arguments for ``join``."""
        return (x_BsH,)

    def join(self, x_BsH: Tensor, out_BsH: Tensor) -> Tensor:
        """Return ``x_BsH + multiplier * out_BsH``, the residual after a block whose output is ``out_BsH``."""
        return x_BsH.add(out_BsH, alpha=self.multiplier)


class ResidualGate(nn.Module):
    """Gated residual (Muse-Spark): ``join`` returns sqrt(1 - b^2) * residual + b * block's output.

    b [H] is sigmoid(gate / temperature), with the learned parameter ``gate`` [H] of dtype ``dtype``;
    1 - b^2 is raised to at least 0.001.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.temperature = config.residual_gate_temperature
        self.gate = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype))

    def __call__(self, x_BsH: Tensor) -> tuple[Tensor, ...]:
        """Return the block's input, ``x_BsH`` itself; then for ``join`` two weights [H], of x and of the output."""
        # Hooks of FSDP would make a view of an input that is also an output.
        return x_BsH, *super().__call__()

    def forward(self) -> tuple[Tensor, Tensor]:
        return gate_weights(self.gate, self.temperature)

    join = staticmethod(gated_sum)


class HyperConnection(nn.Module):
    """Hyper-connection (mHC, arXiv 2512.24880, section 4) around attention or a feed-forward.

    From the n streams of a token, each [H], it computes n weights, with which their sum is the
    block's input; n factors, with which the block's output is added to each stream; and a doubly
    stochastic n x n matrix that mixes the streams. ``dtype`` is that of the parameters.
    """

    first_values = {"base": "zeros", "scale": "ones"}

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config = config
        streams = config.hc_mult
        weights = (2 + streams) * streams
        self.fn = nn.Parameter(torch.empty(weights, config.residual_width, dtype=dtype))
        self.base = nn.Parameter(torch.empty(weights, dtype=dtype))
        self.scale = nn.Parameter(torch.empty(3, dtype=dtype))

    def forward(self, x_BsW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (block's input [B, s, H], output factors [B, s, n], mixing matrix [B, s, n, n]).

        The input is a weighted sum of a token's n streams. ``join`` reads the rest: next stream j = sum
        over i of mixing_ij * stream i, plus factor_j * output. All weights are computed from ``x_BsW``.
        """
        config, streams = self.config, self.config.hc_mult
        logits_BsM = stream_logits(x_BsW, self.fn, config.norm_eps)
        sizes = streams, streams, streams * streams
        pre, post, comb = (
            logits * scale + base
            for logits, scale, base in zip(
                logits_BsM.split(sizes, dim=-1), self.scale, self.base.split(sizes), strict=True
            )
        )
        comb_Bsnn = comb.unflatten(-1, (streams, streams))
        mixing_Bsnn = doubly_stochastic(comb_Bsnn, config.hc_sinkhorn_iters, config.hc_eps)
        return collapse(x_BsW, pre.sigmoid() + config.hc_eps), 2 * post.sigmoid(), mixing_Bsnn

    join = staticmethod(expand)


class HyperHead(nn.Module):
    """Module that collapses n residual streams, x [B, s, n H], before the final norm: to [B, s, H].

    The result is a sum of the streams with weights that depend on the token: sigmoid(``hc_scale`` *
    (rms_norm(x) @ ``hc_fn``.T) + ``hc_base``) + ``hc_eps``, one per stream. The parameters hc_fn [n, n H],
    hc_base [n] and hc_scale [1] have ``dtype``.
    """

    first_values = {"hc_base": "zeros", "hc_scale": "ones"}

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.config = config
        streams = config.hc_mult
        self.hc_fn = nn.Parameter(torch.empty(streams, config.residual_width, dtype=dtype))
        self.hc_base = nn.Parameter(torch.empty(streams, dtype=dtype))
        self.hc_scale = nn.Parameter(torch.empty(1, dtype=dtype))

    def forward(self, x_BsW: Tensor) -> Tensor:
        """Return the sum [B, s, H] of the n residual streams [B, s, W = n H], weighted per token as the class says."""
        logits_Bsn = stream_logits(x_BsW, self.hc_fn, self.config.norm_eps)
        gates_Bsn = (logits_Bsn * self.hc_scale + self.hc_base).sigmoid()
        return collapse(x_BsW, gates_Bsn + self.config.hc_eps)


def residual_of(
    config: ModelConfig, dtype: torch.dtype | None
) -> Residual | HyperConnection | ResidualGate:
    """Return the residual around attention or a feed-forward; its parameters have ``dtype``."""
    if config.hc_mult:
        return HyperConnection(config, dtype)
    if config.residual_gate_temperature:
        return ResidualGate(config, dtype)
    return Residual(config.residual_multiplier)
