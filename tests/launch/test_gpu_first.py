"""The checks of ``automoe doctor --gpu``: each can run, and each can fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from automoe import doctor
from automoe.config.compose import parse_arguments
from automoe.config.schema import Config
from automoe.config.validate import validate
from automoe.launch import gpu_first, trial_runs
from automoe.launch.gpu_first import CHECKS, Check, judge, run_checks
from automoe.launch.prepare import compose
from automoe.launch.trial_runs import TrialError

BY_NAME = {check.name: check for check in CHECKS}


def composed(check: Check) -> Config:
    return compose(parse_arguments([*check.overrides("cuda"), "run_dir=never"]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_a_check_composes_and_fills_its_gpus(check: Check) -> None:
    config = composed(check)
    assert validate(config, config.launch.num_ranks).world_size == max(1, check.gpus)
    assert config.launch.device == ("cuda" if check.gpus else "cpu")
    assert check.proves and (not check.killed or config.checkpoint.every < gpu_first.STEPS // 2 + 1)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("check", [check for check in CHECKS if check.like], ids=lambda check: check.name)
def test_a_check_trains_the_rows_and_weights_of_the_one_that_it_is_held_against(check: Check) -> None:
    """And that one comes before it, on no more GPUs: what differs is what the check proves."""
    names = list(BY_NAME)
    other = BY_NAME[check.like]
    assert names.index(other.name) < names.index(check.name) and other.gpus <= check.gpus
    mine, theirs = composed(check), composed(other)
    assert (mine.model, mine.data, mine.optim) == (theirs.model, theirs.data, theirs.optim)
    same = ("steps", "seq_len", "global_batch_size", "seed")
    assert [getattr(mine.train, key) for key in same] == [getattr(theirs.train, key) for key in same]


def records(*losses: float | str, norm: float = 1.0) -> list[dict]:
    clocks = {"tokens_per_second": 5.0, "peak_memory_bytes": 7, "grad_norm": norm}
    return [{"step": step, "loss": loss} | clocks for step, loss in enumerate(losses, 1)]


CLOSE, EXACT = Check("mine", 1, "", "", "cpu", 1e-3), Check("mine", 1, "", "", "cpu", 0.0)


@pytest.mark.parametrize(
    "check, got, wrong",
    [
        (CLOSE, records(2.0, 1.001), ""),
        (CLOSE, records(2.0, 1.002), "by up to 2.0e-03"),
        (CLOSE, records(2.0, "NaN"), "not finite"),  # as metrics.jsonl has it
        (Check("mine", 1, "", "", "wild", 1e-3), records(2.0, 1.0), "by up to nan"),
        (EXACT, records(2.0, 1.0), ""),
        (EXACT, records(2.0, 1.0, norm=1.0 + 1e-15), "step 1: grad_norm"),
        (Check("mine", 1, "", "", "absent"), records(2.0), "absent failed"),
    ],
)
def test_a_check_fails_for_what_it_is_there_to_find(check: Check, got: list[dict], wrong: str) -> None:
    said = judge(check, {"cpu": records(2.0, 1.0), "wild": records(2.0, "NaN"), "mine": got})["wrong"]
    assert (wrong in said) if wrong else said == ""


def test_outcomes_are_written_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def train(run_dir: Path, overrides: list[str]) -> list[dict]:
        if run_dir.name == "triton":
            raise TrialError("no kernel\nerror: the last line")
        return records(*[2.0] * (20 if run_dir.name == "speed" else 10))

    monkeypatch.setattr(gpu_first, "train", train)
    monkeypatch.setattr(gpu_first, "train_and_kill", lambda run_dir, overrides, after: after)
    monkeypatch.setattr("automoe.launch.hardware.visible_gpus", lambda: 1)
    monkeypatch.setattr("automoe.launch.hardware.torch_has_cuda", lambda: True)
    folder = tmp_path / "checks"
    assert doctor.check_gpus(folder, [doctor.Fact("torch", "9.9")]) == 1
    said = capsys.readouterr().out
    assert "FAILED  triton" in said and "error: the last line" in said and "10 of 11 passed on 1 GPUs" in said
    assert "passed on 1 GPUs; not run: ep8, " in said and f"Send back {folder}/results.json" in said
    written = json.loads((folder / "results.json").read_text())
    assert written["machine"] == {"torch": "9.9"} and list(written["checks"]) == [c.name for c in CHECKS if c.gpus < 2]
    assert written["checks"]["gpu"]["worst"] == 0.0
    assert doctor.main(["--gpu", "--dir", str(folder)]) == 2  # nothing is overwritten


def test_without_a_gpu_it_says_so_and_nothing_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("automoe.launch.hardware.visible_gpus", lambda: 0)
    assert doctor.main(["--gpu"]) == 3
    said = capsys.readouterr().out
    assert "nothing was run" in said and all(check.proves in said for check in CHECKS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
def test_the_first_checks_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in place of the GPU: the same commands, a kill, and a run of other weights that is found."""
    other = replace(BY_NAME["gpu"], name="other", words=BY_NAME["gpu"].words + " train.seed=1")
    checks = [BY_NAME["cpu"], BY_NAME["gpu"], BY_NAME["gpu-killed"], other]
    outcomes = {check.name: outcome for check, outcome in run_checks(tmp_path, checks, {}, "cpu")}
    assert [outcomes[name]["wrong"] for name in ("cpu", "gpu", "gpu-killed")] == ["", "", ""]
    assert outcomes["gpu"]["worst"] == 0.0 and "losses differ from cpu's" in outcomes["other"]["wrong"]
    with pytest.raises(TrialError, match=r"mesh\.ep"):
        trial_runs.train(tmp_path / "refused", ["mesh.ep=3"])
