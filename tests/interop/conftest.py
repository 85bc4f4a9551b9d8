"""torchtitan 0.3's trainer imports under torch 2.14 and later: its tests are those of ``make test-latest``."""

from __future__ import annotations

import torch

collect_ignore = [] if torch.__version__ >= torch.torch_version.TorchVersion("2.14") else ["test_torchtitan_trainer.py"]
