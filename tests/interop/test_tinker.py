"""Loops of tinker's SDK on a session: formulas, a reward that rises, states, and what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tinker import types

from automoe import tinker
from automoe.errors import AutomoeError, ConfigError
from automoe.optim.grad_norm import global_grad_norm
from automoe.session import Sample, Session, losses
from automoe.tinker import ServiceClient, TrainingClient
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import named_parameters, whole
from tests.rl.small import SMALL
from tests.support.hf_models import save_small_hf

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")
OURS: dict[str, Any] = {
    "cross_entropy": (losses.cross_entropy, {}),
    "importance_sampling": (losses.importance_sampling, {}),
    "ppo": (losses.grpo, {"clip_low": 0.3, "clip_high": 0.1}),
    "cispo": (losses.cispo, {"clip_low": 0.3, "clip_high": 0.1}),
}
BOUNDS = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}


# Of a checkpoint that has its own sizes.
SMALL_OF_BASE = [word for word in SMALL if not word.startswith(("model", "data"))] + ["train.dtype=float32"]


def client_of(run_dir: str, *overrides: str, rank: int = 0) -> TrainingClient:
    service = ServiceClient([*SMALL, f"run_dir={run_dir}", *overrides])
    return service.create_lora_training_client(rank=rank).result()


def datum(prompt: list[int], answer: list[int], **inputs: Any) -> types.Datum:
    """As loops build one: the prompt's positions have target 0 and numbers 0."""
    ahead = len(prompt) - 1
    model_input = types.ModelInput.from_ints(prompt).append(types.EncodedTextChunk(tokens=answer[:-1]))
    tensors = {name: torch.tensor([0.0] * ahead + list(values)) for name, values in inputs.items()}
    tensors["target_tokens"] = torch.tensor([0] * ahead + answer)
    return types.Datum(model_input, {k: types.TensorData.from_torch(v) for k, v in tensors.items()})


def data_of(loss_fn: str) -> tuple[list[types.Datum], list[Sample]]:
    """The same four answers for both; old log-probabilities are such that ratios leave the bounds."""
    generator, data, batch = torch.Generator().manual_seed(0), [], []
    for number, length in enumerate((5, 1, 9, 3)):
        prompt, answer = (torch.randint(1, 64, (n,), generator=generator).tolist() for n in (2 + number, length))
        names = (
            {"weights": "weights"}
            if loss_fn == "cross_entropy"
            else {"logprobs": "old_log_probs", "advantages": "advantages"}
        )
        drawn = {name: torch.randn(length, generator=generator) for name in names}
        if "logprobs" in drawn:
            drawn["logprobs"] = drawn["logprobs"] * 0.4 - 4.2
        data.append(datum(prompt, answer, **{name: value.tolist() for name, value in drawn.items()}))
        batch.append(Sample.of_answer(prompt, answer, **{names[name]: value for name, value in drawn.items()}))
    return data, batch


def formula(loss_fn: str, logp: torch.Tensor, sample: Sample) -> torch.Tensor:
    values = {name: torch.as_tensor(value) for name, value in sample.values.items()}
    if loss_fn == "cross_entropy":
        return -values["weights"] * logp
    r, a = torch.exp(logp - values["old_log_probs"]), values["advantages"]
    clipped = torch.clip(r, 0.7, 1.1)
    return -{"importance_sampling": r * a, "ppo": torch.minimum(r * a, clipped * a), "cispo": clipped * a * logp}[
        loss_fn
    ]


def gradients(session: Session) -> list[torch.Tensor]:
    named = named_parameters(session.state.model_parts)
    found = [whole(named[name].grad) for name in sorted(named) if named[name].grad is not None]
    session.zero_grad()
    return found


def both(run_dir: str, *mesh: str) -> list[Any]:
    client = client_of(run_dir, "train.dtype=float64", *mesh)
    session, results = client.session, []
    for loss_fn in LOSSES:
        data, batch = data_of(loss_fn)
        options = BOUNDS if loss_fn in ("ppo", "cispo") else None
        forward = client.forward(data, loss_fn, options).result()
        answer = client.forward_backward(data, loss_fn, options).result()
        mine = gradients(session)
        loss, ours = OURS[loss_fn]
        outcome = session.forward_backward(batch, loss, mean="sum", **ours)
        results.append((loss_fn, forward, answer, mine, outcome.loss, outcome.log_probs, gradients(session)))
    return results


