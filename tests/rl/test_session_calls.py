"""Several calls of a session before an update, its saves, and process groups that it refuses."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from automoe.checkpoint import store
from automoe.errors import CheckpointError, DataError, SaveError
from automoe.rl.engine import Sampling, TransformersEngine
from automoe.rl.losses import dapo, grpo, gspo, on_policy
from automoe.rl.weights import WeightStream
from automoe.session import open_session, save_at, store_at
from automoe.verify.pool import RankPool
from tests.rl.small import SMALL
from tests.rl.test_session import batch_of, bytes_of


def norms_of(run_dir: str, mesh: list[str]) -> list[float]:
    """Norms of the gradients of a batch: in one call, in two of other lengths, with a question between them."""
    session = open_session([*SMALL, *mesh, "train.dtype=float64", "moe.experts=loop", f"run_dir={run_dir}"])
    batch = batch_of()
    counts, norms = session.count(batch), []
    for calls in ([batch], [batch[:2], batch[2:]], [batch[:2], None, batch[2:]]):
        for part in calls:
            if part is None:
                session.log_probs(batch[3:])
            else:
                session.forward_backward(part, dapo, counts=counts)
        norms.append(session.optim_step(lr=0.0).grad_norm)
    return norms


def test_stages_add_gradients_of_several_calls(ranks: RankPool, tmp_path: Path) -> None:
    """Torch's stages forget gradients when the rows have another length, and when they cease to train."""
    alone = ranks.run(norms_of, 1, str(tmp_path / "alone"), ["mesh.pp=1"])[0]
    assert alone == pytest.approx(alone[:1] * 3, rel=1e-10)
    for norms in ranks.run(norms_of, 2, str(tmp_path / "stages"), ["mesh.pp=2", "mesh.dp_shard=1"]):
        assert norms == pytest.approx(alone, rel=1e-10)


def first_updates(run_dir: str, settings: list[str]) -> tuple[list[dict[str, bytes]], list[Any]]:
    """Of three sessions that scored the answers, did not, and got other numbers: their weights, records and answers.

    The second has other numbers too, which it must not read.
    """
    states, records = [], []
    for kind in ("scored", "own", "other"):
        session = open_session([*SMALL, *settings, f"run_dir={run_dir}/{kind}"])
        batch = batch_of()
        if kind == "scored":
            batch = [replace(sample, values={"advantages": sample.values["advantages"]}) for sample in batch]
        options = {"loss": gspo, "max_drift": 0.01}
        if kind == "own":
            options["loss"] = on_policy(partial(gspo))
        if kind == "scored":
            old = session.log_probs(batch).log_probs
            values = [{**sample.values, "old_log_probs": each} for sample, each in zip(batch, old, strict=True)]
            batch = [replace(sample, values=each) for sample, each in zip(batch, values, strict=True)]
        first = session.forward_backward(batch, **options)
        update = session.optim_step(1e-2)
        states.append(bytes_of(session))
        answers = old if kind == "scored" else first.log_probs
        records.append((first.loss, first.metrics, update.grad_norm, [answer.tolist() for answer in answers]))
    return states, records


@pytest.mark.parametrize("settings", [["train.dtype=bfloat16"], ["mesh.dp_shard=2"], ["mesh.pp=2", "mesh.dp_shard=1"]])
def test_a_first_update_needs_no_scores_of_its_own(ranks: RankPool, tmp_path: Path, settings: list[str]) -> None:
    """To the bit: loss, metrics, norm, weights, and log-probabilities for later updates."""
    number = 2 if "dtype" not in settings[0] else 1
    for states, records in ranks.run(first_updates, number, str(tmp_path), settings):
        assert records[0] == records[1] and records[0][0] != records[2][0]
        assert states[0] == states[1] != states[2]


def clipped(run_dir: str) -> tuple[set[str], set[str]]:
    """Projections of queries that a step of rate 0 changes, and all of them."""
    settings = ["model=small_dsv3", "model.hidden_size=64", "model.num_layers=2", "model.num_mtp_layers=1"]
    settings += ["model.moe_intermediate_size=32", "mesh.pp=1", "mesh.ep=1", "optim=muon", "optim.qk_clip=0.01"]
    session = open_session([*settings, f"run_dir={run_dir}"])
    [model] = session.state.model_parts.values()
    queries = {name: p.detach().clone() for name, p in model.named_parameters() if ".q_" in name and p.dim() == 2}
    session.forward_backward(batch_of(), dapo)
    session.optim_step(lr=0.0)
    changed = {name for name, before in queries.items() if not torch.equal(before, model.get_parameter(name))}
    return changed, set(queries)


def test_modules_that_sit_out_a_step_have_no_logits_to_clip(ranks: RankPool, tmp_path: Path) -> None:
    """A session's losses are of tokens; modules for multi-token prediction do not run, and stay as they are."""
    [(changed, queries)] = ranks.run(clipped, 1, str(tmp_path))
    inside = {name for name in queries if name.startswith(("layers.0.", "layers.1."))}
    assert changed and changed <= inside < queries


