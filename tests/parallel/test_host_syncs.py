"""Which functions make the host wait for the device in a step, proven on a device without numbers."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

import automoe.kernels.launches
import automoe.kernels.stochastic_adamw
import automoe.parallel.runner
from automoe.comm.tokens import StepBatch
from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, MoEConfig, TrainConfig
from automoe.model.backend import BackendConfig
from automoe.optim.adamw import build_optimizer
from automoe.parallel.choices import layer_calls
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import build_decoder
from automoe.parallel.runner import SingleStageRunner
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs
from automoe.verify.fake_world import fake_world
from tests.support.gpu import conf_model
from tests.support.host_syncs import DEVICE, HostSyncFinder

ROWS, MICRO_ROWS, SEQ_LEN = 4, 2, 32
COEFFICIENTS = dict(seq_balance_coef=0.1, global_balance_coef=0.1, micro_batch_balance_coef=0.1, z_loss_coef=0.1)
# docs/parallelism.md: the statistics once a step, and the norm.
STATS = {"training/stats.py:gather_stats": 1, "training/step.py:optimizer_step": 1}


def places_of_a_step(config: Config) -> Counter[str]:
    """Where the host waits in a step as ``recipes.pretrain`` takes it.

    The model is as it is within FSDP, and not sharded: FSDP wants streams.
    """
    tokens = torch.randint(config.model.vocab_size, (ROWS, SEQ_LEN))
    doc_ids = (torch.arange(SEQ_LEN) >= SEQ_LEN // 2).long().expand(ROWS, SEQ_LEN)
    batch = StepBatch(tokens, tokens, torch.arange(SEQ_LEN).expand(ROWS, SEQ_LEN), doc_ids, 0, 0)
    with ExitStack() as stack:
        stack.enter_context(fake_world(0, 1))
        meshes = build_meshes(resolve_mesh(config.mesh, 1), torch.device("cpu"))
        backend = BackendConfig(calls=partial(layer_calls, config))
        part = build_decoder(config.model, config.moe, torch.bfloat16, backend=backend).train()
        optimizer = build_optimizer([part], config.optim)
        stack.enter_context(patch.object(automoe.parallel.runner, "defer_reduction"))  # FSDP's switches
        stack.enter_context(patch.object(torch.distributed, "all_reduce"))  # of one rank
        # A launch wants storage; the kernels themselves cannot wait for themselves.
        stack.enter_context(patch.object(automoe.kernels.launches, "products", MagicMock()))
        stack.enter_context(patch.object(automoe.kernels.stochastic_adamw, "update_part", MagicMock()))
        finder = stack.enter_context(HostSyncFinder())
        inputs, trained = prepare_inputs(batch, meshes, config, DEVICE)
        state = TrainState({0: part}, optimizer)
        stats = forward_backward(state, SingleStageRunner({0: part}, meshes, config, DEVICE), inputs, config)
        assert all(p.grad is not None for p in part.parameters())
        assert not optimizer_step(state, stats, trained, meshes, config).skipped
    return finder.places


def one_gpu(model: str, moe: dict[str, Any] | None = None, **parts: Any) -> Config:
    config = Config(
        mesh=MeshConfig(dp_shard=1),
        model=conf_model(model),
        moe=MoEConfig(overlap_shared_experts=False, **COEFFICIENTS, **(moe or {})),  # that wants streams too
        train=TrainConfig(seq_len=SEQ_LEN, global_batch_size=ROWS, micro_batch_size=MICRO_ROWS),
    )
    for name, value in parts.items():
        config = replace(config, **{name: replace(getattr(config, name), **value)})
    return config


CASES = {
    "dsv3": one_gpu("small_dsv3"),
    "triton": one_gpu("small_dsv3", {"experts": "triton"}),
    "stochastic": one_gpu("small_dsv3", optim={"master_weights": "stochastic"}),
}
MORE_CASES = {
    "padded": one_gpu("small_dsv3", {"capacity_factor": 1.0, "pad_to_capacity": True}, data={"document_mask": False}),
    "dense": one_gpu("small_llama"),
    "recomputed": one_gpu("small_dsv3", {"router_jitter": 0.1}, parallel={"recompute": "full"}),
    "qwen3": one_gpu("small_qwen3_moe", {"gate": "zipf"}),
    "gpt_oss": one_gpu("small_gpt_oss"),
    "qwen3_next": one_gpu("small_qwen3_next", data={"document_mask": False}),
}


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(config, id=name) for name, config in CASES.items()),
        *(pytest.param(config, id=name, marks=pytest.mark.exhaustive) for name, config in MORE_CASES.items()),
    ],
)
def test_a_step_waits_for_its_statistics_and_its_norm(config: Config) -> None:
    assert places_of_a_step(config) == STATS


def test_dropping_waits_once_a_layer_and_micro_batch() -> None:
    config = one_gpu("small_dsv3", {"capacity_factor": 1.0})
    layers = config.model.num_layers - config.model.first_k_dense
    dropped = {"moe/dispatch/base.py:run_choices": layers * ROWS // MICRO_ROWS}
    assert places_of_a_step(config) == STATS | dropped


def test_waits_of_an_optimizer_are_found() -> None:
    """AdamW that is not fused asks for its step number, once a parameter."""
    plain = partial(torch.optim.AdamW, foreach=False)
    with patch.object(torch.optim, "AdamW", lambda *groups, fused, **options: plain(*groups, **options)):
        places = places_of_a_step(CASES["dsv3"])
    assert places.keys() == STATS.keys() and places["training/step.py:optimizer_step"] > 50, places


def test_every_kind_of_wait_is_found() -> None:
    x, here = torch.zeros(3, device=DEVICE), torch.zeros(3)
    waits = (
        lambda: float(x.sum()),
        lambda: bool((x > 0).any()),
        lambda: x.tolist(),
        lambda: x.cpu(),
        lambda: here.to(DEVICE),
        lambda: x.copy_(here),
        lambda: here.clone().copy_(x),
        lambda: torch.tensor([1, 2], device=DEVICE),
    )
    for wait in waits:
        with HostSyncFinder() as finder:
            wait()
        assert finder.places == {"elsewhere": 1}, wait
    # Results whose size the device alone knows cannot slip through: torch has none for them without numbers.
    refused = r"data-independent implementation does not exist|without output_size"
    for unknown in (lambda: x.nonzero(), lambda: x[x > 0], lambda: x.repeat_interleave(x.long())):
        with pytest.raises(RuntimeError, match=refused), HostSyncFinder():
            unknown()
    with HostSyncFinder() as finder:
        here.to(DEVICE, non_blocking=True), x + 1, x.sort(), x.where(x > 0, 0)
    assert not finder.places
