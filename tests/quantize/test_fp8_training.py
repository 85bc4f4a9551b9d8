"""Whole steps with 8-bit products: on several meshes, compared with float32, and what stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fp8_cases import DSV4, GQA, LINEARS, LONGCAT, MUSE, ROWS, batches, config

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.errors import BackendError
from automoe.moe import quantized
from automoe.moe.experts import GroupedExperts
from automoe.moe.quantized import QuantizedExperts
from automoe.parallel import fp8
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.quantize import linear
from automoe.quantize.linear import QuantizedProduct
from automoe.quantize.scaling import GRAD, Delayed, Scaling, W, X
from automoe.verify.compare import Comparison, compare_trajectories
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories, micro_batch_order
from tests.support.communication import CommunicationLog
from tests.support.trajectories import run_trajectory

MODES = ("tensorwise", "delayed", "blockwise")
COMPARED = ("loss", "gradient", "gradient norm")


def with_history(*args, **kwargs) -> Trajectory:
    """``run_trajectory`` of a run whose delayed scales look back on steps already."""

    def reset(scaling: Delayed) -> None:
        scaling.history.zero_()
        scaling.seen.zero_()
        scaling.known = None
        for operand, largest in ((X, 8.0), (W, 0.5), (GRAD, 2.0**-9)):
            scaling.history[operand, 3] = largest

    with mock.patch.object(Delayed, "reset_buffers", reset):
        return run_trajectory(*args, **kwargs)


def ranks_alone(*args, **kwargs) -> Trajectory:
    """``run_trajectory`` of ranks that ask nobody."""
    with mock.patch.object(fp8, "_max_over", lambda group: lambda largest: largest):
        return run_trajectory(*args, **kwargs)


def compared(
    ranks: RankPool,
    mode: str,
    mesh: dict[str, int],
    rows: int,
    run: Callable[..., Trajectory] = run_trajectory,
    **options: Any,
) -> list[Comparison]:
    """The first step on ``mesh``, of ``rows`` rows a micro-batch, and on one rank with the same rows in each."""
    settings = config(mode, mesh, rows, **options)
    shape = resolve_mesh(settings.mesh, None)
    forced = settings.train.dtype != "float64"
    order = micro_batch_order(ROWS, shape.dp, rows)
    alone = config(mode, rows=shape.dp * rows, **options)
    usual = with_history if run is with_history else run_trajectory
    [expected] = ranks.run(usual, 1, alone, batches, 1, record=forced, order=order)
    choices = {"forced": expected.choices} if forced else {}
    got = merge_trajectories(ranks.run(run, shape.world_size, settings, batches, 1, **choices))
    return [c for c in compare_trajectories(got, expected) if c.kind in COMPARED]


DP_EP, TP_ETP = dict(dp_shard=2, ep=2), dict(tp=2, etp=2)


CODES = {
    "tensorwise dp2 ep2": ("tensorwise", DP_EP, 2, {}),
    "two ranks a head": ("tensorwise", dict(tp=2, ep=2), 4, dict(attention=replace(GQA, num_kv_heads=1))),
    "tensorwise tp2 etp2": ("tensorwise", TP_ETP, 4, {}),
    "two ranks a head of two": ("delayed", dict(tp=4, ep=4), 4, dict(attention=replace(GQA, qkv_bias=True))),
    "tensorwise cp2 ep2": ("tensorwise", dict(cp=2, ep=2), 4, dict(attention=GQA)),
    "tensorwise dp2 tp2 ep4": ("tensorwise", dict(dp_shard=2, tp=2, ep=4), 1, {}),  # two axes, two micro-batches
    "delayed dp2 ep2": ("delayed", DP_EP, 2, {}),
    "delayed tp2 etp2": ("delayed", TP_ETP, 4, {}),
    "blockwise dp2 ep2": ("blockwise", DP_EP, 2, {}),
    "blockwise dp2 ep2, rows in 8 bits": ("blockwise", DP_EP, 2, dict(dispatch_dtype="fp8")),
    "tensorwise dp2 ep2, rows in 8 bits": ("tensorwise", DP_EP, 2, dict(dispatch_dtype="fp8")),
    "tensorwise pp2 dp2 cp2 ep2 etp2": (
        "tensorwise",
        dict(pp=2, dp_replicate=2, cp=2, ep=2, etp=2),
        1,
        dict(attention=GQA),
    ),
    "tensorwise pp2 tp2 etp2, a module": ("tensorwise", dict(pp=2, tp=2, etp=2), 2, dict(num_mtp_layers=1)),
    "DeepSeek-V4 tp2 ep2": ("tensorwise", dict(tp=2, ep=2), 4, dict(sizes=DSV4)),
    "Muse-Spark tp2 ep2": ("tensorwise", dict(tp=2, ep=2), 4, dict(sizes=MUSE)),
    "LongCat-Flash tp2 ep2": ("tensorwise", dict(tp=2, ep=2), 4, dict(sizes=LONGCAT)),
    "no rows": ("tensorwise", DP_EP, 2, dict(gate="one_hot")),  # a rank without a row to multiply
}


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", list(CODES), ids=str)
def test_codes_are_those_of_one_rank(ranks: RankPool, name: str) -> None:
    """In float64 around the codes, where no order of sums tips one to its neighbour: every number is equal then."""
    mode, mesh, rows, options = CODES[name]
    different = [c for c in compared(ranks, mode, mesh, rows, dtype="float64", **options) if not c.within(1e-10)]
    assert not different, different[0]


@pytest.mark.parametrize(
    "mesh", [dict(dp_shard=2, ep=1, ep_shard=2), pytest.param(TP_ETP, marks=pytest.mark.exhaustive)], ids=str
)
def test_one_rank_asking_nobody_would_have_other_codes(ranks: RankPool, mesh: dict[str, int]) -> None:
    """What lies below the range of a scale differs, and tips codes after it."""
    off = {
        c.name or c.kind: c.error
        for c in compared(ranks, "tensorwise", mesh, 4 // mesh.get("dp_shard", 1), ranks_alone, dtype="float64")
    }
    assert max(off.values()) > 1e-2


def collectives(settings: Config) -> int:
    """Messages of the all-reduce kind in a step."""
    with CommunicationLog() as log:
        with_history(settings, batches, 1, keep_tensors=False)
    return sum(message.op == "all_reduce" for message in log.messages)


@pytest.mark.exhaustive
def test_what_agreement_costs(ranks: RankPool) -> None:
    """One an operand and product in each of two micro-batches, of weights in the first; with a history one a step."""
    sent = {mode: ranks.run(collectives, 2, config(mode, TP_ETP, rows=2)) for mode in ("off", *MODES)}
    dense, moe, cut_by_tp, cut_by_etp = 2 * (5 + 3), 2 * (5 + 3 + 2), 2 * (3 + 3), 2
    more = 2 * (dense + moe) + cut_by_tp + cut_by_etp
    for without, tensorwise, delayed, blockwise in zip(*sent.values(), strict=True):
        assert (tensorwise, delayed, blockwise) == (without + more, without + 1, without)


@pytest.mark.parametrize("mesh", [TP_ETP, pytest.param(dict(dp_shard=2), marks=pytest.mark.exhaustive)], ids=str)
def test_lines_of_other_tokens_change_gradients_of_weights_alone(ranks: RankPool, mesh: dict[str, int]) -> None:
    """``blockwise``: what lies below the range of its 128 tokens, and no product comes after it."""
    found = compared(ranks, "blockwise", mesh, 4 // mesh.get("dp_shard", 1), dtype="float64")
    different = [c for c in found if not c.within(1e-10) and c.kind != "gradient norm"]
    assert all(c.kind == "gradient" and c.within(1e-5) for c in different), different
    assert all("norm" not in c.name and "embed" not in c.name for c in different)


def test_a_gradient_that_ranks_have_in_terms_is_rounded_in_terms(ranks: RankPool) -> None:
    """Keys and values that all cp ranks make of the same latents, each for its own queries."""
    found = compared(ranks, "tensorwise", dict(cp=2, ep=1, ep_shard=2), 4, dtype="float64")
    off = {c.name or c.kind: c.error for c in found}
    assert off["loss"] < 1e-10 and 1e-3 < max(off.values()) < 0.25


@pytest.mark.parametrize(
    "mode, run",
    [
        ("tensorwise", run_trajectory),
        pytest.param("delayed", with_history, marks=pytest.mark.exhaustive),
        pytest.param("blockwise", run_trajectory, marks=pytest.mark.exhaustive),
    ],
)
def test_float32_changes_nothing_where_each_row_is_computed_alone(
    ranks: RankPool, mode: str, run: Callable[..., Trajectory]
) -> None:
    different = [c for c in compared(ranks, mode, DP_EP, 2, run) if not c.within(1e-5)]
    assert not different, different[0]


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool) -> dict[str, Trajectory]:
    return {mode: ranks.run(with_history, 1, config(mode), batches, 1)[0] for mode in (*MODES, "off")}


def test_eight_bits_are_eight_bits(one_rank: dict[str, Trajectory]) -> None:
    """All gradients as one vector: off by a few roundings of their formats, and by others in each mode."""
    exact = torch.cat([gradient.flatten() for gradient in one_rank["off"].gradients[0].values()])
    for mode in MODES:
        got = torch.cat([gradient.flatten() for gradient in one_rank[mode].gradients[0].values()])
        assert 0.03 < float((got - exact).norm() / exact.norm()) < 0.3, mode
        assert 0 < abs(one_rank[mode].losses[0] / one_rank["off"].losses[0] - 1) < 0.01
    assert len({one_rank[mode].grad_norms[0] for mode in MODES}) == 3


# ---------------------------------------------------------------- what is quantized


def what_is_quantized(settings: Config) -> tuple[list[str], int, int]:
    """Modules with 8-bit products by name, dense products of a step, grouped ones."""
    names: list[str] = []
    calls = {"scaled_product": 0, "grouped_product": 0}

    def counting(room, name: str):
        real = getattr(room, name)

        def count(*args):
            calls[name] += 1
            return real(*args)

        return mock.patch.object(room, name, count)

    def apply(model, *args, real=fp8.apply_fp8):
        real(model, *args)
        kinds = (QuantizedProduct, QuantizedExperts)
        names.extend(name for name, module in model.named_modules() if isinstance(module, kinds))

    with mock.patch("automoe.parallel.parallelize.apply_fp8", apply):
        with counting(linear, "scaled_product"), counting(quantized, "grouped_product"):
            run_trajectory(settings, batches, 1, keep_tensors=False)
    return names, calls["scaled_product"], calls["grouped_product"]


def test_router_embedding_head_and_norms_keep_their_precision(ranks: RankPool) -> None:
    """Three products for each linear layer and for each of the experts' two weights, and none for anything else."""
    [(names, dense, grouped)] = ranks.run(what_is_quantized, 1, config("tensorwise"))
    attention = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ffn = ("gate_proj", "up_proj", "down_proj")
    expected = [f"layers.{layer}.self_attn.{name}.product" for layer in (0, 1) for name in attention]
    expected += [f"layers.0.mlp.{name}.product" for name in ffn]
    expected += [f"layers.1.mlp.shared_experts.{name}.product" for name in ffn]
    assert sorted(names) == sorted([*expected, "layers.1.mlp.experts.backend"])
    assert (dense, grouped) == (3 * LINEARS, 3 * 2)
    [(names, dense, grouped)] = ranks.run(what_is_quantized, 1, config("off"))
    assert (names, dense, grouped) == ([], 0, 0)


