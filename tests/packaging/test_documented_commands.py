"""Commands that the documents show: their configurations compose and fit a mesh."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from automoe.config.compose import Arguments, compose_config, parse_arguments
from automoe.config.rule_engine import check_rows
from automoe.config.rules import number_rows
from automoe.config.rules_settings import settings_rows
from automoe.config.validate import validate
from automoe.launch.sweep import sweep_directory
from automoe.planner.search_command import CALIBRATE, question_of, take_own

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def commands() -> list[str]:
    """Lines of fenced blocks that train, plan or verify one configuration which needs no file of the reader's."""
    found: list[str] = []
    pages = [page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "tutorials.md"]  # test_pages runs it
    for document in [ROOT / "README.md", *pages]:
        fenced = False
        for line in document.read_text().splitlines():
            if line.startswith("```"):
                fenced = not fenced
            words = line.split("#")[0].split("  ")[0].split()
            starts = [i for i, word in enumerate(words) if word.removeprefix("automoe.") in ("train", "plan", "verify")]
            if not fenced or not starts or not any("automoe" in word for word in words[: starts[0] + 1]):
                continue
            arguments = words[starts[0] + 1 :]
            if any(sign in word for word in arguments for sign in ("PATH", "DIR", "FILE", "=path/", "…", "...", "[")):
                continue
            if "-m" not in arguments and "--multirun" not in arguments:
                found.append(shlex.join(arguments))
    return list(dict.fromkeys(found))


def test_documents_show_commands() -> None:
    assert len(commands()) >= 4


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_has_a_valid_configuration(command: str) -> None:
    words = [word for word in shlex.split(command) if word not in ("--json", "--build", "--proxy")]
    own, words = take_own(words)
    question = question_of(own)
    arguments = parse_arguments(words)
    config = compose_config(arguments.config_name, arguments.overrides, arguments.config_dir)
    if question and question.kind != CALIBRATE:  # which looks for a mesh
        check_rows(config, [*number_rows(config), *settings_rows(config)])
        return
    assert validate(config, config.launch.num_ranks).world_size >= 1


def folder(arguments: Arguments) -> str:
    if arguments.multirun:
        return os.path.relpath(sweep_directory(arguments)[0])
    return compose_config(arguments.config_name, arguments.overrides).run_dir


def test_commands_of_the_readme_write_into_folders_of_their_own() -> None:
    arguments = [
        line.partition(" train ")[2].split("  ")[0] for line in README.splitlines() if line.startswith("automoe train ")
    ]
    assert len(arguments) >= 3
    folders = [folder(parse_arguments(words.split())) for words in ["", *arguments]]
    assert len(set(folders)) == len(folders), folders
    assert folders[0] == "runs/default" and "export runs/default " in README


def test_jobs_of_the_page_on_clusters_start_as_many_ranks_as_the_flagship_has() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    shells, (job_set,) = ([*re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S)] for kind in ("sh", "yaml"))
    torchrun, slurm = shells
    for shell in shells:
        subprocess.run(["bash", "-n"], input=shell, text=True, check=True)
    nodes = yaml.safe_load(job_set)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = nodes["template"]["spec"]["containers"]
    started, gpus = shlex.join(container["command"]), container["resources"]["limits"]["nvidia.com/gpu"]
    assert nodes["completionMode"] == "Indexed" and nodes["parallelism"] == nodes["completions"]
    sizes = [(nodes["completions"], gpus)]
    for text, here in ((started, "proc-per-node"), (torchrun, "proc-per-node"), (slurm, "tasks-per-node")):
        sizes += [tuple(int(re.findall(rf"--n?{name}=(\d+)", text)[0]) for name in ("nodes", f"n?{here}"))]
    assert len(set(sizes)) == 1, sizes
    config = compose_config("dsv3_671b", parse_arguments(started.split("automoe.train ")[1].split()).overrides)
    assert validate(config, None).world_size == sizes[0][0] * sizes[0][1]
    assert config.cluster.gpus_per_node == gpus and config.run_dir == "/shared/dsv3"
