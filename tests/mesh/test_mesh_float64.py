"""Every mesh trains like one rank: three steps in float64, every number and tensor at 1e-10."""

from __future__ import annotations

import pytest
import torch
from mesh_cases import MODELS, STEPS, Case, run_case
from mesh_draws import draw_cases
from mesh_mappings import CORE, MORE

from automoe.config.schema import has_indexer
from automoe.hf.families.registry import FAMILIES
from automoe.verify.compare import compare_trajectories
from automoe.verify.pool import RankPool

TOLERANCE = 1e-10


def check_against_one_rank(ranks: RankPool, reference, case: Case) -> None:
    compared = compare_trajectories(run_case(ranks, case), reference(case))
    different = [c for c in compared if not c.within(TOLERANCE)]
    assert not different, f"{len(different)} of {len(compared)} differ, first: {different[0]}"


@pytest.mark.one_in(9)
@pytest.mark.parametrize("case", CORE, ids=str)
def test_a_mesh_trains_like_one_rank(ranks: RankPool, reference, case: Case) -> None:
    check_against_one_rank(ranks, reference, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE, ids=str)
def test_every_other_mesh_trains_like_one_rank(ranks: RankPool, reference, case: Case) -> None:
    check_against_one_rank(ranks, reference, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", draw_cases(), ids=str)
def test_a_drawn_mesh_trains_like_one_rank(ranks: RankPool, reference, case: Case) -> None:
    check_against_one_rank(ranks, reference, case)


def test_no_mapping_is_listed_twice() -> None:
    names = [str(case) for case in CORE + MORE]
    assert len(set(names)) == len(names) >= 60
    assert len(CORE) >= 25
    assert max(case.world_size for case in CORE + MORE) == 16


def test_every_native_family_has_a_model_and_a_mesh() -> None:
    assert {MODELS[case.family].family for case in CORE + MORE} == FAMILIES.keys()


PARTS = ("embed_tokens", "self_attn", "layernorm", "norm")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("family", MODELS)
def test_the_reference_has_something_to_compare(reference, family: str) -> None:
    """Gradients that are zero, balance losses that vanish or counts that tie would compare equal for nothing."""
    run, model = reference(Case(family)), MODELS[family]
    moe_layers = model.num_moe_layers
    parts = {
        "mlp.router": moe_layers,
        "mlp.experts": moe_layers,
        "mlp.shared_experts": model.shared_width,
        "output_gate": model.shared_expert_gate,
        "mlp.gate_proj": model.num_dense_layers,
        "_proj.bias": model.attention.qkv_bias,
        "eh_proj": model.num_mtp_layers,
        "_residual.fn": model.hc_mult,
        "hc_head.hc_fn": model.hc_mult,
    }
    for step in range(STEPS):
        assert run.gradients[step].keys() == run.parameters.keys()
        for part in (*PARTS, *parts):
            found = any(part in name for name in run.gradients[step])
            assert found == bool(parts.get(part, True)), part
        assert ("lm_head.weight" in run.gradients[step]) == (not model.tie_embeddings)
        indexed = sum(has_indexer(model.attention, layer) for layer in model.all_layers)
        assert len(run.metrics[step]) == 2 * model.num_mtp_layers + (indexed > 0)
        assert all(run.metrics[step][::2])  # losses of modules, and of indexers behind them
        assert sum(name.endswith(".indexer.weights_proj.weight") for name in run.gradients[step]) == indexed
        assert all(gradient.norm() > 1e-6 for gradient in run.gradients[step].values())
        if not moe_layers:
            continue
        assert run.seq_balance_loss[step] > 1e-3 and run.global_balance_loss[step] > 1e-3
        assert run.z_loss[step] > 1e-3
        assert run.expert_counts[step].std(dim=1).min() > 1
    assert not model.num_mtp_layers or sum(sum(shares[1::2]) for shares in run.metrics) > 0
    assert run.grad_norms[0] > 1, "clipping has to act"
    assert all(bias.abs().max() > 0 for bias in run.biases.values())
    by_scores = moe_layers - model.router.num_hash_layers
    assert len(run.biases) == (by_scores if model.router.expert_bias else 0)
    assert len(set(run.losses)) == STEPS
    assert not moe_layers or not torch.equal(run.expert_counts[0], run.expert_counts[1])


@pytest.mark.parametrize("case", [case for case in CORE if "capacity_factor" in case.moe], ids=str)
def test_the_reference_drops_in_some_layers_and_not_everything(reference, case: Case) -> None:
    shares = [share for step in reference(case).dropped_share for share in step]
    assert all(0.02 < share < 0.9 for share in shares)
