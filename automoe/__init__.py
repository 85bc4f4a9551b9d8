"""automoe: native-PyTorch training of mixture-of-experts language models on any mesh."""

import sys


def _leave_working_directory() -> None:
    """Remove the working directory from ``sys.path`` under ``python -m automoe.NAME``.

    Python puts this directory first, so a file in it, for example from a downloaded model, could be
    imported instead of a package of the same name. The call must come before all other imports.
    """
    if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
        word = sys.orig_argv[-len(sys.argv)]  # before the arguments: NAME, or -mNAME
        name = word.partition("m")[2] if word.startswith("-") else word
        if name.partition(".")[0] == "automoe":
            del sys.path[0]


_leave_working_directory()

import importlib  # noqa: E402  (only from here on is it Python's own)

TYPE_CHECKING = False  # type checkers take it for True
if TYPE_CHECKING:
    from automoe import session as session
    from automoe.classes.expert_parallel import ExpertParallel as ExpertParallel
    from automoe.hf.api import from_hf as from_hf
    from automoe.hf.write import to_hf as to_hf
    from automoe.launch.from_python import train as train

__version__ = "0.27.0"
__all__ = ["ExpertParallel", "from_hf", "session", "to_hf", "train"]
_MODULES = {
    "ExpertParallel": "automoe.classes.expert_parallel",
    "from_hf": "automoe.hf.api",
    "to_hf": "automoe.hf.write",
}


def __getattr__(name: str) -> object:
    # Attributes are imported lazily: entry points must start before torch is imported.
    if name == "train":
        return importlib.import_module("automoe.train")  # this module is callable
    if name == "session":
        return importlib.import_module("automoe.session")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
