"""The weights that an expert backend multiplies by, as plain tensors of this rank's experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ExpertWeights(NamedTuple):
    """Matrices and biases of E experts of width I, for rows of width H.

    Either both biases are given or none.

    Attributes:
        gate_up_proj: [E, 2, I, H], gate then up; a view of [E, 2I, H].
        down_proj: [E, H, I].
        gate_up_proj_bias: [E, 2, I], added to gate and up; None: the experts have no biases.
        down_proj_bias: [E, H], added to the output before the routing weight multiplies it.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    gate_up_proj_bias: Tensor | None = None
    down_proj_bias: Tensor | None = None

    def joined(self) -> ExpertWeights:
        """Return the same weights with gate and up joined in one dim J = 2I: all of gate, then all of up.

        gate_up_proj [E, 2, I, H] becomes [E, J, H], its bias [E, 2, I] becomes [E, J].
        """
        bias = self.gate_up_proj_bias
        return self._replace(
            gate_up_proj=self.gate_up_proj.flatten(1, 2),
            gate_up_proj_bias=None if bias is None else bias.flatten(1, 2),
        )