@pytest.mark.parametrize(
    "mesh", [[], ["mesh.dp_shard=2"], pytest.param(["mesh.cp=2"], marks=pytest.mark.exhaustive)], ids=str
)
def test_losses_are_the_formulas_and_gradients_those_of_a_session(
    ranks: RankPool, tmp_path: Path, mesh: list[str]
) -> None:
    for result in ranks.run(both, 1 + len(mesh), str(tmp_path), *mesh):
        for loss_fn, forward, answer, mine, loss, log_probs, theirs in result:
            batch = data_of(loss_fn)[1]
            terms = [formula(loss_fn, logp, sample)[1:] for logp, sample in zip(log_probs, batch, strict=True)]
            assert answer.metrics["loss:sum"] == pytest.approx(loss, rel=1e-10)
            assert sum(term.sum().item() for term in terms) == pytest.approx(loss, rel=1e-10)
            assert forward.metrics["loss:sum"] == pytest.approx(loss, rel=1e-10)
            for outputs in (forward.loss_fn_outputs, answer.loss_fn_outputs):
                for output, term, logp, sample in zip(outputs, terms, log_probs, batch, strict=True):
                    assert len(output["logprobs"].data) == len(sample.tokens) - 1
                    torch.testing.assert_close(output["elementwise_loss"].to_torch(), term.float())
                    there = torch.as_tensor(sample.mask)[1:]
                    torch.testing.assert_close(output["logprobs"].to_torch()[there], logp[1:][there].float())
            for one, other in zip(mine, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def steps(run_dir: str, by_client: bool) -> dict[str, torch.Tensor]:
    numbers = [
        "optim.betas=[0.8,0.9]",
        "optim.eps=1e-5",
        "optim.weight_decay=0.3",
        "train.grad_clip=0.5",
        "train.dtype=float64",
    ]
    client = client_of(run_dir, *(["train.dtype=float64"] if by_client else numbers))
    params = types.AdamParams(learning_rate=0.02, beta1=0.8, beta2=0.9, eps=1e-5, weight_decay=0.3, grad_clip_norm=0.5)
    data, batch = data_of("importance_sampling")
    if not by_client:
        from automoe.session import open_session

        session = open_session([*SMALL, f"run_dir={run_dir}", *numbers])
    for _ in range(3):
        if by_client:
            for part in (data[:1], data[1:]):  # gradients add up
                client.forward_backward(part, "importance_sampling")
            metrics = client.optim_step(params).result().metrics
            assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0.5
        else:
            session.forward_backward(batch, losses.importance_sampling, mean="sum")
            session.optim_step(0.02)
    session = client.session if by_client else session
    return {name: whole(p.detach()) for name, p in named_parameters(session.state.model_parts).items()}


def test_adam_params_are_those_of_the_step(ranks: RankPool, tmp_path: Path) -> None:
    mine, theirs = (ranks.run(steps, 1, str(tmp_path / str(by)), by)[0] for by in (True, False))
    for name, weight in mine.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-10, atol=1e-12)


def unclipped(run_dir: str) -> tuple[float, float]:
    client = client_of(run_dir, "train.dtype=float64")
    data, _ = data_of("cross_entropy")
    norms = []
    for clip in (0.0, 1e-3):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.0, beta1=0.0, grad_clip_norm=clip))
        moments = [s["exp_avg"] for s in client.session.state.optimizer.state.values()]
        norms.append(float(torch.stack([m.norm() for m in moments]).norm()))
    client.forward_backward(data, "cross_entropy")
    return norms[0] / float(global_grad_norm(client.session.state.parameters())), norms[1]


def test_a_clip_of_zero_does_not_clip(ranks: RankPool, tmp_path: Path) -> None:
    ratio, clipped = ranks.run(unclipped, 1, str(tmp_path))[0]
    assert ratio == pytest.approx(1) and clipped == pytest.approx(1e-3)


# ---------------------------------------------------------------- a loop