def test_a_gpu_without_these_products_is_named() -> None:
    fp8._check_gpu((9, 0))
    with pytest.raises(BackendError, match=r"this one has 8\.0\. Set train\.fp8=off"):
        fp8._check_gpu((8, 0))


# ---------------------------------------------------------------- learning


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "dtype, modes, steps",
    [("float32", ("delayed", "blockwise"), 8), pytest.param("bfloat16", MODES, 20, marks=pytest.mark.exhaustive)],
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
@pytest.mark.parametrize(
    "mode, mesh, names",
    [
        ("delayed", {}, "full"),
        ("delayed", {}, ["layernorm", "mla_up_proj"]),
        ("tensorwise", TP_ETP, "full"),
        ("tensorwise", TP_ETP, ["core_attn", "mlp", "moe", "shared_experts", "layernorm", "mla_up_proj"]),
    ],
    ids=["full", "discarded", "full tp2 etp2", "parts tp2 etp2"],
)
def test_recomputed_layers_quantize_as_they_did(
    ranks: RankPool, mode: str, mesh: dict[str, int], names: str | list[str]
) -> None:
    """Run again in the backward pass, to the bit: delayed scales do not move within a step, ranks agree once more."""
    plain = config(mode, mesh)
    again = replace(plain, parallel=replace(plain.parallel, recompute=names))
    world = resolve_mesh(plain.mesh, None).world_size
    expected, *_ = ranks.run(run_trajectory, world, plain, batches, 2)
    got, *_ = ranks.run(run_trajectory, world, again, batches, 2)
    assert got.losses == expected.losses
    for name, parameter in expected.parameters.items():
        assert torch.equal(got.parameters[name], parameter), name


