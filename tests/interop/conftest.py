"""What tests of private parts share. torchtitan 0.3's trainer imports under torch 2.14 and later (``make test-latest``)."""

from __future__ import annotations

import pytest
import torch

collect_ignore = [] if torch.__version__ >= torch.torch_version.TorchVersion("2.14") else ["test_torchtitan_trainer.py"]


@pytest.fixture(params=[f"torch-{torch.__version__}"])
def release(request: pytest.FixtureRequest) -> None:
    """Put the release into the name of every test."""
