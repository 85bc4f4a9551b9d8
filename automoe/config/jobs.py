"""Defaults by job: a run that begins from a checkpoint takes others than one from random weights.

A configuration file writes ``${by_job:A,B,...}``: A is for random weights, and the others, of which
the last stands for those that are not written, for the weights of a checkpoint, for adapters on
them, for preferences, and for preferences by adapters. What a file or an override names stands in
its place; ``optim=NAME`` names the group's values for any job, and steps name the length of a run.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from automoe.config.data_schema import PREFERENCE_KINDS

# Rates are those of optim=finetune and of the shipped recipes for large models.
BY_JOB = {
    "optim.lr": "${by_job:0.003,1e-5,2e-4,5e-7,5e-6}",
    "optim.weight_decay": "${by_job:0.1,0.0}",
    "train.steps": "${by_job:200}",
    "train.epochs": "${by_job:0,3,3,1}",
}


def register_jobs(named: Collection[str]) -> None:
    """Register the OmegaConf resolver ``by_job``, which picks a default by the kind of training job.

    ``${by_job:A,B,...}`` gives A for random weights, else the value for full fine-tuning, adapters,
    preferences, or preferences with adapters; the last value stands for missing ones.

    Args:
        named: keys and groups that overrides set.
    """
    from omegaconf import OmegaConf

    def by_job(*values: Any, _root_: Any, _parent_: Any) -> Any:
        starts = _root_.model.hf_path is not None and not _root_.model.random_weights
        length = _parent_ is _root_.train and not OmegaConf.is_interpolation(_parent_, "steps")
        group = _parent_ is _root_.optim and "optim" in named
        if not starts or length or group:
            return values[0]
        job = 1 + (_root_.lora.rank > 0) + 2 * (_root_.data.kind in PREFERENCE_KINDS)
        return values[min(job, len(values) - 1)]

    OmegaConf.register_new_resolver("by_job", by_job, replace=True)
