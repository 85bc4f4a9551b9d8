"""The models of the CPU step benchmark: three shapes, and each trainer's way of building the same one.

The GPU step benchmark takes its ``transformers`` models and its batches from here.

Letters: B rows, S positions, T = B S tokens, E experts, K top-k, H hidden, I expert width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from automoe.comm.tokens import IGNORE, MicroBatch
from automoe.config.schema import (
    AttentionConfig,
    Config,
    LaunchConfig,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RouterConfig,
    TrainConfig,
)
from automoe.hf.families.registry import family_of
from automoe.hf.read import load_hf
from automoe.model.decoder import Decoder
from automoe.optim.adamw import build_optimizer

OPTIM = OptimConfig(lr=1e-4)


def coarse(vocab: int = 8192, layers: int = 4, hidden: int = 512) -> ModelConfig:
    """Mixtral's shape: few wide experts, grouped-query attention, softmax router."""
    return ModelConfig(
        family="mixtral",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=2 * hidden,
        norm_eps=1e-5,
        attention=AttentionConfig(kind="gqa", num_heads=8, num_kv_heads=2, head_dim=hidden // 8),
    )


def fine(vocab: int = 8192, layers: int = 4, hidden: int = 512) -> ModelConfig:
    """DeepSeek-V3's shape: many narrow experts and a shared one, latent attention, sigmoid router in groups.

    The first layer is dense, as there; head dims keep the 128 + 64 to 128 ratio.
    """
    model = ModelConfig(
        family="deepseek_v3",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        intermediate_size=2 * hidden,
        first_k_dense=1,
        num_experts=64,
        num_experts_per_token=6,
        moe_intermediate_size=hidden // 4,
        num_shared_experts=1,
        attention=AttentionConfig(
            kind="mla",
            num_heads=8,
            num_kv_heads=8,
            q_lora_rank=hidden // 2,
            kv_lora_rank=hidden // 4,
            qk_nope_head_dim=hidden // 8,
            qk_rope_head_dim=hidden // 16,
            v_head_dim=hidden // 8,
        ),
        router=RouterConfig(score="sigmoid", num_groups=4, topk_groups=2, expert_bias=True, routed_scaling_factor=2.5),
    )
    model.rope.interleaved = True
    return model


def mla(vocab: int = 8192, layers: int = 4, hidden: int = 512) -> ModelConfig:
    """Latent attention as in ``fine``, experts as in ``coarse``: few and wide, in one group, beside a shared one."""
    model, wide = fine(vocab, layers, hidden), coarse(vocab, layers, hidden)
    model.num_experts, model.num_experts_per_token = wide.num_experts, wide.num_experts_per_token
    model.moe_intermediate_size, model.first_k_dense = wide.moe_intermediate_size, 0
    model.router.num_groups = model.router.topk_groups = 1
    return model


SHAPES: dict[str, Callable[..., ModelConfig]] = {"coarse": coarse, "fine": fine, "mla": mla}


@dataclass
class StepTimes:
    """CPU seconds of one training step."""

    forward: float
    backward: float
    optimizer: float  # update and gradient zeroing

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.optimizer


Gradients = dict[str, torch.Tensor]  # under the names of our parameters, in their layout


class Contender:
    """A model, its optimizer, and how it computes a loss.

    Args:
        loss: (tokens [B, S], labels [B, S]) -> scalar mean cross-entropy; labels[i] is the token after i.
        ours: (name, gradient) of this model's own -> those of the parameter of ours that it is.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        ours: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]] = lambda name, grad: (name, grad),
    ) -> None:
        self.model, self.optimizer, self.loss, self.ours = model, optimizer, loss, ours

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> StepTimes:
        clock = [time.process_time()]
        loss = self.loss(tokens, labels)
        clock.append(time.process_time())
        loss.backward()
        clock.append(time.process_time())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clock.append(time.process_time())
        return StepTimes(*(end - start for start, end in zip(clock, clock[1:], strict=False)))

    def loss_and_gradients(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[float, Gradients]:
        """The model is as before afterwards."""
        loss = self.loss(tokens, labels)
        loss.backward()
        gradients = dict(self.ours(name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), gradients


class Recipe:
    """The step of ``recipes/pretrain.py`` on one rank, in a process begun as the launcher begins ranks.

    It does more than the loops of the others: the gradient norm, clipping, counts and records of routing.
    """

    def __init__(self, config: ModelConfig, folder: str, rows: int, seq_len: int) -> None:
        from automoe.config.mesh_shape import resolve_mesh
        from automoe.launch.ranks import init_ranks, store_file
        from automoe.parallel.mesh import build_meshes
        from automoe.parallel.parallelize import build_parts
        from automoe.parallel.pipeline import build_runner
        from automoe.run.weights import load_or_initialize
        from automoe.training.state import TrainState

        train = TrainConfig(seq_len=seq_len, global_batch_size=rows, micro_batch_size=rows)
        optim = replace(OPTIM, warmup_steps=0, schedule="constant")
        model = replace(config, hf_path=folder)
        self.config = Config(mesh=MeshConfig(dp_shard=1), model=model, train=train, optim=optim)
        self.config.moe = MoEConfig(experts="grouped_mm", bias_update_rate=0.0)
        self.store = store_file()
        self.device = init_ranks(LaunchConfig(device="cpu", threads_per_rank=1), 0, 1, 0, self.store.__enter__())
        self.meshes = build_meshes(resolve_mesh(self.config.mesh, 1), self.device)
        parts = build_parts(self.config, self.meshes)
        load_or_initialize(parts, self.config, self.device)
        self.runner = build_runner(parts, self.meshes, self.config, self.device)
        self.state = TrainState(parts, build_optimizer(list(parts.values()), optim, 0))

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> StepTimes:
        """The runner does forward and backward in one call: both count as backward."""
        from automoe.training.step import optimizer_step

        clock = [time.process_time()]
        stats, trained = self._forward_backward(tokens, labels)
        clock.append(time.process_time())
        optimizer_step(self.state, stats, trained, self.meshes, self.config)
        return StepTimes(0.0, clock[1] - clock[0], time.process_time() - clock[1])

    def loss_and_gradients(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[float, Gradients]:
        """The model is as before afterwards."""
        stats, _ = self._forward_backward(tokens, labels)
        (part,) = self.state.model_parts.values()
        gradients = {name: p.grad for name, p in part.named_parameters() if p.grad is not None}
        self.state.optimizer.zero_grad(set_to_none=True)
        return stats.loss, gradients

    def _forward_backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[Any, int]:
        from automoe.comm.tokens import StepBatch
        from automoe.training.step import forward_backward, prepare_inputs

        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        batch = StepBatch(tokens, labels, positions, torch.zeros_like(tokens), tokens.numel(), 0)
        inputs, trained = prepare_inputs(batch, self.meshes, self.config, self.device)
        return forward_backward(self.state, self.runner, inputs, self.config), trained


def transformers_model(config: ModelConfig, experts: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The ``transformers`` model of this shape, SDPA attention, with one of its expert implementations."""
    import transformers

    values = family_of(config).write_config(config)
    hf_config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    hf_config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="sdpa", experts_implementation=experts, dtype=dtype
    )
    return model.train()


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """torch's, with weight decay of matrices alone, as ours."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": OPTIM.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=OPTIM.lr,
        betas=OPTIM.betas,
        eps=OPTIM.eps,
        fused=True,
    )


def transformers_contender(folder: str, experts: str) -> Contender:
    """``transformers``' model trained as its Trainer does by default, with fused AdamW."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", experts_implementation=experts, dtype=torch.float32
    ).train()

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return Contender(model, fused_adamw(model), loss, lambda name, grad: (our_name(name), grad))


