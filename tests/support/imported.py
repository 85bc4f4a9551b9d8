"""Ranks of tests that begin with what their functions import, instead of importing it in each process.

Run as a file it is the pool's fork server, which imports more than that of a run.
"""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

from automoe.launch import fork_server
from automoe.launch.worker import end_process
from automoe.verify import pool
from automoe.verify.pool import RankPool, leave_world

MORE = (
    "hypothesis",
    "pytest",
    "automoe.planner.memory",
    "automoe.session",
    "automoe.verify.run",
    "automoe.verify.trajectory",
    "automoe.classes.model",
    "automoe.rl.engines",
    "transformers.generation.utils",
    "transformers.loss.loss_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)


SIZES = (4, 8, 16)
IN_SIGHT = 100_000  # objects that a look takes a hundredth of a second for


class ImportedRanks(RankPool):
    """A pool whose server imports ``MORE`` once, before it forks the ranks.

    It starts as many ranks as a case needs, of one of ``SIZES``: after an error all of them are started anew, which takes
    16 ranks longer than most cases that end in an error on purpose.
    """

    def __init__(self) -> None:
        super().__init__(SIZES[0])

    def shrink(self) -> None:
        """End the ranks, so that the next ones are as few as at the beginning."""
        self._end_ranks()
        self.max_ranks = SIZES[0]

    def start(self, world_size: int) -> None:
        if len(self._ranks) < world_size:
            self._end_ranks()
            self.max_ranks = next((size for size in SIZES if size >= world_size), SIZES[-1])
        with mock.patch.object(fork_server, "python", lambda: [sys.executable, "-P", __file__]):
            super().start(world_size)


def remember_caches() -> None:
    """Look once, before the ranks are forked, for the caches that each rank looks for first.

    A look touches every object of the imported modules, and so copies their memory into a fork.
    """
    freeze = gc.freeze

    def freeze_imported() -> None:
        from automoe.interop import torch_private

        look = torch_private.cached_functions
        known = look()

        def remembered() -> list[Any]:
            torch_private.cached_functions = look
            return known

        torch_private.cached_functions, gc.freeze = remembered, freeze
        freeze()

    gc.freeze = freeze_imported


def freeze_many(hidden: list[Any]) -> None:
    """Before a world begins: freeze what is in sight, if that is more than ``IN_SIGHT`` objects.

    A model that a module's tests share, with its mesh, would otherwise keep all that is imported meanwhile in sight.
    """
    if len(gc.get_objects()) > IN_SIGHT:
        gc.collect()
        _freeze(hidden)


def _freeze(hidden: list[Any]) -> None:
    from automoe.interop import torch_private

    hidden += torch_private.cached_functions()
    gc.freeze()


def leave_and_freeze(hidden: list[Any]) -> None:
    """``leave_world``, after which nothing that lives on is looked at again: imported modules above all.

    To leave a world is to look at every object that the garbage collector knows, which takes a process that has
    imported much longer than most cases. As long as somebody holds a mesh, all stays in sight.

    Args:
        hidden: caches of torch.distributed that are out of sight; those that this call hides are added.
    """
    from torch.distributed.device_mesh import DeviceMesh

    leave_world(hidden)
    if not any(type(thing) is DeviceMesh for thing in gc.get_objects()):
        _freeze(hidden)


if __name__ == "__main__":
    del sys.argv[1]  # the module that a launcher starts
    fork_server.IMPORTED += MORE
    gc.set_threshold(20_000, 20, 20)  # as the process of the tests: ranks make many objects and few cycles
    remember_caches()
    pool.leave_world = leave_and_freeze
    sys.path.append(str(Path(__file__).parents[2]))
    if find_spec("hydra"):  # which a GPU machine may lack
        import_module("hydra").compose = import_module("tests.support.configurations").quick_compose
    end_process(fork_server.main())
