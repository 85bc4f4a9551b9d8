"""Routing of a training step recorded to a directory, or repeated from one: what ``moe.record_routing`` and
``moe.replay_routing`` ask for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from automoe.config.schema import Config
from automoe.data.batch import StepBatch
from automoe.model.decoder import Decoder
from automoe.moe.replay import RoutingWriter, read_routing


def record_routing(config: Config, parts: Iterable[Decoder], step: int) -> AbstractContextManager[object]:
    """To be entered around a step's forward and backward; writes this rank's choices where that is asked for."""
    if config.moe.record_routing is None:
        return nullcontext()
    return RoutingWriter(list(parts), config.moe.record_routing, step, dist.get_rank())


def replayed_routing(config: Config, batch: StepBatch, step: int) -> torch.Tensor | None:
    """[rows of this rank, R, L, 2, K] recorded choices for ``prepare_inputs``; None unless that is asked for.

    Raises:
        DataError: they were not recorded, or with another model or other rows.
    """
    model = config.model
    if config.moe.replay_routing is None:
        return None
    num_rows, seq_len = batch.tokens.shape
    num_layers = model.num_layers - model.first_k_dense
    return read_routing(
        config.moe.replay_routing,
        step,
        batch.first_row,
        num_rows,
        seq_len,
        num_layers,
        model.num_experts_per_token,
    )
