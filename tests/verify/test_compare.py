"""The comparison that mesh tests stand on: what it must call different, and what it says about it."""

from __future__ import annotations

from copy import deepcopy
from math import inf, isnan, nan

import pytest
import torch

from automoe.verify.compare import compare_tensors, compare_trajectories
from automoe.verify.trajectory import Trajectory
from tests.support.trajectories import differences


def trajectory() -> Trajectory:
    return Trajectory(
        losses=[5.0, 4.0],
        seq_balance_loss=[0.1, 0.0],
        global_balance_loss=[0.2, 0.3],
        micro_batch_balance_loss=[0.4, 0.5],
        z_loss=[0.6, 0.7],
        dropped_share=[[0.0], [0.25]],
        metrics=[[0.8], [0.9]],
        grad_norms=[1.5, 1.25],
        expert_counts=[torch.tensor([[3.0, 5.0]]), torch.tensor([[4.0, 4.0]])],
        gradients=[{"a": torch.ones(2, 3), "b": torch.zeros(2)}, {"a": torch.ones(2, 3), "b": torch.ones(2)}],
        parameters={"a": torch.full((2, 3), 2.0), "b": torch.ones(2)},
        biases={"router.expert_bias": torch.zeros(2)},
    )


def test_equal_runs_have_no_difference_and_everything_is_compared() -> None:
    compared = compare_trajectories(trajectory(), trajectory())
    assert len(compared) == 2 * (5 + 1 + 1 + 1 + 2 + 1) + 2 + 1
    assert not differences(trajectory(), trajectory(), 0.0)


def change(path: str, value: object) -> Trajectory:
    run = deepcopy(trajectory())
    names = path.split(".", 2)
    owner: object = getattr(run, names[0])
    for name in names[1:-1]:
        owner = owner[int(name) if name.isdigit() else name]  # type: ignore[index]
    last = names[-1]
    owner[int(last) if last.isdigit() else last] = value  # type: ignore[index]
    return run


@pytest.mark.parametrize(
    "path, value, kind, step",
    [
        ("losses.1", 4.001, "loss", 1),
        ("losses.0", nan, "loss", 0),
        ("seq_balance_loss.1", 1e-30, "seq_balance_loss", 1),
        ("global_balance_loss.0", 0.21, "global_balance_loss", 0),
        ("metrics.1.0", 0.91, "reported metrics", 1),
        ("grad_norms.1", -1.25, "gradient norm", 1),
        ("expert_counts.0", torch.tensor([[4.0, 4.0]]), "expert counts", 0),
        ("gradients.0.a", torch.full((2, 3), nan), "gradient", 0),
        ("gradients.1.c", torch.zeros(1), "gradient", 1),
        ("gradients.0.b", torch.tensor([0.0, 1e-20]), "gradient", 0),
        ("parameters.b", torch.ones(3), "updated parameter", 1),
        ("parameters.b", torch.ones(1), "updated parameter", 1),
        ("biases.more", torch.zeros(2), "expert bias", 1),
    ],
)
def test_any_change_is_seen_and_placed(path: str, value: object, kind: str, step: int) -> None:
    found = differences(change(path, value), trajectory(), 1e-4)
    assert [(c.kind, c.step) for c in found] == [(kind, step)]


@pytest.mark.parametrize("side", ["got", "expected"])
def test_a_tensor_that_one_side_lacks_is_a_difference(side: str) -> None:
    lacking = trajectory()
    del lacking.parameters["b"]
    pair = (lacking, trajectory()) if side == "got" else (trajectory(), lacking)
    [found] = differences(*pair, 1e300)
    assert found.name == "b" and found.error == inf
    assert ("absent here" in str(found)) == (side == "got")


def test_the_farthest_element_is_named_with_both_values() -> None:
    expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = expected.clone()
    got[1, 0], got[0, 1] = 3.5, 2.1
    found = compare_tensors("gradient", "layers.0.w", 2, got, expected)
    assert (found.index, found.got, found.expected) == ((1, 0), 3.5, 3.0)
    assert found.error == pytest.approx((0.5**2 + 0.1**2) ** 0.5 / 30**0.5, rel=1e-6)
    text = str(found)
    assert text.startswith("step 2 gradient of layers.0.w: relative error 9.31e-02; got 3.5, expected 3.0 at [1, 0]")


def test_nan_is_never_within_any_tolerance() -> None:
    found = compare_tensors("loss", "", 0, torch.tensor(nan), torch.tensor(1.0))
    assert isnan(found.error) and not found.within(inf)
    both = compare_tensors("loss", "", 0, torch.tensor(nan), torch.tensor(nan))
    assert not both.within(inf)


def test_an_empty_tensor_equals_an_empty_tensor() -> None:
    assert compare_tensors("gradient", "w", 0, torch.zeros(0, 3), torch.zeros(0, 3)).within(0.0)
