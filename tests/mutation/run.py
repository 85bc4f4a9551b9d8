"""Do the tests notice? Puts one mistake after the other into a copy of the tree and runs the tests that should see it.

    python tests/mutation/run.py                     all mutants, one at a time
    python tests/mutation/run.py --jobs 4 moe/ optim/   those whose file's name has one of these in it, four at a time
    python tests/mutation/run.py --write             keep the outcomes in tests/mutation/results.json

Torch and the rest are imported once; each mutant is a fork of that process, in which nothing of automoe is imported yet.
First the same tests run without a mutant: a test that is red anyway would kill everything.

Exit status: 0 if every mutant was killed but those listed as survivors, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from mutants import MUTANTS, Mutant  # noqa: E402

RESULTS = ROOT / "tests" / "mutation" / "results.json"
LIMIT_S = 900  # of one mutant; only a hang reaches it
BASELINE_LIMIT_S = 3600  # of all tests without a mutant
HERE = "not gpu and not gpus and not tokenizers and not mlx and not llama and not vllm and not smoke"  # what runs on any machine
QUICK = f"{HERE} and not exhaustive and not faults"  # what `make test` runs
FOLDERS = ("automoe", "recipes", "conf", "tests", "benchmarks", "docs")
LOG = "pytest.log"
PASSED, BROKEN, TOO_LONG = 0, 3, -signal.SIGALRM  # exit statuses
UNUSABLE = (BROKEN, 4, 5)  # pytest's own error, wrong arguments, no test found


@dataclass
class Outcome:
    """What became of one mutant: killed, survived, or timeout, which counts as killed."""

    file: str
    old: str
    new: str
    tests: list[str]
    outcome: str
    by: str  # the first test that failed
    seconds: float
    reason: str = ""  # why it may live


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of file names or of mutants' lines; none: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--write", action="store_true", help=f"keep the outcome in {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--skip-baseline", action="store_true", help="take it that the tests pass without a mutant")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.only or any(part in f"{m.file}: {m.old}" for part in options.only)]
    if not chosen:
        parser.error("no mutant has one of these in its file's name or in its line")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        trees = [copy_tree(Path(scratch) / str(i)) for i in range(options.jobs)]
        if not options.skip_baseline:
            named = {test for mutant in chosen for test in mutant.tests}
            single = {
                test for test in named if "[" in test
            }  # a case that is named runs even if `make test` leaves it out
            for tests, marks in ((named - single, QUICK), (single, HERE)):
                if not tests:
                    continue
                pid, log = start(trees[0], sorted(tests), marks, BASELINE_LIMIT_S)
                _, status = wait([pid])
                if status != PASSED:
                    by = first_failure(log)
                    print(f"without a mutant, {by or sorted(tests)} is red (pytest's status {status}): mend that first")
                    return 1
        outcomes = run_all(chosen, trees)
    if options.write:
        write_results(outcomes, commit)
    return report(outcomes)


def preload() -> None:
    """Import what tests import, but for what is mutated."""
    os.environ.update(OMP_NUM_THREADS="1", TRITON_INTERPRET="1", PYTHONDONTWRITEBYTECODE="1")
    import hypothesis
    import pytest
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor
    import transformers

    torch.set_num_threads(1)
    assert hypothesis and pytest and transformers.AutoModelForCausalLM
    assert not any(name.startswith(("automoe", "recipes")) for name in sys.modules)


def copy_tree(target: Path) -> Path:
    """The files of the working tree, compiled so that a changed source is noticed by its content."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy2(path, target)
    for path in target.rglob("*.py"):
        py_compile.compile(str(path), doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return target


def put_in(tree: Path, mutant: Mutant) -> None:
    path = tree / mutant.file
    before = path.read_text()
    assert before.count(mutant.old) == 1, f"{mutant.file}: {mutant.old!r} is there {before.count(mutant.old)} times"
    path.write_text(before.replace(mutant.old, mutant.new))


class ExhaustiveLast:
    """Runs what ``make test`` leaves out after the rest: only mutants that the rest leaves alive pay for it."""

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: any(item.get_closest_marker(mark) for mark in ("exhaustive", "faults")))


