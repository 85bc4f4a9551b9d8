"""Whole steps with 8-bit products: on several meshes, beside float32, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fp8_cases import LINEARS, batches, config

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.mesh import build_meshes
from automoe.model.linear import Linear
from automoe.moe import quantised
from automoe.moe.experts import GroupedExperts
from automoe.moe.quantised import QuantisedExperts
from automoe.parallel import fp8
from automoe.parallel.parallelize import build_parts, materialize
from automoe.quantise import products
from automoe.quantise.dense import QuantisedProduct
from automoe.quantise.scaling import GRAD, Delayed, Scaling, W, X
from automoe.testing.compare import Comparison, compare_trajectories
from automoe.testing.pool import RankPool
from automoe.testing.trajectory import Trajectory, merge_trajectories, run_trajectory

MESHES = {
    "dp2": dict(dp_shard=2),
    "dp2 x ep2": dict(dp_shard=2, ep=2),
    "tp2 x etp2": dict(tp=2, etp=2),
}
MODES = ("tensorwise", "delayed", "blockwise")


def with_history(*args, **kwargs) -> Trajectory:
    """``run_trajectory`` of a run whose delayed scales look back on steps already."""

    def reset(scaling: Delayed) -> None:
        scaling.history.zero_()
        scaling.seen.zero_()
        for operand, largest in ((X, 8.0), (W, 0.5), (GRAD, 2.0**-9)):
            scaling.history[operand, 3] = largest

    with mock.patch.object(Delayed, "reset_buffers", reset):
        return run_trajectory(*args, **kwargs)


def first_step(ranks: RankPool, settings: Config, **options: object) -> Trajectory:
    sizes = settings.mesh
    return merge_trajectories(
        ranks.run(with_history, sizes.dp_shard * sizes.tp, settings, batches, 1, **options)
    )


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> dict[str, Trajectory]:
    return {mode: first_step(ranks, config(mode), record=True) for mode in (*MODES, "off")}


def compared(ranks: RankPool, one_rank: dict[str, Trajectory], mode: str, mesh: str) -> list[Comparison]:
    axes = MESHES[mesh]
    settings = config(mode, axes, rows=4 // axes.get("dp_shard", 1))
    expected = one_rank[mode]
    got = first_step(ranks, settings, forced=expected.choices)
    return [c for c in compare_trajectories(got, expected) if c.kind in ("loss", "gradient", "gradient norm")]


@pytest.mark.parametrize(
    "mode, mesh",
    [
        ("blockwise", "dp2"),
        ("blockwise", "dp2 x ep2"),
        ("blockwise", "tp2 x etp2"),
        ("delayed", "dp2 x ep2"),
        ("delayed", "tp2 x etp2"),
        ("tensorwise", "dp2"),
    ],
)
def test_a_mesh_changes_no_scale_that_counts(
    ranks: RankPool, one_rank: dict[str, Trajectory], mode: str, mesh: str
) -> None:
    """Blocks lie in the whole weight, a history is the same on all ranks: then codes are equal, bit for bit."""
    different = [c for c in compared(ranks, one_rank, mode, mesh) if not c.within(1e-5)]
    assert not different, different[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", ["dp2 x ep2", "tp2 x etp2"])
def test_a_scale_of_the_moment_knows_its_ranks_numbers_alone(
    ranks: RankPool, one_rank: dict[str, Trajectory], mesh: str
) -> None:
    """A gradient of a rank's experts is not that of all: what lies below the range differs, and tips codes after it."""
    off = {c.name or c.kind: c.error for c in compared(ranks, one_rank, "tensorwise", mesh)}
    assert off["loss"] < 1e-5
    assert 1e-5 < max(off.values()) < 0.1


def test_eight_bits_are_eight_bits(one_rank: dict[str, Trajectory]) -> None:
    """All gradients as one vector: off by a few roundings of their formats, and by others in each mode."""
    exact = torch.cat([gradient.flatten() for gradient in one_rank["off"].gradients[0].values()])
    for mode in MODES:
        got = torch.cat([gradient.flatten() for gradient in one_rank[mode].gradients[0].values()])
        assert 0.03 < float((got - exact).norm() / exact.norm()) < 0.3, mode
        assert 0 < abs(one_rank[mode].losses[0] / one_rank["off"].losses[0] - 1) < 0.01
    assert len({one_rank[mode].grad_norms[0] for mode in MODES}) == 3


# ---------------------------------------------------------------- what is quantised


def what_is_quantised(settings: Config) -> tuple[list[str], int, int]:
    """Modules with 8-bit products by name, dense products of a step, grouped ones."""
    names: list[str] = []
    calls = {"scaled_product": 0, "grouped_product": 0, "grouped_weight_product": 0}

    def counting(room, name: str):
        real = getattr(room, name)

        def count(*args):
            calls[name] += 1
            return real(*args)

        return mock.patch.object(room, name, count)

    def apply(model, *args, real=fp8.apply_fp8):
        real(model, *args)
        kinds = (QuantisedProduct, QuantisedExperts)
        names.extend(name for name, module in model.named_modules() if isinstance(module, kinds))

    with mock.patch("automoe.parallel.parallelize.apply_fp8", apply):
        grouped = counting(quantised, "grouped_product"), counting(quantised, "grouped_weight_product")
        with counting(products, "scaled_product"), grouped[0], grouped[1]:
            run_trajectory(settings, batches, 1, keep_tensors=False)
    return names, calls["scaled_product"], calls["grouped_product"] + calls["grouped_weight_product"]


