from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from launch_command import Command

from tests.support.forked import Forks, forks

LIGHT = ("torch", "torch.distributed.distributed_c10d", "automoe.launch.fork_server", "automoe.launch.sweep")


@pytest.fixture
def command(tmp_path: Path) -> Command:
    return Command(tmp_path / "run")


@pytest.fixture(scope="session")
def forking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    folder = tmp_path_factory.mktemp("forking")
    with forks(folder, Command(folder).env, LIGHT) as started:
        yield started


@pytest.fixture
def run(command: Command, forking: Forks) -> Callable[..., tuple[int, str, str]]:
    """``command.run`` in a fork."""
    return partial(command.run_forked, forking)