def automodel_contender(folder: str, experts: str) -> Contender:
    """NeMo Automodel's DeepSeek-V3 with its own cross-entropy and fused AdamW.

    Args:
        experts: ``torch_mm`` multiplies by ``torch._grouped_mm``; ``torch``, its default on CPUs, one expert after the
            other.
    """
    from nemo_automodel.components.loss.masked_ce import MaskedCrossEntropy
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v3.model import DeepseekV3ForCausalLM
    from safetensors.torch import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, dtype=torch.float32)
    model = DeepseekV3ForCausalLM(config, backend=BackendConfig(experts=experts)).train()
    tensors = {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
    model.load_state_dict(model.state_dict_adapter.from_hf(tensors))
    cross_entropy = MaskedCrossEntropy()

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(tokens).logits, labels, num_label_tokens=int((labels >= 0).sum()))

    def ours(name: str, grad: torch.Tensor) -> tuple[str, torch.Tensor]:
        if name.endswith(("gate_and_up_projs", "down_projs")):  # input features first
            grad = grad.transpose(1, 2)
        name = name.replace("gate_and_up_projs", "gate_up_proj").replace("down_projs", "down_proj")
        return our_name(name), grad

    return Contender(model, fused_adamw(model), loss, ours)


def decoder_contender(config: ModelConfig, folder: str) -> Contender:
    """Our decoder in a bare loop, with the weights of the checkpoint."""
    model = Decoder(config, MoEConfig(experts="grouped_mm", bias_update_rate=0.0))
    load_hf(model, folder)

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(batch=MicroBatch(tokens, labels)).sum()

    return Contender(model, build_optimizer([model], OPTIM), loss)


