"""Muon on one process: torch's Muon, narrow exchange, and the parameters that AdamW keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automoe.config.schema import OptimConfig
from automoe.model.params import find_spec
from automoe.optim import muon
from automoe.optim.adamw import build_optimizer
from automoe.optim.muon import KEY, orthogonalize

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


def test_a_matrix_of_zeros_or_without_a_gradient_only_decays() -> None:
    model = Matrices()
    before = model.get_parameter(NAMES[0]).detach().clone()
    optimizer = build_optimizer([model], OptimConfig(algorithm="muon", lr=0.02, weight_decay=0.1))
    optimizer.step()
    torch.testing.assert_close(model.get_parameter(NAMES[0]).detach(), before * (1 - 0.02 * 0.1))


def test_bfloat16_moves_weights_nearly_alike_and_the_momentum_stays_float32() -> None:
    before, wide, narrow = Matrices(), trained(), trained(muon_dtype="bfloat16")
    for name in (*NAMES, "layers.1.mlp.experts.down_proj"):
        moved = wide.get_parameter(name) - before.get_parameter(name)
        apart = (narrow.get_parameter(name) - wide.get_parameter(name)).norm()
        assert 0 < apart < 0.03 * moved.norm()
    model = Matrices()
    optimizer = build_optimizer([model], OptimConfig(algorithm="muon", muon_dtype="bfloat16"))
    assert optimizer.state[model.get_parameter(NAMES[0])][KEY].dtype == torch.float32
