"""Muon on one process: torch's Muon, narrow exchange, and the parameters that AdamW keeps."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automoe.config.schema import OptimConfig
from automoe.model.params import find_spec
from automoe.optim import muon
from automoe.optim.adamw import build_optimizer
from automoe.optim.muon import KEY, orthogonalize
from automoe.verify.pool import RankPool

NAMES = ("layers.0.self_attn.q_proj.weight", "layers.1.mlp.down_proj.weight")


class Matrices(nn.Module):
    """Two matrices, one wide and one tall, a stack of experts, and a norm, under a decoder's names."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        shapes = {NAMES[0]: (6, 10), NAMES[1]: (12, 4), "layers.1.mlp.experts.down_proj": (3, 4, 8)}
        for name, shape in (shapes | {"norm.weight": (6,), "embed_tokens.weight": (9, 6)}).items():
            module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.randn(shape, dtype=dtype)))

    def set_gradients(self, step: int) -> None:
        for name, parameter in self.named_parameters():
            generator = torch.Generator().manual_seed(step + len(name))
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter)


def trained(steps: int = 3, dtype: torch.dtype = torch.float32, **optim: object) -> Matrices:
    model = Matrices(dtype)
    optimizer = build_optimizer([model], OptimConfig(algorithm="muon", lr=0.02, weight_decay=0.1, **optim))
    for step in range(steps):
        model.set_gradients(step)
        optimizer.step()
    return model


def test_a_round_holds_no_more_numbers_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60, 48 and 96 numbers no two fit in 100; the planner counts a round's buffers."""
    monkeypatch.setattr(muon, "MUON_ROUND", 100)
    assert len(build_optimizer([Matrices()], OptimConfig(algorithm="muon"))._rounds) == 3
    monkeypatch.setattr(muon, "MUON_ROUND", 110)
    assert len(build_optimizer([Matrices()], OptimConfig(algorithm="muon"))._rounds) == 2


def test_single_matrices_are_updated_as_by_torch() -> None:
    """torch iterates in bfloat16, hence the tolerance."""
    ours, theirs = trained(), Matrices()
    matrices = [theirs.get_parameter(name) for name in NAMES]
    reference = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        theirs.set_gradients(step)
        reference.step()
    for name in NAMES:
        before, got, expected = (model.get_parameter(name) for model in (Matrices(), ours, theirs))
        assert (got - expected).norm() < 0.02 * (expected - before).norm()


def test_all_other_parameters_are_updated_by_adamw() -> None:
    muon, adamw = trained(), Matrices()
    optimizer = build_optimizer([adamw], OptimConfig(lr=0.02, weight_decay=0.1))
    for step in range(3):
        adamw.set_gradients(step)
        optimizer.step()
    for name, parameter in muon.named_parameters():
        same = torch.equal(parameter, adamw.get_parameter(name))
        assert same == (not find_spec(name).orthogonalized), name


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (2, 4, 7)])
def test_singular_values_become_about_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    found = torch.linalg.svdvals(orthogonalize(torch.randn(shape, dtype=torch.float64)))
    assert found.min() > 0.6 and found.max() < 1.25


STACK = "layers.1.mlp.experts.down_proj"
# Of each step: the matrices that its pass leaves out.
LEFT_OUT = ((), NAMES[:1], (NAMES[1], STACK), (*NAMES, STACK), ())


def test_a_matrix_with_a_gradient_of_zeros_only_decays() -> None:
    model = Matrices()
    before = model.get_parameter(NAMES[0]).detach().clone()
    optimizer = build_optimizer([model], OptimConfig(algorithm="muon", lr=0.02, weight_decay=0.1))
    model.get_parameter(NAMES[0]).grad = torch.zeros(6, 10)
    optimizer.step()
    torch.testing.assert_close(model.get_parameter(NAMES[0]).detach(), before * (1 - 0.02 * 0.1))


def steps_with_gaps(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    """Parameters, and momenta where Muon has them, after each of the steps of ``LEFT_OUT``."""
    whole, after = Matrices(), []
    for step, absent in enumerate(LEFT_OUT):
        whole.set_gradients(step)
        for name, parameter in model.named_parameters():
            gradient = None if name in absent else whole.get_parameter(name).grad
            if gradient is not None and isinstance(parameter, DTensor):
                gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient
        optimizer.step()
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            if KEY in optimizer.state[parameter]:
                tensors[f"{name}.{KEY}"] = optimizer.state[parameter][KEY]
        after.append({name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in tensors.items()})
    return after


def one_process() -> list[dict[str, torch.Tensor]]:
    model = Matrices()
    return steps_with_gaps(model, build_optimizer([model], OptimConfig(algorithm="muon", lr=0.02, weight_decay=0.1)))


def test_a_matrix_without_a_gradient_stays_as_it_is_as_torch_leaves_it() -> None:
    """Neither its momentum nor its decay moves it; torch iterates in bfloat16, hence the tolerance."""
    ours, theirs = one_process(), Matrices()
    matrices = [theirs.get_parameter(name) for name in NAMES]
    reference = torch.optim.Muon(
        matrices, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    before = dict(Matrices().named_parameters())
    for step, absent in enumerate(LEFT_OUT):
        theirs.set_gradients(step)
        for name in absent:
            theirs.get_parameter(name).grad = None
        reference.step()
        for name in NAMES:
            expected, got = theirs.get_parameter(name), ours[step][name]
            assert (got - expected).norm() < 0.02 * (expected - before[name]).norm(), (step, name)
        for name in absent:
            for tensor in (name, f"{name}.{KEY}"):
                assert torch.equal(ours[step][tensor], ours[step - 1][tensor]), (step, tensor)


def on_ranks() -> list[dict[str, torch.Tensor]]:
    """The same steps on two ranks with half of each matrix, whose rounds hold one matrix each."""
    model, mesh = Matrices(), init_device_mesh("cpu", (2,))
    for number, (path, parameter) in enumerate(list(model.named_parameters())):
        module, _, last = path.rpartition(".")
        shard = distribute_tensor(parameter.data, mesh, [Shard(number % min(parameter.dim(), 2))])
        model.get_submodule(module).register_parameter(last, nn.Parameter(shard))
    with patch.object(muon, "MUON_ROUND", 30):
        optim = OptimConfig(algorithm="muon", lr=0.02, weight_decay=0.1)
        optimizer = build_optimizer([model], optim, ranks=dist.group.WORLD)
    return steps_with_gaps(model, optimizer)


def test_sharded_matrices_without_a_gradient_stay_on_every_rank(ranks: RankPool) -> None:
    alone = one_process()
    for after in ranks.run(on_ranks, 2):
        for step, (got, expected) in enumerate(zip(after, alone, strict=True)):
            for name, tensor in expected.items():
                torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6, msg=f"{step} {name}")
            for name in LEFT_OUT[step]:
                assert torch.equal(got[name], after[step - 1][name]), (step, name)


def test_bfloat16_moves_weights_nearly_alike_and_the_momentum_stays_float32() -> None:
    before, wide, narrow = Matrices(), trained(), trained(muon_dtype="bfloat16")
    for name in (*NAMES, STACK):
        moved = wide.get_parameter(name) - before.get_parameter(name)
        apart = (narrow.get_parameter(name) - wide.get_parameter(name)).norm()
        assert 0 < apart < 0.03 * moved.norm()
    model = Matrices()
    optimizer = build_optimizer([model], OptimConfig(algorithm="muon", muon_dtype="bfloat16"))
    assert optimizer.state[model.get_parameter(NAMES[0])][KEY].dtype == torch.float32
