"""Disks that are full, read-only or not there: training goes on, or never begins."""

from __future__ import annotations

import builtins
import errno
import io
import math
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from checkpoint_runs import build_state, config, open_store, run, run_ranks

from automoe.checkpoint.hashed_files import HashingStream
from automoe.checkpoint.manifest import damage
from automoe.checkpoint.reader import StepReader
from automoe.checkpoint.saved_state import tensors_of
from automoe.checkpoint.store import CheckpointStore
from automoe.comm.agreement import Ranks
from automoe.comm.local_shard import local_shard
from automoe.config.schema import Config
from automoe.errors import AutomoeError, SaveError
from automoe.storage.files import checksum
from automoe.verify.pool import RankError, RankPool

TWO = dict(dp_shard=2, ep=2)


def no_large_files(rank: int, full_in: int, step: int, store: CheckpointStore) -> None:
    """In step ``full_in``, its save included, no file of ``rank`` may grow past 20 kB: writes fail in the kernel."""
    store.poll(wait=True)  # a save in flight belongs to the step before
    soft = 20_000 if step == full_in and dist.get_rank() == rank else resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))


@pytest.mark.faults
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_training_goes_on_where_one_rank_cannot_write(
    ranks: RankPool, text: Path, tmp_path: Path, async_save: bool
) -> None:
    settings = config(text, async_save=async_save, **TWO)
    straight = run(ranks, settings, tmp_path / "straight", until=4)
    run_dir = tmp_path / "run"
    seen = run_ranks(ranks, settings, run_dir, 4, (1, 2, 3), before_step=partial(no_large_files, 1, 2))
    for rank in seen:
        assert rank.losses == straight.losses
        (warning,) = rank.warnings
        assert warning.startswith("the checkpoint of step 2 was not saved: File too large")
        assert "on rank 1; step-1 stays the newest checkpoint" in warning
        assert [note.rsplit("/", 1)[1] for note in rank.notes] == ["step-1", "step-3"]
    folder = run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", "step-1", "step-3"]
    resumed = run(ranks, settings, run_dir, until=4)
    assert resumed.resumed_at == 3 and resumed.losses == straight.losses[3:]


@pytest.mark.faults
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_disk_that_fails_for_a_moment_costs_no_checkpoint(
    ranks: RankPool, text: Path, tmp_path: Path, async_save: bool
) -> None:
    """One error in each stage of four saves; a shard is written anew, for a flush that failed once says nothing."""
    faults = ["eio:rank=1:at=shard_write:step=1", "estale:rank=0:at=manifest_written:step=2"]
    faults += ["estale:rank=1:at=renamed:step=3", "eio:rank=0:at=latest_written:step=4"]
    settings, run_dir = config(text, async_save=async_save, **TWO), tmp_path / "run"
    fault = ";".join(f"{one}:hit=1" for one in faults)
    for rank in run_ranks(ranks, settings, run_dir, 4, (1, 2, 3, 4), fault):
        assert rank.warnings == [] and len(rank.notes) == 4
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["LATEST", "step-3", "step-4"]
    assert damage(run_dir / "checkpoints" / "step-4") is None