def start(tree: Path, tests: list[str], marks: str, limit_s: int) -> tuple[int, Path]:
    """A fork that runs pytest over ``tests`` in ``tree``: its process id, and the file that takes its output.

    ``marks`` selects tests as pytest's ``-m``. A fork that runs for longer than ``limit_s`` ends by SIGALRM.
    """
    log = tree / LOG
    pid = os.fork()
    if pid:
        return pid, log
    try:  # the child
        os.setsid()
        signal.alarm(limit_s)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
        sys.dont_write_bytecode = True
        import pytest

        import automoe

        assert Path(automoe.__file__).is_relative_to(tree)
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-m", marks]
        status = int(pytest.main([*options, *tests], plugins=[ExhaustiveLast()]))
    except BaseException:
        status = BROKEN
    sys.stdout.flush()
    os._exit(status)


def first_failure(log: Path) -> str:
    """The first test that failed, by what pytest printed."""
    lines = log.read_text(errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split(" - ")[0].split(" ", 1)[1] if failed else ""


def end(pid: int) -> None:
    """Kill what is left of a child: ranks that outlived it, or all of it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait(pids: Iterable[int]) -> tuple[int, int]:
    """The first of these children that ends, and its exit status."""
    while True:
        for pid in pids:
            ended, raw = os.waitpid(pid, os.WNOHANG)
            if ended:
                end(pid)
                return pid, os.waitstatus_to_exitcode(raw)
        time.sleep(0.05)


def run_all(chosen: list[Mutant], trees: list[Path]) -> list[Outcome]:
    """Every mutant alone in a tree while its tests run."""
    waiting, free, outcomes = list(enumerate(chosen)), list(trees), {}
    running: dict[int, tuple[int, Mutant, Path, float]] = {}
    while waiting or running:
        while waiting and free:
            (number, mutant), tree = waiting.pop(0), free.pop()
            put_in(tree, mutant)
            pid, _ = start(tree, mutant.tests, HERE, LIMIT_S)
            running[pid] = number, mutant, tree, time.monotonic()
        pid, status = wait(running)
        number, mutant, tree, began = running.pop(pid)
        shutil.copy2(ROOT / mutant.file, tree / mutant.file)
        free.append(tree)
        if status in UNUSABLE:  # a mutant that no test can run with shows nothing
            print(f"pytest's status {status}: {(tree / LOG).read_text()}", file=sys.stderr)
        outcome = {PASSED: "survived", TOO_LONG: "timeout"} | dict.fromkeys(UNUSABLE, "survived")
        outcome = outcome.get(status, "killed")
        by, seconds = first_failure(tree / LOG), round(time.monotonic() - began, 1)
        print(f"{outcome:9} {seconds:6.1f} s  {mutant.file}: {mutant.old!r} -> {mutant.new!r}  {by}", flush=True)
        made = Outcome(mutant.file, mutant.old, mutant.new, mutant.tests, outcome, by, seconds, mutant.lives_because)
        outcomes[number] = made
    return [outcomes[number] for number in sorted(outcomes)]


def report(outcomes: list[Outcome]) -> int:
    survivors = [o for o in outcomes if o.outcome == "survived"]
    unexpected = [o for o in survivors if not o.reason]
    revived = [o for o in outcomes if o.reason and o.outcome != "survived"]
    print(f"\n{len(outcomes) - len(survivors)} of {len(outcomes)} killed")
    for o in survivors:
        print(f"  lives: {o.file}: {o.old!r} -> {o.new!r}  {o.reason or 'NOT LISTED AS A SURVIVOR'}")
    for o in revived:
        print(f"  listed as a survivor, and killed by {o.by}: {o.file}: {o.old!r}")
    return int(bool(unexpected or revived))


def write_results(outcomes: list[Outcome], commit: str) -> None:
    """Each mutant's newest outcome, with the commit that it is of; those of mutants no longer listed are dropped."""
    known = json.loads(RESULTS.read_text())["outcomes"] if RESULTS.exists() else []
    for outcome in outcomes:
        facts = asdict(outcome)
        del facts["tests"]  # they are in the list of mutants
        known.append({"commit": commit} | facts)
    newest = {(o["file"], o["old"], o["new"]): o for o in known}
    kept = [newest[key] for m in MUTANTS if (key := (m.file, m.old, m.new)) in newest]
    killed = sum(o["outcome"] != "survived" for o in kept)
    head = f'"mutants": {len(MUTANTS)}, "run": {len(kept)}, "killed": {killed}'
    lines = ",\n".join(map(json.dumps, kept))
    RESULTS.write_text(f'{{{head}, "outcomes": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
