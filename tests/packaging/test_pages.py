"""Pages for newcomers: sizes, the tutorial's blocks, the complaints' tests, the keys of other trainers, the answers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from automoe.config.convert import leaf_keys
from automoe.launch.gpu_first import CHECKS
from automoe.model.params import LORA_GROUPS, model_params
from automoe.model.trainable import target_names
from tests.support.configurations import quick_model

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MAX_PAGE_WORDS, MAX_DECISIONS, MAX_PICTURE = 2_500, 5_000, 200_000
MAX_WORDS = 45_100
GENERATED = "config.md"  # the key reference
TUTORIAL = DOCS / "tutorials.md"


def text(page: str) -> str:
    return (DOCS / page).read_text()


def rows(page: str) -> list[list[str]]:
    """Cells of every row of every table of a page, without headings."""
    lines = [line for line in text(page).splitlines() if line.startswith("|") and not set(line) <= set("|-: ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_pages_have_a_size() -> None:
    words = {path.name: len(path.read_text().split()) for path in DOCS.glob("*.md") if path.name != GENERATED}
    most = {name: MAX_DECISIONS if name == "decisions.md" else MAX_PAGE_WORDS for name in words}
    assert {name: count for name, count in words.items() if count > most[name]} == {}
    assert sum(words.values()) <= MAX_WORDS
    pictures = {path.name: path.stat().st_size for path in (DOCS / "images").iterdir()}
    assert {name: size for name, size in pictures.items() if size > MAX_PICTURE} == {}


def test_the_page_of_adapters_names_every_group_and_what_has_none() -> None:
    assert [group for group in LORA_GROUPS if f"`{group}`" not in text("lora.md")] == []
    [left_out] = re.findall(r"[^.]*get none\.", text("lora.md"))
    parts = {"o_a_proj": "`o_a_proj`", "compressor.kv_proj": "compressors", "indexer.q_b_proj": "indexers"}
    for name, word in parts.items():
        layers = [param for param in model_params(quick_model("small_dsv4")) if f".{name}." in param.name]
        assert layers and word in left_out and not any(target_names(param) for param in layers), name


def test_pictures_of_the_docs_fetch_nothing() -> None:
    for picture in (DOCS / "images").glob("*.svg"):
        assert set(re.findall(r"https?://[^\s\"')]+", picture.read_text())) <= {"http://www.w3.org/2000/svg"}


def blocks() -> list[tuple[str, str]]:
    found = re.findall(r"^```(\w+)\n(.*?)^```$", TUTORIAL.read_text(), re.M | re.S)
    assert 2 * len(found) == TUTORIAL.read_text().count("```")
    return found


@pytest.mark.faults
def test_every_block_of_the_tutorial_runs_after_the_one_before(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "automoe"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m automoe.cli "$@"\n')
    program.chmod(0o755)
    env = os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    assert {kind for kind, _ in blocks()} == {"sh", "python"} and len(blocks()) >= 10
    for kind, block in blocks():
        start = ["bash", "-euo", "pipefail", "-c"] if kind == "sh" else [sys.executable, "-c"]
        done = subprocess.run([*start, block], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    files = (
        "runs/lora/hf/model.safetensors.index.json",
        "my-adapter/adapter_config.json",
        "plan.html",
        "runs/mine/report.html",
    )
    assert [name for name in files if not (tmp_path / name).exists()] == []
    steps = (tmp_path / "runs" / "mesh" / "metrics.jsonl").read_text().count("\n")
    assert steps == 15  # on two meshes


def functions_of(path: str) -> set[str]:
    file = ROOT / path
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_complaint_has_a_thread_and_a_test_that_exists() -> None:
    complaints = [row for row in rows("complaints.md") if row[0].isdecimal()]
    assert [row[0] for row in complaints] == [str(number) for number in range(1, 21)]
    for number, what, thread, tests in complaints:
        assert what and re.search(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)", thread), number
        named = re.findall(r"`(tests/[^`]+)::([^`]+)`", tests)
        assert named, number
        assert [name for path, name in named if name not in functions_of(path)] == [], number
    assert "## Not answered here" in text("complaints.md")


def titan_rows() -> list[list[str]]:
    found = rows("migrate.md")
    first, after = (next(n for n, row in enumerate(found) if row[0] == name) for name in ("torchtitan", "Megatron-LM"))
    return found[first + 1 : after]


def titan_class(file: str, *names: str) -> ast.ClassDef:
    """A class of torchtitan's sources, which are read: their imports take seconds."""
    found: ast.AST = ast.parse((Path(find_spec("torchtitan").submodule_search_locations[0]) / file).read_text())
    for name in names:
        found = next(node for node in found.body if isinstance(node, ast.ClassDef) and node.name == name)
    return found


