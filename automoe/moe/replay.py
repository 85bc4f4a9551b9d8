"""Record the routing of one run and repeat it in another, in memory or by way of a directory.

Rounding can flip a top-k choice between two runs that are otherwise equal; with the choices of the
first forced on the second, what is left to compare is arithmetic.

On disk a step is a folder ``step-N`` with one ``rank-R.npz`` from every rank that recorded: ``rows`` [T] and
``index`` [T] name its tokens by their row in the training stream and their place in it, ``layers`` [L] its
MoE layers, ``choices`` [T, L, 2, K] what it chose. Nothing in it knows a mesh, so any mesh may replay it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

from automoe.errors import DataError
from automoe.moe.decisions import recomputing
from automoe.moe.router import Router, Routing
from automoe.moe.tokens import Tokens


class RoutingRecorder:
    """Keeps the choices of every router of ``model`` while it is entered.

    The model must hold all layers and whole rows (no pipeline, no context axis).
    """

    def __init__(self, model: nn.Module) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, Router)]
        self._choices: list[list[torch.Tensor]] = [[] for _ in self._routers]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> RoutingRecorder:
        for router, kept in zip(self._routers, self._choices, strict=True):

            def keep(_module: nn.Module, _inputs: object, routing: Routing, kept=kept) -> None:
                if not recomputing():
                    kept.append(torch.stack((routing.ids, routing.plain_ids), dim=2).cpu())

            self._handles.append(router.register_forward_hook(keep))
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def choices(self) -> torch.Tensor:
        """[rows, S, moe layers, 2, K] int64, rows in the order they were seen; 2: chosen, plain top-k."""
        return torch.stack([torch.cat(kept) for kept in self._choices], dim=2)


class RoutingWriter:
    """Keeps the choices of one training step of this rank while it is entered, and writes them as it leaves.

    Args:
        parts: this rank's pipeline stages; any mesh.
        directory: shared by all ranks.
        step: counted from 0; a folder of the same step is written over, file by file.
    """

    def __init__(self, parts: list[nn.Module], directory: str, step: int, rank: int) -> None:
        self._routers = [m for part in parts for m in part.modules() if isinstance(m, Router)]
        self._routers.sort(key=lambda router: router.moe_index)
        self._file = Path(directory).expanduser() / f"step-{step}" / f"rank-{rank}.npz"
        self._seen: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in self._routers]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> RoutingWriter:
        for router, kept in zip(self._routers, self._seen, strict=True):

            def keep(_module: nn.Module, inputs: tuple, routing: Routing, kept=kept) -> None:
                tokens: Tokens = inputs[1]
                if not recomputing():
                    assert tokens.row_ids is not None
                    choices = torch.stack((routing.ids, routing.plain_ids), dim=2)
                    kept.append((tokens.row_ids, tokens.index, choices))

            self._handles.append(router.register_forward_hook(keep))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        if kind is not None or not self._routers:
            return
        layers = []
        for seen in self._seen:  # a pipeline may run two layers' micro-batches in different orders
            rows, index, choices = (
                torch.cat([t.flatten(0, 1) for t in part]).cpu() for part in zip(*seen, strict=True)
            )
            order = np.lexsort((index, rows))
            layers.append((rows[order], index[order], choices[order]))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            np.savez(
                file,
                rows=layers[0][0].numpy(),
                index=layers[0][1].numpy().astype(np.int32),
                layers=np.array([router.moe_index for router in self._routers]),
                choices=torch.stack([choices for _, _, choices in layers], dim=1).numpy().astype(np.int16),
            )
        os.replace(unfinished, self._file)


def read_routing(
    directory: str, step: int, first_row: int, num_rows: int, seq_len: int, num_layers: int, top_k: int
) -> torch.Tensor:
    """Recorded choices for rows ``first_row`` ... of the training stream at ``step``.

    Returns:
        [num_rows, seq_len, num_layers, 2, K] int64, as ``forced_ids`` of a forward pass wants it.

    Raises:
        DataError: the directory has no such step, or not all of these tokens and layers.
    """
    folder = Path(directory).expanduser() / f"step-{step}"
    files = sorted(folder.glob("rank-*.npz"))
    if not files:
        raise DataError(
            f"{folder}: no recorded routing. Replay at most as many steps as were recorded "
            "(moe.record_routing), from the same step on"
        )
    forced = np.full((num_rows, seq_len, num_layers, 2, top_k), -1, dtype=np.int64)
    for path in files:
        with np.load(path) as part:
            rows, index, layers = part["rows"] - first_row, part["index"], part["layers"]
            mine = (rows >= 0) & (rows < num_rows)
            if not mine.any():
                continue
            choices = part["choices"]
            if choices.shape[-1] != top_k or index.max() >= seq_len or layers.max() >= num_layers:
                raise DataError(
                    f"{path}: recorded with K={choices.shape[-1]}, rows of at least {index.max() + 1} tokens and "
                    f"at least {layers.max() + 1} MoE layers; this run has K={top_k}, train.seq_len={seq_len} and "
                    f"{num_layers}. Replay with the model and rows of the recording"
                )
            forced[rows[mine][:, None], index[mine][:, None], layers] = choices[mine]
    if (missing := int((forced < 0).any((2, 3, 4)).sum())) > 0:
        raise DataError(
            f"{folder}: {missing} of {num_rows * seq_len} tokens of rows {first_row} ... {first_row + num_rows - 1} "
            "were not recorded. Replay with the same data, seed and batch, and keep every rank's file"
        )
    return torch.from_numpy(forced)
