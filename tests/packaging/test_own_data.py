"""The page for a checkpoint and data of one's own: its commands with real paths, its rates, its keys."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automoe import cli
from automoe.config.compose import compose_config, parse_arguments
from automoe.config.convert import leaf_keys
from automoe.config.frozen import load_config
from automoe.data.prepare import with_steps
from automoe.launch.prepare import prepare
from automoe.observe.metrics import read_metrics
from tests.support.chat import TEMPLATES, messages, save_tokenizer
from tests.support.command import ROOT, TrainCommand
from tests.support.hf_models import save_small_hf
from tests.support.preference import write_pairs

PAGE = (ROOT / "docs" / "own_data.md").read_text()
SHOWS_TOOLS = "{% for t in tools or [] %}{{ t.function.name + ' ' }}{% endfor %}" + TEMPLATES["thinks"]
TOOLS = [{"type": "function", "function": {"name": "who_is_in", "parameters": {"type": "object"}}}]


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "who_is_in", "arguments": arguments}}


def records() -> list[dict[str, Any]]:
    """All kinds of records that the page says are read together: with tools, arguments of each form, reasoning."""
    found: list[dict[str, Any]] = []
    for n in range(90):
        turns = messages(f"Who is in room {n}?", f"Person {n}.")
        turns[1]["reasoning_content"] = f"I look into {n}."
        calls = [
            {"role": "assistant", "content": "", "tool_calls": [call(({"room": n}, f'{{"room": {n}}}', {})[n % 3])]}
        ]
        result = {"role": "tool", "content": str(n)}
        found.append(
            {"messages": [turns[0], *calls, result, turns[1]], "tools": TOOLS} if n % 2 else {"messages": turns}
        )
    return found


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What stands for DIR, and for FILE by the kind of data."""
    folder = tmp_path_factory.mktemp("own")
    save_small_hf("qwen3_moe", folder / "hf", other_sizes={"vocab_size": 304, "max_position_embeddings": 512})
    save_tokenizer(folder / "hf", "thinks")
    (folder / "hf" / "chat_template.jinja").write_text(SHOWS_TOOLS)
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records()))
    texts = (json.dumps({"text": f"Room {n} is {'very ' * 30}large."}) + "\n" for n in range(300))
    (folder / "texts.jsonl").write_text("".join(texts))
    files = {"chat": "chats.jsonl", "jsonl": "texts.jsonl", "preference": "pairs.jsonl"}
    write_pairs(folder / "pairs.jsonl", 90)
    return {"DIR": folder / "hf"} | {kind: folder / name for kind, name in files.items()}


def commands(paths: dict[str, Path], run: str) -> list[list[str]]:
    """Arguments of every command of the page, with paths for its words."""
    found = []
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S):
        for line in block.splitlines():
            kind = (re.findall(r"\bdata=(\w+)", line) or ["chat"])[0]
            words = {"DIR": paths["DIR"], "FILE": paths[kind], "RUN": run}
            for word, path in words.items():
                line = re.sub(rf"\b{word}\b", str(path), line)
            program, *arguments = shlex.split(line, comments=True)
            assert program == "automoe"
            found.append(arguments)
    assert [arguments[0] for arguments in found] == ["train"] * 4 + ["generate"]
    return found


def test_commands_of_the_page_pass_what_is_checked_before_ranks_start(
    paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    for command, *arguments in commands(paths, str(paths["DIR"])):
        if command == "train":
            config, _, _ = prepare(parse_arguments(arguments))
            assert with_steps(config).train.steps > config.train.epochs > 0
        else:
            assert cli.main([command, *arguments, "--max-new-tokens", "2"]) == 0
    assert "> Who is in room 4?" in capsys.readouterr().out


JOBS = {
    "random": (),
    "checkpoint": ("model.hf_path=DIR", "data=chat"),
    "adapters": ("model.hf_path=DIR", "data=chat", "lora.rank=16"),
    "DPO": ("model.hf_path=DIR", "data=preference", "recipe=dpo"),
    "DPO, adapters": ("model.hf_path=DIR", "data=preference", "recipe=dpo", "lora.rank=16"),
}


def test_the_table_of_the_page_has_the_rates_that_are_taken() -> None:
    table = re.findall(r"^\|(.*)\|$", PAGE.partition("## Rates and length")[2].partition("\n\n`config`")[0], re.M)
    head, _, *rows = ([cell.strip() for cell in row.split("|")] for row in table)
    assert head == ["key", *JOBS] and [row[0] for row in rows] == ["`optim.lr`", "`optim.weight_decay`", "length"]
    for job, *said in zip(*(line[1:] for line in (head, *rows)), strict=True):
        config = compose_config("config", [*JOBS[job], "data.path=FILE"])
        epochs = f"{config.train.epochs:g} epoch" + "s" * (config.train.epochs != 1)
        assert [float(number) for number in said[:2]] == [config.optim.lr, config.optim.weight_decay], job
        assert said[2] == ("`train.steps`" if job == "random" else epochs), job


def test_keys_that_the_page_names_exist() -> None:
    named = re.findall(r"\b((?:data|train|optim|model)\.[a-z_.]+)", PAGE)
    assert len(set(named)) > 10 and set(named) <= set(leaf_keys())


@pytest.mark.exhaustive
def test_commands_of_the_page_run(paths: dict[str, Path], tmp_path: Path) -> None:
    env = TrainCommand(tmp_path).env | {"XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    for number, arguments in enumerate(commands(paths, "run")):
        folder = tmp_path / (str(number) if arguments[0] == "train" else "")
        folder.mkdir(exist_ok=True)
        start = [sys.executable, "-m", "automoe.cli", *arguments]
        done = subprocess.run(start, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        if arguments[0] == "train":
            [run] = folder.glob("runs/*")
            assert load_config(run).train.steps == len(read_metrics(run)) > 1
            assert (run / "hf/model.safetensors.index.json").exists()
        if not number:
            (tmp_path / "run").symlink_to(run)
    assert "> Who is in room 4?" in done.stdout
