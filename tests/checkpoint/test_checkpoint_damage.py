"""What a checkpoint folder can look like after an accident, and what a run makes of it."""

from __future__ import annotations

import ctypes
import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import xxhash
from checkpoint_runs import config, refusal, run, save_twice

from automoe import errors
from automoe.checkpoint.steps import committed_steps, digest_of
from automoe.config.schema import Config
from automoe.verify.pool import RankPool


@pytest.fixture(scope="module")
def three_steps(ranks: RankPool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of steps 1, 2 and 3."""
    run_dir = tmp_path_factory.mktemp("three") / "run"
    run(ranks, config(text, keep=3), run_dir, until=3, save_at=[1, 2, 3])
    return run_dir


@pytest.fixture
def run_dir(three_steps: Path, tmp_path: Path) -> Path:
    """A copy of that directory for one test to damage."""
    return shutil.copytree(three_steps, tmp_path / "run")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x10
    file.write_bytes(data)


def one(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


@contextmanager
def ordinary_user() -> Iterator[None]:
    """This thread keeps to the permissions of files, whoever runs it: of root's powers, those over files are put down."""
    libc, version = ctypes.CDLL(None, use_errno=True), 0x20080522
    header = (ctypes.c_uint32 * 2)(version, 0)
    powers = (ctypes.c_uint32 * 6)()  # twice: effective, permitted, inheritable
    assert libc.capget(header, powers) == 0
    held = powers[0]
    powers[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, powers) == 0, "putting down is always allowed"
    try:
        yield
    finally:
        powers[0] = held
        assert libc.capset(header, powers) == 0


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped byte in a shard": lambda step: flip_a_byte(one(step, "*.distcp")),
    "flipped byte in the index": lambda step: flip_a_byte(step / ".metadata"),
    "flipped byte in the manifest": lambda step: flip_a_byte(step / "manifest.json"),
    "truncated shard": lambda step: one(step, "*.distcp").open("r+b").truncate(1000),
    "missing shard": lambda step: one(step, "*.distcp").unlink(),
    "missing manifest": lambda step: (step / "manifest.json").unlink(),
    "empty manifest": lambda step: (step / "manifest.json").write_text(""),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_the_newest_valid_step_is_taken_loudly(
    ranks: RankPool, text: Path, run_dir: Path, damage: Callable[[Path], object]
) -> None:
    folder = run_dir / "checkpoints"
    damage(folder / "step-3")
    resumed = run(ranks, config(text, keep=3), run_dir, until=2)
    assert resumed.resumed_at == 2
    assert f"{folder}/step-3 is damaged" in resumed.said and "step-3 is set aside" in resumed.said
    assert names(folder) == ["LATEST", "damaged-step-3.1", "step-1", "step-2"]
    assert (folder / "LATEST").read_text() == "step-2\n"


def test_a_step_under_another_steps_name_counts_as_what_its_manifest_says(
    ranks: RankPool, text: Path, run_dir: Path, tmp_path: Path
) -> None:
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step-1", folder / "step-4")
    (folder / "step-3").rename(folder / "step-0300")
    (folder / "step-5").symlink_to(shutil.copytree(folder / "step-2", tmp_path / "elsewhere"))
    assert committed_steps(folder) == ["step-4", "step-1", "step-5", "step-2", "step-0300"]
    resumed = run(ranks, config(text, keep=1), run_dir, until=5, save_at=[4, 5])
    assert resumed.resumed_at == 3
    assert f"{folder}/step-4 is step 1" in resumed.said and f"{folder}/step-0300 is step 3" in resumed.said
    # The new steps get their names, and what a person put there stays.
    assert names(folder) == ["LATEST", "misnamed-step-4.1", "misnamed-step-5.1", "step-0300", "step-5"]
    assert run(ranks, config(text), run_dir, until=5).resumed_at == 5
    # A manifest that lies is damaged: its folder counts by its name, and is not passed over.
    manifest = folder / "step-5" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 5,', '"step": 1,'))
    assert committed_steps(folder) == ["step-0300", "step-5"]


def test_two_damaged_steps(ranks: RankPool, text: Path, run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    flip_a_byte(one(folder / "step-3", "*.distcp"))
    one(folder / "step-2", "*.distcp").unlink()
    assert run(ranks, config(text, keep=3), run_dir, until=1).resumed_at == 1
    assert names(folder) == ["LATEST", "damaged-step-2.1", "damaged-step-3.1", "step-1"]


def test_the_step_is_written_anew_where_a_damaged_one_was(ranks: RankPool, text: Path, run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    flip_a_byte(one(folder / "step-3", "*.distcp"))
    run(ranks, config(text), run_dir, until=3, save_at=[3])
    assert names(folder) == ["LATEST", "damaged-step-3.1", "step-2", "step-3"]
    again = run(ranks, config(text), run_dir, until=3)
    assert again.resumed_at == 3 and again.said == ""


def test_latest_points_nowhere(ranks: RankPool, text: Path, run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    (folder / "LATEST").write_text("step-9\n")
    resumed = run(ranks, config(text), run_dir, until=3)
    assert resumed.resumed_at == 3
    assert "LATEST names 'step-9', which does not exist" in resumed.said
    assert (folder / "LATEST").read_text() == "step-3\n"


def test_a_lost_newest_step_is_noticed(ranks: RankPool, text: Path, run_dir: Path) -> None:
    """Without LATEST, the step before would be taken as if nothing were amiss."""
    shutil.rmtree(run_dir / "checkpoints" / "step-3")
    resumed = run(ranks, config(text), run_dir, until=2)
    assert resumed.resumed_at == 2
    assert "LATEST names 'step-3', which does not exist" in resumed.said


@pytest.mark.parametrize("latest", ["step-2\n", None], ids=["behind", "absent"])
def test_a_step_committed_just_before_latest_counts(
    ranks: RankPool, text: Path, run_dir: Path, latest: str | None
) -> None:
    file = run_dir / "checkpoints" / "LATEST"
    file.unlink() if latest is None else file.write_text(latest)
    resumed = run(ranks, config(text), run_dir, until=3)
    assert resumed.resumed_at == 3 and resumed.said == ""
    assert file.read_text() == "step-3\n"


def test_an_unfinished_step_is_not_a_checkpoint(ranks: RankPool, text: Path, run_dir: Path) -> None:
    folder = run_dir / "checkpoints"
    shutil.copytree(folder / "step-3", folder / ".tmp-step-4")
    resumed = run(ranks, config(text), run_dir, until=4, save_at=[4])
    assert resumed.resumed_at == 3 and resumed.said == ""
    assert names(folder) == ["LATEST", "step-3", "step-4"]


def test_no_valid_step_left_is_an_error_on_every_rank(ranks: RankPool, text: Path, run_dir: Path) -> None:
    """Training from the start again by itself would throw the run away."""
    folder = run_dir / "checkpoints"
    for step in folder.glob("step-*"):
        flip_a_byte(one(step, "*.distcp"))
    before = names(folder)
    messages = ranks.run(refusal, 2, config(text, dp_shard=2), run_dir)
    assert len(set(messages)) == 1
    assert "holds no checkpoint that can be trusted" in messages[0] and "step-1 (" in messages[0]
    assert "checkpoint.resume=never" in messages[0]
    assert names(folder) == before
    for step in folder.glob("step-*"):
        shutil.rmtree(step)
    assert "LATEST names 'step-3', which is missing" in ranks.run(refusal, 1, config(text), run_dir)[0]


def rewrite(step: Path, **changes: object) -> None:
    """The manifest as an automoe of tomorrow would write it."""
    manifest = json.loads((step / "manifest.json").read_text())
    manifest |= changes
    manifest["sha256"] = digest_of({key: manifest[key] for key in manifest if key != "sha256"})
    (step / "manifest.json").write_text(json.dumps(manifest))


def rewrite_index(step: Path, change: Callable[[Any], object]) -> None:
    """The index as a torch of tomorrow would write it."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    raw = change(metadata) or pickle.dumps(metadata)
    (step / ".metadata").write_bytes(raw)
    files = json.loads((step / "manifest.json").read_text())["files"]
    files[".metadata"] = {"bytes": len(raw), "xxh128": xxhash.xxh3_128(raw).hexdigest()}
    rewrite(step, files=files)


def without_versions(step: Path) -> None:
    manifest = json.loads((step / "manifest.json").read_text()) | {"format": 4}
    del manifest["versions"]
    (step / "manifest.json").write_text(json.dumps(manifest))


TOMORROW = {"automoe": "7.1", "torch": "3.5"}
NEWER: dict[str, tuple[Callable[[Path], object], str]] = {
    "format": (
        lambda step: rewrite(step, format=4, versions=TOMORROW),
        r"another version \(automoe 7\.1, torch 3\.5\) than this one \(automoe .*format 4, and this version reads format 3",
    ),
    "format without versions": (without_versions, "format 4, and this version reads format 3"),
    "format with versions as text": (
        lambda step: rewrite(step, format=5, versions="automoe 8"),
        r"another version \(automoe 8\) .*format 5, and this version reads format 3",
    ),
    "format with versions as a list": (
        lambda step: rewrite(step, format=4, versions=["8", 5]),
        r"\['8', 5\].*format 4",
    ),
    "key": (lambda step: rewrite(step, shards={}, versions=TOMORROW), r"automoe 7\.1, .*has shards in manifest\.json"),
    "version of the index": (
        lambda step: rewrite_index(step, lambda metadata: setattr(metadata, "version", "1.10.0")),
        r"has version 1\.10\.0 of torch's format, and torch .* reads 1\.0\.0\. A newer torch may have written it",
    ),
    "class in the index": (
        lambda step: rewrite_index(step, lambda _: b"ctorch.distributed.checkpoint.metadata\nShard5\n."),
        r"names torch\.distributed\.checkpoint\.metadata\.Shard5, which torch .* A newer torch may have written it",
    ),
}


@pytest.mark.parametrize(("change", "says"), NEWER.values(), ids=NEWER.keys())
def test_a_step_of_a_newer_version_is_refused_as_such_and_left_alone(
    ranks: RankPool, text: Path, run_dir: Path, change: Callable[[Path], object], says: str
) -> None:
    folder = run_dir / "checkpoints"
    change(folder / "step-3")
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    messages = ranks.run(refusal, 2, config(text, dp_shard=2), run_dir)
    assert re.search(says, messages[0]) and re.search(says, messages[1])
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before


def test_retention_leaves_what_it_cannot_read(ranks: RankPool, text: Path, run_dir: Path) -> None:
    rewrite(run_dir / "checkpoints" / "step-1", format=4)
    run(ranks, config(text, keep=1), run_dir, until=4, save_at=[4])
    assert names(run_dir / "checkpoints") == ["LATEST", "step-1", "step-4"]


def refusal_without_powers(settings: Config, run_dir: Path) -> str:
    """``refusal`` where root, too, reads only what it may."""
    with mock.patch.object(errors, "_WAITS_S", (0.0,)), ordinary_user():
        return refusal(settings, run_dir)


@pytest.mark.parametrize("name", ["manifest.json", "__0_0.distcp"])
def test_what_cannot_be_read_is_not_called_damaged(ranks: RankPool, text: Path, run_dir: Path, name: str) -> None:
    folder = run_dir / "checkpoints"
    (folder / "step-3" / name).chmod(0)
    messages = ranks.run(refusal_without_powers, 2, config(text, dp_shard=2), run_dir)
    assert len(set(messages)) == 1 and "damage" not in messages[0]
    assert f"{folder}/step-3 cannot be read: Permission denied ({folder}/step-3/{name}) on rank" in messages[0]
    assert "left as it is" in messages[0]
    assert names(folder) == ["LATEST", "step-1", "step-2", "step-3"]


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(ranks: RankPool, text: Path, run_dir: Path) -> None:
    """A run that took it for one would begin at step 0, and cut its record."""
    (run_dir / "checkpoints").chmod(0o300)
    (message,) = ranks.run(refusal_without_powers, 1, config(text), run_dir)
    assert f"{run_dir}/checkpoints cannot be used: Permission denied" in message


def test_a_disk_that_never_answers_is_not_called_damaged(ranks: RankPool, text: Path, run_dir: Path) -> None:
    """Of a process' memory nothing can be read at address 0: a real EIO."""
    manifest = run_dir / "checkpoints" / "step-3" / "manifest.json"
    manifest.unlink()
    manifest.symlink_to("/proc/self/mem")
    (message,) = ranks.run(refusal_without_powers, 1, config(text), run_dir)
    assert "step-3 cannot be read: Input/output error" in message and "It is left as it is" in message
    assert names(run_dir / "checkpoints") == ["LATEST", "step-1", "step-2", "step-3"]


def test_a_folder_in_the_place_of_latest(ranks: RankPool, text: Path, run_dir: Path) -> None:
    (run_dir / "checkpoints" / "LATEST").unlink()
    (run_dir / "checkpoints" / "LATEST").mkdir()
    (message,) = ranks.run(refusal, 1, config(text), run_dir)
    assert "LATEST is a folder. Remove it" in message


def test_no_checkpoint_at_all_starts_the_run(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    assert run(ranks, config(text), tmp_path / "run", until=0).resumed_at is None


def test_another_model_is_refused_with_what_differs(ranks: RankPool, text: Path, run_dir: Path) -> None:
    settings = config(text, dp_shard=2)
    attention = replace(settings.model.attention, v_head_dim=8)
    other = replace(settings, model=replace(settings.model, num_experts=4, attention=attention))
    messages = ranks.run(refusal, 2, other, run_dir)
    assert len(set(messages)) == 1
    assert (
        "step-3 is of another model or optimizer: model.attention.v_head_dim was 6, is 8; model.num_experts was 8, is 4."
        in (messages[0])
    )
    muon = replace(settings, optim=replace(settings.optim, algorithm="muon"))
    assert "optim.algorithm was adamw, is muon. Set them back" in ranks.run(refusal, 2, muon, run_dir)[0]
    family = replace(other, model=replace(other.model, family="glm4_moe_lite"))
    assert "optimizer: model.family was deepseek_v3, is glm4_moe_lite. Set" in ranks.run(refusal, 2, family, run_dir)[0]
    elsewhere = replace(settings, model=replace(settings.model, hf_path="elsewhere"))
    assert ranks.run(refusal, 2, elsewhere, run_dir, settings) == ["", ""]


def test_an_existing_step_is_never_written_into(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    for first, second in ranks.run(save_twice, 2, config(text, dp_shard=2), tmp_path / "run"):
        assert first == second
    assert names(tmp_path / "run" / "checkpoints") == ["LATEST", "step-0"]


@pytest.mark.exhaustive
def test_retention_keeps_the_newest(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    run(ranks, config(text, keep=2), tmp_path / "run", until=11, save_at=[2, 9, 10, 11])
    assert names(folder) == ["LATEST", "step-10", "step-11"]
    run(ranks, config(text, keep=0), tmp_path / "run", until=12, save_at=[12])
    assert names(folder) == ["LATEST", "step-12"]
