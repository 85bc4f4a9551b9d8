"""Sessions on meshes: ragged samples have equal log-probabilities, losses, reports and updates; natural routes change no bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from mesh_cases import VOCAB, Case

from automoe.comm.tokens import MicroBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config
from automoe.model.loss import LossInputs
from automoe.moe.router import recorded_choices
from automoe.rl import losses
from automoe.rl.batch import Sample
from automoe.rl.losses import Correction
from automoe.rl.routes import read_sglang, read_vllm
from automoe.rl.session import Session
from automoe.training.context import RunContext
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from tests.support.routes import as_sglang, as_vllm

CPU, TOLERANCE = torch.device("cpu"), 1e-10
LENGTHS = ((2, 9), (3, 14), (1, 1), (4, 6), (2, 2), (5, 11), (3, 5), (1, 12), (6, 1), (2, 7), (3, 3))
# Every loss, with options that act on these samples, and for some the value that they read as another.
LOSSES: dict[str, tuple[Any, dict[str, Any], dict[str, str]]] = {
    "grpo": (losses.grpo, {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.3}, {}),
    "dr_grpo": (losses.dr_grpo, {"length": 16}, {}),
    "dapo": (losses.dapo, {"max_drift": 0.01}, {}),
    "gspo": (losses.gspo, {"clip_low": 0.05, "clip_high": 0.08}, {}),
    "cispo": (losses.cispo, {"clip_low": 0.1, "clip_high": 0.2}, {}),
    "sapo": (losses.sapo, {"tau_positive": 0.9, "tau_negative": 1.2}, {}),
    "dppo": (losses.dppo, {"clip_low": 1e-3, "clip_high": 1e-3, "high": 1.1}, {}),
    "importance_sampling": (losses.importance_sampling, {"entropy_coef": 0.02}, {}),
    "cross_entropy": (losses.cross_entropy, {}, {"weights": "sampler_log_probs"}),
    "on policy": (losses.on_policy(losses.gspo), {}, {}),
    "distill": (losses.distill, {"strength": 0.7}, {"teacher_log_probs": "ref_log_probs"}),
    "forward": (losses.distill_top_k, {}, {}),
    "reverse": (losses.distill_top_k, {"direction": "reverse"}, {}),
    "no tail": (losses.distill_top_k, {"direction": "reverse", "tail": False}, {}),
}
LOSSES |= {f"mean of {mean}": (losses.grpo, {"mean": mean, "length": 9}, {}) for mean in get_args(losses.Mean)}
LOSSES |= {f"kl {kind}": (losses.dapo, {"kl_coef": 0.3, "kl_kind": kind}, {}) for kind in get_args(losses.KL)}
for _kind in ("truncate", "mask", "reject"):
    for _level in ("token", "sequence", "mean"):
        _correction = Correction(_kind, _level, high=1.03, low=0.97)  # type: ignore[arg-type]
        LOSSES[f"{_kind} by {_level}"] = (losses.dapo, {"correction": _correction}, {})


def every_loss(nll_BS: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return the sum of ``LOSSES``; report each with its metrics and its gradients, a sum that tells tokens apart."""
    leaves = [leaf for leaf in (nll_BS, inputs.scored, inputs.entropy) if leaf is not None]
    total = nll_BS.new_zeros(())
    for name, (loss, options, renamed) in LOSSES.items():
        given = {**inputs.given} | {new: inputs.given[old] for new, old in renamed.items()}
        own = replace(inputs, given=given, reported={})
        share = loss(nll_BS, own, **options)
        gradients = torch.autograd.grad(share, leaves, retain_graph=True, allow_unused=True)
        for gradient in [gradient for gradient in gradients if gradient is not None]:
            gradient_BS = gradient[..., 0] if gradient.dim() == 3 else gradient  # of the teacher's likeliest id
            inputs.report(f"{name} gradient", (gradient_BS * inputs.given["places"].double().cos()).sum())
        inputs.report(f"{name} loss", share)
        for metric, value in own.reported.items():
            inputs.report(f"{name} {metric}", value)
        total = total + share
    return total


NOTES = {
    "reads": ("advantages", "old_log_probs", "sampler_log_probs", "ref_log_probs", "teacher_log_probs", "scored_ids"),
    "metrics": [
        f"{name} {metric}" for name, (loss, *_) in LOSSES.items() for metric in (*loss.metrics, "loss", "gradient")
    ],
    "uses_entropy": True,
}
vars(every_loss).update(NOTES)
PART = Correction("mask", "mean", high=1.03, low=0.97)
# The loss of each of four updates; the samples' values are those that it reads.
UPDATES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (losses.gspo, {"clip_low": 0.05, "clip_high": 0.08, "kl_coef": 0.1, "correction": PART}),
    (losses.dapo, {"dual_clip": 1.5, "entropy_coef": 0.02, "kl_coef": 0.1, "kl_kind": "k3_weighted"}),
    (losses.distill_top_k, {"direction": "reverse"}),
    (every_loss, {}),
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
        if step >= 2:
            values = {"teacher_log_probs": likeliest.values} | (values if step == 3 else {})
        made.append(
            Sample(
                tokens,
                mask,
                values,
                candidates=left if step == 1 and number % 2 else None,
                scored_ids=likeliest.indices if step >= 2 else None,
            )
        )
    return made


def drive(config: Config, folder: str) -> Answers:
    """On one rank: four updates, the second in two parts whose gradients add up."""
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


