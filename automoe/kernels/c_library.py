"""The C sources of this package, compiled by this machine's compiler for its processor. No torch."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from automoe.errors import BackendError
from automoe.storage.cache import default_cache_dir, open_entry


class Source(NamedTuple):
    """A file of this folder, the setting that asks for it, and the one for machines without a compiler."""

    file: str
    setting: str
    instead: str


ATTENTION = Source("attention.c", "kernels.attention=c", "kernels.attention=sdpa")
SOURCES = Path(__file__).parent
_LIBRARY = "library.so"
_NAMES = ("cc", "gcc", "clang")


@cache
def load_library(source: Source) -> ctypes.CDLL:
    """The functions of ``source``; compiled once for each compiler and kind of processor.

    Raises:
        BackendError: there is no compiler, it fails, or the cache cannot be written or belongs to another user.
    """
    setting, remedy = source.setting, f"set {source.instead}"
    command = [*find_compiler(setting, "CC", _NAMES, remedy), *_flags()]
    code = (SOURCES / source.file).read_bytes()
    made_by = _output([*command, "--version"], setting, remedy)
    parts = code, shlex.join(command).encode(), made_by.encode(), _processor().encode()
    digest = sha256(b"\0".join(sha256(part).digest() for part in parts)).hexdigest()[:32]
    entry = default_cache_dir() / "kernels" / digest
    write = partial(_compile, [*command, str(SOURCES / source.file), "-lm"], setting, remedy)
    what, again = f"what {setting} compiles", "it is compiled again"
    open_entry(entry, write, what=what, again=again, error_type=BackendError)
    owner = entry.stat().st_uid
    if owner not in (os.geteuid(), 0):
        raise BackendError(
            f"{entry}: belongs to user {owner}, and {setting} runs code from it as user {os.geteuid()}. Set "
            "XDG_CACHE_HOME to a directory of your own"
        )
    return _load(entry / _LIBRARY, command, setting, remedy)


def _load(library: Path, command: list[str], setting: str, remedy: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BackendError(
            f"{setting}: what {shlex.join(command)} made cannot be loaded ({error}). Set CC to another compiler, "
            f"XDG_CACHE_HOME to a disk that programs may run from, or {remedy}"
        ) from None


def find_compiler(key: str, variable: str, names: Sequence[str], remedy: str) -> list[str]:
    """The words of the environment's ``variable``, or the first of ``names`` on the PATH; ``key`` asks for it.

    Raises:
        BackendError: there is none, or the variable is no command.
    """
    given = os.environ.get(variable, "")
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise BackendError(f"{key}: {variable}={given} is no command ({error}). Correct it, or {remedy}") from None
    names = words[:1] or names
    found = next((name for name in names if shutil.which(name)), None)
    if found is None:
        raise BackendError(
            f"{key} compiles with {' or '.join(names)}, and there is none on the PATH. Install it, set {variable} to "
            f"another compiler, or {remedy}"
        )
    return words or [found]


def _flags() -> list[str]:
    processor = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    # Against what $CC may bring, or a compiler does by itself: reordered sums break exp, and NaN would be hidden.
    exact = ["-fno-fast-math", "-fno-unsafe-math-optimizations", "-fno-associative-math", "-fno-finite-math-only"]
    return ["-O3", processor, *exact, "-std=gnu11", "-fPIC", "-shared"]


def _processor() -> str:
    """What ``native`` stands for here, in words: the model and the instructions that it has."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    wanted = ("model", "model name", "flags", "Features", "CPU part", "isa")
    return "\n".join(line for line in first.splitlines() if line.split(":")[0].strip() in wanted)


def _compile(command: list[str], setting: str, remedy: str, folder: Path) -> dict[str, Any]:
    _output([*command, "-o", str(folder / _LIBRARY)], setting, remedy)
    _load(folder / _LIBRARY, command, setting, remedy)  # before it is kept
    return {"command": shlex.join(command)}


def _output(command: list[str], setting: str, remedy: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BackendError(f"{setting}: {command[0]} cannot be run ({error.strerror}); {remedy}") from error
    if done.returncode != 0:
        raise BackendError(
            f"{setting}: {shlex.join(command)} failed with status {done.returncode}:\n{done.stderr.strip()[-2000:]}\n"
            f"Set CC to another compiler, or {remedy}"
        )
    return done.stdout
