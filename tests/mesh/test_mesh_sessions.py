"""Sessions: log-probabilities, losses, reports and updates of ragged samples are equal on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mesh_cases import VOCAB, Case

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.rl import losses
from automoe.rl.batch import Sample
from automoe.rl.losses import Correction
from automoe.rl.session import Session
from automoe.training.context import RunContext
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole

CPU, TOLERANCE = torch.device("cpu"), 1e-10
LENGTHS = ((2, 9), (3, 14), (1, 1), (4, 6), (2, 2), (5, 11), (3, 5), (1, 12), (6, 1), (2, 7), (3, 3))
PART = Correction("mask", "mean", high=1.03, low=0.97)
# The loss of each of three updates; the samples' values are those that it reads.
UPDATES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (losses.gspo, {"clip_low": 0.05, "clip_high": 0.08, "kl_coef": 0.1, "correction": PART}),
    (losses.dapo, {"dual_clip": 1.5, "entropy_coef": 0.02, "kl_coef": 0.1, "kl_kind": "k3_weighted"}),
    (losses.distill_top_k, {"direction": "reverse"}),
)


class Answers(NamedTuple):
    log_probs: list[list[torch.Tensor]]
    entropies: list[torch.Tensor]
    records: list[dict[str, float]]
    parameters: dict[str, torch.Tensor]


def samples(step: int) -> list[Sample]:
    """Ragged samples with all fields; some answers have two turns, one has no trained token."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for number, (prompt, answer) in enumerate(LENGTHS):
        n = prompt + answer
        tokens = torch.randint(VOCAB, (n,), generator=generator)
        mask = torch.arange(n) >= prompt
        if number % 4 == 1:
            mask[prompt + 3 : prompt + 5] = False
        if number == 8:
            mask[:] = False
        old, sampler, ref = (-4 + 0.3 * torch.randn(3, n, generator=generator, dtype=torch.float64)).unbind()
        teacher = torch.randn(n, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)
        likeliest = teacher.topk(3, dim=-1)
        left = [torch.unique(torch.cat((torch.arange(0, 40, 2), token[None]))).tolist() for token in tokens]
        values = {
            "advantages": float(torch.randn((), generator=generator)),
            "old_log_probs": old,
            "sampler_log_probs": old + (sampler - old) / 3,
            "ref_log_probs": ref,
        }
        if step == 2:
            values = {"teacher_log_probs": likeliest.values}
        made.append(
            Sample(
                tokens,
                mask,
                values,
                candidates=left if step == 1 and number % 2 else None,
                scored_ids=likeliest.indices if step == 2 else None,
            )
        )
    return made


def drive(config: Config, folder: str) -> Answers:
    """On one rank: three updates, the second in two parts whose gradients add up."""
    shape = resolve_mesh(config.mesh, None)
    rank = torch.distributed.get_rank()
    session = Session.open(config, shape, RunContext(rank, shape.world_size, rank, CPU, Path(folder)))
    records, log_probs = [], []
    for step, (loss, options) in enumerate(UPDATES):
        batch = samples(step)
        parts = [batch[:4], batch[4:]] if step == 1 else [batch]
        counts = session.count(batch)
        record: dict[str, float] = {}
        for part in parts:
            outcome = session.forward_backward(part, loss, temperature=0.7, counts=counts, **options)
            for name, value in ({"loss": outcome.loss} | outcome.metrics).items():
                record[name] = record.get(name, 0.0) + value
            log_probs.append(outcome.log_probs)
        record["norm"] = session.optim_step(1e-2).grad_norm
        records.append(record)
    answer = session.log_probs(samples(1), temperature=1.3, entropy=True)
    log_probs.append(answer.log_probs)
    assert answer.entropy is not None
    parts = session.state.model_parts
    return Answers(log_probs, answer.entropy, records, {name: whole(p) for name, p in named_parameters(parts).items()})


def answers(ranks: RankPool, case: Case, folder: Path) -> Answers:
    found = ranks.run(drive, case.world_size, case.config, str(folder))
    for other in found[1:]:  # every rank has every answer; of the parameters those of its stage
        for mine, theirs in zip(found[0].log_probs, other.log_probs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        found[0].parameters.update(other.parameters)
    return found[0]


CASES = [
    Case("qwen3", {"cp": 2}),
    Case("qwen3", {"pp": 2, "tp": 2}),
    Case("deepseek", {"dp_shard": 2, "ep": 2}, rows=2),
    Case("deepseek", {"dp_replicate": 2, "cp": 2}),
    Case("qwen3", {"tp": 2, "ep": 1, "etp": 2}),
    Case("deepseek", {"pp": 2, "dp_shard": 2, "ep": 2}, parallel={"schedule": "ZBVZeroBubble", "stages_per_rank": 2}),
    Case("qwen3", {"pp": 2}, parallel={"schedule": "DualPipeV", "stages_per_rank": 2}),
    Case("gpt-oss", {"dp_shard": 2, "cp": 2, "ep": 4}),
    Case("deepseek-mtp", {"pp": 2, "dp_shard": 2}),
    Case("qwen3-tied", {"pp": 2}, parallel={"recompute": "full"}),
    # both copies of the embedding on the first rank; a session's loss reads one
    Case(
        "deepseek-mtp",
        {"pp": 2},
        parallel={"schedule": "ZBVZeroBubble", "stages_per_rank": 2, "layers_per_stage": [1, 2, 1, 1]},
    ),
]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """``alone(family)``: what one rank answers, asked once."""
    return cache(lambda family: answers(ranks, Case(family, rows=8), tmp_path_factory.mktemp(family)))


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sessions_answer_alike_on_every_mesh(
    ranks: RankPool, alone: Callable[[str], Answers], case: Case, tmp_path: Path
) -> None:
    same, found = alone(case.family), answers(ranks, case, tmp_path)
    for mine, theirs in zip([*found.log_probs, found.entropies], [*same.log_probs, same.entropies], strict=True):
        assert [len(one) for one in mine] == [len(one) for one in theirs]
        torch.testing.assert_close(torch.cat(mine), torch.cat(theirs), rtol=TOLERANCE, atol=TOLERANCE)
    for mine, theirs in zip(found.records, same.records, strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)
    assert same.records[0]["dropped_share.to_128"] > 0 and same.records[0]["clipped_share"] > 0
    assert found.parameters.keys() == same.parameters.keys()
    for name, value in found.parameters.items():
        torch.testing.assert_close(value, same.parameters[name], rtol=1e-8, atol=TOLERANCE, msg=name)
