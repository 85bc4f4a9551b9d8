"""Comparison of a training step on a mesh with the same step on one rank, the reference.

Each number and tensor of the step (losses, gradients, updated parameters) gets a relative error: the L2
norm of the difference, divided by that of the reference's value.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from math import inf
from typing import Any

import torch
import torch.distributed as dist

from automoe.config.mesh_shape import MeshShape
from automoe.config.schema import Config
from automoe.verify.run import Comparison, loader_rows
from automoe.verify.trajectory import (
    Trajectory,
    merge_trajectories,
    micro_batch_order,
    run_trajectory,
)

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
_references: list[Trajectory] = []  # of this process, until the mesh's step is compared with it


def run_reference(
    config: Config, shape: MeshShape, dp: int, record: bool, device: str
) -> bytes | None:
    """Run one training step on one rank, the reference, and keep its results in this process.

    ``run_compared`` in the same process compares a mesh with them.

    Args:
        config, shape: configuration for one rank, and its mesh.
        dp: data-parallel ranks of the compared mesh. Rows are reordered, so that the first
            micro-batch here has the rows of these ranks' first micro-batches, and so on.
        record: True to return the routing of the step, pickled; False returns None.
        device: cpu or cuda.
    """
    train = config.train
    order = micro_batch_order(train.global_batch_size, dp, train.micro_batch_size // dp)
    reference = run_trajectory(
        config, shape, loader_rows, 1, device=device, record=record, order=order
    )
    _references[:] = [reference]
    return pickle.dumps(reference.choices) if record else None


def run_compared(
    run: Callable[..., Trajectory] | None,
    config: Config,
    shape: MeshShape,
    routing: bytes | None,
    device: str,
) -> list[Comparison]:
    """Run a step on the mesh and compare it, on rank 0, with the step that one rank ran.

    Collective. Rank 0's process must have called ``run_reference`` before.

    Args:
        run: function with the signature of ``run_trajectory``; None: ``run_trajectory`` itself.
        config, shape: configuration of the run, and its mesh.
        routing: pickled routing to repeat, from ``run_reference``; None: the model's own.
        device: cpu or cuda.

    Returns:
        The comparisons on rank 0; [] on other ranks.
    """
    options: dict[str, Any] = {"forced": pickle.loads(routing)} if routing else {}
    mine = (run or run_trajectory)(config, shape, loader_rows, 1, device=device, **options)
    if dist.get_rank():
        dist.gather_object(mine)
        return []
    ranks: list[Any] = [None] * shape.world_size
    dist.gather_object(None, ranks)
    return compare_trajectories(merge_trajectories([mine, *ranks[1:]]), _references.pop())


def compare_tensors(
    kind: str, name: str, step: int, got: Numbers | None, expected: Numbers | None
) -> Comparison:
    """Compare a tensor or list of numbers of a run on a mesh with that of a run on one rank, in float64.

    Args:
        kind, name, step: fields of the result, such as ``gradient``, a parameter's name, and 0.
        got, expected: values of the run on the mesh and on one rank; None if that run lacks them.
    """
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
    """Compare every number and tensor of two runs of the same steps, in the order in which a step computes them.

    Args:
        got: results of the run on the mesh.
        expected: results of the run on one rank, the reference.
    """
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