def titan_fields(file: str, *names: str) -> set[str]:
    return {node.target.id for node in titan_class(file, *names).body if isinstance(node, ast.AnnAssign)}


def test_keys_of_ours_and_of_torchtitan_exist() -> None:
    ours = set(leaf_keys()) | {"data", "recipe"}
    sections = {
        "parallelism": titan_fields("config/configs.py", "ParallelismConfig"),
        "training": titan_fields("config/configs.py", "TrainingConfig"),
        "compile": titan_fields("config/configs.py", "CompileConfig"),
        "lr_scheduler": titan_fields("components/optimizer/lr_scheduler.py", "LRSchedulersContainer", "Config"),
        "optimizer": titan_fields("components/optimizer/optimizer.py", "OptimizersContainer", "Config"),
        "checkpoint": titan_fields("components/checkpointer/base.py", "BaseCheckpointManager", "Config"),
    }
    theirs = {f"{section}.{field}" for section, keys in sections.items() for field in keys}
    table = [row for row in rows("migrate.md") if row[1] != "here"]
    assert len(table) > 40
    named = re.findall(
        rf"`((?:{'|'.join(sections)})\.\w+)`", " ".join(cell for row in titan_rows() for cell in row[::2])
    )
    assert len(named) > 15 and [key for key in named if key not in theirs] == []
    classes = re.findall(r"`(\w+AC)`", text("migrate.md"))
    assert len(classes) == 3 and all(titan_class("distributed/activation_checkpoint.py", name) for name in classes)
    for _, our, _ in table:
        for key in re.findall(r"`([^`]+)`", our):
            names = [word.partition("=")[0] for word in key.split()]
            assert [name for name in names if name not in ours] == [], key


def test_pages_name_the_versions_that_tests_run() -> None:
    for page, package, pattern in (
        ("finetune.md", "trl", r"TRL ([\d.]+)'s `SFTTrainer`"),
        ("dpo.md", "trl", r"`DPOTrainer` \(([\d.]+);"),
        ("migrate.md", "torchtitan", r"torchtitan ([\d.]+) and"),
    ):
        stated = re.search(pattern, text(page))
        assert stated and f"{version(package)}.".startswith(f"{stated[1]}."), page
    for page in ("migrate.md", "routing.md"):
        assert "Megatron-Core 0.19.2" in text(page) and "0.20" not in text(page)


def test_ten_questions_have_answers_that_are_there() -> None:
    """What is searched for stands in the section that the answer links to."""
    questions = [row for row in rows("questions.md") if row[0] != "question"]
    assert len(questions) == 10
    for question, answer in questions:
        query = re.search(r"\[`([^`]+)`\]$", question)[1]
        page, anchor = re.search(r"\]\(([\w.]+\.md)#?([\w-]*)\)", answer).groups()
        section = section_of(page, anchor).lower()
        assert section and [word for word in query.lower().split() if word not in section] == [], question


