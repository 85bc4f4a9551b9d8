"""Rules of the source tree that no linter knows: import order, file size, files that must agree."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "automoe"

# A module may import from its own layer and from those after it.
LAYERS = [
    {"api", "cli", "completion", "help", "train", "plan", "verify", "export", "convert", "worker"},
    {"recipes"},
    {"launch", "parallel", "checkpoint", "hf", "data", "observe", "optim", "interop"},
    {"model"},
    {"moe"},
    {"mesh", "blocks", "collectives", "counter_random", "quantize", "rows"},
    {"config", "errors", "fault_points"},
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.py"))


def imported_parts(path: Path) -> set[str]:
    """First name below ``automoe`` of every import that runs with the module."""
    tree = ast.parse((ROOT / path).read_text())
    parts: set[str] = set()
    for node in tree.body:  # not within functions and TYPE_CHECKING: those run late or never
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = [f"automoe.{alias.name}" for alias in node.names] if module == "automoe" else [module]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("automoe.")}
    return parts


def test_imports_point_downwards() -> None:
    upwards = []
    for path in MODULES:
        part = path.with_suffix("").parts[1]
        if part in ("__init__", "conf", "testing"):
            continue
        assert part == "cost" or part in LEVEL, f"{path} has no layer here"
        for other in imported_parts(path) - {"__version__"}:
            if part == "cost":
                fine = other in ("cost", "config", "errors")
            else:
                fine = other == "cost" or LEVEL.get(other, -1) >= LEVEL[part]
            if not fine:
                upwards.append(f"{path} imports automoe.{other}")
    assert upwards == []


def test_files_stay_under_five_hundred_lines() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in MODULES}
    assert {path: length for path, length in lengths.items() if length >= 500} == {}


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


def third_party_imports(folder: str) -> set[str]:
    """Distributions that the sources of a folder import anywhere, functions included."""
    own = {path.stem for path in (ROOT / folder).rglob("*.py")} | {"automoe"}
    modules: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    distributions = packages_distributions()
    modules -= own | set(sys.stdlib_module_names)
    return {distributions.get(module, [module])[0].lower() for module in modules}


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed, extras = project["dependencies"], project["optional-dependencies"]
    names = {group: {Requirement(line).name for line in lines} for group, lines in {"": needed, **extras}.items()}
    assert third_party_imports("automoe") <= names[""] | names["gpu"]
    assert third_party_imports("tests") | third_party_imports("benchmarks") <= names[""] | names["dev"]


def test_the_readme_names_targets_that_exist_and_ci_runs_its_test_command() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", (ROOT / "README.md").read_text(), re.M))
    assert {"train", "test"} <= named <= targets
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()


def test_links_between_documents_lead_somewhere() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    broken = []
    for document in documents:
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", document.read_text()):
            if not (document.parent / target).exists():
                broken.append(f"{document.relative_to(ROOT)}: {target}")
    assert broken == []