def loop(run_dir: str, num_steps: int, mesh: list[str], rank: int = 0, replay: bool = True) -> list[float]:
    """Group-centred rewards with the calls of a script for the service; answers should hold ids below 16."""
    service = ServiceClient([*SMALL, f"run_dir={run_dir}", *mesh])
    trainer = service.create_lora_training_client(rank=rank).result()
    params = types.AdamParams(learning_rate=0.05, beta1=0.9, beta2=0.95, eps=1e-8)
    rewards = []
    for _ in range(num_steps):
        sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=False).result()
        prompts = [types.ModelInput.from_ints([number, number + 1]) for number in (20, 40)]
        how = types.SamplingParams(max_tokens=6, stop=[0])
        futures = [sampler.sample(prompt=prompt, num_samples=8, sampling_params=how) for prompt in prompts]
        data, means = [], []
        for prompt, future in zip(prompts, futures, strict=True):
            sequences = future.result().sequences
            gains = [sum(token < 16 for token in one.tokens) / len(one.tokens) for one in sequences]
            means.append(sum(gains) / len(gains))
            for one, gain in zip(sequences, gains, strict=True) if len(set(gains)) > 1 else ():
                advantages = [gain - means[-1]] * len(one.tokens)
                made = datum(prompt.to_ints(), one.tokens, logprobs=one.logprobs, advantages=advantages)
                if replay:
                    made.loss_fn_inputs["routes"] = types.TensorData.from_torch(one.routes)
                data.append(made)
        rewards.append(sum(means) / len(means))
        if not data:
            continue
        before = trainer.forward_backward(data, loss_fn="importance_sampling")
        after = trainer.optim_step(params)
        gaps = [
            (torch.tensor(a["logprobs"].data) - torch.tensor(d.loss_fn_inputs["logprobs"].data))[1:].abs().max()
            for a, d in zip(before.result().loss_fn_outputs, data, strict=True)
        ]
        assert max(gaps) < 1e-4 and after.result().metrics["skipped"] == 0
    asyncio.run(awaited(trainer))
    return rewards


async def awaited(trainer: TrainingClient) -> None:
    state = await trainer.save_state("final", ttl_seconds=3600)
    sampler = await trainer.save_weights_for_sampler("final", ttl_seconds=None)
    assert Path(state.path).is_dir() and Path(sampler.path).is_dir() and state.path != sampler.path


@pytest.mark.parametrize(
    ("mesh", "rank"), [([], 0), pytest.param(["mesh.dp_shard=2"], 0, marks=pytest.mark.exhaustive)]
)
def test_a_reward_rises(ranks: RankPool, tmp_path: Path, mesh: list[str], rank: int) -> None:
    by_rank = ranks.run(loop, 1 + len(mesh), str(tmp_path), 14, mesh, rank)
    assert all(rewards == by_rank[0] for rewards in by_rank)
    assert sum(by_rank[0][-3:]) / 3 > sum(by_rank[0][:3]) / 3 + 0.3


# ---------------------------------------------------------------- states


def trained_on(client: TrainingClient, num: int) -> dict[str, torch.Tensor]:
    data, _ = data_of("cross_entropy")
    for _ in range(num):
        client.forward_backward(data, "cross_entropy").result()
        client.optim_step(types.AdamParams(learning_rate=0.01)).result()
    return {name: whole(p.detach()) for name, p in named_parameters(client.session.state.model_parts).items()}


def saved(run_dir: str) -> tuple[str, list[dict[str, torch.Tensor]]]:
    client = client_of(run_dir, "mesh.dp_shard=2", "train.dtype=float64", "checkpoint.resume=never", rank=2)
    weights = [trained_on(client, 2)]
    path = client.save_state("two").result().path
    with pytest.raises(AutomoeError, match="two is there. Give another name, or overwrite=True"):
        client.save_state("two")
    weights.append(trained_on(client, 1))
    client.load_state_with_optimizer(path)
    weights.append(trained_on(client, 1))
    assert client.save_state("two", overwrite=True).result().path == path
    client.load_state_with_optimizer(path)
    weights.append(trained_on(client, 0))
    client.load_state(path)
    weights.append(trained_on(client, 1))
    for name in ("../up", "", ".."):
        with pytest.raises(ConfigError, match="names a folder"):
            client.save_state(name)
    with pytest.raises(AutomoeError, match="has no checkpoint"):
        client.load_state(run_dir)
    return path, weights