def anchor_of(title: str) -> str:
    """The heading's anchor on the site."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def section_of(page: str, anchor: str) -> str:
    """The text under the heading with this anchor, or all of the page; empty if there is no such heading."""
    if not anchor:
        return text(page)
    parts = re.split(r"^#{1,3} (.*)$", text(page), flags=re.M)[1:]
    found = zip(parts[::2], parts[1::2], strict=True)
    return next((f"{title} {body}" for title, body in found if anchor_of(title) == anchor), "")


def test_the_page_on_the_first_half_hour_has_every_check() -> None:
    named = " ".join(row[0] for row in rows("gpu_first.md"))
    assert [check.name for check in CHECKS if f"`{check.name}`" not in named] == []
    for check in CHECKS:
        row = next(row for row in rows("gpu_first.md") if f"`{check.name}`" in row[0])
        assert row[1] == str(check.gpus) and (not check.like or f"`{check.like}`" in row[2])


def test_the_first_page_says_what_has_never_run() -> None:
    """As long as no result is from a GPU."""
    results = [path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.json")]
    from_gpus = [text for text in results if re.search(r'"(device|gpu)": "(NVIDIA|cuda|H\d00)', text)]
    said = "**What has never run**: no GPU" in (ROOT / "README.md").read_text()
    assert said == (not from_gpus)


def test_the_version_is_one() -> None:
    versions = [
        re.search(pattern, (ROOT / file).read_text(), re.M)[1]
        for file, pattern in (("automoe/__init__.py", r'^__version__ = "(.*)"'), ("CITATION.cff", r"^version: (.*)$"))
    ]
    assert len(set(versions)) == 1, versions


def test_workflows_call_what_people_call() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    commands = {
        name: [step["run"] for job in one["jobs"].values() for step in job["steps"] if "run" in step]
        for name, one in workflows.items()
    }
    assert commands["ci"] == [".ci/run"]
    assert {"make dist", "make site"} <= set(commands["release"])
    script = "\n".join([*commands["release"], (ROOT / ".ci/run").read_text()]).replace("\\\n", " ")
    lines = re.findall(r"^make (.+)", script, re.M)
    called = {
        word for line in lines for word in line.split("#")[0].split() if not word.startswith("-") and "=" not in word
    }
    assert {"site", "notebook", "lint-docker"} <= called <= make_targets()
    assert all(one["permissions"] == {"contents": "read"} for one in workflows.values())
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for pattern in re.findall(r"'([^']+)'", " ".join(re.findall(r"hashFiles\((.*?)\)", path.read_text()))):
            assert list(ROOT.glob(pattern)), f"{path.name}: no file {pattern}"
        for file in re.findall(r"(?:automoe|docs|tests|\.ci)/[\w./-]+", path.read_text()):
            assert (ROOT / file).exists(), f"{path.name}: no {file}"


def make_targets() -> set[str]:
    rules = re.findall(r"^([a-z -]+):(?!=)", (ROOT / "Makefile").read_text(), re.M)
    return {name for rule in rules for name in rule.split()}


def test_every_target_of_make_that_a_page_names_is_there() -> None:
    pages = [
        *(page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"),
        *DOCS.glob("*.md"),
        *(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"),
    ]
    pages += [*(ROOT / "docker").glob("*"), ROOT / ".devcontainer" / "devcontainer.json"]
    named = set()
    for page in pages:
        read = page.read_text()
        shell = "\n".join(re.findall(r"^```sh\n(.*?)^```$", read, re.M | re.S))
        named |= set(re.findall(r"[`\"]make ([a-z][a-z-]*)", read) + re.findall(r"^make ([a-z][a-z-]*)", shell, re.M))
    assert len(named) > 15 and named - make_targets() == set()


def test_templates_and_containers_are_well_formed() -> None:
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        read = yaml.safe_load(form.read_text())
        assert form.stem == "config" or {"name", "description", "body"} <= read.keys(), form.name
    image = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert image["postCreateCommand"] == "make setup"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in (ROOT / "docker").glob("*.Dockerfile"):
        lines = file.read_text()
        assert "\nUSER 1000\n" in lines and ":latest" not in lines
        for name in re.findall(r"^COPY (\S+) ", lines, re.M):
            assert (ROOT / name).exists(), name
        assert set(",".join(re.findall(r"automoe\[([^]]+)\]", lines)).split(",")) - {""} <= extras.keys()