def saved_over(run_dir: str, folder: str) -> tuple[dict[str, bytes], dict[str, bytes], list[str]]:
    """Two states of one step, saved in one folder: the second, what is read back, and the folder's steps."""
    for sign in (1.0, -1.0):
        session = open_session([*SMALL, "mesh.dp_shard=2", f"run_dir={run_dir}{sign}"])
        session.forward_backward(batch_of(sign), dapo)
        session.optim_step(lr=1e-2)
        save_at(session, Path(folder))
    second = bytes_of(session)
    session.forward_backward(batch_of(), dapo)
    session.optim_step(lr=1e-2)
    store = store_at(session, Path(folder))
    assert store.load_latest(session.state) is not None
    torch.distributed.barrier()
    return second, bytes_of(session), sorted(entry.name for entry in store.folder.glob("*step-*"))


def test_a_folder_that_has_this_step_gets_the_state_of_now(ranks: RankPool, tmp_path: Path) -> None:
    for second, read, steps in ranks.run(saved_over, 2, str(tmp_path / "run"), str(tmp_path / "saved")):
        assert read == second
        assert steps == ["diverged-step-1.1", "step-1"]


def test_a_checkpoint_has_the_settings_as_given(ranks: RankPool, tmp_path: Path) -> None:
    """They are what a run that is started again is compared with; a session without balance losses changes its own."""
    ranks.run(saves_twice, 1, str(tmp_path))
    manifest = json.loads(next(tmp_path.glob("checkpoints/step-*/manifest.json")).read_text())
    moe = manifest["config"]["moe"]
    assert (moe["bias_update_rate"], moe["global_balance_coef"], moe["z_loss_coef"]) == (0.1, 0.1, 0.2)


def saves_twice(run_dir: str) -> None:
    session = open_session([*SMALL, f"run_dir={run_dir}", "moe.z_loss_coef=0.2"])
    assert session.save({"a": 1}) == session.save({"a": 1})
    with pytest.raises(CheckpointError, match="step-0 is there, and this session did not write it with this extra"):
        session.save({"a": 2})
    for extra in ({"a": torch.ones(2)}, "abc"):
        with pytest.raises(DataError, match="expected a JSON object"):
            session.save(extra)  # type: ignore[arg-type]
    other = open_session([*SMALL, f"run_dir={run_dir}"])
    with pytest.raises(CheckpointError, match="this session did not write it"):
        other.save({"a": 1})
    assert other.load() == {"a": 1} and other.save({"a": 1})


def test_a_save_that_would_change_nothing_on_disk_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(saves_twice, 1, str(tmp_path))


def fails_to_save(run_dir: str, background: bool) -> list[str]:
    session = open_session([*SMALL, f"run_dir={run_dir}", f"checkpoint.async_save={background}"])
    messages = []
    with mock.patch.object(store.folders, "point_to", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        if background:
            assert session.save({"a": 1}) is None
            session.store._in_flight.exception()  # type: ignore[union-attr]
        with pytest.raises(SaveError) as caught:
            session.save({"a": 1})
        messages.append(str(caught.value))
    session.forward_backward(batch_of(), grpo)
    session.optim_step()
    weight = next(iter(session.state.parameters()))
    number = weight.flatten()[0].item()
    with torch.no_grad():
        weight.flatten()[0] = float("nan")
        with pytest.raises(SaveError) as caught:
            session.save({"a": 2})
        messages.append(str(caught.value))
        weight.flatten()[0] = number
    session.save({"a": 2})
    session.store.poll(wait=True)
    assert open_session([*SMALL, f"run_dir={run_dir}"]).load() == {"a": 2}
    return messages


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_save_that_failed_is_an_error(ranks: RankPool, tmp_path: Path, background: bool) -> None:
    [disk, numbers] = ranks.run(fails_to_save, 1, str(tmp_path), background)[0]
    words = ["in the background failed"] * 2 if background else ["No space left", "numbers are not finite"]
    assert words[0] in disk and words[1] in numbers


ON_ONE_DEVICE = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from automoe.session import open_session
dist.init_process_group("cuda:fake", store=FakeStore(), rank=0, world_size=1)
open_session(["experiment=smoke", "mesh.pp=1", "mesh.dp_shard=1", "mesh.ep=1", "launch.device=cpu"])
"""


def test_a_process_group_without_a_backend_of_the_cpu_is_refused(tmp_path: Path) -> None:
    """As one of NCCL alone would be, with whose first background save the session would end."""
    done = subprocess.run([sys.executable, "-c", ON_ONE_DEVICE], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "the process group has cuda:fake alone" in done.stderr.splitlines()[-1]


def sizes_of_routes(run_dir: str) -> list[tuple[int, int, int]]:
    """Of each answer: its lines of routes, their numbers, and the bytes that hold them."""
    session = open_session([*SMALL, f"run_dir={run_dir}"])
    engine = TransformersEngine(session.config, session.device)
    engine.update(WeightStream(session.state.model_parts, **engine.options))
    sizes = []
    for prompt in ([1, 2], [4, 5, 7, 8, 10]):
        [answers] = engine.sample([prompt], Sampling(3, 9, stops=range(0, 64, 3)))
        for answer in answers:
            assert answer.routes is not None and len(answer.routes) == len(prompt) + len(answer.tokens) - 1
            sizes.append((len(answer.routes), answer.routes.numel(), answer.routes.untyped_storage().nbytes()))
    return sizes


def test_an_answer_holds_its_own_routes_in_16_bits(ranks: RankPool, tmp_path: Path) -> None:
    """A view of the routes of all answers would be sent to every rank as often as there are answers."""
    for lines, numbers, num_bytes in ranks.run(sizes_of_routes, 1, str(tmp_path))[0]:
        assert numbers == lines * 2 * 2 and num_bytes == 2 * numbers
