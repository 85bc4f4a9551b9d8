"""Who trains in ``train_step.py``: one model, one set of first weights, automoe's own step, another model code in it.

Every contender has the same optimizer, gradient norm and micro-batches, and the same rules of memory: weights, moments
and gradients in bfloat16 (``optim.master_weights=stochastic``, ``optim.moments=bfloat16``), 8 bytes a parameter, and FSDP2
where micro-batches are summed. What differs is the model. Letters: S positions, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from contenders import our_name, random_batch, transformers_model
from kernel_peers import Absent, torchtitan_moe
from torch import nn

from automoe.comm.tokens import MicroBatch, StepBatch
from automoe.config.mesh_shape import resolve_mesh, stays_unsharded
from automoe.config.schema import Config, MeshConfig, ModelConfig, MoEConfig, OptimConfig, TrainConfig
from automoe.model.causal_lm import Unit
from automoe.model.decoder import Decoder
from automoe.model.init import initialize
from automoe.moe.router import gate_ids, routing_probs, score_experts
from automoe.optim.adamw import build_optimizer
from automoe.parallel.choices import build_backend
from automoe.parallel.expert import ExpertStyle
from automoe.parallel.fsdp import apply_data_parallel
from automoe.parallel.mesh import Meshes
from automoe.parallel.parallelize import allocate, build_decoder, build_parts, materialize, parallelize, parameter_dtype
from automoe.parallel.pipeline import build_runner
from automoe.passes.calls import call_module
from automoe.planner.plan import make_plan
from automoe.training.state import TrainState
from automoe.training.step import forward_backward, optimizer_step, prepare_inputs

GATES = {"balanced": "balanced", "natural": "learned"}  # routing -> MoEConfig.gate
SAMPLE = 4096  # elements of a gradient that are compared
TRANSFORMERS_LOGIT = 12.0  # bytes that its loss holds at its peak, in the backward pass
TIGHT = 0.9  # of a GPU's memory, the rest for fragmentation and kernels' workspaces


@dataclass(frozen=True)
class Case:
    """A model to train a slice of: at most ``layers`` layers, at least ``least``, with ``rows`` to ``least_rows`` a step.

    All rows of a step are one micro-batch, unless ``micro_batches`` says otherwise.
    """

    model: ModelConfig
    layers: int
    least: int
    rows: int = 8
    least_rows: int = 8
    micro_batches: int = 1
    seq_len: int = 4096

    def config(self, layers: int, num_experts: int, rows: int) -> Config:
        """The configuration of a slice on one rank."""
        model = replace(self.model, num_layers=layers, num_experts=num_experts)
        config = Config(
            mesh=MeshConfig(dp_shard=1),
            model=model,
            moe=MoEConfig(bias_update_rate=0.0),  # nobody else moves biases within the step
            train=TrainConfig(
                seq_len=self.seq_len,
                global_batch_size=rows,
                micro_batch_size=rows // self.micro_batches,
                dtype="bfloat16",
            ),
            optim=OptimConfig(master_weights="stochastic", moments="bfloat16"),
        )
        config.data.document_mask = False
        return config

    def slice_for(self, memory: float) -> tuple[Config, float]:
        """The largest slice that every contender can train in ``memory`` bytes (0: no limit), and its planned bytes.

        Rows go first, then layers, then experts by halves.

        Raises:
            Absent: not even the smallest fits.
        """
        num_experts, needed = self.model.num_experts, 0.0
        while num_experts >= max(self.model.num_experts_per_token, 2 * self.model.router.num_groups):
            for layers in range(self.layers, self.least - 1, -1):
                for rows in range(self.rows, self.least_rows - 1, -1):
                    config = self.config(layers, num_experts, rows)
                    needed = needed_bytes(config)
                    if not memory or needed <= TIGHT * memory:
                        return config, needed
            num_experts //= 2
        raise Absent(f"the smallest slice needs {needed / 2**30:.0f} GiB of {TIGHT} times {memory / 2**30:.0f}")


def needed_bytes(config: Config) -> float:
    """The most that a contender needs: the plan, which is ours; or in place of its chunk of logits what transformers
    holds, three float32 numbers for every logit of a micro-batch: the log-softmax, the gradient of the loss by it and
    the gradient by the logit. (In the forward pass 10 bytes: the logit in bfloat16 and float32, the log-softmax.)"""
    train = config.train
    logits = TRANSFORMERS_LOGIT * train.micro_batch_size * train.seq_len * config.model.vocab_size
    plan = make_plan(config, resolve_mesh(config.mesh, 1)).heaviest
    return plan.peak + max(0.0, logits - plan.head)


@dataclass(frozen=True)
class Built:
    """A sharded model, how its routing is chosen, and its gradients under our parameters' names."""

    part: Any  # a Decoder, or what has a decoder's signature
    choose: Callable[[str], None]
    gradients: Callable[[], Iterator[tuple[str, torch.Tensor]]]