def our_name(hf_name: str) -> str:
    """The parameter of our model that holds what ``transformers`` calls ``hf_name``."""
    name = hf_name.removeprefix("model.")
    name = name.replace("mlp.gate.weight", "mlp.router.weight")
    return name.replace("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj").replace(
        "mlp.experts.down_proj", "mlp.experts.down_proj"
    )


def all_contenders(
    config: ModelConfig, folder: str, rows: int, seq_len: int
) -> tuple[dict[str, Callable[[], Contender | Recipe]], dict[str, str]]:
    """What builds each contender, ours first, and why others are absent."""
    found: dict[str, Callable[[], Contender | Recipe]] = {
        "automoe": lambda: Recipe(config, folder, rows, seq_len),
        "automoe decoder": lambda: decoder_contender(config, folder),
    }
    for experts in ("grouped_mm", "eager"):
        found[f"transformers {experts}"] = partial(transformers_contender, folder, experts)
    if find_spec("nemo_automodel") is None:
        return found, {"nemo_automodel": "not installed: pip install --no-deps -r benchmarks/requirements-peers.txt"}
    if config.family != "deepseek_v3":
        reason = f"NeMo Automodel has no {config.family} of its own: it trains that of transformers, which is here"
        return found, {"nemo_automodel": reason}
    for experts in ("torch_mm", "torch"):
        found[f"nemo_automodel {experts}"] = partial(automodel_contender, folder, experts)
    return found, {}


def gate_differences(
    ours: tuple[float, Gradients], theirs: tuple[float, Gradients], name: str
) -> tuple[float, dict[str, float]]:
    """Relative difference of the loss, and of each gradient (norm of the difference over the norm)."""
    (loss, gradients), (their_loss, their_gradients) = ours, theirs
    if odd := sorted(set(their_gradients) ^ set(gradients)):
        raise SystemExit(f"automoe and {name} do not train the same parameters: {odd}")
    differences = {}
    for key, expected in their_gradients.items():
        difference = gradients[key].reshape(expected.shape) - expected
        differences[key] = float(difference.norm() / expected.norm().clamp_min(1e-30))
    return abs(loss - their_loss) / abs(their_loss), differences


def random_batch(config: ModelConfig, rows: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and labels, [B, S] each; the last label of a row is not trained."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (rows, seq_len), generator=generator)
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    return tokens, labels
