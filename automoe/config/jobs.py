"""Defaults that depend on the training job, such as a lower learning rate for fine-tuning.

A configuration file writes ``${by_job:A,B,C,D,E}``: A for training from random weights, B for full
fine-tuning of a checkpoint, C for adapters, D for preference training, E for preference training of
adapters. The last value also stands for those that are left out. A value in a file or an override
replaces all of them. With ``optim=NAME``, all keys of ``optim`` take A; with ``train.steps=N``, all
keys of ``train`` do.
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
    """Register the OmegaConf resolver ``by_job``: a default for the kind of training job.

    ``${by_job:A,B,C,D,E}`` gives A for training from random weights, B for full fine-tuning, C for
    adapters, D for preference training, E for that of adapters; the last value stands for those
    left out. Keys of ``train`` take A if ``train.steps`` is set.

    Args:
        named: keys and config groups that overrides set. With ``optim`` (a group) among them, its
            keys take A.
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
