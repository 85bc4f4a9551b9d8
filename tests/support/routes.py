"""Natural routes of a model, written as engines write them, and read again into rows."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from automoe.config.schema import ModelConfig
from automoe.data.loader import StepBatch
from automoe.rl.routes import read_sglang, read_vllm


def all_layers(lines_TLK: torch.Tensor, model: ModelConfig) -> np.ndarray:
    """Lines of the MoE layers as an engine has them: dense layers as zeros."""
    lines = torch.zeros(len(lines_TLK), model.num_layers, lines_TLK.shape[2], dtype=torch.int64)
    lines[:, [layer for layer in model.moe_layers if layer < model.num_layers]] = lines_TLK
    return lines.numpy()


def as_vllm(lines_TLK: torch.Tensor, model: ModelConfig, start: int = 0) -> np.ndarray:
    return all_layers(lines_TLK[start:], model).astype(np.uint8 if model.num_experts <= 256 else np.uint16)


def as_sglang(lines_TLK: torch.Tensor, model: ModelConfig, start: int = 0) -> dict[str, Any]:
    raw = all_layers(lines_TLK[start:], model).astype("<i4").tobytes()
    return {"routed_experts": base64.b64encode(raw).decode(), "routed_experts_start_len": start}


def through_engines(choices: torch.Tensor, batch: StepBatch, model: ModelConfig) -> torch.Tensor:
    """Return ``forced_ids`` [B, S, L, 1, K] of each document, by turns through both formats, some without a beginning.

    Args:
        choices: [B, S, MoE layers, 2, K] that a run recorded.
    """
    layers = model.num_moe_layers - model.num_mtp_layers
    forced = torch.full((*batch.tokens.shape, layers, 1, choices.shape[-1]), -1, dtype=torch.int16)
    for row, doc_ids in enumerate(batch.doc_ids):
        for document in range(int(doc_ids.max()) + 1):
            here = (doc_ids == document).nonzero().flatten()
            lines, start = choices[row, here, :layers, 0], min(row % 3, len(here))
            if (row + document) % 2:
                read = read_vllm(as_vllm(lines, model, start), model, len(here) + 1, start)
            else:
                read = read_sglang(as_sglang(lines, model, start), model, len(here) + 1)
            forced[row, here, :, 0] = read
    return forced
