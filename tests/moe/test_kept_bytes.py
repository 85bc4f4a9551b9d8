"""How little a MoE layer keeps for its backward pass, counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import automoe.kernels.launches as kernels
from automoe.comm.tokens import Tokens
from automoe.config.schema import ModelConfig, MoEConfig
from automoe.kernels.tiling import HOPPER
from automoe.model.backend import BackendConfig
from automoe.model.block import Latent
from automoe.moe.layer import MoE
from tests.support.gpu import conf_model


class NoKernels:
    """The module of Triton kernels, of which none is launched."""

    def __getattr__(self, _name: str) -> NoKernels:
        return self

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return lambda *_operands, **_flags: None


def saved_bytes(model: ModelConfig, experts: str, rows: int = 2, seq_len: int = 4096) -> float:
    """Bytes a token that a layer without shared experts keeps, its input included."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            moe = MoEConfig(experts=experts, seq_balance_coef=1e-4)  # type: ignore[arg-type]
            latent = Latent(model, BackendConfig())
            layer = MoE(model, moe, model.first_k_dense, None, BackendConfig(), latent)  # type: ignore[arg-type]
            layer.router.float()  # as within FSDP
            x = torch.empty(rows, seq_len, model.hidden_size, requires_grad=True)
    finally:
        torch.set_default_dtype(default)
    index = torch.empty(rows, seq_len, dtype=torch.int64, device="meta")
    weights = {parameter.untyped_storage()._cdata for parameter in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, Tokens(index, index, None, index[0, 0], row_ids=index, not_padding=index >= 0))
    return sum(storage.nbytes() for at, storage in kept.items() if at not in weights) / (rows * seq_len)


@pytest.mark.parametrize("experts", ["grouped_mm", "triton"])
@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "moonlight_16b_a3b", "dsv3_671b", "mixtral_8x7b"])
def test_a_layer_keeps_little_beside_its_rows_and_gate_and_up(
    name: str, experts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ideal: the row itself, and gate and up of its K choices, in two-byte numbers."""
    monkeypatch.setattr(kernels, "products", NoKernels())
    monkeypatch.setattr(kernels, "blocks_of", lambda product, _dtype, _aligned: HOPPER[product])
    model = conf_model(name)
    ideal = 2 * model.hidden_size + 4 * model.num_experts_per_token * model.moe_intermediate_size
    assert ideal <= saved_bytes(model, experts) <= 1.03 * ideal
