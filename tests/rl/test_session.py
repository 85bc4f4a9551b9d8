"""A session against transformers, what it refuses, what it leaves alone, and what it saves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

import automoe
from automoe.checkpoint import store
from automoe.checkpoint.saved_state import tensors_of
from automoe.comm.tokens import IGNORE
from automoe.config.schema import Config
from automoe.errors import DataError, LaunchError
from automoe.export import export_run
from automoe.launch.run_dir import locked
from automoe.session import Sample, Session, losses, open_session
from automoe.verify.pool import RankPool
from automoe.verify.trajectory import whole
from tests.rl.small import SMALL
from tests.support.hf_models import save_small_hf


def batch_of(advantages: float = 1.0, number: int = 6) -> list[Sample]:
    """Ragged samples whose answers are as likely as ids drawn evenly."""
    made = []
    for sample in range(number):
        tokens = torch.randint(64, (8 + 3 * sample,), generator=torch.Generator().manual_seed(sample)).tolist()
        sign = advantages * (-1) ** sample
        made.append(Sample.of_answer(tokens[:3], tokens[3:], advantages=sign, old_log_probs=[-4.0] * len(tokens[3:])))
    return made


def bytes_of(session: Session) -> dict[str, bytes]:
    """Every tensor of a checkpoint: weights, biases, moments."""
    return {name: whole(tensor).numpy().tobytes() for name, tensor in tensors_of(session.state).items()}


# ---------------------------------------------------------------- numbers


def scored_by_session(folder: str, batch: list[Sample], temperature: float) -> tuple[list[torch.Tensor], ...]:
    overrides = [f"model.hf_path={folder}", "train.dtype=float32", "mesh.pp=1", "mesh.ep=1", f"run_dir={folder}/run"]
    answer = open_session(overrides).log_probs(batch, temperature, entropy=True)
    assert answer.entropy is not None
    return answer.log_probs, answer.entropy


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("dsv3_groups_yarn", marks=pytest.mark.exhaustive)])
def test_log_probs_and_entropies_are_those_of_transformers(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """With a temperature, and over the ids that top-k sampling leaves."""
    theirs = save_small_hf(name, tmp_path / "model").eval()
    generator = torch.Generator().manual_seed(0)
    batch, expected = [], []
    for length in (9, 30, 2, 17):
        tokens = torch.randint(96, (length,), generator=generator)
        with torch.no_grad():
            logits = theirs(tokens[None]).logits[0, :-1].float() / 0.7
        left = logits.topk(20, dim=-1).indices
        left[:, 0] = tokens[1:]  # the token itself is left
        if length == 30:
            logits = logits.masked_fill(torch.ones_like(logits).scatter(1, left, 0.0).bool(), -torch.inf)
        log_p = logits.log_softmax(-1)
        entropy = -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)
        expected.append((log_p.gather(1, tokens[1:, None])[:, 0], entropy))
        mask = torch.arange(length) > 0
        candidates = [[], *left.tolist()] if length == 30 else None
        batch.append(Sample(tokens, mask, candidates=candidates))
    log_probs, entropies = ranks.run(scored_by_session, 1, str(tmp_path / "model"), batch, 0.7)[0]
    for (log_p, entropy), mine, my_entropy in zip(expected, log_probs, entropies, strict=True):
        assert mine[0] == 0 and mine.dtype == torch.float64
        torch.testing.assert_close(mine[1:].float(), log_p, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(my_entropy[1:].float(), entropy, rtol=1e-4, atol=2e-5)


def rows_of_the_head(folder: str) -> int:
    from automoe.model import loss

    multiplied, chunks = [], loss._trained_chunks

    def counted(*args: Any) -> Any:
        multiplied.extend(args[0][chunk].shape[0] for chunk in chunks(*args))
        return chunks(*args)

    with patch.object(loss, "_trained_chunks", counted):
        open_session([*SMALL, f"run_dir={folder}"]).log_probs(batch_of())
    return sum(multiplied)


def test_the_head_multiplies_trained_tokens_alone(ranks: RankPool, tmp_path: Path) -> None:
    [rows] = ranks.run(rows_of_the_head, 1, str(tmp_path))
    assert rows == sum(sum(sample.mask) for sample in batch_of())


def test_scores_have_the_gradients_of_whole_logits() -> None:
    from automoe.model.loss import token_scores

    torch.manual_seed(0)
    x, weight = (torch.randn(size, 8, dtype=torch.float64, requires_grad=True) for size in (6, 40))
    labels, ids = torch.randint(40, (6,)), torch.randint(40, (6, 3))
    temperature = torch.rand(6, dtype=torch.float64) + 0.5
    candidates = torch.cat((torch.stack([torch.randperm(40)[:9] for _ in range(6)]), labels[:, None], ids), 1)
    candidates[2] = -1  # all ids
    labels[3] = IGNORE
    trained = (labels >= 0).double()
    factors = torch.randn(3, 6, dtype=torch.float64)

    def gradients(nll: torch.Tensor, entropy: torch.Tensor, scored: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = (factors[0] * nll + factors[1] * entropy + factors[2] * scored.square().sum(-1)).sum()
        return total, *torch.autograd.grad(total, (x, weight))

    logits = x @ weight.T / temperature[:, None]
    outside = torch.ones(6, 41).scatter(1, candidates % 41, 0.0)[:, :40].bool() & (candidates >= 0).all(1)[:, None]
    log_p = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    p, finite = log_p.exp(), log_p.masked_fill(outside, 0.0)
    nll = -log_p.gather(1, labels.clamp_min(0)[:, None])[:, 0]
    scored = torch.where(trained[:, None] > 0, log_p.gather(1, ids), 0.0)
    expected = gradients(torch.where(trained > 0, nll, 0.0), -(p * finite).sum(-1) * trained, scored)
    got = gradients(
        *token_scores(
            x,
            weight,
            labels,
            temperature_T=temperature,
            candidates_TN=candidates,
            scored_ids_TK=ids,
            wants_entropy=True,
        )
    )
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


# ---------------------------------------------------------------- what stays as it is


def updates(run_dir: str, advantages: list[float], auxiliary_losses: bool) -> tuple[list[dict[str, bytes]], list[Any]]:
    session = open_session([*SMALL, "lora.rank=0", f"run_dir={run_dir}"], auxiliary_losses=auxiliary_losses)
    states, steps = [bytes_of(session)], []
    for advantage in advantages:
        session.forward_backward(batch_of(advantage), losses.dapo)
        steps.append(session.optim_step(1e-3))
        states.append(bytes_of(session))
    return states, steps


@pytest.mark.parametrize("auxiliary_losses", [False, True])
def test_equal_rewards_leave_every_byte(ranks: RankPool, tmp_path: Path, auxiliary_losses: bool) -> None:
    """Weight decay and momentum of a step before would move weights; balance losses do, if asked for."""
    states, steps = ranks.run(updates, 1, str(tmp_path), [0.0, 1.0, 0.0], auxiliary_losses)[0]
    assert states[2] != states[1]
    assert (states[1] == states[0]) is not auxiliary_losses
    assert (states[3] == states[2]) is not auxiliary_losses
    assert [step.skipped for step in steps] == [not auxiliary_losses, False, not auxiliary_losses]
    if not auxiliary_losses:
        assert steps[0].grad_norm == 0 and steps[0].skip_reason == "the gradient is zero"


def reference_by_adapter(run_dir: str) -> list[list[torch.Tensor]]:
    session = open_session([*SMALL, "lora.rank=2", "lora.targets=[q_proj,v_proj]", f"run_dir={run_dir}"])
    before = session.log_probs(batch_of()).log_probs
    session.forward_backward(batch_of(), losses.grpo)
    session.optim_step(1e-1)
    with session.adapter_off():
        off = session.log_probs(batch_of()).log_probs
    return [before, off, session.log_probs(batch_of()).log_probs]


def test_without_its_adapter_a_model_is_the_one_before_training(ranks: RankPool, tmp_path: Path) -> None:
    before, off, on = (torch.cat(one) for one in ranks.run(reference_by_adapter, 1, str(tmp_path))[0])
    assert torch.equal(before, off) and not torch.equal(before, on)


# ---------------------------------------------------------------- saved and resumed


def train_and_save(run_dir: str, steps: list[float], load: bool) -> tuple[dict[str, bytes], Any]:
    session = open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}"])
    extra = session.load() if load else None
    for step in steps:
        session.forward_backward(batch_of(step), losses.grpo)
        session.optim_step(1e-2)
    session.save({"samples": [1, 2, len(steps)]})
    return bytes_of(session), extra


def test_a_session_resumes_to_the_bit(ranks: RankPool, tmp_path: Path) -> None:
    straight = ranks.run(train_and_save, 2, str(tmp_path / "a"), [1.0, 0.5, -0.3], False)[0]
    ranks.run(train_and_save, 2, str(tmp_path / "b"), [1.0, 0.5], False)
    resumed, extra = ranks.run(train_and_save, 2, str(tmp_path / "b"), [-0.3], True)[0]
    assert resumed == straight[0] and extra == {"samples": [1, 2, 2]}
    assert not isinstance(export_run(tmp_path / "b", tmp_path / "exported"), str), "proven, as any run's"
    (tmp_path / "b" / "config.yaml").write_text("of a run\n")
    ranks.run(train_and_save, 2, str(tmp_path / "b"), [-0.3], True)
    assert (tmp_path / "b" / "config.yaml").read_text() == "of a run\n"


def saved_twice_and_loaded(folder: str) -> tuple[bool, int]:
    """On a rank: whether a load right after a save in the background gives that save."""
    session = open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={folder}", "checkpoint.async_save=true"])
    real = store.write_manifest

    def slowly(*args: Any) -> None:
        time.sleep(1.0)
        real(*args)

    with patch.object(store, "write_manifest", slowly):
        for step in (1.0, 0.5):
            session.forward_backward(batch_of(step), losses.grpo)
            session.optim_step(1e-2)
            session.save()
        saved = bytes_of(session)
        session.load()
    return bytes_of(session) == saved, session.state.step


def test_a_load_waits_for_the_save_in_the_background(ranks: RankPool, tmp_path: Path) -> None:
    """Looking for the newest step removes half-written folders: not the one that is being written."""
    assert ranks.run(saved_twice_and_loaded, 2, str(tmp_path / "run")) == [(True, 2)] * 2


def open_in(folder: str, num_ranks: int = 1) -> str:
    try:
        open_session([*SMALL, f"mesh.dp_shard={num_ranks}", f"run_dir={folder}"])
    except LaunchError as error:
        return str(error)
    return "opened"


def test_a_run_directory_that_another_process_uses_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    with locked(tmp_path / "run"):
        for number in (1, 2):
            for said in ranks.run(open_in, number, str(tmp_path / "run"), number):
                assert f"is in use by another run, process {os.getpid()}" in said
    assert ranks.run(open_in, 1, str(tmp_path / "run")) == ["opened"]
    with pytest.raises(LaunchError, match="is in use by another run"), locked(tmp_path / "run"):
        pass


def test_an_answer_has_values_of_any_numbers() -> None:
    one = Sample.of_answer([1], [2, 3], a=torch.tensor(2.0), b=np.float32(2), c=[[1.0, 2.0], [3.0, 4.0]])
    assert one.values["a"] == one.values["b"] == 2
    assert torch.as_tensor(one.values["c"]).tolist() == [[0, 0], [1, 2], [3, 4]]
    with pytest.raises(DataError, match="field ref: not numbers"):
        Sample.of_answer([1], [2, 3], ref=None)  # type: ignore[arg-type]


SCRIPT = """
import sys
from automoe import session
from automoe.session import Sample, losses
one = session.open_session(sys.argv[1:])
batch = [Sample.of_answer([1, 2], [3, 4, 5], advantages=1.0, old_log_probs=[-4.0] * 3)]
loss = one.forward_backward(batch, losses.grpo).loss
print("loss", loss, "norm", one.optim_step(1e-3).grad_norm)
session.close()
"""


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_script_opens_a_session_alone_and_under_torchrun(tmp_path: Path, number: int) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    start = [sys.executable]
    if number > 1:
        start += ["-m", "torch.distributed.run", f"--nproc-per-node={number}", "--standalone"]
    settings = [*SMALL, f"mesh.dp_shard={number}", f"run_dir={tmp_path}/run"]
    environment = os.environ | {"PYTHONPATH": str(Path(automoe.__file__).parents[1])}
    (tmp_path / "scratch").mkdir()
    environment["TMPDIR"] = str(tmp_path / "scratch")
    done = subprocess.run(
        [*start, "script.py", *settings], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.count("loss ") == number, done.stderr
    assert number > 1 or [*(tmp_path / "scratch").iterdir()] == []


def test_a_config_is_taken_as_it_is(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(opened_from_config, 1, str(tmp_path))[0] == 32


def opened_from_config(run_dir: str) -> int:
    config: Config = open_session([*SMALL, f"run_dir={run_dir}"]).config
    return open_session(config).config.train.seq_len
