"""Validation: the losses of held-out data, by source and mixed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from automoe.comm.tokens import StepBatch
from automoe.config.metrics import perplexity
from automoe.config.schema import Config
from automoe.model.mtp import MTP_METRICS
from automoe.optim.ema import averaged_weights
from automoe.parallel.mesh import Meshes
from automoe.parallel.runner import StepRunner
from automoe.passes.trace import phase
from automoe.training.stats import sum_over_ranks
from automoe.training.step import prepare_inputs


class ValidationSource(Protocol):
    """Interface of validation data: batches of one or more sources.

    Attributes:
        names: name of each source; a single source has an empty name.
        weights: weight of each source in means over sources.
    """

    names: Sequence[str]
    weights: Sequence[float]

    def batches(self, split: Literal["validation"], most: int, source: int) -> Iterator[StepBatch]:
        """Yield this rank's part of at most ``most`` validation batches of the source with index ``source``."""
        ...


@phase("validate")
def validate(
    config: Config,
    runner: StepRunner,
    loader: ValidationSource,
    meshes: Meshes,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None = None,
    extra_inputs: Callable[[StepBatch], Mapping[str, Tensor]] = lambda batch: {},
) -> Mapping[str, float]:
    """Return the validation losses by name, for a step's metrics; {} without data. Collective.

    ``val_loss`` is in nats per token, ``val_perplexity`` is its exp, and ``val_bits_per_byte`` is
    added for text. With several sources, these are means by weight, and each source adds a
    ``val_loss.NAME``. With ``optim.ema_decay``, ``val_loss_ema`` is the ``val_loss`` of the
    averaged weights. For a loss other than cross-entropy, ``val_loss`` is the mean of the loss.
    Each number that losses report is added as ``val_NAME``.

    Args:
        loader: source of the validation batches.
        optimizer: holds the averaged weights; None: no ``val_loss_ema``.
        extra_inputs: returns a batch's further inputs of the loss, tensors [B, ...] by name.
    """

    def losses() -> dict[str, float]:
        by_source = {}
        for source, name in enumerate(loader.names):
            batches = loader.batches("validation", config.train.val_batches, source)
            sums = _validation_sums(config, runner, batches, meshes, device, extra_inputs)
            if sums["count"]:
                by_source[name] = loader.weights[source], sums
        return _mean_losses(by_source, runner.loss is None)

    record = losses()
    if record and optimizer is not None and config.optim.ema_decay:
        with averaged_weights(optimizer):
            record["val_loss_ema"] = losses()["val_loss"]
    return record


def _mean_losses(
    by_source: Mapping[str, tuple[float, dict[str, float]]], is_cross_entropy: bool
) -> dict[str, float]:
    """Return a validation's metrics by name, as means over sources by weight; {} without sources.

    They are ``val_loss``, ``val_NAME`` of each number NAME that the loss reports, and for each source
    with a name, ``val_loss.SOURCE`` of it alone.

    Args:
        by_source: name of a source -> (its weight, its sums as ``_validation_sums`` returns them).
        is_cross_entropy: add ``val_perplexity``, and for text ``val_bits_per_byte``.
    """
    if not by_source:
        return {}
    total = sum(sums["count"] for _, sums in by_source.values())
    mixed: dict[str, float] = {}
    for weight, sums in by_source.values():
        factor = weight * total / sums["count"]  # 1 for a single source
        mixed = {key: mixed.get(key, 0.0) + factor * value for key, value in sums.items()}
    nats, count, text_bytes = (mixed.pop(key) for key in ("nats", "count", "bytes"))
    record = {"val_loss": nats / count}
    if is_cross_entropy:
        record["val_perplexity"] = perplexity(nats / count)
        if text_bytes:  # synthetic ids have none
            record["val_bits_per_byte"] = nats / math.log(2) / text_bytes
    record |= {key: value / count for key, value in mixed.items()}
    return record | {
        f"val_loss.{name}": sums["nats"] / sums["count"]
        for name, (_, sums) in by_source.items()
        if name
    }


def _validation_sums(
    config: Config,
    runner: StepRunner,
    batches: Iterator[StepBatch],
    meshes: Meshes,
    device: torch.device,
    extra_inputs: Callable[[StepBatch], Mapping[str, Tensor]],
) -> dict[str, float]:
    """Return a validation's sums over batches and ranks, by name.

    ``count`` is the number of tokens with a label (of documents, for a loss that is a mean over
    documents), ``nats`` the sum of the loss over these, ``val_NAME`` that of each number NAME that
    the loss reports, and ``bytes`` the text's UTF-8 bytes.

    Args:
        extra_inputs: returns a batch's further inputs of the loss, tensors [B, ...] by name.
    """
    sums = defaultdict[str, float](float)
    labels = defaultdict[str, int](int)  # that each reported number is a mean of
    over_documents = getattr(runner.loss, "mean_over", "tokens") == "documents"
    # one rank per row counts its bytes
    reads_text = all(meshes.coordinate(axis) == 0 for axis in ("pp", "cp", "tp"))
    for batch in batches:
        inputs, num_labels = prepare_inputs(batch, meshes, config, device)
        share = runner.evaluate(inputs | extra_inputs(batch))
        reported = runner.take_reported()
        loss, num_bytes, *values = sum_over_ranks(
            share, float(batch.num_bytes * reads_text), *reported.values(), device=device
        )
        counts = inputs.known_counts()
        count = int(counts.documents) if over_documents else num_labels
        sums["nats"] += loss * count
        sums["count"] += count
        sums["bytes"] += num_bytes
        for name, value in zip(reported, values, strict=True):
            number = count
            kind, _, depth = name.partition(".")
            if kind in MTP_METRICS:
                assert counts.mtp is not None
                number = int(counts.mtp[int(depth) - 1, 0])
            sums[f"val_{name}"] += value * number
            labels[f"val_{name}"] += number
    # The caller divides by ``count``, and a depth of multi-token prediction has fewer labels.
    for name, number in labels.items():
        sums[name] *= sums["count"] / max(number, 1)
    return sums
