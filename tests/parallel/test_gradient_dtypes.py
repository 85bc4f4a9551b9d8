"""bfloat16 computes; what is added up, kept and routed by stays in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from automoe.comm.tokens import StepBatch
from automoe.config.data_schema import DataConfig
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import (
    AttentionConfig,
    Config,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ParallelConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import Trajectory, merge_trajectories
from tests.support.gpu import one_rank
from tests.support.releases import HALVES, needs
from tests.support.trajectories import run_trajectory

ROWS, SEQ, VOCAB = 4, 16, 48
CPU = torch.device("cpu")


def config(rows: int = ROWS, **mesh: int) -> Config:
    """``rows`` rows a step, one a micro-batch."""
    return Config(
        mesh=MeshConfig(**({"dp_shard": 1} | mesh)),
        model=ModelConfig(
            family="deepseek_v3",
            vocab_size=VOCAB,
            hidden_size=16,
            num_layers=2,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_intermediate_size=8,
            initializer_range=0.3,
            attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, qk_norm=True),
            router=RouterConfig(score="sigmoid", expert_bias=True),
        ),
        moe=MoEConfig(seq_balance_coef=0.01),
        train=TrainConfig(seq_len=SEQ, global_batch_size=rows, micro_batch_size=1, dtype="bfloat16", grad_clip=0.0),
        optim=OptimConfig(lr=1e-3),
        data=DataConfig(document_mask=False),
    )


def rows_of(config: Config, step: int, dp_rank: int, dp_size: int, chosen: tuple[int, ...]) -> StepBatch:
    """This rank's share of the rows ``chosen`` of four, all of whose labels count: a power of two of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=generator)[list(chosen)].chunk(dp_size)[dp_rank]
    positions = torch.arange(SEQ).expand(len(tokens), SEQ)
    return StepBatch(tokens[:, :-1], tokens[:, 1:], positions, torch.zeros_like(positions), 0, 0)


@pytest.fixture(scope="module")
def summed(ranks: RankPool) -> Callable[[str], dict[str, torch.Tensor]]:
    """Each row's gradients, of a step of its own, added up in float64; a division by four is exact in every dtype.

    By ``parallel.expert_wgrad``: what autograd returns is rounded, what is added to a sum is not.
    """

    @cache
    def total(wgrad: str) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for row in range(ROWS):
            one = replace(config(1), parallel=ParallelConfig(expert_wgrad=wgrad))
            [seen] = ranks.run(run_trajectory, 1, one, partial(rows_of, chosen=(row,)), 1)
            for name, gradient in seen.gradients[0].items():
                found[name] = found.get(name, 0) + gradient.double() / ROWS
        return found

    return total


ZBV = ParallelConfig(schedule="ZBVZeroBubble", stages_per_rank=2, layers_per_stage=[0, 1, 1, 0])
EACH = ParallelConfig(grad_sync="micro_batch", reshard="micro_batch")
DELAYED = ParallelConfig(expert_wgrad="delayed", overlap_all_to_all=True)
CASES = {
    "one rank": config(),
    "dp2": config(dp_shard=2),
    "hsdp2x2": config(dp_replicate=2, dp_shard=2),
    "pp2": config(pp=2),
    "halves": replace(config(pp=2), parallel=ZBV),
    "dp2, each micro-batch": replace(config(dp_shard=2), parallel=EACH),
    "dp2, fused": replace(config(dp_shard=2), parallel=ParallelConfig(expert_wgrad="fused")),
    "dp2 ep2, delayed": replace(config(dp_shard=2, ep=2), parallel=DELAYED),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "settings",
    [pytest.param(one, id=name, marks=needs(HALVES) if name == "halves" else ()) for name, one in CASES.items()],
)
def test_gradients_are_added_up_in_float32(ranks: RankPool, settings: Config, summed) -> None:
    """Over micro-batches and over ranks: what one row gives is rounded to bfloat16, sums are not."""
    total = summed(settings.parallel.expert_wgrad.replace("delayed", "fused"))
    world = resolve_mesh(settings.mesh, None).world_size
    seen: Trajectory = merge_trajectories(
        ranks.run(run_trajectory, world, settings, partial(rows_of, chosen=tuple(range(ROWS))), 1)
    )
    assert seen.gradients[0].keys() == total.keys()
    for name, expected in total.items():
        gradient = seen.gradients[0][name]
        assert gradient.dtype == torch.float32 and seen.parameters[name].dtype == torch.float32, name
        assert (gradient.double() - expected).norm() <= 1e-6 * expected.norm(), name
    rounded = total["embed_tokens.weight"].bfloat16().double()
    assert (rounded - total["embed_tokens.weight"]).norm() > 1e-4 * rounded.norm(), "sums in bfloat16 would be seen"


