"""Ranks of tests that begin with what their functions import, instead of importing it in each process.

Run as a file it is the pool's fork server, which imports more than that of a run.
"""

from __future__ import annotations

import sys
from unittest import mock

from automoe.launch import fork_server
from automoe.launch.worker import end_process
from automoe.verify.pool import RankPool

MORE = (
    "pytest",
    "automoe.verify.run",
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


class ImportedRanks(RankPool):
    """A pool whose server imports ``MORE`` once, before it forks the ranks."""

    def _start(self) -> None:
        with mock.patch.object(fork_server, "python", lambda: [sys.executable, "-P", __file__]):
            super()._start()


if __name__ == "__main__":
    del sys.argv[1]  # the module that a launcher starts
    fork_server.IMPORTED += MORE
    end_process(fork_server.main())
