"""The page of names: every key of a record and every word that heads a number on a screen is there, and no other."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import numpy as np
import pytest
from synthetic_run import record_of, small_config

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.metrics import OTHER_KEYS, REQUIRED_KEYS, VALIDATION_KEYS, is_taken
from automoe.config.validate import validate
from automoe.moe.balance import LOSSES
from automoe.observe.console import REWARDS, Console
from automoe.observe.summary import final_numbers
from automoe.planner.plan import make_plan
from automoe.planner.views.plan_view import plan_tables
from automoe.storage.sealed import SEAL
from automoe.training.preference import PreferenceLoss
from tests.support.configurations import quick_config

ROOT = Path(__file__).resolve().parents[2]
# Functions that make parts of a record.
WRITERS = {
    "run/run.py": ("end_step", "_skip_record"),
    "run/slow_ranks.py": ("record",),
    "training/validate.py": ("validate", "_mean_losses"),
    "training/stats.py": ("gather_stats",),
    "checkpoint/store.py": ("record",),
    "observe/metrics.py": ("load_summary",),
}
BY_DEPTH = {"mtp_loss.k", "mtp_acceptance.k"}
# What recipes/grpo.py and its loss add.
GRPO = {"rollout", "update_tokens", "reward", "answer_tokens", "engine_gap", "engine_gap_max", "ref_kl", "teacher_kl"}
GRPO |= {"engine_gap.same", "engine_gap.layer_N"}
KNOWN = {*REQUIRED_KEYS, *OTHER_KEYS, *VALIDATION_KEYS, "val_loss.NAME"}
# Small models on GPUs, since the search for what makes a plan fit takes seconds.
PLANS = (
    ("cluster=h100_sxm", "optim.ema_decay=0.9", "checkpoint.async_save=true", "parallel.recompute=full"),
    ("cluster=h100_sxm", "mesh.pp=1", "mesh.cp=2", "mesh.tp=2", "mesh.etp=2", "mesh.ep=2", "launch.num_ranks=8"),
    ("mesh.pp=1", "lora.rank=8", "lora.base=nf4", "train.dtype=bfloat16", "parallel.reshard=micro_batch"),
    ("mesh.pp=1", "train.fp8=tensorwise", "parallel.recompute=[moe_act]", "parallel.grad_sync=micro_batch"),
)


def cells(page: str) -> list[list[str]]:
    lines = [line for line in (ROOT / "docs" / page).read_text().splitlines() if re.match(r"\| *[^|-]", line)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def metric_rows() -> list[list[str]]:
    return [row for row in cells("metrics.md") if row[0].startswith("`")]


def written() -> set[str]:
    """Keys of dicts, and keys that are assigned, in the functions that make a record."""
    found = set()
    for file, names in WRITERS.items():
        for function in ast.walk(ast.parse((ROOT / "automoe" / file).read_text())):
            if not isinstance(function, ast.FunctionDef) or function.name not in names:
                continue
            for node in ast.walk(function):
                keys = node.keys if isinstance(node, ast.Dict) else ()
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    keys = [node.slice]
                found |= {key.value for key in keys if isinstance(key, ast.Constant)}
    return found


def test_a_records_keys_are_those_of_the_page() -> None:
    documented = {key for row in metric_rows() for key in re.findall(r"`([^`]+)`", row[0])}
    assert documented == KNOWN | BY_DEPTH | {SEAL, "val_*", *PreferenceLoss.metrics, *GRPO}


def test_no_other_metric_can_take_a_key_that_the_trainer_writes() -> None:
    made = written() | {*LOSSES, "indexer_loss"}
    assert made == {*KNOWN} - {"val_loss.NAME"}
    assert all(is_taken(key) for key in (*made, "val_loss.code", "mtp_loss.1", "val_mtp_acceptance.2"))


def screens(tmp_path: Path) -> tuple[set[str], str]:
    """Titles of the report's cards without what is of one run, and all lines of the terminal."""
    config = small_config(tmp_path, steps=10)
    out = io.StringIO()
    console = Console(config, resolve_mesh(config.mesh, None), file=out)
    of_the_run = {"expert_max_load": 1.5, "val_loss": 1.0, "val_loss.NAME": 1.0, "val_loss_ema": 1.0, "mfu": 0.4}
    of_the_run |= {"val_perplexity": 3.0, "val_bits_per_byte": 1.0, "slowest_rank": 3, "slowest_host": "node"}
    of_the_run |= {"probe_seconds_max": 2.0, "probe_seconds_median": 1.0}
    first = record_of(10, config, np.random.default_rng(0)) | of_the_run
    pairs, answers = ({key: 0.5 for place, (_, key) in REWARDS.items() if (place > 0) == of} for of in (True, False))
    for record in (first, first | pairs | {"mfu": None}, first | answers | {"mfu": None}):
        console._lines = 0
        console.step(record)
    titles = {re.sub(r", (median|on node|of 1)$", "", title) for title, _ in final_numbers([first])}
    return titles, out.getvalue()


def test_every_name_on_the_screens_of_a_run_is_on_the_page_and_shown_somewhere(tmp_path: Path) -> None:
    titles, terminal = screens(tmp_path)
    names = {re.sub(r"(?<=left|ight), .*", "", name) for row in metric_rows() for name in row[2].split("; ") if name}
    assert titles <= names
    headings = {word for line in terminal.splitlines() if "loss" in line for word in re.findall(r"grad norm|\S+", line)}
    assert len(headings) > 10 and headings <= names
    drawn = (ROOT / "automoe" / "observe" / "plots.py").read_text().lower()
    assert {name for name in names if name not in titles | {"warning"} and name not in terminal + drawn} == set()
    assert max(map(len, terminal.splitlines())) <= 80


@pytest.fixture(scope="module")
def plan_names() -> set[str]:
    rows = [row[1] for row in cells("metrics.md") if len(row) == 2]
    rows += [row[0] for page in ("plan.md", "plan_accuracy.md") for row in cells(page)]
    return {re.sub(r" ?\(.*", "", part).strip() for row in rows for part in re.split(r"[;:,] ?", row)}


@pytest.mark.parametrize("words", PLANS, ids=" ".join)
def test_every_name_of_a_plan_is_on_its_pages(words: tuple[str, ...], plan_names: set[str]) -> None:
    config = quick_config("config", list(words))
    plan = make_plan(config, validate(config, config.launch.num_ranks))
    first, *tables = plan_tables(config, plan)
    shown = set(first.columns[0].cells)
    for table in tables:
        shown |= {str(column.header) for column in table.columns}
        shown |= {str(cell) for cell in table.columns[0].cells if not str(cell).isdecimal()}
    assert shown - {"", "what", "what it is"} - plan_names == set()
