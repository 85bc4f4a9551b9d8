from __future__ import annotations

import errno
import io
import json
import math
import resource
import shutil

import numpy as np
import pytest
import torch
from synthetic_run import counts_of, record_of, small_config

from automoe.config.metrics import REQUIRED_KEYS, perplexity
from automoe.errors import ConfigError
from automoe.observe.metrics import (
    MAX_LOAD_SNAPSHOTS,
    SAMPLES_FILE,
    MetricsLog,
    last_objective,
    load_summary,
    read_expert_load,
    read_jsonl,
    read_metrics,
    series,
)


def test_perplexity_is_the_exp_of_a_loss_and_never_an_error():
    assert perplexity(2.5) == math.exp(2.5) and perplexity("Infinity") == perplexity(1e6) == math.inf
    assert math.isnan(perplexity("NaN"))


def test_samples_are_cut_back_to_the_step_that_is_resumed(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(plain_record(step))
            log.write_samples(step, [{"prompt": "Who?", "text": str(step)}])
    path = tmp_path / SAMPLES_FILE
    with MetricsLog(tmp_path, resume_step=2) as log:
        assert [record["step"] for record in read_jsonl(path)] == [1, 2]
        log.write_samples(3, [{"prompt": "Who?", "text": "again"}])
    assert read_jsonl(path)[-1] == {"step": 3, "samples": [{"prompt": "Who?", "text": "again"}]}
    with MetricsLog(tmp_path):  # a new run
        assert not read_jsonl(path) and len(read_jsonl(tmp_path / "samples.1.jsonl")) == 3


def plain_record(step: int, **values: object) -> dict[str, object]:
    return dict.fromkeys(REQUIRED_KEYS, 1.0) | {"step": step} | values


def test_a_log_that_cannot_be_closed_leaves_the_others_closed(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path)
    log.write(plain_record(1), [[1.0, 2.0]])
    log.write_samples(1, [{"prompt": "a", "text": "b"}])
    assert log._samples is not None

    def full() -> None:
        raise OSError(errno.EIO, "the disk is gone")

    monkeypatch.setattr(log._samples, "close", full)
    with pytest.raises(OSError, match="the disk is gone"):
        log.close()
    assert log._metrics._file.closed and log._load._file.closed


def test_one_line_a_step_is_on_disk_before_the_next_step(tmp_path):
    log = MetricsLog(tmp_path)
    rng = np.random.default_rng(0)
    for step in (1, 2, 3):
        log.write(
            record_of(step, small_config(tmp_path), rng) | {"expert_max_load": 1.5}, counts_of(step, 2, 4, 100, rng)
        )
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()  # the writer is still open
        assert len(lines) == step
        assert set(REQUIRED_KEYS) <= set(json.loads(lines[-1]))
    log.close()


def test_a_record_without_a_required_key_is_refused(tmp_path):
    with MetricsLog(tmp_path) as log, pytest.raises(AssertionError, match="grad_norm"):
        log.write({key: 1.0 for key in REQUIRED_KEYS if key != "grad_norm"})


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(plain_record(1, loss=math.nan, grad_norm=math.inf, lr=-math.inf, mfu=None))
    line = (tmp_path / "metrics.jsonl").read_text()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert (record["loss"], record["grad_norm"], record["lr"], record["mfu"]) == ("NaN", "Infinity", "-Infinity", None)
    records = read_metrics(tmp_path)
    assert math.isnan(series(records, "loss")[1][0])
    assert series(records, "grad_norm")[1][0] == math.inf
    assert len(series(records, "mfu")[1]) == 0


def test_tensor_and_numpy_values_become_plain_numbers(tmp_path):
    with MetricsLog(tmp_path) as log:
        log.write(plain_record(1, loss=torch.tensor(2.5), lr=np.float32(0.5)), torch.tensor([[3, 1], [2, 2]]))
    assert read_metrics(tmp_path)[0]["loss"] == 2.5
    assert read_metrics(tmp_path)[0]["lr"] == 0.5
    steps, counts = read_expert_load(tmp_path)
    assert steps.tolist() == [1]
    assert counts.tolist() == [[[3, 1], [2, 2]]]


@pytest.mark.parametrize("resume_step, kept", [(0, 0), (3, 3), (5, 5), (9, 5)])
def test_resume_drops_the_records_past_the_resumed_step(tmp_path, resume_step, kept):
    with MetricsLog(tmp_path) as log:
        for step in range(1, 6):
            log.write(plain_record(step, loss=step), [[step, 1]])
    with MetricsLog(tmp_path, resume_step=resume_step) as log:
        for step in range(kept + 1, 8):
            log.write(plain_record(step, loss=10 * step), [[10 * step, 1]])
    expected = list(range(1, kept + 1)) + [10 * step for step in range(kept + 1, 8)]
    assert [record["step"] for record in read_metrics(tmp_path)] == list(range(1, 8))
    assert [record["loss"] for record in read_metrics(tmp_path)] == expected
    assert read_expert_load(tmp_path)[1][:, 0, 0].tolist() == expected


def test_resume_removes_a_line_that_a_kill_cut(tmp_path):
    with MetricsLog(tmp_path) as log:
        for step in (1, 2, 3):
            log.write(plain_record(step))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2]
    with MetricsLog(tmp_path, resume_step=3) as log:
        log.write(plain_record(4))
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 4]


