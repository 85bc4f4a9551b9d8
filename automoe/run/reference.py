"""Reference log-probabilities of preference data, computed with a run's initial weights.

Letters: B rows, S positions of this rank, N answer pairs of the data.
"""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from automoe.checkpoint.manifest import check_base
from automoe.checkpoint.store import CheckpointStore
from automoe.comm.tokens import StepBatch
from automoe.config.convert import config_to_dict
from automoe.config.frozen import flat
from automoe.config.hub import local_folder
from automoe.config.schema import Config
from automoe.data.loader import Loader, completed
from automoe.data.prepare import Split
from automoe.errors import DataError
from automoe.hf.peft import WEIGHTS_FILE
from automoe.model.loss import LossInputs
from automoe.parallel.mesh import Meshes
from automoe.parallel.runner import StepRunner
from automoe.storage.sealed import read_json, replace_json
from automoe.training.context import RunContext
from automoe.training.preference import pair_log_probs
from automoe.training.step import copy_to_device, prepare_inputs

REFERENCE_FILE = "reference.json"
# Settings outside ``model`` that change the log-probabilities of pairs under the same weights.
_SETTINGS = (
    "train.dtype train.fp8 train.indexer optim.master_weights lora.base moe.gate moe.dispatch_dtype "
    "moe.router_dtype moe.capacity_factor moe.drop_policy moe.drop_scope"
).split()


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of every answer pair under a preference run's initial weights.

    Attributes:
        log_probs: [N, 2] float64 on the CPU: chosen and rejected answer of N pairs.
        device: device of the training, to which the values of a batch are sent.
    """

    log_probs: torch.Tensor
    device: torch.device

    def inputs(self, batch: StepBatch) -> dict[str, torch.Tensor]:
        """Return {"reference": [B, P, 2]}, the loss's input: log-probabilities of the batch's answer pairs.

        They are (chosen, rejected) of each pair under the initial weights. Each of the B rows has at
        most P pairs; missing ones have zeros. ``PreferenceLoss`` (DPO) reads this input.
        """
        assert batch.pairs is not None
        values = torch.where(
            (batch.pairs >= 0).unsqueeze(-1), self.log_probs[batch.pairs.clamp_min(0)], 0.0
        )
        return {"reference": copy_to_device(values, self.device)}


def open_reference(
    config: Config,
    runner: StepRunner,
    loader: Loader,
    meshes: Meshes,
    context: RunContext,
    store: CheckpointStore,
) -> Reference | None:
    """Return the log-probabilities under the initial weights, from file or computed. Collective.

    Call this function while the model has its initial weights, before a checkpoint is loaded. A
    damaged file, or one computed with other settings, or not the one that the checkpoint to resume
    was trained with, is reported, computed again and replaced.

    Returns:
        None if the run was asked to stop during the computation; ``context.preempted`` is then
        True.

    Raises:
        OSError: the file cannot be read, or a folder, a FIFO or a device has its name.
        CheckpointError: the checkpoint at ``model.hf_path`` cannot be read, or the checkpoint to
            resume was trained against other initial weights.
    """
    path = context.run_dir / REFERENCE_FILE
    weights = store.first_weights
    splits: list[Split] = ["train", "validation"] if config.train.val_every else ["train"]
    belongs = _belongs(config, weights, loader, splits, meshes)
    saved: dict[str, Any] = {"base": weights}
    if (newest := store.newest()) is not None:
        step_dir, manifest, _ = newest
        saved |= manifest["counters"].get("reference", {})
        check_base(step_dir, manifest | saved, config, weights)

    def look() -> Any:
        values = _read(path, belongs, loader.num_pairs)
        if isinstance(values, np.ndarray) and saved.get("crc32") not in (
            None,
            zlib.crc32(values.data),
        ):
            return f"it is not the one that {step_dir} was trained against"
        return values

    values = store.ranks.lead(look)
    if not isinstance(values, np.ndarray):
        if context.rank == 0:
            if values is not None:
                print(
                    f"warning: {path}: {values}; log-probabilities under the starting weights are computed again",
                    flush=True,
                )
            print(
                f"one pass over {loader.num_pairs:,} pairs for log-probabilities under the starting weights",
                flush=True,
            )
        table = _compute(config, runner, loader, meshes, context, splits)
        if table is None:
            return None
        values = table.numpy()
        store.ranks.lead(lambda: _write(path, belongs, values), again=False)
    store.facts["reference"] = {"base": weights, "crc32": zlib.crc32(values)}
    return Reference(torch.from_numpy(values), context.device)


def _belongs(
    config: Config, weights: str, loader: Loader, splits: list[Split], meshes: Meshes
) -> dict[str, Any]:
    """Return everything that the stored log-probabilities depend on, by name, as plain JSON.

    These are settings by key, ``weights``, ``splits``, ``data`` (the data's fingerprint), and where they
    matter ``adapter`` and ``mesh``. They are stored with the log-probabilities, and compared later.

    Args:
        weights: hash that identifies the initial weights.
        splits: splits of the data whose pairs are computed.
    """
    settings = flat(config_to_dict(config)).items()
    facts = {k: v for k, v in settings if k in _SETTINGS or k.startswith("model.")}
    del facts["model.hf_path"]  # The path does not change the numbers.
    if config.lora.path:
        facts["adapter"] = zlib.crc32((local_folder(config.lora.path) / WEIGHTS_FILE).read_bytes())
    if config.moe.capacity_factor and config.moe.drop_scope == "rank":
        facts["mesh"] = [meshes.shape.sizes("default"), config.train.micro_batch_size]
    facts |= {"weights": weights, "splits": splits, "data": loader.fingerprint()}
    return json.loads(json.dumps(facts))


def _read(path: Path, belongs: dict[str, Any], num_pairs: int) -> np.ndarray | str | None:
    """Return the stored log-probabilities [N, 2] float64 of N pairs: chosen and rejected answer.

    Each is summed over the trained tokens of the answer. The result is a text with the reason if
    the file is damaged or belongs to another run, and None without a file.

    Args:
        belongs: settings, weights and data of this run (``_belongs``), which must equal the file's.
        num_pairs: N.
    """
    try:
        content = read_json(path, must_be_sealed=True)
        raw = base64.b64decode(content["log_probs"], validate=True)
        values = np.frombuffer(raw).reshape(num_pairs, 2).copy()
        then = dict(content["belongs"])
        then["data"] = completed(then["data"], belongs["data"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        return f"it is damaged ({error})"
    differing = [key for key in belongs | then if belongs.get(key) != then.get(key)]
    return f"it belongs to other {', '.join(differing)}" if differing else values


def _write(path: Path, belongs: dict[str, Any], values: np.ndarray) -> None:
    log_probs = base64.b64encode(values.tobytes()).decode()
    replace_json(path, {"belongs": belongs, "log_probs": log_probs})


class _Collector:
    """Loss function that stores the log-probabilities of each micro-batch's answer pairs.

    ``seen`` gets (indices of P pairs in the data, log-probabilities [P, 2]) of each micro-batch. It
    is used in evaluation only; the loss that it returns has no meaning.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, nll_BS: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
        numbers_BP = inputs.given["pairs"]
        log_probs, _ = pair_log_probs(nll_BS, inputs, numbers_BP.shape[1])
        there_BP = numbers_BP >= 0
        self.seen.append((numbers_BP[there_BP].cpu(), log_probs[there_BP].detach().double().cpu()))
        return nll_BS.sum()


def _compute(
    config: Config,
    runner: StepRunner,
    loader: Loader,
    meshes: Meshes,
    context: RunContext,
    splits: list[Split],
) -> torch.Tensor | None:
    """Run the model on all N answer pairs; return log-probabilities [N, 2] of (chosen, rejected) answer.

    The result is None if the run was asked to stop meanwhile; ``context.preempted`` is then True.

    Args:
        splits: splits of the data to run. Pairs of other splits get zeros.

    Raises:
        DataError: a log-probability is not finite.
    """
    collector = _Collector()
    before = runner.loss
    runner.set_loss(collector)
    for split in splits:
        for batch in loader.every_pair(split):
            if context.any_rank_stops():
                context.preempted = True
                return None
            inputs, _ = prepare_inputs(batch, meshes, config, context.device)
            assert batch.pairs is not None
            runner.evaluate(inputs | {"pairs": copy_to_device(batch.pairs, context.device)})
    runner.set_loss(before)
    table = torch.zeros((loader.num_pairs, 2), dtype=torch.float64)
    # Ranks of tp and cp have the same numbers, so only the first of each contributes.
    if all(meshes.coordinate(axis) == 0 for axis in ("cp", "tp")):
        for numbers, log_probs in collector.seen:
            table[numbers] = log_probs
    dist.all_reduce(table)
    if not torch.isfinite(table).all():
        places = torch.nonzero(~torch.isfinite(table).all(1)).flatten().tolist()
        raise DataError(
            f"The starting weights give {len(places)} of {len(table)} pairs no finite log-probability, "
            f"first {loader.where_pair(places[0])}. Check the checkpoint, or that data."
        )
    return table