def natural_routes(session: Session, batch: list[Sample]) -> list[torch.Tensor]:
    """Routes [n - 1, MoE layers, K] of samples that run one by one, as an engine computes them; one rank, all layers."""
    model, found = session.config.model, []
    for sample in batch:
        with recorded_choices(session.state.model_parts[0]) as choices, torch.no_grad():
            session.state.model_parts[0](batch=MicroBatch(torch.as_tensor(sample.tokens)[None, :-1]))
        found.append(choices()[0, :, : model.num_moe_layers - model.num_mtp_layers, 0])
    return found


def replay(config: Config, folder: str, routes: Any = None, record: bool = False) -> tuple[Answers, Any]:
    """On one rank: two updates, with the routes of each, ``routes[step]``, through an engine's format; and natural routes."""
    shape = resolve_mesh(config.mesh, None)
    rank = torch.distributed.get_rank()
    session = Session.open(config, shape, RunContext(rank, shape.world_size, rank, CPU, Path(folder)))
    model, records, log_probs, recorded = session.config.model, [], [], []
    for step, loss in enumerate((losses.dapo, losses.gspo)):
        batch = samples(0)
        if record:
            recorded.append(natural_routes(session, batch))
        for number, lines in enumerate(routes[step] if routes else ()):
            n, start = len(lines) + 1, number % 3 % len(lines)
            if number % 2:
                read = read_vllm(as_vllm(lines, model, start), model, n, start)
            else:
                read = read_sglang(as_sglang(lines, model, start), model, n)
            batch[number] = replace(batch[number], routes=read)
        differing = session.log_probs(batch).first_differing
        assert (differing is None) == (routes is None) and all((one == -1).all() for one in differing or ())
        outcome = session.forward_backward(batch, loss)
        assert outcome.metrics.pop("routes_differ", None) == (0 if routes else None)
        log_probs.append(outcome.log_probs)
        records.append({"loss": outcome.loss, "norm": session.optim_step(1e-2).grad_norm} | outcome.metrics)
    parts = session.state.model_parts
    return Answers(log_probs, [], records, {name: whole(p) for name, p in named_parameters(parts).items()}), recorded


def merged(found: list[Answers]) -> Answers:
    for other in found[1:]:  # every rank has every answer; of the parameters those of its stage
        for mine, theirs in zip(found[0].log_probs, other.log_probs, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        found[0].parameters.update(other.parameters)
    return found[0]


def answers(ranks: RankPool, case: Case, folder: Path) -> Answers:
    return merged(ranks.run(drive, case.world_size, case.config, str(folder)))


def replayed(ranks: RankPool, case: Case, folder: Path, routes: Any = None) -> Answers:
    return merged([found for found, _ in ranks.run(replay, case.world_size, case.config, str(folder), routes)])


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
    check_equal(found, same, TOLERANCE, 1e-8)
    assert same.records[0]["dropped_share.to_128"] > 0 and same.records[0]["clipped_share"] > 0


def check_equal(found: Answers, same: Answers, tolerance: float, of_parameters: float) -> None:
    for mine, theirs in zip([*found.log_probs, found.entropies], [*same.log_probs, same.entropies], strict=True):
        assert [len(one) for one in mine] == [len(one) for one in theirs]
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    for record, other in zip(found.records, same.records, strict=True):
        assert record == (pytest.approx(other, rel=tolerance, abs=tolerance) if tolerance else other)
    assert found.parameters.keys() == same.parameters.keys()
    for name, value in found.parameters.items():
        torch.testing.assert_close(value, same.parameters[name], rtol=of_parameters, atol=tolerance, msg=name)


def test_every_loss_and_option_is_compared_and_acts(alone: Callable[[str], Answers]) -> None:
    public = {name: loss.options for name, loss in vars(losses).items() if hasattr(loss, "options")}
    assert public.keys() == {loss.__name__ for loss, *_ in LOSSES.values()}
    taken = [options for _, options, *_ in (*LOSSES.values(), *UPDATES)]
    assert {name for options in public.values() for name in options} == {name for options in taken for name in options}
    record = alone("qwen3").records[3]
    assert all(record[f"{name} gradient"] for name in LOSSES)
    different = [record[f"{name} {what}"] for name in LOSSES for what in ("loss", "gradient")]
    assert len({round(value, 9) for value in different}) > len(LOSSES)


@pytest.fixture(scope="module")
def natural(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Answers, Any]]:
    """``natural(family)``: two updates on one rank, and the routes of each."""

    def run(family: str) -> tuple[Answers, Any]:
        config = Case(family, rows=8).config
        return ranks.run(replay, 1, config, str(tmp_path_factory.mktemp(family)), record=True)[0]

    return cache(run)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("case", [*CASES[1:], CASES[0]], ids=str)
def test_natural_routes_of_samples_change_no_bit_of_a_session(
    ranks: RankPool, natural: Callable[[str], tuple[Answers, Any]], case: Case, tmp_path: Path
) -> None:
    """Both engines' formats, some without a beginning; the mesh's own run without them, and one rank's, are the reference."""
    same, routes = natural(case.family)
    found = replayed(ranks, case, tmp_path / "replayed", routes)
    check_equal(found, replayed(ranks, case, tmp_path / "free"), 0.0, 0.0)
    check_equal(found, same, TOLERANCE, 1e-8)