def loaded(run_dir: str, path: str) -> list[dict[str, torch.Tensor]]:
    service = ServiceClient([*SMALL, f"run_dir={run_dir}", "train.dtype=float64"])
    with mock.patch.object(tinker, "load_from", wraps=tinker.load_from) as loads:
        with_moments = service.create_training_client_from_state_with_optimizer(path).result()
    assert loads.call_count == 1, "a state of a large model takes minutes"
    alone = service.create_training_client_from_state(path).result()
    assert with_moments.session.config.lora.rank == 2
    return [trained_on(with_moments, 0), trained_on(with_moments, 1), trained_on(alone, 1)]


def test_a_state_goes_on_on_another_mesh(ranks: RankPool, tmp_path: Path) -> None:
    path, weights = ranks.run(saved, 2, str(tmp_path / "a"))[0]
    first, third, again, overwritten, reset = weights

    def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 0.0) -> bool:
        return all(torch.allclose(one[name], other[name], rtol=within, atol=within) for name in other)

    assert equal(third, again) and equal(third, overwritten) and not equal(first, third) and not equal(again, reset)
    now, moved, anew = ranks.run(loaded, 1, str(tmp_path / "b"), path)[0]
    assert equal(now, third)
    assert not equal(moved, anew, 1e-6) and equal(anew, reset, 1e-9)


def overwritten_badly(run_dir: str, base: str) -> tuple[bool, str]:
    service = ServiceClient([*SMALL_OF_BASE, f"run_dir={run_dir}"])
    client = service.create_lora_training_client(base, rank=4).result()
    path = client.save_state("kept").result().path
    before = trained_on(client, 0)
    for parameter in client.session.state.model_parts[0].parameters():
        if parameter.requires_grad:
            parameter.data.fill_(float("nan"))
    with pytest.raises(AutomoeError):
        client.save_state("kept", overwrite=True)
    client.load_state(str(Path(path).with_name("older-kept.1")))
    after = trained_on(client, 0)
    other = ServiceClient([*SMALL_OF_BASE, f"run_dir={run_dir}2", "lora.alpha=3"])
    with pytest.raises(ConfigError) as refused:
        other.create_training_client_from_state(str(Path(path).with_name("older-kept.1")))
    return all(torch.equal(before[name], after[name]) for name in before), str(refused.value)


def test_a_state_is_not_lost_to_one_that_cannot_be_saved(ranks: RankPool, tmp_path: Path) -> None:
    """From a base model whose path Hydra would not read; and a state opens with its own adapters alone."""
    base = tmp_path / "modèle, a=b"
    save_small_hf("qwen3_moe", base)
    [(kept, refused)] = ranks.run(overwritten_badly, 1, str(tmp_path / "run"), str(base))
    assert kept
    assert "was saved with lora.alpha=32" in refused and "Give these overrides to ServiceClient" in refused


# ---------------------------------------------------------------- what is refused


def without(one: types.Datum, *names: str, **tensors: torch.Tensor) -> types.Datum:
    inputs = {name: value for name, value in one.loss_fn_inputs.items() if name not in names}
    return replace(one, loss_fn_inputs=inputs | {k: types.TensorData.from_torch(v) for k, v in tensors.items()})


