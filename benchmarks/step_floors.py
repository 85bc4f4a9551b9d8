"""What a step of ``train_step.py`` should take on one GPU, part by part, from operations, bytes and assumed rates.

Operations come from shapes. Bytes of element-wise operators are counted while the step's model runs on the meta device.
The rates are assumptions, written with each part; nothing runs on a GPU.

    python benchmarks/step_floors.py    # anywhere, half a minute: the step tables of NOTES.md
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # as in gpu_floors

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import checkout  # noqa: F401
import torch
from gpu_floors import BANDWIDTH, MEMORY, META, Traffic, traffic
from measuring import PEAK
from train_step import cases

from automoe.config.schema import Config
from automoe.model.flops import train_flops_per_token
from automoe.model.loss import chunk_loss
from automoe.model.params import count_params, layer_params
from automoe.model.runtime import Runtime
from automoe.moe.communicators import Communicator
from automoe.moe.tokens import TokenCounts
from automoe.parallel.fake_world import fake_world
from automoe.parallel.parallelize import build_decoder

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
DENSE = 650e12  # FLOP/s: 0.66 of the peak
SCORES = 400e12  # of attention
EXPERTS = 400e12  # of a MoE layer without its router: what the benchmark of the layer is to show first
REACHED = 0.85  # of the bandwidth, by kernels that do little else than move
PARTS = {  # of a model's parameters -> of a step
    "attention": "attention projections",
    "dense_ffn": "dense and shared FFN",
    "shared_experts": "dense and shared FFN",
    "routed_experts": "experts",
}
# Bytes a parameter: what AdamW reads and writes (weight and two moments twice, gradient once); the norm's reading, and
# clipping. All in bfloat16.
ADAMW, NORM_AND_CLIP = 14, 6


@dataclass(frozen=True)
class Part:
    """Seconds of it are those of its operations and of its bytes, one after the other."""

    name: str
    flops: float = 0.0
    rate: float = DENSE
    bytes: float = 0.0

    def seconds(self, gpu: str) -> float:
        return self.flops / self.rate + self.bytes / (REACHED * BANDWIDTH[gpu])


class Elementwise(Traffic):
    """Counts operators that do not multiply matrices, and no launched kernels: the rates of products are theirs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in PRODUCTS:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def launch(self, *_tensors: Any, **_flags: Any) -> None:
        pass


class _Scores(torch.autograd.Function):
    """In place of attention, whose bytes belong to its rate: outputs of the right shape."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx, _grad):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def _compiled_chunk(
    x: torch.Tensor, weight: torch.Tensor, _labels: torch.Tensor, _first_id: int, _vocab: Communicator, _wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The passes over the logits of a chunk of the loss that ``train.compile`` leaves: maximum, sum, gradient."""
    logits = x @ weight.T
    return logits.amax(-1).sum() + logits.sum(-1).sum(), logits.neg()


def elementwise_bytes(config: Config) -> int:
    """Of one micro-batch, forward and backward. Of what ``train.compile`` fuses, the loss alone is counted fused."""
    train = config.train
    moe = replace(config.moe, experts="triton", overlap_shared_experts=False)  # which wants a stream
    loss = _compiled_chunk if train.compile else chunk_loss
    runtime = Runtime(attend=lambda q, k, v, _mask, _scale, _sinks=None: _Scores.apply(q, k, v), chunk_loss=loss)
    part = build_decoder(config.model, moe, torch.bfloat16, runtime=runtime).train()
    for _, layer in part.moe_layers():
        layer.router.float()
    index = torch.empty(train.micro_batch_size, train.seq_len, dtype=torch.int64, device=META)
    counts = TokenCounts(*torch.empty(3, dtype=torch.int64, device=META))
    other_inputs = dict(positions=index, index=index, row_ids=index, not_padding=index >= 0)
    with fake_world(0, 1), traffic(Elementwise) as counter:
        part(index, labels=index, token_counts=counts, **other_inputs).sum().backward()
    return counter.bytes


def step_parts(config: Config) -> list[Part]:
    """Of a step whose rows are one micro-batch, without FSDP."""
    model, train = config.model, config.train
    assert train.micro_batch_size == train.global_batch_size
    tokens, parameters = train.global_batch_size * train.seq_len, count_params(model).total
    active: Counter[str] = Counter()
    for layer in range(model.num_layers):
        for param in layer_params(model, layer):
            if param.multiplies and param.part in PARTS:
                routed = model.num_experts_per_token / model.num_experts if param.expert else 1.0
                active[PARTS[param.part]] += param.numel * routed
    active["head"] = model.hidden_size * model.vocab_size
    flops = {name: 6.0 * tokens * count for name, count in active.items()}
    scores = tokens * train_flops_per_token(model, train.seq_len).causal - sum(flops.values())
    return [
        *(Part(name, count, EXPERTS if name == "experts" else DENSE) for name, count in flops.items()),
        Part("attention scores", scores, SCORES),
        Part("element-wise operators", bytes=elementwise_bytes(config)),
        Part("AdamW", bytes=ADAMW * parameters),
        Part("gradient norm, clipping", bytes=NORM_AND_CLIP * parameters),
    ]


def predicted_mfu(parts: list[Part], gpu: str) -> float:
    """Model operations, causal, over the peak and the sum of all parts' seconds."""
    return sum(part.flops for part in parts) / PEAK / sum(part.seconds(gpu) for part in parts)


def print_step(gpu: str, name: str, config: Config, planned: float) -> None:
    """One slice: what it is, then its parts."""
    model, parts = config.model, step_parts(config)
    print(
        f"\n{gpu}: {name}, {model.num_layers} layers, {model.num_experts} experts, {count_params(model).total / 1e9:.2f} B "
        f"parameters,\n{config.train.global_batch_size} rows of {config.train.seq_len}, {planned / 2**30:.0f} GiB planned"
    )
    print(f"{'':26}{'TFLOP':>8}{'TFLOPS':>8}{'GB':>8}{'ms':>8}")
    for part in parts:
        rate = f"{part.rate / 1e12:8.0f}" if part.flops else " " * 8
        ms = 1e3 * part.seconds(gpu)
        print(f"{part.name:26}{part.flops / 1e12:8.0f}{rate}{part.bytes / 1e9:8.0f}{ms:8.0f}")
    compiled = step_parts(replace(config, train=replace(config.train, compile=True)))
    for which, made in (("step", parts), ("step, train.compile", compiled)):
        flops, moved = sum(part.flops for part in made) / 1e12, sum(part.bytes for part in made) / 1e9
        ms = 1e3 * sum(part.seconds(gpu) for part in made)
        print(f"{which:26}{flops:8.0f}{'':8}{moved:8.0f}{ms:8.0f}   MFU {predicted_mfu(made, gpu):.1%}")


if __name__ == "__main__":
    for gpu, memory in MEMORY.items():
        for name, case in cases().items():
            print_step(gpu, name, *case.slice_for(memory))
