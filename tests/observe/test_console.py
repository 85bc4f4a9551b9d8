from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest
from synthetic_run import record_of, small_config, write_run

from automoe.config.mesh_shape import resolve_mesh
from automoe.observe.console import HEADER_EVERY, Console
from automoe.observe.summary import bytes_text, duration, final_numbers, from_here, short_number


def console_of(config) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(config, resolve_mesh(config.mesh, None), file=out), out


def run_steps(console: Console, config, steps: int, **changes) -> None:
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        console.step(record_of(step, config, rng) | {"expert_max_load": 1.31} | changes.get(f"step{step}", {}))


def test_paths_are_relative_to_a_working_directory_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path)
    assert from_here(f"saved {tmp_path}/a/b") == "saved a/b"
    monkeypatch.chdir("/")
    assert from_here("https://wandb.ai/x and /a/b") == "https://wandb.ai/x and /a/b"
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert from_here(f"saved {tmp_path}/a") == f"saved {tmp_path}/a"


@pytest.mark.parametrize("mfu", [None, 0.9999])
def test_every_cell_ends_under_its_heading(tmp_path, mfu):
    config = small_config(tmp_path, steps=120)
    config.observe.log_every = 1
    console, out = console_of(config)
    extremes = {"tokens_per_second": 1.234e9, "peak_memory_bytes": 191 * 2**30, "step_seconds": 7200.0}
    extremes |= {"loss": 12345.6789, "grad_norm": 9.87e12, "lr": 1e-12, "expert_max_load": 123.4}
    changes = {f"step{step}": {"mfu": mfu} | (extremes if step == 60 else {}) for step in range(1, 121)}
    run_steps(console, config, 120, **changes)
    lines = out.getvalue().splitlines()
    header = lines[0]
    edges = [match.end() for match in re.finditer(r"(grad norm|[^ ]+)", header)]
    for line in lines:
        if line.strip().startswith("validation"):
            continue
        assert len(line) == len(header) == 80
        for edge in edges:
            assert line[edge - 1] != " ", f"nothing ends at column {edge}: {line!r}"
        cells = len(re.findall(r"(grad norm|[\d.]+ (?:[KMGT]iB|ms|s)\b|[^ ]+)", line))
        assert cells == len(edges), line


