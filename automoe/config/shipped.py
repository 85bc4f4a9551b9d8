"""Find ``conf/`` and ``recipes/``, and load recipes.

Both are folders, not modules: inside the installed package, or next to it in a checkout.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from automoe.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_ALIASES = {"finetune": "pretrain"}  # fine-tuning is the same loop over conversations


def shipped_folder(name: str) -> Path:
    """Return the folder ``conf`` or ``recipes``: inside the package, or next to it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def list_recipes() -> list[str]:
    """Return the names of the shipped recipes."""
    return sorted(path.stem for path in shipped_folder("recipes").glob("*.py"))


@contextmanager
def working_directory_last() -> Iterator[None]:
    """Append the working directory to ``sys.path`` within the context, to import a user's modules.

    At the end the directory is removed from ``sys.path``, unless a module was imported from it.
    """
    try:
        here = os.getcwd()
    except FileNotFoundError:  # it was removed: nothing can be found there
        yield
        return
    known = set(sys.modules)
    hidden = [name for name in ("kernels", "bitsandbytes") if sys.modules.get(name, "") is None]
    for name in hidden:  # by ``automoe.errors.without``; what the user named may import it
        del sys.modules[name]
    sys.path.append(here)
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None) or ""
            # In the directory itself, not in an environment somewhere below it.
            stem = os.path.join(here, *name.split("."))
            if file.startswith((f"{stem}.", os.path.join(stem, "__init__."))):
                break
        else:
            del sys.path[len(sys.path) - 1 - sys.path[::-1].index(here)]


def named_recipe(recipe: str) -> str:
    """Return the absolute path of ``./recipes/NAME.py`` for the recipe NAME, or NAME without such a file.

    Call this only for a name that the user typed, since the file is code.
    """
    file = Path("recipes", f"{recipe}.py")
    return str(file.absolute()) if recipe.isidentifier() and file.is_file() else recipe


def find_recipe(recipe: str) -> Path | str:
    """Return the file that ``recipe`` names, or the dotted name of an importable module.

    ``finetune`` is another name of the shipped ``pretrain``. ``my.py`` is a path.

    Raises:
        ConfigError: there is no such file or module.
    """
    is_file = recipe.endswith(".py")
    path = Path(recipe).expanduser().absolute() if is_file else _shipped_recipe(recipe)
    if (is_file or recipe.isidentifier()) and path.is_file():
        return path
    try:
        with working_directory_last():
            if not is_file and importlib.util.find_spec(recipe) is not None:
                return recipe
    except (ModuleNotFoundError, ValueError):  # a parent package is missing; an empty name
        pass
    raise ConfigError(
        "recipe",
        recipe,
        f"no such recipe (looked from {Path.cwd()})",
        f"Name one of {', '.join(list_recipes())}, a file such as my_recipe.py, or an importable module",
    )


def _shipped_recipe(name: str) -> Path:
    return shipped_folder("recipes") / f"{_ALIASES.get(name, name)}.py"


def source_of(recipe: Path | str) -> Path:
    """Return the source file of a recipe, given as a file or module name, without importing it."""
    if isinstance(recipe, Path):
        return recipe
    with working_directory_last():
        spec = importlib.util.find_spec(recipe)
    assert spec is not None and spec.origin is not None, recipe
    return Path(spec.origin)


def own_recipe(recipe: str) -> Path | str | None:
    """Return the file or module name of a user's recipe; None if ``recipe`` is a shipped one.

    Raises:
        ConfigError: there is no such file or module.
    """
    path = find_recipe(recipe)
    shipped = (
        isinstance(path, Path) and path.resolve().parent == shipped_folder("recipes").resolve()
    )
    return None if shipped else path


def load_recipe(recipe: str) -> ModuleType:
    """Import the recipe that ``recipe`` names; it defines ``main(config, shape, context)``.

    Raises:
        ConfigError: the recipe does not exist, or has no ``main``.
    """
    path = find_recipe(recipe)
    module = import_recipe(path)
    if not hasattr(module, "main"):
        raise ConfigError(
            "recipe", recipe, f"{path} has no main(config, shape, context)", "Define it"
        )
    return module


def import_recipe(path: Path | str) -> ModuleType:
    """Import a recipe from a file, or by the name of a module."""
    if isinstance(path, Path):
        return load_file(path)
    with working_directory_last():
        return importlib.import_module(path)


def load_file(path: str | Path) -> ModuleType:
    """Import a file as a module; it runs again only after its text has changed.

    The file's folder is appended to ``sys.path``, so the file can import its neighbours.

    Raises:
        ImportError: there is no such file.
    """
    path = Path(path).expanduser().absolute()
    if not path.is_file():
        raise ImportError(f"no such file: {path}")
    name = f"automoe_file_{path.stem}_{zlib.crc32(str(path).encode() + path.read_bytes()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a later import must not find a half-initialised module
        raise
    return module


def copy_recipe(name: str, to: str | None = None) -> Path:
    """Copy a shipped recipe to ``./recipes/NAME.py`` or to the file ``to``; return the new path.

    Raises:
        ConfigError: there is no such shipped recipe, or ``to`` exists or does not end in ``.py``.
    """
    if _shipped_recipe(name).stem not in list_recipes():
        raise ConfigError(
            "recipe", name, "no such shipped recipe", f"Available: {', '.join(list_recipes())}"
        )
    path = Path("recipes", f"{name}.py") if to is None else Path(to).expanduser()
    if path.suffix != ".py":
        raise ConfigError("recipe", path, "a recipe is a file that ends in .py", f"Name {path}.py")
    if path.exists() or path.is_symlink():
        raise ConfigError(
            "recipe", path, "this file exists, and a copy would overwrite it", "Name another file"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_shipped_recipe(name), path)
    return path
