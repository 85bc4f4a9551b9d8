"""What a new user waits for: each of the first commands in a fresh clone, with PyPI alone, and what pip downloads.

pip gets neither local wheels nor configuration, and its cache is off. Bytes are what pip's log says of each file.
Results of several Pythons stand beside each other in benchmarks/results/install.json.

    python benchmarks/install.py python3.12              # make setup, train, test; then pip install . and automoe demo
    python benchmarks/install.py python3.12 setup train  # some of them
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import HERE, cpu_model

OUT = HERE / "results" / "install.json"
COMMANDS = {
    "setup": "make setup PYTHON={python}",
    "train": "make train PYTHON={python}",
    "test": "make test PYTHON={python}",
    "pip": "{python} -m venv own && own/bin/python -m pip install --quiet .",
    "demo": "own/bin/automoe demo",
}
UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}


def measure(command: str, clone: Path) -> dict[str, Any]:
    """Run one command in the clone, and say what it took; a command that fails ends the measurement."""
    log = clone.with_name("pip.log")  # what lies in the clone is taken for a file of the project
    log.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_CACHE_DIR": "1", "PIP_LOG": str(log)}
    env |= {"XDG_CACHE_HOME": str(clone.with_name("cache"))}
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, shell=True, cwd=clone, env=env, stdin=subprocess.DEVNULL)
    after, load = resource.getrusage(resource.RUSAGE_CHILDREN), os.getloadavg()
    seconds = time.monotonic() - started
    if done.returncode:
        raise SystemExit(f"{command} left with {done.returncode}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    text = log.read_text() if log.exists() else ""
    files = re.findall(r"Downloading (\S+\.(?:whl|gz|zip))(?:\.metadata)? \(([\d.]+) (\w+)\)", text)
    size = sum(float(number) * UNITS[unit] for _, number, unit in files)
    return {
        "command": command.replace(sys.executable, "python"),
        "seconds": round(seconds),
        "cpu_seconds": round(cpu),
        "megabytes_downloaded": round(size / 1e6),
        "files_downloaded": len(files),
        "load_average_after": round(load[0], 1),
    }


def main() -> None:
    python, *names = sys.argv[1:]
    version = subprocess.run([python, "-c", "import platform; print(platform.python_version())"], capture_output=True)
    with tempfile.TemporaryDirectory(prefix="automoe_install_") as folder:
        clone = Path(folder) / "automoe"
        subprocess.run(["git", "clone", "--quiet", HERE.parent, clone], check=True)
        for name in names or COMMANDS:
            took = measure(COMMANDS[name].format(python=python), clone)
            took["command"] = took["command"].replace(python, "python")
            report = (
                json.loads(OUT.read_text()) if OUT.exists() else {"reading": "seconds depend on the load", "runs": {}}
            )
            report |= {"cpu": cpu_model(), "cores": len(os.sched_getaffinity(0))}
            head = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
            took["commit"] = head.stdout.strip()
            report["runs"].setdefault(version.stdout.decode().strip(), {})[name] = took
            OUT.write_text(json.dumps(report, indent=1) + "\n")
            print(name, took, flush=True)


if __name__ == "__main__":
    main()