BIASED = dict(biased_experts=True, expert_activation="clamped_swiglu", swiglu_limit=4.0, zero_centered_norms=True)


@pytest.mark.parametrize(
    ("model", "wgrad"),
    [({}, "autograd"), (BIASED, "autograd"), (BIASED, "fused")],
    ids=["plain", "biased", "biased, fused, one micro-batch"],
)
def test_gradients_in_bfloat16_are_those_in_float64(ranks: RankPool, model: dict, wgrad: str) -> None:
    """Up to rounding, from the same routing: what has a backward pass of its own for narrow numbers has this one too."""
    narrow = config()
    attention = replace(narrow.model.attention, qkv_bias=bool(model), o_bias=bool(model), sinks=bool(model))
    router = replace(narrow.model.router, logit_bias=bool(model))
    narrow = replace(narrow, model=replace(narrow.model, attention=attention, router=router, **model))
    if wgrad == "fused":  # without an earlier micro-batch, FSDP has sums of no other parameter
        train = replace(narrow.train, micro_batch_size=ROWS)
        narrow = replace(narrow, train=train, parallel=ParallelConfig(expert_wgrad=wgrad))
    wide = replace(
        narrow,
        parallel=ParallelConfig(),
        train=replace(narrow.train, dtype="float64"),
        moe=replace(narrow.moe, experts="loop"),
    )
    rows = partial(rows_of, chosen=tuple(range(ROWS)))
    [expected] = ranks.run(run_trajectory, 1, wide, rows, 1, record=True)
    [seen] = ranks.run(run_trajectory, 1, narrow, rows, 1, forced=expected.choices)
    assert seen.losses[0] == pytest.approx(expected.losses[0], rel=1e-2)
    assert seen.seq_balance_loss[0] == pytest.approx(expected.seq_balance_loss[0], rel=1e-2)
    for name, gradient in expected.gradients[0].items():
        difference = (seen.gradients[0][name].double() - gradient).norm()
        assert difference <= 0.2 * gradient.norm(), (name, float(difference / gradient.norm()))


def test_what_is_computed_in_which_dtype() -> None:
    """Matrices multiply in bfloat16; routers, routing weights, losses and all that is kept are float32."""
    settings, seen = config(), {}
    with one_rank("cpu"):
        meshes = build_meshes(resolve_mesh(settings.mesh, 1), CPU)
        parts = build_parts(settings, meshes)
        materialize(parts, settings, CPU)
        block = parts[0].layers["1"]

        def keep(name: str):
            def hook(module: torch.nn.Module, arguments: tuple, *output) -> None:
                tensors = [x for x in (*arguments, *output) if isinstance(x, torch.Tensor) and x.is_floating_point()]
                seen[name] = [x.dtype for x in tensors]
                seen[f"{name} weight"] = [p.dtype for p in module.parameters()]

            return hook

        block.mlp.router.register_forward_pre_hook(keep("router"))
        block.mlp.experts.register_forward_pre_hook(keep("experts"))
        block.self_attn.register_forward_hook(keep("attention"))
        runner = build_runner(parts, meshes, settings, CPU)
        batch = rows_of(settings, 0, 0, 1, tuple(range(ROWS)))
        loss = runner.train(prepare_inputs(batch, meshes, settings, CPU)[0])
        optimizer = build_optimizer(parts.values(), settings.optim)
        optimizer.step()
        states = {t.dtype for state in optimizer.state.values() for t in state.values()}
        kept = {t.dtype for p in parts[0].parameters() for t in (p, p.grad)}
        bias = block.mlp.router.expert_bias.dtype
    narrow, wide = torch.bfloat16, torch.float32
    assert seen["router"] == [narrow] and seen["router weight"] == [wide]
    assert seen["experts"] == [narrow, wide], "tokens, routing weights"
    assert set(seen["experts weight"]) == {narrow}
    assert set(seen["attention"]) == {narrow}
    assert states == kept == {wide} and bias == wide and loss.dtype == torch.float64
