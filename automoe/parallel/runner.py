"""One step's forward and backward over all micro-batches, and the runner without a pipeline.

``automoe.parallel.pipeline`` has the runner with one, and chooses between the two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from automoe.comm.tokens import MicroBatch
from automoe.config.mesh_shape import stage_layers
from automoe.config.metrics import is_taken
from automoe.config.pipeline import rank_of_stage
from automoe.config.rules_model import BY_CROSS_ENTROPY
from automoe.config.schema import Config
from automoe.errors import ConfigError
from automoe.model.causal_lm import CausalLM
from automoe.model.loss import Loss
from automoe.model.params import embedding_stages
from automoe.parallel.fsdp import defer_reduction, reshard
from automoe.parallel.mesh import Meshes
from automoe.parallel.overlap import MERGED_PASSES
from automoe.parallel.shared_gradients import SharedGradients
from automoe.passes.trace import training_pass


def checked_loss(loss: Loss | None, name: str) -> Loss | None:
    """Return ``loss`` after checking its attributes ``metrics`` and ``mean_over``.

    Args:
        loss: loss function, or None for cross-entropy, which passes.
        name: the loss's name for the error.

    Raises:
        ConfigError: a name in ``metrics`` is another metric's, is listed twice or begins with
            ``val_``; or ``mean_over`` is neither tokens nor documents.
    """
    names = [*getattr(loss, "metrics", ())]
    for metric in names:
        if (
            is_taken(metric)
            or is_taken(f"val_{metric}")
            or metric.startswith("val_")
            or names.count(metric) > 1
        ):
            rule = f"it reports {metric!r}, and the record uses that name, or its val_ form, for another number"
            raise ConfigError(
                "train.loss", name, rule, "Use another name in its metrics and where it reports"
            )
    if (over := getattr(loss, "mean_over", "tokens")) not in ("tokens", "documents"):
        raise ConfigError(
            "train.loss", name, f"mean_over={over!r}", "A loss is a mean over tokens or documents"
        )
    return loss


class StepRunner(ABC):
    """Runner of this rank's pipeline stages over the micro-batches of a step.

    Attributes:
        model_parts: this rank's stages, {stage number: part}.
        micro_batch_rows: sequences of a micro-batch, by default ``train.micro_batch_size``.
    """

    def __init__(
        self, model_parts: dict[int, CausalLM], meshes: Meshes, config: Config, device: torch.device
    ) -> None:
        self.model_parts = model_parts
        self.config = config
        self.device = device
        self.micro_batch_rows = config.train.micro_batch_size
        shape, schedule = meshes.shape, config.parallel.schedule
        embedded = embedding_stages(config.model, stage_layers(config, shape))
        holders = [rank_of_stage(stage, shape.pp, schedule) for stage in embedded]
        self.shared = SharedGradients(model_parts, meshes, holders)
        self.reports_loss = meshes.coordinate("tp") == 0

    @property
    def loss(self) -> Loss | None:
        """Loss of the model, the same on all its stages; None means cross-entropy."""
        return next(iter(self.model_parts.values())).loss

    def set_loss(self, loss: Loss | None, mtp: bool = True) -> None:
        """Replace the loss of training and validation on all stages; None is cross-entropy.

        Args:
            mtp: False if steps leave modules for multi-token prediction out.

        Raises:
            ConfigError: the loss reports a metric under a name that another metric has, or modules
                for multi-token prediction, which train by cross-entropy alone, would run.
        """
        loss = checked_loss(loss, "the recipe's")
        for part in self.model_parts.values():
            if mtp and loss is not None and (depths := part.config.num_mtp_layers):
                remedy = "Set model.num_mtp_layers=0"
                raise ConfigError("model.num_mtp_layers", depths, BY_CROSS_ENTROPY, remedy)
            part.loss = loss

    def train(self, inputs: MicroBatch) -> Tensor:
        """Run forward and backward of a step; gradients are summed over the global batch on return.

        ``inputs`` are this rank's sequences of all micro-batches. After an error clear the
        parameters' own gradients, to which some micro-batches have added.

        Returns this rank's share of the loss, a float64 scalar whose sum over ranks is the loss. It
        is zero on ranks without the last stage, and on all tp ranks but the first, because tp ranks
        have equal losses.
        """
        parts = self.model_parts.values()
        for part in parts:
            part.reported.clear()  # of a pass outside of this runner
        try:
            with training_pass(), self.shared.summed():
                loss = self._train(inputs)
        except BaseException:  # whoever catches it may go on
            MERGED_PASSES.forget_deferred()
            reshard(parts)
            for part in parts:
                part.zero_counters()
            raise
        return loss.detach().to(torch.float64) * self.reports_loss

    @abstractmethod
    def _train(self, inputs: MicroBatch) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of their losses, a scalar.

        The sum is zero if this rank does not hold the last stage.
        """

    def evaluate(self, inputs: MicroBatch) -> Tensor:
        """Return this rank's share of the loss of ``inputs``, by a forward pass without gradients.

        It is a float64 scalar: 0 on ranks without the last stage, and on all tp ranks but the
        first. The pass does not count for statistics such as tokens per expert.
        """
        shares = self.outputs(inputs)
        if shares is None or not self.reports_loss:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return shares.to(torch.float64).sum()

    def outputs(self, inputs: MicroBatch) -> Tensor | None:
        """Run a forward pass of ``inputs`` without gradients; return the last stage's outputs.

        The pass does not count for statistics such as tokens per expert. Metrics that losses
        reported before the pass are discarded.

        Returns:
            The model's results (``CausalLM.forward``), joined over micro-batches along the first
            dim; None on ranks without the last stage.
        """
        for part in self.model_parts.values():
            part.eval().reported.clear()
        try:
            return self._outputs(inputs)
        finally:  # whoever catches an error goes on with a model that trains
            for part in self.model_parts.values():
                part.train()
            reshard(self.model_parts.values())

    @abstractmethod
    def _outputs(self, inputs: MicroBatch) -> Tensor | None:
        """Run forward without gradients; return the last stage's outputs, None on other ranks.

        Outputs are joined over micro-batches along the first dim.
        """

    def take_reported(self) -> dict[str, Tensor]:
        """Return this rank's sums of the metrics that losses report, by name, and reset them.

        They are zero on all tp ranks but the first, because tp ranks have equal sums.

        Raises:
            ConfigError: a loss reported a name that its attribute ``metrics`` does not list.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        reported = dict[str, Tensor]()
        for part in self.model_parts.values():
            for name in part.metrics:
                reported[name] = (
                    reported.get(name, zero) + part.reported.pop(name, zero) * self.reports_loss
                )
            if part.reported:
                names = sorted(part.reported)
                rule = "the loss reports them, and does not list them in its attribute metrics"
                raise ConfigError("loss", names, rule, "List them there")
        return reported


class SingleStageRunner(StepRunner):
    """Runner of the whole model on this rank, in a loop over micro-batches."""

    def _split(self, inputs: MicroBatch) -> list[MicroBatch]:
        """Split a step's sequences, in order, into micro-batches of ``micro_batch_rows`` sequences."""
        count = len(inputs.tokens) // self.micro_batch_rows
        _, parts = split_args_kwargs_into_chunks((), {"batch": inputs}, count)
        return [part["batch"] for part in parts]

    def _train(self, inputs: MicroBatch) -> Tensor:
        part, micro_batches = self.model_parts[0], self._split(inputs)
        total = torch.zeros((), dtype=torch.float64, device=inputs.tokens.device)
        for micro_batch in micro_batches:
            defer_reduction(part, self.config.parallel, last=micro_batch is micro_batches[-1])
            loss = part(batch=micro_batch).sum()
            loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def _outputs(self, inputs: MicroBatch) -> Tensor:
        part = self.model_parts[0]
        return torch.cat([part(batch=micro_batch) for micro_batch in self._split(inputs)])
