"""How long the plan takes to answer, as it is typed: whole processes, and one plan after imports.

python benchmarks/plan_speed.py     # three minutes; writes benchmarks/results/plan_speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from provenance import HERE, commit, cpu_model

RESULT = HERE / "results" / "plan_speed.json"
PLAN = ["--config-name", "dsv3_671b"]
COMMANDS = {  # as in docs/plan.md, and how often
    "one plan": (PLAN, 5),
    "search=true world=1024": ([*PLAN, "search=true", "world=1024"], 2),
}
AFTER_IMPORTS = """
import time
from automoe.config.compose import compose_config
from automoe.config.validate import validate
from automoe.planner.plan import make_plan
compose_config("config", [])  # Hydra's own imports
seconds = []
for _ in range(5):
    began = time.perf_counter()
    config = compose_config("dsv3_671b", [])
    make_plan(config, validate(config, None))
    seconds.append(time.perf_counter() - began)
print(sorted(seconds)[2])
"""


def run(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Seconds by the clock and of the CPU of ``automoe plan``; how many candidates a search timed."""
    command = [sys.executable, "-m", "automoe.plan", *arguments]
    command += [f"out={folder}"] if any(word.startswith("search=") for word in arguments) else []
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    after, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    timed = re.search(r"([\d,]+) candidates were timed", done.stdout)
    found = {"seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}
    return found | ({"candidates_timed": int(timed[1].replace(",", ""))} if timed else {})


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    after = subprocess.run(
        [sys.executable, "-c", AFTER_IMPORTS], capture_output=True, text=True, check=True, env=environment()
    )
    result: dict[str, Any] = {"commit": commit(), "cpu": cpu_model(), "cores": os.cpu_count()}
    result |= {"python": sys.version.split()[0], "torch": version("torch"), "load_average_before": os.getloadavg()[0]}
    result |= {"one plan of dsv3_671b after imports, seconds": round(float(after.stdout), 3), "commands": {}}
    for name, (arguments, times) in COMMANDS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = [run(arguments, Path(folder) / str(number)) for number in range(times)]
        result["commands"][name] = found[0] | {
            key: median(one[key] for one in found) for key in ("seconds", "cpu_seconds")
        }
        print(name, result["commands"][name], flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
