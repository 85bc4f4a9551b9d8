"""Write ``tests/rl/reference_losses.json``: losses and gradients of TRL's and verl's own functions.

    pip install --no-deps -r benchmarks/requirements-peers.txt
    pip install accelerate datasets omegaconf ray tensordict==0.10.0
    python tests/rl/reference_losses.py

Numbers are float64, of six answers of 1 to 7 tokens. A gradient is with respect to log-probabilities.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1"}
import torch
import trl
import verl
import verl.trainer.ppo.core_algos as algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

LENGTHS = [4, 1, 7, 3, 5, 2]
LONGEST = max(LENGTHS)
HORIZON = 16  # divisor of Dr. GRPO
torch.manual_seed(0)
mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).double()
old = -torch.rand(len(LENGTHS), LONGEST, dtype=torch.float64) * 3
new = old + 0.3 * torch.randn_like(old)
sampler = old + 0.2 * torch.randn_like(old)
ref = old + 0.4 * torch.randn_like(old)
advantages = torch.tensor([1.2, -0.7, 0.4, -2.0, 0.9, -0.1], dtype=torch.float64)


def with_gradient(loss: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    log_probs = new.clone().requires_grad_()
    value = loss(log_probs)
    (gradient,) = torch.autograd.grad(value, log_probs)
    return {"loss": value.item(), "gradient": ragged(gradient)}


def ragged(values: torch.Tensor) -> list[list[float]]:
    return [row[:length].tolist() for row, length in zip(values, LENGTHS, strict=True)]


def of_trl(loss_type: str, **options: Any) -> dict[str, Any]:
    """Run ``GRPOTrainer._compute_loss`` with the attributes that it reads."""
    config = dict(delta=None, use_bias_correction_kl=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05)
    trainer = dict(
        loss_type=loss_type,
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        beta=0.0,
        max_completion_length=HORIZON,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
    )
    for name, value in options.items():
        (config if name in config else trainer)[name] = value
    weights = trainer.pop("importance_sampling_ratio", None)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    metrics = {"train": defaultdict(list)}
    self = SimpleNamespace(
        **trainer,
        args=SimpleNamespace(**config, steps_per_generation=1, gradient_accumulation_steps=1),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        _metrics=metrics,
    )

    def loss(log_probs: torch.Tensor) -> torch.Tensor:
        self._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None)
        ids = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.int64)
        inputs = dict(
            prompt_ids=ids[:, :1],
            prompt_mask=torch.ones_like(ids[:, :1]),
            completion_ids=ids,
            completion_mask=mask,
            advantages=advantages,
            old_per_token_logps=old,
            ref_per_token_logps=ref,
            num_items_in_batch=mask.sum(),
            importance_sampling_ratio=weights,
            sampling_per_token_logps=sampler,
        )
        return trl.GRPOTrainer._compute_loss(self, None, inputs)

    return with_gradient(loss)


def of_verl(mode: str, agg: str, correction: torch.Tensor | None = None, **options: Any) -> dict[str, Any]:
    config = ActorConfig(strategy="none", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **options)
    config.global_batch_info["loss_scale_factor"] = HORIZON
    every = advantages[:, None].expand(-1, LONGEST)
    fn = algos.get_policy_loss_fn(mode)
    return with_gradient(lambda x: fn(old, x, every, mask, agg, config, correction)[0])


def of_verl_kl(kind: str) -> dict[str, Any]:
    return with_gradient(lambda x: algos.agg_loss(algos.kl_penalty(x, ref, kind), mask, "token-mean"))


def of_verl_correction(level: str, high: float) -> torch.Tensor:
    return compute_rollout_correction_weights((old - sampler) * mask, mask, level, high)[0]


ratio = torch.exp((old - sampler) * mask)
products = torch.exp(((old - sampler) * mask).sum(-1, keepdim=True))
cases = {
    "trl grpo": of_trl("grpo"),
    "trl grpo delta": of_trl("grpo", delta=1.3),
    "trl dapo": of_trl("dapo", epsilon_high=0.28),
    "trl dr_grpo": of_trl("dr_grpo"),
    "trl gspo": of_trl("grpo", importance_sampling_level="sequence", epsilon_low=3e-2, epsilon_high=4e-2),
    "trl cispo": of_trl("cispo", epsilon_high=1.2),
    "trl sapo": of_trl("sapo"),
    "trl kl": of_trl("grpo", beta=0.3),
    "trl kl weighted": of_trl("grpo", beta=0.3, use_bias_correction_kl=True),
    "trl drift": of_trl("dapo", off_policy_mask_threshold=0.05),
    "trl token_truncate": of_trl(
        "dapo", use_vllm=True, vllm_importance_sampling_correction=True, importance_sampling_ratio=ratio.clamp(max=1.1)
    ),
    "trl token_mask": of_trl(
        "dapo",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        importance_sampling_ratio=ratio.masked_fill((ratio < 0.8) | (ratio > 1.1), 0.0),
    ),
    "trl sequence_mask": of_trl(
        "dapo",
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        importance_sampling_ratio=products.masked_fill(products > 1.1, 0.0),
    ),
    "verl vanilla": of_verl("vanilla", "token-mean", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1.3),
    "verl vanilla samples": of_verl("vanilla", "seq-mean-token-mean", clip_ratio_low=0.2, clip_ratio_high=0.2),
    "verl vanilla length": of_verl("vanilla", "seq-mean-token-sum-norm", clip_ratio_low=0.2, clip_ratio_high=0.2),
    "verl gspo": of_verl("gspo", "seq-mean-token-mean", clip_ratio_low=3e-2, clip_ratio_high=4e-2),
    "verl cispo": of_verl("cispo", "token-mean", clip_ratio_low=0.1, clip_ratio_high=0.2),
    "verl dppo": of_verl("dppo_tv", "token-mean", clip_ratio_low=0.02, clip_ratio_high=0.01, clip_ratio_c=1.1),
    "verl sapo": of_verl("sapo", "seq-mean-token-mean", tau_pos=1.0, tau_neg=1.05),
    **{f"verl kl {kind}": of_verl_kl(kind) for kind in ("k1", "k2", "k3", "k3+")},
    "verl token truncate": of_verl("vanilla", "token-mean", of_verl_correction("token", 1.1)),
    "verl sequence truncate": of_verl("vanilla", "token-mean", of_verl_correction("sequence", 1.1)),
}
content = {
    "made by": {"trl": trl.__version__, "verl": verl.__version__, "torch": torch.__version__},
    "horizon": HORIZON,
    "advantages": advantages.tolist(),
    "log_probs": ragged(new),
    "old_log_probs": ragged(old),
    "sampler_log_probs": ragged(sampler),
    "ref_log_probs": ragged(ref),
    "cases": cases,
}
path = Path(__file__).with_name("reference_losses.json")
path.write_text(json.dumps(content) + "\n")
print(f"{path}: {len(cases)} cases")