@pytest.mark.faults
def test_a_disk_that_goes_on_failing_costs_the_save(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    seen = run_ranks(ranks, config(text, **TWO), tmp_path / "run", 2, (1, 2), "eio:rank=1:at=shard_write:step=1")
    for rank in seen:
        assert ["step 1 was not saved: Input/output error" in warning for warning in rank.warnings] == [True]
        assert [note.rsplit("/", 1)[1] for note in rank.notes] == ["step-2"]


def resume_on_a_shaky_disk(settings: Config, run_dir: Path) -> tuple[int, list[str]]:
    """Step that is resumed where the first look at every file and folder of the checkpoints fails, and those."""
    state, _, _ = build_state(settings, run_dir)
    store, failed = open_store(settings, run_dir), []

    def once(original: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *args: Any, **kwargs: Any) -> Any:
            written = "w" in args or (args and isinstance(args[0], int) and args[0] & os.O_WRONLY)
            if str(path).startswith(str(run_dir)) and str(path) not in failed and not written:
                failed.append(str(path))
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return original(path, *args, **kwargs)

        return look

    with mock.patch.object(io, "open", once(io.open)), mock.patch.object(builtins, "open", once(open)):
        with mock.patch.object(os, "listdir", once(os.listdir)), mock.patch.object(os, "open", once(os.open)):
            store.load_latest(state)
            # What is verified was read before: now it is the loading itself that fails once.
            verified, failed[:] = list(failed), []
            StepReader(store.folder / "step-1").load(tensors_of(state), process_group=store.ranks.group)
    assert any(path.endswith(".distcp") for path in failed) and any(path.endswith(".metadata") for path in failed)
    return state.step, sorted(Path(path).name for path in verified)


@pytest.mark.faults
def test_a_read_that_fails_for_a_moment_condemns_nothing(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run(ranks, config(text, **TWO), run_dir, 1, (1,))
    (first, read), (second, _) = ranks.run(resume_on_a_shaky_disk, 2, config(text, **TWO), run_dir)
    assert first == second == 1
    assert {"LATEST", "checkpoints", "manifest.json"} < set(read) and any(name.endswith(".distcp") for name in read)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["LATEST", "step-1"]


def save_what_is_not_finite(settings: Config, run_dir: Path) -> list[str]:
    """Warnings of saves whose state has, on rank 1, a parameter or a moment that is not finite; then of a last one."""
    state, _, _ = build_state(settings, run_dir)
    said: list[str] = []
    store = open_store(settings, run_dir)
    store.attach(said.append, said.append, lambda step_dir: None)
    names = [name for name in sorted(tensors_of(state)) if ".exp_avg." in name or name.startswith("model.layers")]
    for state.step, (name, value) in enumerate([(names[0], math.nan), (names[-1], -math.inf)], 1):
        tensor = local_shard(tensors_of(state)[name])
        before = tensor.clone()
        if dist.get_rank() == 1:
            tensor.view(-1)[0] = value
        store.save(state, None, stopping=False)
        tensor.copy_(before)
    state.step = 3
    store.save(state, None, stopping=True)
    local_shard(tensors_of(state)[names[0]]).fill_(math.nan)
    state.step = 4
    with pytest.raises(SaveError, match="of step 4 was not saved: its numbers are not finite"):
        store.save(state, None, stopping=True)
    return said


@pytest.mark.parametrize(
    "async_save", [pytest.param(False, id="sync", marks=pytest.mark.faults), pytest.param(True, id="async")]
)
def test_a_state_that_is_not_finite_is_not_saved(ranks: RankPool, text: Path, tmp_path: Path, async_save: bool) -> None:
    settings = config(text, async_save=async_save, keep=1, **TWO)
    first, second = ranks.run(save_what_is_not_finite, 2, settings, tmp_path / "run")
    assert first == second
    for step, said in enumerate(first[:2], 1):
        assert f"the checkpoint of step {step} was not saved: its numbers are not finite (" in said
        assert "on rank 1)" in said and said.endswith("Training goes on")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["LATEST", "step-3"]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A tmpfs at ``folder``, where this process may mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"may not mount a small disk ({mount.stderr.strip()}); the file size limit stands in for it")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.faults
@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_full_disk(ranks: RankPool, text: Path, tmp_path: Path, async_save: bool) -> None:
    """A disk with room for one checkpoint and a half, until somebody makes room."""
    settings = config(text, async_save=async_save, **TWO)
    straight = run(ranks, settings, tmp_path / "straight", until=4, save_at=[1])
    step = tmp_path / "straight" / "checkpoints" / "step-1"
    size = sum(path.stat().st_size for path in step.iterdir())
    run_dir = tmp_path / "run"
    folder = run_dir / "checkpoints"
    with mounted(folder, f"size={size * 3 // 2}"):
        first = run(ranks, settings, run_dir, 3, (1, 2, 3))
        assert first.losses == straight.losses[:3]
        assert len(first.warnings) == 2, "steps 2 and 3 had no room"
        assert all("No space left on device" in warning for warning in first.warnings)
        assert sorted(path.name for path in folder.iterdir()) == ["LATEST", "step-1"]
        subprocess.run(["mount", "-o", f"remount,size={size * 4}", str(folder)], check=True)
        second = run(ranks, settings, run_dir, 4, (2, 3, 4))
        assert (second.resumed_at, second.warnings) == (1, [])
        assert second.losses == straight.losses[1:]


def test_a_full_disk_is_heard_of_when_the_file_is_sealed() -> None:
    """torch's serializer must not meet the exception."""
    stream = HashingStream(Path("/dev/full"))
    assert stream.write(b"x" * 100) == 100 and stream.write(bytes(3 << 20)) == 3 << 20
    with pytest.raises(OSError) as full:
        stream.seal()
    assert full.value.errno == errno.ENOSPC
    stream.release()


def test_what_is_written_is_what_is_hashed(tmp_path: Path) -> None:
    stream = HashingStream(tmp_path / "file")
    for size in (10, 3 << 20, 1, 5 << 20):
        data = os.urandom(size)
        stream.write(memoryview(data))
    facts = stream.seal()
    stream.release()
    assert facts["bytes"] == stream.tell() == (tmp_path / "file").stat().st_size == 11 + (8 << 20)
    assert checksum(tmp_path / "file") == facts["xxh128"]


def refused(run_dir: Path, text: Path, resume: str) -> str:
    """What this rank's ``check`` raises."""
    settings = config(text, dp_shard=2)
    settings = replace(settings, checkpoint=replace(settings.checkpoint, resume=resume))
    try:
        open_store(settings, run_dir).check()
    except AutomoeError as error:
        return str(error)
    return ""


def a_file_in_the_way(run_dir: Path) -> str:
    run_dir.mkdir(parents=True)
    (run_dir / "checkpoints").write_text("")
    return "File exists"


def no_permission(run_dir: Path) -> str:
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints").chmod(0o555)
    return "Permission denied"


@pytest.mark.parametrize(
    "obstacle",
    [
        a_file_in_the_way,
        pytest.param(no_permission, marks=pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")),
    ],
)
def test_a_folder_that_cannot_be_written_is_found_first(
    ranks: RankPool, text: Path, tmp_path: Path, obstacle: Callable[[Path], str]
) -> None:
    reason = obstacle(tmp_path / "run")
    messages = ranks.run(refused, 2, tmp_path / "run", text, "auto")
    assert len(set(messages)) == 1
    assert f"{tmp_path}/run/checkpoints cannot be written: {reason}" in messages[0]
    assert "checkpoint.every=0" in messages[0]


@pytest.mark.faults
def test_a_read_only_disk_is_found_first(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "run" / "checkpoints", "ro"):
        messages = ranks.run(refused, 2, tmp_path / "run", text, "auto")
    assert len(set(messages)) == 1 and "cannot be written: Read-only file system" in messages[0]


def test_a_folder_that_can_be_written_is_left_as_it_was(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    assert ranks.run(refused, 2, tmp_path / "run", text, "auto") == ["", ""]
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_nothing_to_resume_from_is_found_first(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, reason in ((tmp_path / "gone", "does not exist"), (tmp_path / "empty", "has no checkpoint in it")):
        messages = ranks.run(refused, 2, tmp_path / "run", text, str(path))
        assert len(set(messages)) == 1
        assert f"checkpoint.resume={path} {reason}" in messages[0]


def raise_on(errors: dict[int, Exception]) -> tuple[str, str]:
    def action() -> int:
        if dist.get_rank() in errors:
            raise errors[dist.get_rank()]
        return dist.get_rank()

    ranks = Ranks(60)
    try:
        return "returned", str(ranks.all(action))
    except Exception as error:
        return type(error).__name__, str(error)


def test_ranks_agree_on_what_went_wrong(ranks: RankPool) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "shard")
    assert ranks.run(raise_on, 3, {}) == [("returned", "[0, 1, 2]")] * 3
    said = f"[Errno {errno.ENOSPC}] No space left on device (shard) on rank 2"
    assert ranks.run(raise_on, 3, {2: full}) == [("OSError", said)] * 3
    # What is not a full disk stops the run, and must stop it on the rank with the full disk, too.
    both = {0: full, 2: ZeroDivisionError("division by zero")}
    said = "rank 2: ZeroDivisionError: division by zero"
    assert ranks.run(raise_on, 3, both) == [("RuntimeError", said)] * 3


def shares(sizes: dict[str, int]) -> list[str]:
    return Ranks(60).share(sizes)


def test_files_to_verify_are_spread_over_ranks(ranks: RankPool) -> None:
    sizes = {"a": 10, "b": 6, "c": 5, "d": 1}
    assert ranks.run(shares, 2, sizes) == [["a", "d"], ["b", "c"]]
    one, two, three = ranks.run(shares, 3, {"only": 7})
    assert (one, two, three) == (["only"], [], [])


@pytest.mark.faults
@pytest.mark.parametrize("point", ["manifest_written", "renamed"])
def test_a_disk_that_fills_up_late(ranks: RankPool, text: Path, tmp_path: Path, point: str) -> None:
    """Before the rename nothing is committed; after it the step is, and the next run takes it."""
    fault = f"enospc:rank=0:at={point}:step=2"
    seen = run_ranks(ranks, config(text, **TWO), tmp_path / "run", 3, (1, 2), fault)
    newest, told = {
        "manifest_written": (1, "was not saved: No space left on device"),
        "renamed": (2, "was written, but LATEST was not or older ones not deleted: No space left on device"),
    }[point]
    for rank in seen:
        (warning,) = rank.warnings
        assert f"the checkpoint of step 2 {told}" in warning
        assert ("step-1 stays the newest" in warning) == (newest == 1)
    assert run(ranks, config(text, **TWO), tmp_path / "run", 3).resumed_at == newest


def save_last(text: Path, run_dir: Path) -> None:
    """A rank that saves at its end on a disk that fills up then."""
    settings = config(text)
    state, _, _ = build_state(settings, run_dir)
    store = open_store(settings, run_dir)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        store.save(state, None, stopping=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_the_last_save_of_a_run_must_not_fail_quietly(ranks: RankPool, text: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="of step 0 was not saved: File too large.*there is no checkpoint yet"):
        ranks.run(save_last, 1, text, tmp_path / "run")