def test_the_header_comes_back_and_validations_stand_out(tmp_path):
    config = small_config(tmp_path, steps=50)
    config.observe.log_every = 1
    console, out = console_of(config)
    run_steps(console, config, 50)
    lines = out.getvalue().splitlines()
    headers = [i for i, line in enumerate(lines) if "grad norm" in line]
    assert len(headers) == -(-50 // HEADER_EVERY)
    validations = [line for line in lines if "validation" in line]
    assert len(validations) == 2 and all("bits per byte" in line for line in validations)
    loss_edge = lines[0].index("loss") + len("loss")
    assert re.search(r"\d\.\d{4}$", validations[0][:loss_edge])


def test_a_validation_shows_perplexity_averages_and_sources(tmp_path):
    config = small_config(tmp_path, steps=9999)
    console, out = console_of(config)
    losses = {"val_loss": 1.25, "val_loss.code": 800.0, "val_loss_ema": 12.125, "val_bits_per_byte": 12.0}
    losses["val_perplexity"] = 3.49
    console.step(record_of(9999, config, np.random.default_rng(0)) | {"expert_max_load": 1.0} | losses)
    mixture, code = out.getvalue().splitlines()[-2:]
    assert mixture.split() == "validation 1.2500 12.000 bits per byte perplexity 3.49 EMA 12.1250".split()
    assert code.split() == "800.0000 perplexity inf code".split() and len(mixture) <= 80
    facts = dict(final_numbers([{"step": 1} | losses]))
    assert facts["validation perplexity"] == "3.49" and facts["validation loss, EMA"] == "12.1250"
    assert facts["validation loss of code"] == "800.0000, perplexity inf"


def test_answers_take_a_line_each(tmp_path):
    console, out = console_of(small_config(tmp_path))
    console.samples([{"prompt": "Who?\n\x1b[2J", "text": "I" * 200}], 1.5)
    prompt, text, note = out.getvalue().splitlines()
    assert prompt.strip() == "> Who?⏎ [2J" and len(text) == 80 and note.strip() == "answered in 1.50 s"


def test_a_log_file_gets_plain_text_without_escape_codes(tmp_path):
    config = small_config(tmp_path, steps=3)
    console, out = console_of(config)
    console.start()
    run_steps(console, config, 3)
    assert "\x1b" not in out.getvalue() and "\r" not in out.getvalue()


def test_log_every_skips_lines_but_never_what_matters(tmp_path):
    config = small_config(tmp_path, steps=99)
    config.observe.log_every = 40
    console, out = console_of(config)
    run_steps(console, config, 99, step7={"loss": math.nan})
    shown = [int(number) for number in re.findall(r"^ *(\d+)/99", out.getvalue(), re.M)]
    assert shown == [1, 7, 25, 40, 50, 75, 80, 99]


@pytest.mark.parametrize(
    "steps, seconds, resumed, at_least, at_most",
    [
        (150, 0.1, 0, 15, 40),  # as on a laptop
        (150, 1.7, 0, 15, 40),
        (150, 6.0, 0, 15, 40),
        (3000, 0.02, 0, 25, 160),  # 120 of the lines are validations
        (30, 0.01, 0, 30, 30),  # few steps print each
        (150, 0.5, 130, 20, 20),  # so does what is left of a resumed run
        (120, 45.0, 0, 120, 120),  # never silent for long
    ],
)
def test_lines_come_by_time_and_never_skip_what_matters(
    tmp_path, monkeypatch, steps, seconds, resumed, at_least, at_most
):
    clock = iter(range(10**6))
    monkeypatch.setattr("automoe.observe.console.time.monotonic", lambda: seconds * next(clock))
    config = small_config(tmp_path, steps=steps)
    console, out = console_of(config)
    rng = np.random.default_rng(0)
    records = [record_of(step, config, rng) | {"expert_max_load": 1.3} for step in range(1, steps + 1)]
    records[steps - 5]["loss"] = math.nan
    for record in records[resumed:]:
        console.step(record)
    shown = {int(number) for number in re.findall(rf"^ *(\d+)/{steps}", out.getvalue(), re.M)}
    assert at_least <= len(shown) <= at_most
    validated = {record["step"] for record in records[resumed:] if "val_loss" in record}
    assert validated | {resumed + 1, steps - 4, steps} <= shown


def test_time_left_falls_to_nothing(tmp_path, monkeypatch):
    clock = iter(range(0, 100, 2))  # two seconds a step
    monkeypatch.setattr("automoe.observe.console.time.monotonic", lambda: float(next(clock)))
    config = small_config(tmp_path, steps=40)
    config.observe.log_every = 1
    console, out = console_of(config)
    run_steps(console, config, 40)
    rows = {line.split()[0]: line.split()[-1] for line in out.getvalue().splitlines() if "/40" in line}
    assert rows["2/40"] == "1:16"
    assert rows["39/40"] == "0:02"
    assert rows["40/40"] == "-"


def test_the_banner_states_model_meshes_and_batch_arithmetic(tmp_path):
    config = small_config(tmp_path)
    console, out = console_of(config)
    console.start(resume_step=30)
    text = out.getvalue()
    assert "pp2 x dp_shard2 = 4 ranks" in text and "pp2 x ep2 = 4 ranks" in text
    batch = "16 rows x 256 tokens = 4,096 tokens a step: 2 dp ranks x 4 micro-batches x 2 rows"
    assert batch in " ".join(text.split())
    assert "after step 30" in text
    assert "      pp 1 |  2  3" in text
    assert str(tmp_path) in text


@pytest.mark.parametrize("columns", [60, 80])
def test_the_banner_and_the_summary_fit_the_terminal_and_paths_stay_whole(tmp_path, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(tmp_path)
    config = write_run(tmp_path, steps=2)
    console, out = console_of(config)
    console.start()
    console.note(f"checkpoint {tmp_path}/checkpoints/step-2")
    path = "/a-folder-with-a-name/" * 6
    console.finish(
        {"HF checkpoint": f"{tmp_path}/hf (201 tensors, 14.4 MB in 4 files; equal bit for bit)", "far": path}
    )
    lines = out.getvalue().splitlines()
    assert f"  {'run directory':<15}{tmp_path}" in lines
    assert [line for line in lines if len(line) > columns and str(tmp_path) not in line] == [f"{'  far':<29}{path}"]
    assert f"{'':>12}checkpoint checkpoints/step-2" in lines
    assert any(re.fullmatch(r"  HF checkpoint +hf \(201 tensors, 14.4 MB in.*", line) for line in lines)


def test_the_closing_summary_comes_from_the_record(tmp_path):
    config = write_run(tmp_path, steps=25)
    console, out = console_of(config)
    console.finish({"report": tmp_path / "report.html"})
    assert re.search(r"validation bits per byte +\d\.\d{3}\n", out.getvalue())
    assert "slowest rank" not in out.getvalue()
    assert str(tmp_path / "report.html") in out.getvalue()


def test_the_rank_that_is_slowest_in_most_timings_is_named():
    timings = [(3, "node-a", 1.1), (17, "node-b", 1.5), (17, "node-b", 1.3), (17, "node-b", 1.4)]
    records = [
        dict(loss=1.0, slowest_rank=rank, slowest_host=host, probe_seconds_median=2.0, probe_seconds_max=2 * behind)
        for rank, host, behind in timings
    ]
    facts = dict(final_numbers([{"step": step} | record for step, record in enumerate(records)]))
    of_ranks = {name: text for name, text in facts.items() if "slowest" in name or "median rank" in name}
    # In the report each is a card, whose text is in large letters: numbers alone.
    assert of_ranks == {
        "slowest rank, on node-b": "17",
        "slowest in timings, of 4": "3",
        "its time / median rank": "1.40",
    }


def test_other_ranks_say_nothing(tmp_path, capsys):
    config = small_config(tmp_path, steps=2)
    console = Console(config, resolve_mesh(config.mesh, None), enabled=False)
    console.start()
    run_steps(console, config, 2)
    console.note("saved")
    console.finish()
    assert capsys.readouterr().out == ""


def test_units_read_well_at_their_borders():
    assert [short_number(n) for n in (None, 0, 999, 999.96, 1234, 999_950, 3.94e6, 671e9)] == [
        "-",
        "0",
        "999",
        "1.00k",
        "1.23k",
        "1.00M",
        "3.94M",
        "671B",
    ]
    assert [bytes_text(n) for n in (2**20 - 1, 1.5 * 2**30, 2**40)] == ["1.00 MiB", "1.50 GiB", "1.00 TiB"]
    assert [duration(s) for s in (0.4, 59.6, 3661, 180_000, math.nan)] == ["0:00", "1:00", "1:01:01", "2d 02h", "-"]


def test_a_loss_over_preferences_shows_margins_and_no_perplexity(tmp_path):
    config = small_config(tmp_path, steps=9999)
    console, out = console_of(config)
    rewards = {"expert_max_load": 1.0, "rewards/margins": -0.0123456, "rewards/accuracies": 0.625, "val_loss": 0.6543}
    rewards |= {"val_rewards/margins": 1.5, "val_rewards/accuracies": 0.75}
    console.step(record_of(9999, config, np.random.default_rng(0)) | rewards)
    heading, line, validation = out.getvalue().splitlines()[-3:]
    assert "margin" in heading and "right" in heading and "memory" not in heading and len(heading) <= 80
    assert "-0.0123" in line and "0.625" in line
    assert validation.split() == "validation 0.6543 margin 1.5 right 0.75".split()