def test_router_embedding_head_and_norms_keep_their_precision(ranks: RankPool) -> None:
    """Three products for each linear layer and for each of the experts' two weights, and none for anything else."""
    [(names, dense, grouped)] = ranks.run(what_is_quantised, 1, config("tensorwise"))
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ffn = ("gate_proj", "up_proj", "down_proj")
    expected = [f"layers.{layer}.self_attn.{name}.product" for layer in (0, 1) for name in attention]
    expected += [f"layers.0.mlp.{name}.product" for name in ffn]
    expected += [f"layers.1.mlp.shared_experts.{name}.product" for name in ffn]
    assert sorted(names) == sorted([*expected, "layers.1.mlp.experts.backend"])
    assert (dense, grouped) == (3 * LINEARS, 3 * 2)
    [(names, dense, grouped)] = ranks.run(what_is_quantised, 1, config("off"))
    assert (names, dense, grouped) == ([], 0, 0)


def test_a_gpu_without_these_products_is_named() -> None:
    fp8._check_gpu((9, 0))
    with pytest.raises(BackendError, match=r"this one has 8\.0\. Set train\.fp8=off"):
        fp8._check_gpu((8, 0))


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize(
    "dtype, modes, steps",
    [
        ("float32", ("delayed", "blockwise"), 8),
        pytest.param("bfloat16", MODES, 20, marks=pytest.mark.exhaustive),
    ],
    ids=["float32", "bfloat16"],
)
def test_a_small_model_learns_as_it_does_without(
    ranks: RankPool, dtype: str, modes: tuple[str, ...], steps: int
) -> None:
    """The loss falls by more than nine tenths of what it falls without, and is never off by a twentieth of the first."""
    losses = {}
    for mode in ("off", *modes):
        settings = config(mode, dtype=dtype)
        [run] = ranks.run(run_trajectory, 1, settings, batches, steps, keep_tensors=False)
        losses[mode] = torch.tensor(run.losses)
    exact = losses["off"]
    assert exact[-1] < 0.6 * exact[0]
    for mode in modes:
        assert (losses[mode] - exact).abs().max() < 0.05 * exact[0], mode
        assert exact[0] - losses[mode][-1] > 0.9 * (exact[0] - exact[-1]), mode
        assert not torch.equal(losses[mode], exact)


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", ["full", ["layernorm", "mla_up_proj"]], ids=["full", "promised"])
def test_recomputed_layers_quantise_as_they_did(ranks: RankPool, names: str | list[str]) -> None:
    """Run again in the backward pass, to the bit: delayed scales do not move within a step."""
    plain = config("delayed")
    again = replace(plain, parallel=replace(plain.parallel, recompute=names))
    [expected] = ranks.run(run_trajectory, 1, plain, batches, 2)
    [got] = ranks.run(run_trajectory, 1, again, batches, 2)
    assert got.losses == expected.losses
    for name, parameter in expected.parameters.items():
        assert torch.equal(got.parameters[name], parameter), name


def scales_of_weights(settings: Config) -> dict[str, torch.Tensor]:
    """The scale of each weight as this rank quantises it, with one number of the last rank's part far larger."""
    shape = resolve_mesh(settings.mesh, None)
    meshes = build_meshes(shape, torch.device("cpu"))
    parts = build_parts(settings, meshes)
    materialize(parts, settings, torch.device("cpu"))
    scales = {}
    for name, module in parts[0].named_modules():
        weights: dict[str, tuple[torch.nn.Parameter, Scaling]] = {}
        if isinstance(module, Linear) and isinstance(module.product, QuantisedProduct):
            weights[name] = (module.weight, module.product.scaling)
        elif isinstance(module, GroupedExperts):
            weights[f"{name}.up"] = (module.w_gate_up, module.backend.up.scaling)
            weights[f"{name}.down"] = (module.w_down, module.backend.down.scaling)
        for each, (weight, scaling) in weights.items():
            local = weight.to_local().detach()
            if dist.get_rank() == dist.get_world_size() - 1 and "kv_a" not in each and "q_a" not in each:
                local.flatten()[-1] = 1000.0
            scales[each] = scaling.weight(local.flatten(1, -2) if local.dim() == 4 else local).scales
    return scales


def test_ranks_that_share_a_weight_agree_on_its_scale(ranks: RankPool) -> None:
    first, last = ranks.run(scales_of_weights, 2, config("tensorwise", MESHES["tp2 x etp2"]))
    assert len(first) == LINEARS + 2
    for name, scales in first.items():
        assert torch.equal(scales, last[name]), name
        small = ("kv_a" in name) or ("q_a" in name)
        assert float(scales.max()) == 4.0 or small, name  # 1000 / 448, up to a power of two
