"""Samples packed into rows train as each would alone: same loss, same gradients, and nothing from a prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from mesh_cases import VOCAB, Case

from automoe.comm.tokens import IGNORE, StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MoEConfig
from automoe.data.packing import SampleRows
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_parts, materialize
from automoe.parallel.pipeline import build_runner
from automoe.training.step import prepare_inputs
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole

CPU, TOLERANCE = torch.device("cpu"), 1e-10
LENGTHS = np.array([16, 11, 5, 4, 4, 3, 3, 2])  # of samples, all of which 3 rows of 16 tokens hold


def rows(pack: bool) -> StepBatch:
    """All samples, the last two or more tokens of each trained."""
    starts = np.cumsum(LENGTHS) - LENGTHS
    tokens = np.random.default_rng(0).integers(0, VOCAB, LENGTHS.sum())
    trained = np.zeros(len(tokens), dtype=bool)
    for start, length in zip(starts, LENGTHS, strict=True):
        trained[start + max(1, length // 2) : start + length] = True
    packed = SampleRows(tokens, starts, LENGTHS, trained=trained, seq_len=16, seed=0, pad_id=0, pack=pack)
    taken = packed.take(np.arange(packed.num_rows))
    return StepBatch(**{name: torch.from_numpy(array) for name, array in vars(taken).items()}, num_bytes=0, first_row=0)


def train_both(config: Config) -> list[tuple[float, dict[str, torch.Tensor], list[bool]]]:
    """This rank's loss share, gradients, and which positions of the last norm have one: packed, then each sample alone."""
    meshes = build_meshes(resolve_mesh(config.mesh, None), CPU)
    parts = build_parts(config, meshes)
    materialize(parts, config, CPU)
    outputs: list[torch.Tensor] = []
    parts[0].norm.register_forward_hook(lambda module, args, output: (output.retain_grad(), outputs.append(output))[1])
    results = []
    for pack in (True, False):
        outputs.clear()
        inputs, _ = prepare_inputs(rows(pack), meshes, config, CPU)
        loss = build_runner(parts, meshes, config, CPU).train(inputs)
        gradients = {name: whole(p.grad).clone() for name, p in named_parameters(parts).items()}
        for part in parts.values():
            part.zero_grad()
        reached = [bool(row.any()) for output in outputs for row in output.grad.flatten(0, 1)]
        predicts = (inputs.labels != IGNORE).flatten().tolist()
        assert reached == predicts, "the loss reaches positions that predict a trained token, and no other"
        results.append((float(loss), gradients))
    return results


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("family", "cp"), [("qwen3", 1), ("qwen3", 2), ("deepseek", 1), ("deepseek", 2), ("deepseek-v4", 1), ("longcat", 2)]
)
def test_a_packed_batch_trains_as_its_samples_alone(ranks: RankPool, family: str, cp: int) -> None:
    packed = rows(True)
    assert packed.tokens.shape[0] == 3 and (packed.doc_ids.max(1).values > 0).any()
    config = replace(Case(family, mesh={"cp": cp}).config, moe=MoEConfig(experts="loop"))
    both = ranks.run(train_both, cp, config)
    losses = [sum(rank[which][0] for rank in both) for which in (0, 1)]
    assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE) and losses[0] > 1
    (_, together), (_, alone) = both[0]
    for name in together:
        scale = alone[name].abs().max()
        assert scale > 0 and (together[name] - alone[name]).abs().max() <= TOLERANCE * scale, name
