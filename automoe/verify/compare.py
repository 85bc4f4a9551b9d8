"""Comparison of two trajectories: relative errors of every number and tensor of both runs."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

import torch

from automoe.verify.trajectory import Trajectory

Numbers = torch.Tensor | list[float] | float
NUMBERS = {  # kind of quantity -> attribute of ``Trajectory``
    "loss": "losses",
    "seq_balance_loss": "seq_balance_loss",
    "global_balance_loss": "global_balance_loss",
    "micro_batch_balance_loss": "micro_batch_balance_loss",
    "z_loss": "z_loss",
    "dropped_share": "dropped_share",
    "reported metrics": "metrics",
    "expert counts": "expert_counts",
}


@dataclass(frozen=True)
class Comparison:
    """Comparison of one tensor or number of both runs.

    Attributes:
        kind: kind of quantity: ``loss``, ``gradient``, ``updated parameter``, ...
        name: name of the parameter or buffer; empty for a number of the whole model.
        step: optimizer step of the quantity, counted from 0.
        error: ||got - expected|| / ||expected||. It is infinite if one run lacks the tensor, if the
            shapes differ, or if ``expected`` is zero and ``got`` is not; 0 if both are zero.
        index: index of the element with the largest difference.
        got: value at ``index`` in the run under test.
        expected: value at ``index`` in the reference.
        absent: why the values cannot be compared; empty if they can.
    """

    kind: str
    name: str
    step: int
    error: float
    index: tuple[int, ...] = ()
    got: float = nan
    expected: float = nan
    absent: str = ""

    def within(self, tolerance: float) -> bool:
        """Return True if the error is at most ``tolerance``; False if it is NaN."""
        return self.error <= tolerance

    def __str__(self) -> str:
        what = f"step {self.step} {self.kind}" + (f" of {self.name}" if self.name else "")
        if self.absent:
            return f"{what}: {self.absent}"
        where = f" at {list(self.index)}" if self.index else ""
        return f"{what}: relative error {self.error:.2e}; got {self.got!r}, expected {self.expected!r}{where}"


def compare_tensors(
    kind: str, name: str, step: int, got: Numbers | None, expected: Numbers | None
) -> Comparison:
    """Compare a tensor or numbers of the two runs in float64; a run may lack them (None)."""
    if got is None or expected is None:
        places = ("absent", "present") if got is None else ("present", "absent")
        absent = "{} here, {} in the reference".format(*places)
        return Comparison(kind, name, step, inf, absent=absent)
    got = torch.as_tensor(got, dtype=torch.float64)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    if got.shape != expected.shape:
        absent = f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
        return Comparison(kind, name, step, inf, absent=absent)
    delta = got - expected
    size = float(expected.norm())
    error = float(delta.norm())
    if error:  # also if it is NaN
        error = error / size if size else error * inf
    if delta.numel() == 0:
        return Comparison(kind, name, step, error)
    flat = int(delta.abs().nan_to_num(nan=inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), delta.shape))
    return Comparison(kind, name, step, error, index, float(got[index]), float(expected[index]))


def compare_trajectories(got: Trajectory, expected: Trajectory) -> list[Comparison]:
    """Compare every number and tensor of both runs, in the order in which a step computes them."""
    steps = len(expected.losses)
    assert steps and len(got.losses) == steps, "runs of different lengths"
    compared = []
    for step in range(steps):
        for kind, name in NUMBERS.items():
            mine = getattr(got, name)[step]
            compared.append(compare_tensors(kind, "", step, mine, getattr(expected, name)[step]))
        compared += _compare_named("gradient", step, got.gradients[step], expected.gradients[step])
        compared.append(
            compare_tensors(
                "gradient norm", "", step, got.grad_norms[step], expected.grad_norms[step]
            )
        )
    compared += _compare_named("updated parameter", steps - 1, got.parameters, expected.parameters)
    return compared + _compare_named("expert bias", steps - 1, got.biases, expected.biases)


def _compare_named(
    kind: str, step: int, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> list[Comparison]:
    return [
        compare_tensors(kind, name, step, got.get(name), expected.get(name))
        for name in expected | got
    ]