def test_a_new_run_sets_the_record_of_an_earlier_one_aside(tmp_path):
    for run in (1, 2, 3):
        with MetricsLog(tmp_path) as log:
            log.write(plain_record(1, loss=run), [[run, 1]])
    losses = [
        json.loads((tmp_path / name).read_text())["loss"]
        for name in ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    ]
    assert losses == [1, 2, 3]
    assert read_expert_load(tmp_path)[1].tolist() == [[[3, 1]]]


def test_a_full_disk_delays_the_record_and_leaves_no_gap(tmp_path, capsys):
    """A file-size limit stands for the full disk: the kernel cuts the write in the middle of a line."""
    log = MetricsLog(tmp_path)
    log.write(plain_record(1))
    size = (tmp_path / "metrics.jsonl").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
    try:
        log.write(plain_record(2))
        log.write(plain_record(3))
        assert [record["step"] for record in read_metrics(tmp_path)] == [1]
        assert (tmp_path / "metrics.jsonl").stat().st_size == size + 20  # the rest of the line waits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shutil.copytree(tmp_path, tmp_path / "killed")
    log.write(plain_record(4))
    log.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert capsys.readouterr().err.count("metrics.jsonl") == 1  # one warning, not one a step
    with MetricsLog(tmp_path / "killed", resume_step=1) as log:
        log.write(plain_record(2))
    assert [record["step"] for record in read_metrics(tmp_path / "killed")] == [1, 2]


def test_expert_load_stays_small_and_keeps_the_last_step(tmp_path):
    steps_run = 5 * MAX_LOAD_SNAPSHOTS + 3
    with MetricsLog(tmp_path, num_steps=steps_run) as log:
        for step in range(1, steps_run + 1):
            log.write(plain_record(step), [[step, 0]])
    steps, counts = read_expert_load(tmp_path)
    assert MAX_LOAD_SNAPSHOTS // 2 <= len(steps) <= MAX_LOAD_SNAPSHOTS + 1 and len({*np.diff(steps[1:])}) == 1
    assert steps[0] == 1 and steps[-1] == steps_run
    assert counts[:, 0, 0].tolist() == steps.tolist()
    assert len(read_metrics(tmp_path)) == steps_run


def test_a_resumed_run_samples_the_load_at_the_same_pace(tmp_path):
    num_steps = 2 * MAX_LOAD_SNAPSHOTS
    with MetricsLog(tmp_path, num_steps=num_steps) as log:
        for step in range(1, num_steps):
            log.write(plain_record(step), [[step, 0]])
    before = np.diff(read_expert_load(tmp_path)[0])[1:-1]
    half = MAX_LOAD_SNAPSHOTS
    with MetricsLog(tmp_path, resume_step=half, num_steps=num_steps) as log:
        for step in range(half + 1, half + 40):
            log.write(plain_record(step), [[step, 0]])
    after = np.diff(read_expert_load(tmp_path)[0])[1:-1]
    assert set(before) == set(after) and len(set(after)) == 1


def test_load_summary_against_hand_computed_numbers():
    summary = load_summary([[10, 10, 10, 10], [40, 0, 0, 0], [20, 20, 0, 0], [0, 0, 0, 0]])
    assert summary["max_share"] == pytest.approx([0.25, 1.0, 0.5, 0.0])
    assert summary["max_over_mean"] == pytest.approx([1.0, 4.0, 2.0, 0.0])
    assert summary["entropy"] == pytest.approx([1.0, 0.0, 0.5, 0.0])
    assert summary["expert_max_load"] == 4.0


def test_load_summary_is_of_the_experts_that_compute_and_has_the_share_of_the_others():
    """Of 48 choices 24 are of the last two experts, which compute nothing."""
    summary = load_summary([[4, 4, 16, 0], [12, 4, 4, 4]], 2)
    assert summary["max_over_mean"] == pytest.approx([1.0, 1.5]) and summary["expert_max_load"] == 1.5
    assert summary["max_share"] == pytest.approx([0.5, 0.75]) and summary["entropy"][0] == pytest.approx(1.0)
    assert summary["zero_expert_share"] == 0.5
    assert "zero_expert_share" not in load_summary([[4, 4, 16, 0]])


def test_load_summary_of_a_model_without_experts_and_of_a_wrong_shape():
    assert load_summary(np.zeros((0, 8)))["expert_max_load"] == 0.0
    with pytest.raises(ValueError, match="layers, experts"):
        load_summary([1, 2, 3])


def test_objective_is_the_last_validation_loss_else_the_last_loss(tmp_path):
    assert last_objective(tmp_path, 1) is None
    with MetricsLog(tmp_path) as log:
        log.write(plain_record(1, loss=5.0, val_loss=4.5))
        assert last_objective(tmp_path, 1) == 4.5
        log.write(plain_record(2, loss=4.0))
        assert last_objective(tmp_path, 2) == 4.0
        log.write(plain_record(3, loss=math.nan))
        assert math.isnan(last_objective(tmp_path, 3))
        log.write(plain_record(4, loss=9.0, skipped=1))
        assert math.isnan(last_objective(tmp_path, 4)), "a skipped step has none"
        assert last_objective(tmp_path, 5) is None, "and not that of a step before"


