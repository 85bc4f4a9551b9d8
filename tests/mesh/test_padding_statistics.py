"""Padding decides no maximum and no mean: what stands there changes nothing but its own embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mesh_cases import Case, batches
from mesh_mappings import CLIP

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.optim import qk_clip
from automoe.optim.adamw import build_optimizer
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, prepare_inputs
from tests.support.gpu import one_rank

LOSSES = dict(micro_batch_balance_coef=0.02)
CASES = [
    Case("mixtral-mha", rows=2, optim=CLIP, moe=LOSSES),
    Case("gpt-oss", rows=2, optim=CLIP, document_mask=False),
    Case("deepseek", rows=4, optim=CLIP, document_mask=False, moe=dict(capacity_factor=1.0, drop_scope="sequence")),
    Case("deepseek-mtp2", rows=2, optim=CLIP, moe=LOSSES),
    Case("glm-sparse", rows=2, optim=CLIP),
]


def statistics(config: Config, seed: int) -> dict[str, Any]:
    """The numbers of a step whose padding, in rows and in modules, has the embedding that ``seed`` draws."""
    with one_rank("cpu") as device:
        meshes = build_meshes(resolve_mesh(config.mesh, 1), device)
        parts = build_parts(config, meshes)
        materialize(parts, config, device)
        with torch.no_grad():
            parts[0].embedding.weight[0].normal_(generator=torch.Generator().manual_seed(seed))
        batch = batches(config, 0, 0, 1)
        tokens = batch.tokens.where(batch.tokens > 0, 1).where(batch.doc_ids >= 0, 0)
        inputs, _ = prepare_inputs(replace(batch, tokens=tokens), meshes, config, device)
        state = TrainState(parts, build_optimizer(parts.values(), config.optim))
        stats = forward_backward(state, build_runner(parts, meshes, config, device), inputs, config)
        logits = qk_clip.take_largest_logits(parts.values(), None, device).by_head
        gradients = {name: p.grad.clone() for name, p in parts[0].named_parameters()}
    return vars(stats) | {"logits": logits} | gradients


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_stands_in_padding_changes_no_number_of_a_step(case: Case) -> None:
    plain, *others = (statistics(case.config, seed) for seed in range(3))
    assert plain["loss"] > 0 and plain["logits"].isfinite().all()
    for name, number in plain.items():
        for other in others:
            torch.testing.assert_close(
                other[name], number, rtol=1e-13, atol=1e-15, msg=lambda text, n=name: f"{n}: {text}"
            )
