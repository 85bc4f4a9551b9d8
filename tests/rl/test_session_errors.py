"""What a session refuses, and what it is after an error that its caller caught."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from automoe.errors import AutomoeError, ConfigError, DataError
from automoe.model.causal_lm import CausalLM
from automoe.parallel.shared_gradients import earlier_gradients_added
from automoe.session import Counts, Sample, losses, open_session
from automoe.verify.pool import RankPool
from tests.rl.small import SMALL
from tests.rl.test_session import batch_of, bytes_of


def changed(sample: int, **fields: Any) -> list[Sample]:
    batch = batch_of()
    values = fields.pop("values", {})
    batch[sample] = replace(batch[sample], values={**batch[sample].values, **values}, **fields)
    return batch


def without(batch: list[Sample], sample: int, name: str) -> list[Sample]:
    values = {key: value for key, value in batch[sample].values.items() if key != name}
    return [replace(one, values=values) if number == sample else one for number, one in enumerate(batch)]


def wrong_batch(kind: str, rank: int = 1) -> list[Sample]:
    nan = [0.5] * 13 + [float("nan")]
    wrong = {
        "empty": lambda: [],
        "one token": lambda: changed(1, tokens=[3], mask=[False]),
        "too long": lambda: changed(1, tokens=[3] * 40, mask=[False] + [True] * 39),
        "beyond the vocabulary": lambda: changed(1, tokens=[*range(10), 64]),
        "negative id": lambda: changed(1, tokens=[*range(10), -1]),
        "floats": lambda: changed(1, tokens=[0.5] * 11),
        "short mask": lambda: changed(1, mask=[False, True]),
        "first token": lambda: changed(1, mask=[True] * 11),
        "NaN": lambda: changed(2, values={"advantages": nan}),
        "short values": lambda: changed(2, values={"old_log_probs": [0.0] * 3}),
        "words": lambda: changed(2, values={"advantages": "high"}),
        "taken": lambda: changed(2, values={"places": [0.0] * 12}),
        "taken by a row": lambda: [replace(s, values={**s.values, "labels": 1.0}) for s in batch_of()],
        "missing": lambda: without(batch_of(), 3, "old_log_probs"),
        "unequal": lambda: changed(3, values={"weights": 1.0}),
        "candidates": lambda: changed(4, candidates=[[1]] * 20),
        "no list of candidates": lambda: changed(4, candidates=[1] * 20),
        "a column": lambda: changed(2, values={"advantages": torch.ones(14, 1)}),
        "ids of some": lambda: changed(3, scored_ids=torch.ones(17, 2, dtype=torch.int64)),
        "one id": lambda: changed(1, tokens=5),
        "no sample": lambda: [*batch_of(), ([1, 2], [False, True])],  # type: ignore[list-item]
        "no sequence": lambda: iter(batch_of()),  # type: ignore[return-value]
        "short routes": lambda: changed(4, routes=torch.zeros(3, 2, 2, dtype=torch.int64)),
        "on one rank": lambda: changed(5, tokens=[rank] * 23),
        "NaN on one rank": lambda: changed(5, values={"advantages": float("nan") if rank else 0.5}),
        "fewer on one rank": lambda: batch_of(number=6 - rank),
    }
    return wrong[kind]()


WRONG = {
    "empty": ("the batch has no sample",),
    "one token": ("sample 1", "field tokens", "two tokens"),
    "too long": ("sample 1", "field tokens", "at most train.seq_len + 1 = 33"),
    "beyond the vocabulary": ("sample 1", "field tokens", "id 64", "0 to 63"),
    "negative id": ("sample 1", "field tokens", "id -1"),
    "floats": ("sample 1", "field tokens", "integers"),
    "short mask": ("sample 1", "field mask", "11"),
    "first token": ("sample 1", "field mask", "token 0"),
    "NaN": ("sample 2", "field advantages", "finite"),
    "short values": ("sample 2", "field old_log_probs"),
    "words": ("sample 2", "field advantages"),
    "taken": ("sample 2", "field places", "another name than"),
    "taken by a row": ("sample 0", "field labels", "another name than"),
    "missing": ("sample 3", "field old_log_probs", "missing"),
    "unequal": ("sample 3", "field weights"),
    "candidates": ("sample 4", "field candidates"),
    "no list of candidates": ("sample 4", "field candidates", "20 lists"),
    "a column": ("sample 2", "field advantages", "one number, or 14"),
    "ids of some": ("sample 3", "field scored_ids"),
    "one id": ("sample 1", "field tokens", "two tokens"),
    "no sample": ("sample 6", "expected a Sample"),
    "no sequence": ("no sequence of samples",),
    "short routes": ("sample 4", "field routes", "[19, MoE layers, K]"),
    "on one rank": ("sample 5", "field tokens", "rank 1"),
    "NaN on one rank": ("sample 5", "field advantages", "finite", "rank 1"),
    "fewer on one rank": ("sample 5", "rank 1", "or none"),
}


def messages_of(kinds: list[str], run_dir: str) -> list[str]:
    session = open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}"])
    messages = []
    for kind in kinds:
        with pytest.raises(DataError) as caught:
            session.forward_backward(wrong_batch(kind, torch.distributed.get_rank()), losses.grpo)
        messages.append(str(caught.value))
    assert session.forward_backward(batch_of(), losses.grpo).loss < 10  # a good batch works afterwards
    return messages


def test_wrong_batches_are_refused_on_every_rank_alike(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(messages_of, 2, list(WRONG), str(tmp_path))
    assert first == second
    for message, words in zip(first, WRONG.values(), strict=True):
        assert all(word in message for word in words), message


def misspelled(run_dir: str) -> str:
    session = open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}"])
    with pytest.raises(ConfigError) as caught:
        session.forward_backward(batch_of(), losses.dapo, clip_hihg=0.3)
    assert session.forward_backward(batch_of(), losses.dapo, clip_high=0.3, dual_clip=3.0, kl_kind="k2").loss < 10
    return str(caught.value)


def test_an_option_that_a_loss_lacks_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(misspelled, 2, str(tmp_path))
    assert first == second and "clip_hihg" in first and "clip_high, clip_low" in first


def refused_settings(run_dir: str) -> list[str]:
    session = open_session([*SMALL, f"run_dir={run_dir}"])
    batch = batch_of()
    calls: list[Any] = [
        *(lambda t=t: session.log_probs(batch, t) for t in (0, -1.0, float("nan"), float("inf"), "warm", None)),
        lambda: session.forward_backward(batch, losses.dapo, 0.0),
        lambda: session.forward_backward(batch, "dapo"),  # type: ignore[arg-type]
        lambda: session.forward_backward(batch, lambda nll, inputs: losses.dapo(nll, inputs)),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        messages.append(str(caught.value))
    for lr in (float("nan"), -1e-3, float("inf"), "fast"):
        before = bytes_of(session)
        session.forward_backward(batch, losses.dapo)
        with pytest.raises(ConfigError) as caught:
            session.optim_step(lr)  # type: ignore[arg-type]
        messages.append(str(caught.value))
        assert bytes_of(session) == before
        assert not session.optim_step(1e-3).skipped, "the gradients are still there"
    return messages


def test_numbers_that_would_spoil_every_weight_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    messages = ranks.run(refused_settings, 1, str(tmp_path))[0]
    assert all("temperature" in message for message in messages[:7])
    assert "must be a function" in messages[7] and "attribute metrics" in messages[8]
    assert all(message.startswith("lr") for message in messages[9:])


def losses_after_an_error(run_dir: str, *settings: str) -> list[tuple[float, list[list[float]]]]:
    session = open_session([*SMALL, "train.micro_batch_size=1", f"run_dir={run_dir}", *settings])
    calls = []

    def failing(nll: torch.Tensor, inputs: Any) -> torch.Tensor:
        calls.append(nll)
        if len(calls) == 2:
            raise KeyError("mine")
        return nll.sum()

    norms = []
    for kind in ("alone", "after an error", "after a load"):
        if kind == "after an error":
            with pytest.raises(KeyError, match="mine"):
                session.forward_backward(batch_of(), failing)
        if kind == "after a load":
            session.forward_backward(batch_of(3.0), losses.grpo)
            session.load()
        if kind == "alone":
            session.save()
        outcome = session.forward_backward(batch_of(), partial(losses.grpo, clip_high=0.3))
        norms.append((session.optim_step(0.0).grad_norm, outcome.stats.expert_counts.tolist()))
    return norms


@pytest.mark.parametrize(
    ("num_ranks", "setting"), [(1, "train.dtype=float32"), (1, "train.dtype=bfloat16"), (2, "mesh.dp_shard=2")]
)
def test_gradients_of_a_call_that_failed_are_forgotten(
    ranks: RankPool, tmp_path: Path, num_ranks: int, setting: str
) -> None:
    """Those of FSDP's units too, which are whole until the step's last micro-batch, and the counts of experts."""
    alone, after_error, after_load = ranks.run(losses_after_an_error, num_ranks, str(tmp_path), setting)[0]
    assert alone == after_error == after_load and alone[0] > 0


def scored_by_stages(run_dir: str) -> tuple[set[bool], int]:
    """On a rank: whether scoring records gradients, and what stages keep of it."""
    session = open_session([*SMALL, "mesh.pp=2", "train.micro_batch_size=1", f"run_dir={run_dir}"])
    modes, real = set(), CausalLM.forward

    def forward(*args: Any, **options: Any) -> Any:
        modes.add(torch.is_grad_enabled())
        return real(*args, **options)

    with patch.object(CausalLM, "forward", forward):
        session.log_probs(batch_of())
    caches = "fwd_cache", "_forward_chunk_states"  # to torch 2.14, and from 2.15 on
    return modes, sum(len(getattr(stage, name, ())) for stage in session._runner.stages for name in caches)


def test_stages_that_score_keep_nothing(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(scored_by_stages, 2, str(tmp_path)) == [({False}, 0)] * 2


def test_an_error_in_a_pass_leaves_earlier_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    with pytest.raises(KeyError), earlier_gradients_added([parameter]):
        assert parameter.grad is None
        raise KeyError
    assert parameter.grad.tolist() == [1, 1]


def biases_moved(run_dir: str, lr: float | None) -> bool:
    phases = "optim.phases=[{steps: 4, bias_update_rate: 0.0}]"
    settings = ["model=small_dsv3", "model.num_layers=2", "model.num_mtp_layers=0", *SMALL[1:3], *SMALL[11:], phases]
    settings += ["optim.schedule=phases", "optim.warmup_steps=0", "train.steps=4", f"run_dir={run_dir}"]
    session = open_session(settings, auxiliary_losses=True)
    session.forward_backward(batch_of(), losses.grpo)
    session.optim_step(lr)
    layers = [layer for part in session.state.model_parts.values() for _, layer in part.moe_layers()]
    return any(bool(layer.router.expert_bias.any()) for layer in layers)


@pytest.mark.parametrize("lr", [None, 1e-3])
def test_a_given_learning_rate_leaves_the_phases_of_the_rest(ranks: RankPool, tmp_path: Path, lr: float | None) -> None:
    assert ranks.run(biases_moved, 1, str(tmp_path), lr) == [False]


def names_after_an_error(run_dir: str) -> tuple[list[str], list[str], bool]:
    """Names of what a checkpoint saves before and after a scoring pass that failed; whether the model trains."""
    session = open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}"])
    session.forward_backward(batch_of(), losses.grpo)
    session.optim_step(1e-2)
    before = list(bytes_of(session))
    with patch.object(CausalLM, "_loss", side_effect=RuntimeError("no memory")):
        with pytest.raises(RuntimeError, match="no memory"):
            session.log_probs(batch_of())
    return before, list(bytes_of(session)), all(part.training for part in session.state.model_parts.values())


def test_a_scoring_pass_that_failed_leaves_a_state_that_is_saved_whole(ranks: RankPool, tmp_path: Path) -> None:
    before, after, trains = ranks.run(names_after_an_error, 2, str(tmp_path))[0]
    assert after == before and any("embed_tokens" in name and "exp_avg" in name for name in after) and trains


def scored_after_an_error(run_dir: str) -> list[bool]:
    """On a rank: do two scorings agree after a pass that failed while the next layer's weights were on their way."""
    session = open_session([*SMALL, "model.num_layers=4", "mesh.dp_shard=2", f"run_dir={run_dir}"])
    session.forward_backward(batch_of(), losses.grpo)
    layers = [unit.layer for part in session.state.model_parts.values() for unit in part.units()]
    with patch.object(layers[1].mlp, "forward", side_effect=RuntimeError("no memory")):
        with pytest.raises(RuntimeError, match="no memory"):
            session.log_probs(batch_of())
    session.optim_step(0.1)
    first, again = (session.log_probs(batch_of()).log_probs for _ in range(2))
    return [bool(torch.equal(*pair)) for pair in zip(first, again, strict=True)]


