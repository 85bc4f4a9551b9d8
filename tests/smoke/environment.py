"""Make the environment of a smoke test, keep it between runs, and print the path of its Python.

    python3 tests/smoke/environment.py floor     # the oldest versions, those of constraints-floor.txt
    python3 tests/smoke/environment.py latest    # the newest released versions, made anew every week
    python3 tests/smoke/environment.py mlx       # mlx-lm alone, its newest release, made anew every week

Environments lie in AUTOMOE_ENVS, by default in the user's cache folder, not in the checkout: a fresh clone finds them.
The folder's name has a hash of all that decides what is installed. An environment gets that name when it is complete,
and goes when nobody has used it for two weeks. The package itself is not installed: tests run in the checkout.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTED_WITH = ("pytest", "hypothesis", "psutil", "packaging", "datasets")  # what the tests themselves import
# Of these ``latest`` has the newest releases, also where another package declares that it takes older ones alone
# (torchtitan 0.3: datasets before 4.8).
NEWEST = ("torch", "transformers", "datasets")
MLX = ["mlx-lm", "mlx[cpu]"]  # mlx-lm, and a backend for machines that are no Mac
KEPT_DAYS = 14


def requirements() -> list[str]:
    """Return what the package declares, and of its extra ``dev`` what the smoke tests import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    return project["dependencies"] + [line for line in dev if re.split(r"[^\w-]", line)[0] in TESTED_WITH]


def folder_name(name: str, needed: list[str], constraints: str) -> str:
    """Return a name that differs whenever something else is to be installed; what is newest also has the week in it."""
    decides = [sys.version, *needed, *NEWEST, constraints]
    if name != "floor":
        decides.append(datetime.date.today().strftime("%G-%V"))
    return f"{name}-{hashlib.sha256(chr(0).join(decides).encode()).hexdigest()[:12]}"


def make(folder: Path, needed: list[str], constraints: list[str], newest: tuple[str, ...] = ()) -> None:
    """Install into a folder of another name and rename it.

    Args:
        newest: packages to upgrade afterwards; pip only warns of those that declare to take older ones alone.
    """
    size = "0.5 GB" if needed == MLX else "6 GB"
    print(f"Installing into {folder}, {size}: one or two minutes", file=sys.stderr)
    temporary = folder.with_suffix(".part")
    shutil.rmtree(temporary, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", temporary], check=True)
    pip = [temporary / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *constraints, *needed], check=True, stdout=sys.stderr)
    if newest:
        subprocess.run([*pip, "--upgrade", *newest], check=True, stdout=sys.stderr)
    temporary.rename(folder)


def remove_unused(folders: Path) -> None:
    for folder in folders.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
            shutil.rmtree(folder)


def main() -> None:
    [name] = sys.argv[1:]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = Path(os.environ.get("AUTOMOE_ENVS") or cache / "automoe" / "envs")
    folders.mkdir(parents=True, exist_ok=True)
    pinned = {"floor": ROOT / "constraints-floor.txt", "latest": None, "mlx": None}[name]
    needed = MLX if name == "mlx" else requirements()
    folder = folders / folder_name(name, needed, pinned.read_text() if pinned else "")
    with (folders / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs at once one installs and the other waits
        if not folder.exists():
            if pinned:
                make(folder, needed, ["--constraint", str(pinned)])
            else:
                make(folder, needed, [], () if name == "mlx" else NEWEST)
        os.utime(folder)
        remove_unused(folders)
    print(folder / "bin" / "python")


if __name__ == "__main__":
    main()
