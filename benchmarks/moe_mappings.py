"""What every rank of ``moe_layer.py`` does: one MoE layer under many mappings, checked, then timed in turns.

Shapes: T tokens of each rank, K top-k, E experts, H hidden, I expert width, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from automoe.config.mesh_shape import resolve_mesh
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig
from automoe.model.init import initialize
from automoe.moe.layer import MoE
from automoe.moe.tokens import Tokens
from automoe.parallel.expert import apply_expert_parallel
from automoe.parallel.mesh import build_meshes
from automoe.parallel.parallelize import allocate, build_decoder, build_runtime
from tests.support.communication import CommunicationLog
from tests.support.host_syncs import HostReads

RANKS = 8
# The layer sees T tokens of its own on every rank whatever attention's axes are; after sequence-parallel
# attention that holds for tp ranks too, so ep lies over tp as over dp.
MAPPINGS: dict[str, dict[str, int]] = {
    "ep8": {"dp_shard": 8, "ep": 8},
    "ep8 over tp4 dp2": {"tp": 4, "dp_shard": 2, "ep": 8},
    "ep2 etp4, tied to tp4 dp2": {"tp": 4, "dp_shard": 2, "ep": 2, "etp": 4},
    "ep4 etp2": {"dp_shard": 8, "ep": 4, "etp": 2},
    "ep2 ep_shard4": {"dp_shard": 8, "ep": 2},
}
DISPATCHERS = ("alltoall", "allgather")


@dataclass(frozen=True)
class Size:
    tokens: int  # T, of each rank
    hidden: int
    width: int
    experts: int
    top_k: int


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, float]:
    """(wall, CPU) seconds of ``work``; on CUDA wall is between two events and CPU is 0."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3, 0.0
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


class Contender:
    """One MoE layer under one mapping and dispatcher. Expert weights are whole over ep_shard, as within a step."""

    def __init__(self, size: Size, mesh: dict[str, int] | None, dispatcher: str, device: torch.device) -> None:
        model = ModelConfig(
            family="mixtral",
            hidden_size=size.hidden,
            num_layers=1,
            num_experts=size.experts,
            num_experts_per_token=size.top_k,
            moe_intermediate_size=size.width,
        )
        moe = MoEConfig(dispatcher=dispatcher, gate="balanced")  # type: ignore[arg-type]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        meshes = None if mesh is None else build_meshes(resolve_mesh(MeshConfig(**mesh), None), device)
        runtime = build_runtime(Config(model=model, moe=moe), meshes)
        part = build_decoder(model, moe, dtype, range(1), runtime, embeds=False, predicts=False)
        if meshes is not None:
            apply_expert_parallel(part, meshes)
        allocate({0: part}, device)
        initialize(part, 0.05, seed=0)
        self.part = part  # its layer alone would not keep it alive
        self.layer: MoE = next(layer for _, layer in part.moe_layers())
        self.device = device
        generator = torch.Generator().manual_seed(dist.get_rank())
        x, self.upstream = (
            torch.randn(1, size.tokens, size.hidden, generator=generator).to(device, dtype) for _ in range(2)
        )
        self.x = x.requires_grad_()
        index = torch.arange(size.tokens, device=device).unsqueeze(0)
        count = torch.tensor(RANKS * size.tokens, device=device)
        self.rows = Tokens(index, index, None, count)
        self.y = x

    def forward(self) -> None:
        self.y = self.layer(self.x, self.rows)
        if isinstance(self.y, AsyncCollectiveTensor):
            self.y.trigger_wait()  # the next layer would

    def backward(self) -> None:
        self.y.backward(self.upstream)

    def forget(self) -> None:
        self.part.zero_grad(set_to_none=True)
        self.x.grad, self.y = None, self.x

    def answer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and gradient of the tokens, both [1, T, H]."""
        self.forward()
        self.backward()
        answer = self.y.detach().clone(), self.x.grad.clone()
        self.forget()
        return answer

    def time(self) -> dict[str, tuple[float, float]]:
        dist.barrier()
        times = {"forward": timed(self.device, self.forward), "backward": timed(self.device, self.backward)}
        self.forget()
        return times


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def sent_bytes(contender: Contender) -> tuple[int, int]:
    """Bytes of activations that this rank sends in a forward pass, and how often its dispatch waits for sizes."""
    with CommunicationLog() as log, HostReads() as reads:
        contender.forward()
    contender.forget()
    return sum(m.sent for m in log.messages if m.dtype.is_floating_point), reads.count


def measure(size: Size, rounds: int, device_type: str = "cpu", spoil: str = "") -> dict[str, Any]:
    """This rank's differences from the reference, bytes, syncs and (wall, CPU) seconds of every contender.

    Contenders take turns, so that noise of the machine meets all of them.

    Args:
        spoil: name of a contender whose weights are changed, to see that the check finds it.
    """
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    contenders = {
        f"{mapping} | {dispatcher}": Contender(size, mesh, dispatcher, device)
        for mapping, mesh in MAPPINGS.items()
        for dispatcher in DISPATCHERS
    }
    if spoil:
        with torch.no_grad():
            contenders[spoil].layer.experts.w_down.mul_(1.001)
    reference = Contender(size, None, "alltoall", device).answer()
    result: dict[str, Any] = {
        "differences": {
            name: max(map(relative, contender.answer(), reference)) for name, contender in contenders.items()
        }
    }
    if spoil:
        return result
    measured = {name: sent_bytes(contender) for name, contender in contenders.items()}
    result["sent_bytes"] = {name: sent for name, (sent, _) in measured.items()}
    result["host_syncs"] = {name: syncs for name, (_, syncs) in measured.items()}
    for contender in contenders.values():
        contender.time()
    result["times"] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            result["times"][name].append(contender.time())
    return result
