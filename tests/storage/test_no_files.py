"""Pipes and devices where a user's file belongs: opening the one waits for ever, reading the other never ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from automoe import generate
from automoe.config import compose
from automoe.config.data_schema import ChatConfig
from automoe.data import prompts
from automoe.data.tokenizer import stored_template
from automoe.planner.output_file import write_out
from tests.support.hostile import ends_within, refused

READERS: dict[str, Callable[[Path], object]] = {
    "data.chat.template": lambda path: stored_template(ChatConfig(template=str(path)), "byte"),
    "observe.samples": lambda path: prompts._texts(str(path)),
    "out=": lambda path: write_out(path, "text", str(path), "it", "out=FILE"),
    "--config-dir": lambda path: compose._check_files(str(path.parents[1])),
}


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    with ends_within(60):
        yield


@pytest.mark.parametrize("kind", ["a FIFO", "a device"])
@pytest.mark.parametrize("key", READERS)
def test_what_is_no_file_is_not_read(key: str, kind: str, tmp_path: Path) -> None:
    (path := tmp_path / "cluster" / "x.yaml").parent.mkdir()
    os.mkfifo(path) if kind == "a FIFO" else path.symlink_to("/dev/zero")
    said = "exists with other content" if key == "out=" else f"it is {kind}, where a file belongs"
    refused(lambda: READERS[key](path), key, said)


def test_a_run_whose_configuration_is_a_pipe_is_asked_all_the_same(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    assert generate._wrote_a_model(tmp_path)