def messages_of(run_dir: str) -> list[str]:
    client = client_of(run_dir, "mesh.dp_shard=2")
    rank = torch.distributed.get_rank()

    def ppo(number: int, *names: str, **tensors: torch.Tensor) -> Any:
        data, _ = data_of("ppo")
        data[number] = without(data[number], *names, **tensors)
        return lambda: client.forward_backward(data, "ppo")

    data, _ = data_of("ppo")
    wrong = [data[0], replace(data[1], model_input=types.ModelInput.from_ints([1, 2, 64])), *data[2:]]
    one_rank = [*data[:2], without(data[2], "logprobs") if rank else data[2], data[3]]
    sampler = client.save_weights_and_get_sampling_client().result()
    stale = client.save_weights_and_get_sampling_client().result() and sampler
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints([1, 2])

    def sample(client: Any = sampler, prompt: Any = prompt, num: int = 1, **params: Any) -> Any:
        return lambda: client.sample(prompt, num, types.SamplingParams(**({"max_tokens": 2} | params)))

    calls = [
        ppo(1, "logprobs"),
        ppo(2, advantages=torch.ones(7)),
        ppo(3, target_tokens=torch.ones(7, 2, dtype=torch.int64)),
        ppo(2, target_tokens=torch.arange(12)),
        ppo(0, advantages=torch.tensor([0.0] + [torch.nan] * 5)),
        ppo(0, mask=torch.ones(6)),
        ppo(3, routes=torch.zeros(4, 2, 2, dtype=torch.int64)),
        lambda: client.forward_backward(wrong, "ppo"),
        lambda: client.forward_backward(one_rank, "ppo"),
        lambda: client.forward([], "ppo"),
        lambda: client.forward_backward([("tokens",)], "ppo"),  # type: ignore[list-item]
        lambda: client.forward_backward(data, "stable_reinforce"),
        lambda: client.forward_backward(data, "ppo", {"clip_low": 0.2}),
        lambda: client.forward_backward(data, "importance_sampling", {"clip_low_threshold": 0.2}),
        lambda: client.forward_backward(data, "cispo", {"clip_low_threshold": 1.3}),
        lambda: client.optim_step(types.AdamParams()),
        lambda: client.optim_step(types.AdamParams(beta2=1.0)),
        lambda: client.optim_step(types.AdamParams(learning_rate=float("nan"))),
        lambda: client.optim_step(),
        lambda: client.save_weights_and_get_sampling_client(record_stability_info=True),
        sample(stale),
        sample(top_k=5),
        sample(top_p=0.9),
        sample(temperature=0.0),
        sample(temperature=float("inf")),
        sample(seed=2**63),
        sample(max_tokens=0),
        sample(num=0),
        sample(stop=["end"]),
        sample(prompt=types.ModelInput.from_ints([])),
        sample(prompt=types.ModelInput.from_ints([64])),
    ]
    messages = []
    assert not hasattr(sampler, "get_base_model")
    calls += [
        lambda: client.forward_backward_custom(data, sum),
        lambda: client.optim_step_async(types.AdamParams()),
        lambda: sampler.compute_logprobs_async(prompt),
        lambda: client.get_telemetry(),
    ]
    for call in calls:
        with pytest.raises(AutomoeError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


SAID = [
    ("datum 1", "field logprobs", "got nothing"),
    ("datum 2", "field advantages", "expected [12]", "got [7]"),
    ("datum 3", "field target_tokens", "expected [7]", "got [7, 2]"),
    ("datum 2", "field target_tokens", "token 3 is 3", "model_input goes on with"),
    ("datum 0", "field advantages", "finite"),
    ("datum 0", "field mask", "ppo takes", "expected nothing"),
    ("datum 3", "field routes", "[7, MoE layers, K]"),
    ("datum 1", "field model_input", "id 64"),
    ("datum 2", "field logprobs", "got nothing", "on rank 1"),
    ("no datum",),
    ("datum 0", "expected a Datum"),
    ("loss_fn=stable_reinforce", "cross_entropy, importance_sampling, ppo, cispo"),
    ("loss_fn_config.clip_low=0.2", "take clip_low_threshold and clip_high_threshold"),
    ("loss_fn_config.clip_low_threshold", "other losses no option"),
    ("loss_fn_config", "1.3", "1.2", "in order"),
    ("there are no gradients",),
    ("AdamParams.beta2=1.0",),
    ("AdamParams.learning_rate=nan",),
    ("AdamParams.learning_rate",),
    ("record_stability_info",),
    ("newer weights",),
    ("sample.top_k=5",),
    ("sample.top_p=0.9",),
    ("sample.temperature=0.0",),
    ("sample.temperature=inf",),
    ("sample.seed=9223372036854775808", "63 bits"),
    ("sample.max_tokens=0",),
    ("sample.num_samples=0",),
    ("sample.stop", "ids of tokens"),
    ("prompt", "one or more"),
    ("prompt", "0 to 63"),
    ("TrainingClient.forward_backward_custom is not", "session.forward_backward(batch, loss)"),
    ("TrainingClient.optim_step_async", "optim_step, whose future can be awaited"),
    ("SamplingClient.compute_logprobs_async", "TrainingClient.forward"),
    ("TrainingClient.get_telemetry", "one of forward, forward_backward, load_state"),
]


def test_errors_name_the_datum_and_the_field(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(messages_of, 2, str(tmp_path))
    assert first == second
    for message, words in zip(first, SAID, strict=True):
        assert all(word in message for word in words), message
