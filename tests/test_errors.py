"""What fails for a moment is tried again, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from automoe import errors
from automoe.errors import CheckpointError, ConfigError, retried, spelled_out


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_WAITS_S", (0.0,) * len(errors._WAITS_S))


class Failing:
    """Raises ``number`` for the first ``times`` calls."""

    def __init__(self, number: int, times: int) -> None:
        self.number, self.times, self.calls = number, times, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.times:
            raise OSError(self.number, os.strerror(self.number), "file")
        return 7


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT])
def test_a_disk_that_is_away_for_a_moment(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert retried(Failing(number, 3)) == 7
    said = capsys.readouterr().out.splitlines()
    assert said == [f"warning: file: {os.strerror(number)}; trying again in 0.0 s"] * 3


def test_it_ends() -> None:
    failing = Failing(errno.EIO, 99)
    with pytest.raises(OSError, match="Input/output error"):
        retried(failing)
    assert failing.calls == 4


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.ENOENT, errno.EROFS])
def test_what_does_not_pass_is_not_tried_again(number: int) -> None:
    failing = Failing(number, 1)
    with pytest.raises(OSError):
        retried(failing)
    assert failing.calls == 1


def test_a_real_input_output_error() -> None:
    """Nobody has memory mapped at address 0, and the kernel says so with EIO."""
    with pytest.raises(OSError) as raised:
        retried(Path("/proc/self/mem").read_bytes)
    assert raised.value.errno == errno.EIO


def test_what_steers_a_terminal_is_spelled_out() -> None:
    """A tensor's name, a path: whoever made the file chose it."""
    said = str(CheckpointError("a\x1b[2J\x07b\u202ec\ud800\nd\té"))
    assert said == "a\\x1b[2J\\x07b\\u202ec\\ud800\nd\té"
    kept = "1\xa0000\u3000\u4f60 \U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c\u062e"  # blanks and joiners of other scripts
    assert spelled_out(kept) == kept
    assert str(ConfigError("key", "\x9b31m", "rule", "remedy")) == "key=\\x9b31m: rule. remedy"


PRINTS = """
import sys
from automoe import errors

@errors.exit_status
def command():
    for n in range(20000):
        print(n, "\\u23ce")
    return 0

sys.exit(command())
"""


@pytest.mark.parametrize(("buffered", "target", "status", "says"), [
    ("", "|", 141, ""), ("1", "|", 141, ""),
    ("", "/dev/full", 2, "error: standard output: No space left on device\n"),
    ("1", "/dev/full", 2, "error: standard output: No space left on device\n"),
])  # fmt: skip
def test_output_that_nobody_reads_or_that_no_disk_takes_ends_a_command_without_a_traceback(
    buffered: str, target: str, status: int, says: str
) -> None:
    env = os.environ | {"PYTHONUNBUFFERED": buffered, "PYTHONIOENCODING": "ascii"}
    with open(os.devnull if target == "|" else target, "w") as out:
        piped = subprocess.PIPE if target == "|" else out
        command = subprocess.Popen([sys.executable, "-c", PRINTS], env=env, stdout=piped, stderr=subprocess.PIPE)
        if command.stdout is not None:
            assert command.stdout.readline() == b"0 \\u23ce\n"  # nor is a character that it lacks an error
            command.stdout.close()
        assert command.stderr is not None and command.stderr.read().decode() == says
        assert command.wait() == status
