"""An engine of verl 0.9: name it with ``VERL_USE_EXTERNAL_MODULES=automoe.verl``, strategy=automoe.

A loss of verl is any function of log-probabilities and entropies. The engine computes these in one
forward pass, calls the loss, and runs a second forward and backward pass whose per-token weights
are the loss's derivatives. So verl's losses run on every mesh, over all samples of a step at once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineConfig
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func

from automoe.errors import ConfigError
from automoe.model.loss import LossInputs
from automoe.optim.schedule import learning_rate
from automoe.rl.routes import read_vllm
from automoe.session import Sample, Session, load_from, open_session, resolved, save_at

ALL = ["extra", "model", "optimizer"]
# settings of verl of which the engine follows one value
FOLLOWED = {
    "model.lora_rank": 0,
    "engine.param_offload": False,
    "engine.optimizer_offload": False,
    "optim.lr_scheduler_type": "constant",
    "optim.optimizer": "AdamW",
    "optim.override_optimizer_config": None,
    "checkpoint.save_contents": ALL,
    "checkpoint.load_contents": ALL,
    "checkpoint.async_save": False,
    "checkpoint.save_lora_only": False,
}


@dataclass
class AutomoeEngineConfig(EngineConfig):
    """Engine settings for verl's config, with strategy ``automoe``.

    Attributes:
        overrides: overrides of automoe's configuration, such as ``mesh.ep=4``.
    """

    strategy: str = "automoe"
    overrides: list[str] = field(default_factory=list)


def by_derivatives(nll_BS: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """Return a loss with the same gradient as a verl loss, built from its derivatives per token.

    ``of_log_probs`` and ``of_entropy``, values in ``inputs.given``, are the verl loss's derivatives
    with respect to each token's log-probability and entropy. The result is the sum over tokens of
    ``of_log_probs`` * log-probability + ``of_entropy`` * entropy.
    """
    loss = -(inputs.given["of_log_probs"] * nll_BS).sum()
    if "of_entropy" in inputs.given and inputs.entropy is not None:
        loss = loss + (inputs.given["of_entropy"] * inputs.entropy).sum()
    return loss


@EngineRegistry.register(model_type="language_model", backend="automoe", device=["cuda", "cpu"])
class AutomoeEngine(BaseEngine):
    """verl's ``BaseEngine``, implemented by an automoe training session; verl's workers call it.

    verl's data-parallel ranks are those of the mesh. Ranks that differ only in other axes get the
    same samples.
    """

    is_param_offload_enabled = property(lambda self: False)
    is_optimizer_offload_enabled = property(lambda self: False)

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        overrides = list(getattr(engine_config, "overrides", ()))
        path = model_config.get("local_path", None) or model_config.get("path", None)
        if path and not any(word.startswith("model.hf_path=") for word in overrides):
            overrides.append(f"model.hf_path={path}")
        sections = dict(engine=engine_config, optim=optimizer_config, checkpoint=checkpoint_config)
        sections["model"] = model_config
        for key, followed in FOLLOWED.items():
            section, name = key.split(".")
            value = getattr(sections[section], name, followed)
            if (
                sorted(value or ()) if isinstance(followed, list) else value or followed
            ) != followed:
                rule = f"the engine follows {followed} alone"
                raise ConfigError(key, value, rule, f"Set it to {followed}")
        if optimizer_config is not None:
            overrides += [
                f"optim.lr={optimizer_config.lr}",
                f"optim.weight_decay={optimizer_config.weight_decay}",
                f"optim.betas=[{','.join(map(str, optimizer_config.betas))}]",
                "optim.schedule=constant",
                f"train.grad_clip={optimizer_config.clip_grad}",
            ]
        self.config, self.shape = resolved(overrides, dist.get_world_size())
        if self.shape.dp_replicate > 1 < self.shape.dp_shard:
            rule = "verl knows one data-parallel axis"
            raise ConfigError("mesh.dp_replicate", self.shape.dp_replicate, rule, "Set it to 1")
        self._at = self.shape.coordinates(dist.get_rank(), "default")
        self._optimizer_config = optimizer_config
        self._saved: list[str] = []  # folders, the oldest first
        self.session: Session
        self.mode: str | None = None

    def initialize(self) -> None:
        if (optim := self._optimizer_config) is not None:  # trainers now know their steps
            warmup = optim.lr_warmup_steps
            if warmup is None or warmup < 0:
                warmup = int(optim.lr_warmup_steps_ratio * max(optim.total_training_steps, 0))
            warmed = replace(self.config.optim, warmup_steps=warmup)
            self.config = replace(self.config, optim=warmed)
        self.session = open_session(self.config)
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        self.optimizer = self.session.state.optimizer
        self.lr_scheduler_step()

    def train_mode(self, **options: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "train", **options)

    def eval_mode(self, **options: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **options)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True):
        """Check that verl asks for the engine's own device, since the engine does not offload; move nothing.

        Raises:
            ConfigError: ``device`` is of another type than the engine's, and ``model`` or
                ``optimizer`` is True.
        """
        here = self.session.device.type
        if (model or optimizer) and device.partition(":")[0] != here:
            rule = f"the engine does not offload, it stays on {here}"
            raise ConfigError("to", device, rule, "Give it devices of its own")

    def get_data_parallel_size(self) -> int:
        return self.shape.dp

    def get_data_parallel_rank(self) -> int:
        return self._at["dp_replicate"] * self.shape.dp_shard + self._at["dp_shard"]

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        if self.shape.dp == self.shape.world_size:
            return dist.group.WORLD if self.shape.dp > 1 else None
        if self.shape.dp == 1:
            return self._alone  # verl takes None for all ranks
        axis = "dp_shard" if self.shape.dp_shard > 1 else "dp_replicate"
        return self.session.meshes.group(axis)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return not any(self._at[axis] for axis in ("pp", "cp", "tp"))

    # ---------------------------------------------------------------- a step

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable | None, forward_only: bool = False
    ) -> dict[str, Any]:
        options = {
            "temperature": float(tu.get_non_tensor_data(data, "temperature", 1.0)),
            "entropy": bool(tu.get_non_tensor_data(data, "calculate_entropy", False)),
        }
        local_samples = self._samples(data)
        of_ranks = self._of_dp_ranks(local_samples)
        batch = [sample for samples in of_ranks for sample in samples]
        first = sum(map(len, of_ranks[: self.get_data_parallel_rank()]))
        here = slice(first, first + len(local_samples))
        scores = self.session.log_probs(batch, **options)
        names = {"log_probs": scores.log_probs}
        if scores.entropy is not None:
            names["entropy"] = scores.entropy
        output, leaves = {}, {}
        offsets = data["input_ids"].offsets()
        for name, of_samples in names.items():
            # verl has the value of token t + 1 at position t, and nothing at the last.
            shifted = [values.roll(-1) for values in of_samples[here]]
            leaves[name] = torch.cat(shifted).float().to(offsets.device)
            leaves[name].requires_grad_(not forward_only)
            output[name] = torch.nested.nested_tensor_from_jagged(leaves[name], offsets)
        mask = data["loss_mask"].values() if data["loss_mask"].is_nested else data["loss_mask"]
        tokens = torch.tensor([float(mask.sum())], device=self.session.device)
        if (group := self.get_data_parallel_group()) is not None:
            dist.all_reduce(tokens, group=group)
        tu.assign_non_tensor(data, sp_size=1, dp_size=self.shape.dp, batch_num_tokens=int(tokens))
        loss, metrics = torch.zeros(()), {}
        if loss_function is not None:
            with torch.set_grad_enabled(not forward_only):
                loss, metrics = loss_function(model_output=output, data=data, dp_group=group)
        if not forward_only:
            self._second_pass(loss, leaves, local_samples, options["temperature"])
        detached = {name: values.detach() for name, values in output.items()}
        outputs = [{"model_output": detached, "loss": loss.detach(), "metrics": metrics}]
        return postprocess_batch_func(outputs, [list(range(len(local_samples)))], data)

    def _second_pass(
        self,
        loss: torch.Tensor,
        leaves: dict[str, torch.Tensor],
        local_samples: list[Sample],
        temperature: float,
    ) -> None:
        grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        lengths = [len(sample.tokens) for sample in local_samples]
        weighted = local_samples
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
            # A loss comes times dp_size, since verl averages gradients over dp.
            grad = torch.zeros_like(leaf) if grad is None else grad / self.shape.dp
            weighted = [
                replace(sample, values={**sample.values, f"of_{name}": part.roll(1)})
                for sample, part in zip(weighted, grad.cpu().split(lengths), strict=True)
            ]
        batch = [sample for samples in self._of_dp_ranks(weighted) for sample in samples]
        by_derivatives.uses_entropy = "entropy" in leaves  # type: ignore[attr-defined]
        self.session.forward_backward(batch, by_derivatives, temperature)

    def _samples(self, data: TensorDict) -> list[Sample]:
        routes = data.get("routed_experts", None)
        samples = []
        for number, tokens in enumerate(data["input_ids"].unbind()):
            tokens = tokens.cpu()
            lines = None
            if routes is not None:  # the last line is a placeholder
                lines = read_vllm(routes[number][:-1].cpu(), self.config.model, len(tokens))
            samples.append(Sample(tokens, torch.arange(len(tokens)) > 0, routes=lines))
        return samples

    def _of_dp_ranks(self, local_samples: list[Sample]) -> list[list[Sample]]:
        """Gather the samples of all data-parallel ranks; return a list per rank. Collective."""
        boxes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(boxes, (self.get_data_parallel_rank(), local_samples))
        return [samples for _, samples in sorted(dict(boxes[::-1]).items())]

    def optimizer_zero_grad(self) -> None:
        self.session.zero_grad()

    def optimizer_step(self) -> float:
        return self.session.optim_step(self.optimizer.param_groups[0]["lr"]).grad_norm

    def lr_scheduler_step(self) -> float:
        """Write the next step's learning rate to the optimizer's parameter groups, and return it.

        The optimizer step takes the rate from the groups, since verl's Tinker worker may set its
        own there.
        """
        config = self.session.config
        lr = learning_rate(config.optim, self.session.state.step, config.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    # ---------------------------------------------------------------- weights

    def disable_adapter(self) -> AbstractContextManager[None]:
        return self.session.adapter_off()

    def get_per_tensor_param(
        self, **options: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self.session.weights(), None

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **options: Any,
    ) -> None:
        if hdfs_path is not None:
            rule = "the engine writes to local_path alone"
            raise ConfigError("hdfs_path", hdfs_path, rule, "Leave it out")
        save_at(self.session, Path(local_path))
        self._saved = [path for path in self._saved if path != local_path] + [local_path]
        while max_ckpt_to_keep and len(self._saved) > max_ckpt_to_keep:
            oldest = self._saved.pop(0)
            self.session.store.ranks.lead(
                lambda path=Path(oldest): path.exists() and shutil.rmtree(path)
            )

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **options: Any,
    ) -> None:
        load_from(self.session, Path(local_path))
        self.lr_scheduler_step()
