"""From the command to the recipe are few calls, in the launching process and in a rank."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest
from launch_command import ROOT, TWO_RANKS

from automoe.launch.fork_server import ForkServer
from automoe.train import main

MOST_CALLS = 7
RECIPE = """
import json, traceback
from pathlib import Path

def main(config, shape, context):
    calls = [[frame.filename, frame.name] for frame in traceback.extract_stack()]
    Path(context.run_dir, f"calls{context.rank}.json").write_text(json.dumps(calls))
    return 1.0
"""


def of_the_package(calls: list[tuple[str, str]]) -> list[str]:
    """Names of the functions of automoe in a call stack, outermost first, without modules and the decorator of ``main``."""
    package = str(ROOT / "automoe")
    inside = [(Path(file), name) for file, name in calls if file.startswith(package) and name != "<module>"]
    return [name for file, name in inside if file.name != "errors.py"]


def test_from_the_command_to_the_recipe_are_at_most_seven_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher: list[tuple[str, str]] = []
    start = ForkServer.start

    def recorded(self, *args, **kwargs):
        launcher[:] = [(frame.filename, frame.name) for frame in traceback.extract_stack()]
        return start(self, *args, **kwargs)

    monkeypatch.setattr(ForkServer, "start", recorded)
    (tmp_path / "recipe_calls.py").write_text(RECIPE)
    run_dir = tmp_path / "run"
    assert (
        main([f"recipe={tmp_path / 'recipe_calls.py'}", f"run_dir={run_dir}", "observe.report=false", *TWO_RANKS]) == 0
    )
    calls = [*of_the_package(launcher), "start"]  # which sends the job, and in the server's fork begins ``become``
    for rank in range(2):
        in_rank = of_the_package(json.loads((run_dir / f"calls{rank}.json").read_text()))
        assert len(calls) <= MOST_CALLS and len(in_rank) <= MOST_CALLS, (calls, in_rank)
        chain = [*calls, *in_rank[in_rank.index("become") :], "recipe.main"]
        assert chain[0] == "main" and chain[-2] == "run_rank"
        assert len(chain) - 1 <= MOST_CALLS, f"{' -> '.join(chain)} are {len(chain) - 1} calls"