STEPS = range(1, 9)
ZEROS = b"\0" * 50


def damaged(tmp_path, edit) -> list[bytes]:
    """The lines of eight steps after ``edit``, which are also in the file."""
    with MetricsLog(tmp_path) as log:
        for step in STEPS:
            log.write(plain_record(step, loss=step))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    edit(lines)
    path.write_bytes(b"".join(lines))
    return lines


def at(place: int, new: bytes | None = None, old: bytes = b"", rest: bytes = b""):
    """An edit of line ``place``, from 0: another line, or ``old`` in it as ``rest``."""

    def edit(lines: list[bytes]) -> None:
        lines[place] = lines[place].replace(old, rest, 1) if new is None else new

    return edit


@pytest.mark.parametrize(
    "edit, lost, says",
    [
        (at(2, old=b'"loss": 3', rest=b'"loss": 7'), {3}, "damaged lines: 3|no record of steps: 3"),
        (at(2, old=b'"step": 3', rest=b'"step": 6'), {3}, "damaged lines: 3|no record of steps: 3"),
        (at(2, old=b"loss", rest=b"lo\xffs"), {3}, "damaged lines: 3|no record of steps: 3"),
        (at(2, old=b"loss", rest=b"lo\nss"), {3}, "damaged lines: 3-4|no record of steps: 3"),
        (at(2, old=b"\n", rest=b" "), {3, 4}, "damaged lines: 3|no record of steps: 3-4"),
        (at(2, ZEROS), {3, 4}, "damaged lines: 3|no record of steps: 3-4"),
        (at(2, b"[3]\n"), {3}, "damaged lines: 3|no record of steps: 3"),
        (at(2, b'{"step": "3"}\n'), {3}, "damaged lines: 3|no record of steps: 3"),
        (at(2, b""), {3}, "no record of steps: 3"),
        (at(0, b"{}\n"), {1}, "damaged lines: 1|no record of steps: 1"),
        (at(5, b"\n"), {6}, "damaged lines: 6|no record of steps: 6"),  # the last one that stays
        (lambda lines: lines.clear(), set(range(1, 7)), "no record of steps: 1-6"),
        (lambda lines: lines.__delitem__(slice(4, None)), {5, 6}, "no record of steps: 5-6"),
        (lambda lines: lines.insert(3, lines[2]), set(), ""),
        (lambda lines: lines.append(ZEROS), set(), ""),  # past the step: run again
        (at(7, b'{"step": 8, "lo'), set(), ""),
        (at(6, b"\xff\n"), set(), "damaged lines: 7"),
    ],
)
def test_a_damaged_line_is_left_out_and_said(tmp_path, edit, lost, says):
    """Resumed after step 6."""
    said = []
    damaged(tmp_path, edit)
    assert {record["step"] for record in read_metrics(tmp_path)} >= set(range(1, 7)) - lost
    with MetricsLog(tmp_path, resume_step=6, warn=said.append) as log:
        log.write(plain_record(7, loss=70))
    expected = [(step, step) for step in range(1, 7) if step not in lost] + [(7, 70)]
    assert [(record["step"], record["loss"]) for record in read_metrics(tmp_path)] == expected
    assert said == [f"{tmp_path / 'metrics.jsonl'}: {line}" for line in says.split("|") if line]


def test_lines_without_a_seal_are_read_and_the_last_of_a_step_counts(tmp_path):
    lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in ((1, 1), (3, 9), (2, 2), (3, 3))]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + "{\n")
    assert [record["loss"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    said = []
    read_jsonl(tmp_path / "metrics.jsonl", said.append)
    assert said == [f"{tmp_path / 'metrics.jsonl'}: damaged lines: 5"]


def test_a_run_that_began_at_another_ones_step_lacks_no_step_before_it(tmp_path, capsys):
    with MetricsLog(tmp_path) as log:
        for step in (101, 102):
            log.write(plain_record(step))
    with MetricsLog(tmp_path, resume_step=102):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["metrics.jsonl", "expert_load.jsonl", "environment.json"])
def test_a_folder_in_the_place_of_a_file_is_named(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ConfigError, match=f"{name} cannot be opened: (it is a folder|Is a directory)"):
        MetricsLog(tmp_path, resume_step=1)


def test_one_write_error_does_not_end_a_run(tmp_path, capsys):
    class FailsOnce(io.FileIO):
        failed = False

        def write(self, data):
            if not FailsOnce.failed:
                FailsOnce.failed = True
                raise OSError(errno.EIO, "Input/output error")
            return super().write(data)

    with MetricsLog(tmp_path) as log:
        log._metrics._file = io.BufferedWriter(FailsOnce(tmp_path / "metrics.jsonl", "ab"))
        log.write(plain_record(1))
    assert FailsOnce.failed and [record["step"] for record in read_metrics(tmp_path)] == [1]
