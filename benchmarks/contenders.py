"""The models of the CPU step benchmark: two shapes, and each trainer's way of building the same one.

The GPU step benchmark takes its ``transformers`` models and its batches from here.

Letters: B rows, S positions, T = B S tokens, E experts, K top-k, H hidden, I expert width.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import torch
from torch import nn

from automoe.config.schema import AttentionConfig, ModelConfig, MoEConfig, OptimConfig, RouterConfig
from automoe.hf.families.registry import family_of
from automoe.hf.read import load_hf
from automoe.model.decoder import Decoder
from automoe.moe.tokens import IGNORE
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


SHAPES: dict[str, Callable[..., ModelConfig]] = {"coarse": coarse, "fine": fine}


@dataclass
class StepTimes:
    """CPU seconds of one training step."""

    forward: float
    backward: float
    optimizer: float  # update and gradient zeroing

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.optimizer


class Contender:
    """A model, its optimizer, and how it computes a loss.

    Args:
        loss: (tokens [B, S], labels [B, S]) -> scalar mean cross-entropy; labels[i] is the token after i.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self.name, self.model, self.optimizer, self.loss = name, model, optimizer, loss

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

    def loss_and_gradients(self, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
        """Loss, and gradients under this model's own names; the model is as before afterwards."""
        loss = self.loss(tokens, labels)
        loss.backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item(), gradients


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


def transformers_contender(config: ModelConfig, experts: str, seed: int) -> Contender:
    """``transformers_model`` trained as its Trainer does by default, with fused AdamW."""
    torch.manual_seed(seed)
    model = transformers_model(config, experts)

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": OPTIM.weight_decay},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=OPTIM.lr,
        betas=OPTIM.betas,
        eps=OPTIM.eps,
        fused=True,
    )
    return Contender(f"transformers {experts}", model, optimizer, loss)


def our_name(hf_name: str) -> str:
    """The parameter of our model that holds what ``transformers`` calls ``hf_name``."""
    name = hf_name.removeprefix("model.")
    name = name.replace("mlp.gate.weight", "mlp.router.weight")
    return name.replace("mlp.experts.gate_up_proj", "mlp.experts.w_gate_up").replace(
        "mlp.experts.down_proj", "mlp.experts.w_down"
    )


def our_contender(config: ModelConfig, reference: Contender) -> Contender:
    """Our model with the weights of a ``transformers`` contender, by way of a checkpoint on disk."""
    model = Decoder(config, MoEConfig(experts="grouped_mm", bias_update_rate=0.0))
    with TemporaryDirectory() as folder:
        reference.model.save_pretrained(folder)
        load_hf(model, folder)

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(tokens, labels=labels)[0]

    return Contender("automoe", model, build_optimizer([model], OPTIM), loss)


def gate_differences(
    ours: Contender, reference: Contender, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[float, dict[str, float]]:
    """Relative difference of the loss, and of each gradient (norm of the difference over the norm)."""
    loss, gradients = ours.loss_and_gradients(tokens, labels)
    reference_loss, reference_gradients = reference.loss_and_gradients(tokens, labels)
    if set(map(our_name, reference_gradients)) != set(gradients):
        odd = sorted(set(map(our_name, reference_gradients)) ^ set(gradients))
        raise SystemExit(f"{ours.name} and {reference.name} do not train the same parameters: {odd}")
    differences = {}
    for name, expected in reference_gradients.items():
        got = gradients[our_name(name)].view_as(expected)
        differences[name] = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    return abs(loss - reference_loss) / abs(reference_loss), differences


def random_batch(config: ModelConfig, rows: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens and labels, [B, S] each; the last label of a row is not trained."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (rows, seq_len), generator=generator)
    labels = torch.full_like(tokens, IGNORE)
    labels[:, :-1] = tokens[:, 1:]
    return tokens, labels
