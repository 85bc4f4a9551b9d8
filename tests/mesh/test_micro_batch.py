"""Torch splits a step's rows into micro-batches, and inputs of a loss reach it as they are."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from mesh_cases import Case, batches
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from automoe.comm.tokens import MicroBatch, TokenCounts
from automoe.config.mesh_shape import resolve_mesh
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool

ROWS, SIZE = 6, 4


@pytest.mark.parametrize("missing", [(), ("doc_ids", "given", "mtp_tokens", "mtp_labels"), ("labels", "counts")])
def test_torch_splits_rows(missing: tuple[str, ...]) -> None:
    tensors = {
        one.name: torch.arange(ROWS * SIZE).view(ROWS, SIZE) + number
        for number, one in enumerate(fields(MicroBatch))
        if one.name not in ("counts", "given", *missing)
    }
    counts = TokenCounts(*torch.arange(3))
    beside = {"counts": counts, "given": {"pairs": torch.rand(ROWS, 2, 2), "weights": torch.rand(ROWS)}}
    whole = MicroBatch(**tensors, **{name: value for name, value in beside.items() if name not in missing})
    _, parts = split_args_kwargs_into_chunks((), {"batch": whole}, 3)
    assert len(parts) == 3
    for number, part in enumerate(parts):
        rows = slice(2 * number, 2 * number + 2)
        for name, value in vars(part["batch"]).items():
            before = getattr(whole, name)
            if name == "given":
                assert value.keys() == before.keys()
                assert all(torch.equal(tensor, before[key][rows]) for key, tensor in value.items())
            elif isinstance(value, torch.Tensor):
                assert torch.equal(value, before[rows])
            else:
                assert value is before


def dtypes_given(config) -> list[torch.dtype]:
    """Dtypes in which a loss gets its inputs, in training and in validation."""
    cpu, seen = torch.device("cpu"), []

    def loss(nll_BS: torch.Tensor, inputs) -> torch.Tensor:
        seen.append(inputs.given["reference"].dtype)
        return nll_BS.sum() / inputs.counts.trained.clamp_min(1)

    meshes = build_meshes(resolve_mesh(config.mesh, None), cpu)
    parts = build_parts(config, meshes)
    materialize(parts, config, cpu)
    runner = build_runner(parts, meshes, config, cpu)
    runner.set_loss(loss)
    rows = batches(config, 0, meshes.dp_rank, meshes.shape.dp)
    inputs, _ = prepare_inputs(rows, meshes, config, cpu)
    inputs |= {"reference": torch.rand(len(rows.tokens), 3, dtype=torch.float64)}
    runner.train(inputs)
    runner.evaluate(inputs)
    return seen


@pytest.mark.parametrize("mesh", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_inputs_of_a_loss_keep_their_dtype_if_layers_compute_in_bfloat16(ranks: RankPool, mesh: dict) -> None:
    config = Case("qwen3", mesh=mesh).config
    config = replace(config, train=replace(config.train, dtype="bfloat16"))
    seen = sum(ranks.run(dtypes_given, 2, config), [])
    assert seen and set(seen) == {torch.float64}
