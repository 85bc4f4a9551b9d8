"""Where ``conf/`` and ``recipes/`` are: folders, not modules, in the installed package or next to
it in a checkout."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zlib
from pathlib import Path
from types import ModuleType

from automoe.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
_ALIASES = {"finetune": "pretrain"}  # fine-tuning is the same loop over conversations


def shipped_folder(name: str) -> Path:
    """``conf`` or ``recipes``: the folder in the package if there is one, else the one next to the
    package."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def list_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in shipped_folder("recipes").glob("*.py"))


def find_recipe(recipe: str) -> Path | str:
    """The file that ``recipe`` names, or the dotted name of an importable module.

    ``pretrain`` is ``./recipes/pretrain.py`` if the working directory has one, else the shipped
    file. ``finetune`` is another name of the shipped ``pretrain``. ``my.py`` is a path.

    Raises:
        ConfigError: there is no such file or module.
    """
    if recipe.endswith(".py"):
        files = [Path(recipe).expanduser().absolute()]
    elif recipe.isidentifier():
        files = [Path.cwd() / "recipes" / f"{recipe}.py", _shipped_recipe(recipe)]
    else:
        files = []
    for file in files:
        if file.is_file():
            return file
    try:
        if not recipe.endswith(".py") and importlib.util.find_spec(recipe) is not None:
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
    """Return the source file of what ``find_recipe`` returned; a module is not imported for it."""
    if isinstance(recipe, Path):
        return recipe
    spec = importlib.util.find_spec(recipe)
    assert spec is not None and spec.origin is not None, recipe
    return Path(spec.origin)


def own_recipe(recipe: str) -> Path | str | None:
    """What ``recipe`` names if that is not a shipped recipe, else None. Raises ``ConfigError`` as
    ``find_recipe``."""
    found = find_recipe(recipe)
    shipped = (
        isinstance(found, Path) and found.resolve().parent == shipped_folder("recipes").resolve()
    )
    return None if shipped else found


def load_recipe(recipe: str) -> ModuleType:
    """The module that ``recipe`` names, with its ``main(config, shape, context)``.

    Raises:
        ConfigError: no such recipe, or one without ``main``.
    """
    found = find_recipe(recipe)
    module = import_recipe(found)
    if not hasattr(module, "main"):
        raise ConfigError(
            "recipe", recipe, f"{found} has no main(config, shape, context)", "Define it"
        )
    return module


def import_recipe(found: Path | str) -> ModuleType:
    """The module that ``find_recipe`` has found."""
    return importlib.import_module(found) if isinstance(found, str) else load_file(found)


def load_file(path: str | Path) -> ModuleType:
    """The module in a file, run once until its text changes; it can import files of its own folder.

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
        del sys.modules[name]  # half of a module is not a module
        raise
    return module


def copy_recipe(name: str, to: str | None = None) -> Path:
    """Copy a shipped recipe to ``./recipes/NAME.py``, or to the file ``to``; returns the new file's
    path.

    Raises:
        ConfigError: no such recipe, or the file exists already.
    """
    if _shipped_recipe(name).stem not in list_recipes():
        raise ConfigError(
            "recipe", name, "no such shipped recipe", f"There are: {', '.join(list_recipes())}"
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