class Trainer:
    """One contender with optimizer and data, ready to step."""

    def __init__(self, built: Built, meshes: Meshes, config: Config, device: torch.device) -> None:
        self.part, self.choose, self._gradients = built.part, built.choose, built.gradients
        self.meshes, self.config, self.device = meshes, config, device
        self.runner = build_runner({0: self.part}, meshes, config, device)
        self.optimizer = build_optimizer([self.part], config.optim)
        self.state = TrainState({0: self.part}, self.optimizer)
        tokens, labels = random_batch(config.model, config.train.global_batch_size, config.train.seq_len)
        positions = torch.arange(config.train.seq_len).expand_as(tokens)
        self.batch = StepBatch(tokens, labels, positions, torch.zeros_like(tokens), 0, 0)

    def step(self) -> float:
        """What ``recipes.pretrain`` does in a step, its records apart; returns the loss."""
        inputs, trained = prepare_inputs(self.batch, self.meshes, self.config, self.device)
        stats = forward_backward(self.state, self.runner, inputs, self.config)
        optimizer_step(self.state, stats, trained, self.meshes, self.config)
        return stats.loss

    def state_bytes(self) -> int:
        """Of parameters and moments, after a step; what gradients, activations and workspaces take is not in it."""
        tensors = [*self.part.parameters()]
        for state in self.optimizer.state.values():
            tensors += [state["exp_avg"], state["exp_avg_sq"]]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def fingerprint(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and a sample of every gradient, float32 on the CPU; the model stays as it is."""
        inputs, _ = prepare_inputs(self.batch, self.meshes, self.config, self.device)
        loss = forward_backward(self.state, self.runner, inputs, self.config).loss
        samples = {}
        for name, gradient in self._gradients():
            flat = gradient.flatten()
            at = torch.linspace(0, flat.numel() - 1, min(SAMPLE, flat.numel()), dtype=torch.float64)
            samples[name] = flat[at.long().to(flat.device)].float().cpu()
        self.optimizer.zero_grad()
        return loss, samples


def automoe(experts: str) -> Callable[[Config, Meshes, torch.device], Built]:
    """This project's model, with one of its expert backends."""

    def build(config: Config, meshes: Meshes, device: torch.device) -> Built:
        if experts == "triton" and device.type != "cuda":
            raise Absent("Triton's kernels need CUDA")
        config = replace(config, moe=replace(config.moe, experts=experts))
        parts = build_parts(config, meshes)
        materialize(parts, config, device)
        part = parts[0]
        with torch.no_grad():
            for _, layer in part.moe_layers():  # its router is float32, and starts where theirs in bfloat16 do
                for parameter in layer.router.parameters():
                    parameter.copy_(parameter.to(parameter_dtype(config)))

        def choose(routing: str) -> None:
            for _, layer in part.moe_layers():
                layer.router.moe = replace(layer.router.moe, gate=GATES[routing])

        return Built(part, choose, lambda: _named(part))

    return build


def transformers_grouped_mm(config: Config, meshes: Meshes, device: torch.device) -> Built:
    """The ``transformers`` model with ``experts_implementation="grouped_mm"``."""
    try:
        with torch.device(device):
            model = transformers_model(config.model, "grouped_mm", parameter_dtype(config))
    except Exception as error:  # another release of it may raise anything
        raise Absent(f"transformers: {type(error).__name__}: {error}") from None
    ours = dict(_first_weights(config, device).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(ours.pop(our_name(name)).view_as(parameter))
    assert not ours, f"transformers' model lacks {sorted(ours)}"
    routing = ["natural"]
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(_forced_choices(routing, config))
    part = TransformersPart(model, config.model)
    if not stays_unsharded(config, meshes.shape):
        apply_data_parallel(part, meshes, config.parallel, config.train.dtype)  # type: ignore[arg-type]

    def choose(kind: str) -> None:
        routing[0] = kind

    def gradients() -> Iterator[tuple[str, torch.Tensor]]:
        return ((our_name(name.removeprefix("model.")), g) for name, g in _named(part))

    return Built(part, choose, gradients)


def torchtitan_layer(config: Config, meshes: Meshes, device: torch.device) -> Built:
    """Our model with torchtitan's MoE layer in place of ours."""
    part = _first_weights(config, device, meshes)
    layers = []
    for number, layer in list(part.moe_layers()):
        try:
            theirs = torchtitan_moe(config.model, layer)
        except Exception as error:  # a release whose names differ, or that does not import here
            raise Absent(f"torchtitan: {type(error).__name__}: {error}") from None
        block = part.layers[str(number)]
        block.mlp, block.call_mlp = theirs, call_module  # as a layer without routing calls its feed-forward
        layers.append((number, theirs.layer))
    parallelize(part, meshes, config, ExpertStyle())

    def choose(routing: str) -> None:
        for _, layer in layers:
            layer.router._debug_force_load_balance = routing == "balanced"

    def gradients() -> Iterator[tuple[str, torch.Tensor]]:
        for name, gradient in _named(part):
            if ".mlp.layer." not in name:
                yield name, gradient
        for number, layer in layers:
            mlp, experts = f"layers.{number}.mlp", layer.routed_experts.inner_experts
            gate, up, down = map(_gradient, (experts.w1_EFD, experts.w3_EFD, experts.w2_EDF))
            yield f"{mlp}.experts.gate_up_proj", torch.stack((gate, up), dim=1)
            yield f"{mlp}.experts.down_proj", down
            yield f"{mlp}.router.weight", _gradient(layer.router.gate.weight)

    return Built(part, choose, gradients)


CONTENDERS: dict[str, Callable[[Config, Meshes, torch.device], Built]] = {
    "automoe triton": automoe("triton"),
    "automoe grouped_mm": automoe("grouped_mm"),
    "torchtitan layer": torchtitan_layer,
    "transformers grouped_mm": transformers_grouped_mm,
}


def build_trainer(name: str, config: Config, meshes: Meshes, device: torch.device) -> Trainer:
    """The contender called ``name`` with its first weights.

    Raises:
        Absent: it cannot run here.
    """
    return Trainer(CONTENDERS[name](config, meshes, device), meshes, config, device)


class TransformersPart(nn.Module):
    """A ``transformers`` model with the signature of a decoder that predicts."""

    loss, metrics = None, ()  # the cross-entropy that it returns, and nothing else
    embedding = None  # nothing is shared with another stage

    def __init__(self, model: Any, config: ModelConfig) -> None:
        super().__init__()
        self.model, self.config = model, config
        self.reported: dict[str, torch.Tensor] = {}

    def units(self) -> Iterator[Unit]:
        return (Unit(number, layer) for number, layer in enumerate(self.model.model.layers))

    def moe_layers(self) -> Iterator[tuple[int, nn.Module]]:
        return iter(())  # none that counts its load

    def zero_counters(self) -> None:
        """There are none."""

    def forward(self, *, batch: MicroBatch) -> torch.Tensor:
        labels, num_labels = batch.labels, batch.known_counts().trained
        out = self.model(input_ids=batch.tokens, labels=labels, shift_labels=labels, num_items_in_batch=num_labels)
        return torch.stack([out.loss])


def _first_weights(config: Config, device: torch.device, meshes: Meshes | None = None) -> Decoder:
    """Our model before it is sharded, all in ``parameter_dtype``, with the values that every contender starts from."""
    part = build_decoder(
        config.model,
        config.moe,
        parameter_dtype(config),
        backend=replace(build_backend(config, meshes), router_dtype=None),
    )
    allocate({0: part}, device)
    initialize(part, config.model.initializer_range, config.train.seed)
    return part


def _forced_choices(routing: list[str], config: Config) -> Callable[..., Any]:
    """A forward hook on a router that returns (logits, weights, ids): balanced choices where ``routing`` says so."""
    model = config.model

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if not (isinstance(output, tuple) and len(output) == 3):
            raise Absent("this transformers' router does not return its choices, so none can be forced")
        if routing[0] != "balanced":
            return output
        logits, weights, ids = output
        index = torch.arange(logits.shape[0], device=logits.device).view(-1, config.train.seq_len)
        ids = gate_ids("balanced", index % config.train.seq_len, model.num_experts, ids.shape[-1])
        ids = ids.flatten(0, 1)
        scores = score_experts(logits.float(), model.router)
        return logits, routing_probs(scores.choice, ids, model.router).to(weights.dtype), ids

    return hook


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    gradient: Any = parameter.grad
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def _named(part: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, _gradient(parameter)) for name, parameter in part.named_parameters())
