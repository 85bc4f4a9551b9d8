"""Declared, pinned and imported packages agree, and so do the commands that the README names."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.version import Version
from sources import ROOT, tree_of


def pins(file: str) -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def declared(*extras: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return [Requirement(line) for line in lines]


def test_pinned_versions_satisfy_the_declared_ranges() -> None:
    pinned = pins("constraints-cpu.txt")
    for requirement in declared("dev"):
        assert requirement.specifier.contains(pinned[requirement.name]), (
            f"{requirement} against {pinned[requirement.name]}"
        )


def test_the_floor_is_the_oldest_version_of_every_declared_range() -> None:
    """As far as the range says: the first release of ``>=5.10`` is 5.10.1."""
    floor = pins("constraints-floor.txt")
    assert floor.keys() == {requirement.name for requirement in declared()}
    for requirement in declared():
        [bound] = [Version(part.version).release for part in requirement.specifier if part.operator == ">="]
        assert Version(floor[requirement.name]).release[: len(bound)] == bound, requirement


@cache
def distributions_of() -> dict[str, list[str]]:
    """Distributions by module, looked for once: it reads the list of files of every package."""
    return packages_distributions() | {"google": ["protobuf"]}  # of the many that share this namespace


def third_party_imports(folder: str) -> set[str]:
    """Distributions that the sources of a folder import anywhere, functions included."""
    own = {path.stem for path in (ROOT / folder).rglob("*.py")} | {"automoe", "recipes", "tests", "benchmarks"}
    modules: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    modules -= own | set(sys.stdlib_module_names)
    return {distributions_of().get(module, [module])[0].lower() for module in modules}


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, extras = project["dependencies"], project["optional-dependencies"]
    names = {group: {Requirement(line).name for line in lines} for group, lines in {"": needed, **extras}.items()}
    assert third_party_imports("automoe") <= names[""] | names["gpu"] | names["eval"] | names["mlflow"] | names[
        "wandb"
    ] | names["tinker"] | {"protobuf", "verl", "tensordict"}
    lines = (ROOT / "benchmarks" / "requirements-peers.txt").read_text().splitlines()
    peers = {Requirement(line).name for line in lines if not line.startswith("#")}
    peers |= {name.replace("-", "_") for name in peers}  # where they are not installed only modules' names are known
    in_other_environments = {
        "compressed_tensors",  # of `make test-writers`
        "llmcompressor",
        "mlx",
        "mlx_lm",
        "verl",
        "tensordict",
        "vllm",
        "llama_cpp",
        "conversion",
        "convert_hf_to_gguf",
    }
    assert third_party_imports("tests") <= names[""] | names["dev"] | in_other_environments
    assert third_party_imports("benchmarks") <= names[""] | names["dev"] | peers


def test_the_readme_names_targets_that_exist_and_ci_runs_its_test_command() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M))
    assert {"train", "test"} <= named <= targets
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()