def test_weights_that_were_on_their_way_when_a_pass_failed_are_dropped(ranks: RankPool, tmp_path: Path) -> None:
    assert all(map(all, ranks.run(scored_after_an_error, 2, str(tmp_path))))


def open_on_another_mesh(run_dir: str) -> str:
    with pytest.raises(AutomoeError) as caught:
        open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}"])
    return str(caught.value)


def test_a_mesh_of_another_size_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    [said] = ranks.run(open_on_another_mesh, 1, str(tmp_path))
    assert "2 ranks" in said or "mesh.dp_shard=2" in said, said


def open_with(run_dir: str, settings: list[str]) -> list[str]:
    messages = []
    for setting in settings:
        with pytest.raises(ConfigError) as caught:
            open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}", setting])
        messages.append(str(caught.value))
    return messages


def test_folders_of_routes_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    """A session writes and reads none."""
    (tmp_path / "step-0").mkdir()
    (tmp_path / "step-0" / "rank-0.npz").touch()
    settings = [f"moe.{name}={tmp_path}" for name in ("record_routing", "replay_routing")]
    for messages in ranks.run(open_with, 2, str(tmp_path / "run"), settings):
        assert messages == [f"{setting}: a session takes routes with its samples. Leave it out" for setting in settings]


def refused_losses_and_counts(run_dir: str) -> list[str]:
    session = open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}"])

    def of_rows(nll: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nll.sum(1) / inputs.counts.trained

    messages, batch = [], batch_of()
    calls: list[Any] = [
        lambda: session.forward_backward(batch, lambda nll, inputs: nll / inputs.counts.trained),
        lambda: session.forward_backward(batch, of_rows),
        lambda: session.forward_backward(batch, lambda nll, inputs: nll.sum().view(1)),
        lambda: session.forward_backward(batch, lambda nll, inputs: 0.5),  # type: ignore[arg-type,return-value]
        *(
            lambda counts=counts: session.forward_backward(batch, losses.dapo, counts=counts)
            for counts in (Counts(0, 6), Counts(87, -1), Counts(2.5, 6), Counts("many", 6), (87, 6))
        ),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        messages.append(str(caught.value))
        with pytest.raises(AutomoeError, match="there are no gradients"):
            session.optim_step()
    halves = session.forward_backward(batch, losses.dapo, counts=Counts(2 * session.count(batch).tokens, 12)).loss
    assert halves == pytest.approx(session.forward_backward(batch, losses.dapo).loss / 2)
    return messages


def test_a_loss_of_several_numbers_and_divisors_below_one_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(refused_losses_and_counts, 2, str(tmp_path))
    assert first == second
    assert all("returns one number" in message for message in first[:4])
    names = ["counts.tokens=0", "counts.samples=-1", "counts.tokens", "counts.tokens", "counts.tokens"]
    for message, name in zip(first[4:], names, strict=True):
        assert message.startswith(name), message