def scales_of_weights(settings: Config) -> dict[str, torch.Tensor]:
    """The scale of each weight as this rank quantizes it, with one number of the last rank's part far larger."""
    shape = resolve_mesh(settings.mesh, None)
    meshes = build_meshes(shape, torch.device("cpu"))
    parts = build_parts(settings, meshes)
    materialize(parts, settings, torch.device("cpu"))
    scales = {}
    for name, module in parts[0].named_modules():
        weights: dict[str, tuple[torch.nn.Parameter, Scaling]] = {}
        if isinstance(module, fp8.FP8Linear):
            weights[name] = (module.weight, module.product.scaling)
        elif isinstance(module, GroupedExperts):
            weights[f"{name}.up"] = (module.gate_up_proj, module.backend.up.scaling)
            weights[f"{name}.down"] = (module.down_proj, module.backend.down.scaling)
        for each, (weight, scaling) in weights.items():
            local = weight.to_local().detach()
            if dist.get_rank() == dist.get_world_size() - 1 and "kv_a" not in each and "q_a" not in each:
                local.flatten()[-1] = 1000.0
            scales[each] = scaling.scales(local.flatten(1, -2) if local.dim() == 4 else local, W)
    return scales


def test_ranks_that_share_a_weight_agree_on_its_scale(ranks: RankPool) -> None:
    first, last = ranks.run(scales_of_weights, 2, config("tensorwise", TP_ETP))
    assert len(first) == LINEARS + 2
    for name, scales in first.items():
        assert torch.equal(scales, last[name]), name
        small = ("kv_a" in name) or ("q_a" in name)
        assert float(scales.max()) == 4.0 or small, name  # 1000 / 448, up to a power of two
