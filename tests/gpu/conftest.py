"""Every test here runs twice: small on the CPU in the usual suite, in full on a GPU with ``-m gpu``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.gpu import one_rank


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The only rank's device, within an initialised world of one; float32 products are not rounded to TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with one_rank(request.param) as device:
        yield device
    torch.set_float32_matmul_precision(before)
