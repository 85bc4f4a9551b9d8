"""Recording of routing to files (``moe.record_routing``), and its replay (``moe.replay_routing``).

Each step has a folder ``step-N`` with one ``rank-R.npz`` of every recording rank. Its arrays:
``rows`` [T] and ``index`` [T] identify T tokens by their row in the training stream and their
position in the row; ``layers`` [L] are indices among MoE layers, from 0; ``choices`` [T, L, 2, K] are
expert ids: those used, and the top-K of the scores without bias and groups. The format does not
depend on the mesh, so any mesh can replay it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from automoe.comm.tokens import StepBatch, Tokens
from automoe.config.schema import Config
from automoe.errors import DataError
from automoe.moe.router import BalancedRouter, Routing, watch_routing
from automoe.storage.files import read_file, replace_file


@contextmanager
def record_routing(
    config: Config, model_parts: Mapping[int, nn.Module], step: int
) -> Iterator[None]:
    """Context that records this rank's routing of one training step (``moe.record_routing``).

    The file is written when the ``with`` block ends; nothing is recorded if the setting is off.

    Args:
        model_parts: this rank's pipeline stages, by stage number.
        step: counted from 0. If the step has been recorded before, each rank replaces its file.
    """
    if config.moe.record_routing is None:
        yield
        return
    seen: dict[int, list[tuple[torch.Tensor, ...]]] = {}

    def keep(router: BalancedRouter, tokens: Tokens, routing: Routing) -> None:
        assert tokens.row_ids is not None
        choices = torch.stack((routing.topk_expert_ids, routing.plain_ids), dim=2)
        seen.setdefault(router.moe_index, []).append((tokens.row_ids, tokens.index, choices))

    with watch_routing(model_parts.values(), keep):
        yield
    if seen:
        folder = Path(config.moe.record_routing).expanduser() / f"step-{step}"
        _write(folder / f"rank-{dist.get_rank()}.npz", dict(sorted(seen.items())))


def _write(path: Path, seen: dict[int, list[tuple[torch.Tensor, ...]]]) -> None:
    """Write recorded routing to one file, atomically.

    Args:
        seen: index among MoE layers -> one tuple per micro-batch: row numbers of the tokens [B, S], their
            positions in the row [B, S], and expert ids [B, S, 2, K]: those used, and the top-K of the scores.
    """
    layers = []
    # a pipeline may run two layers' micro-batches in different orders
    for micro_batches in seen.values():
        rows, index, choices = (
            torch.cat([t.flatten(0, 1) for t in tensors]).cpu()
            for tensors in zip(*micro_batches, strict=True)
        )
        order = np.lexsort((index, rows))
        layers.append((rows[order], index[order], choices[order]))
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez(
        content,
        rows=layers[0][0].numpy(),
        index=layers[0][1].numpy().astype(np.int32),
        layers=np.array(list(seen)),
        choices=torch.stack([choices for _, _, choices in layers], dim=1).numpy().astype(np.int16),
    )
    replace_file(path, content.getvalue())


def replayed_routing(config: Config, batch: StepBatch, step: int) -> torch.Tensor | None:
    """Return the expert ids in ``moe.replay_routing`` for the rows of ``batch``; None if it is off.

    Args:
        step: step whose recording is read, counted from 0.

    Returns:
        [rows, positions, L, 2, K] int64 for L MoE layers: the K experts to use, and the top-K of
        the scores without bias and groups. ``prepare_inputs`` takes it as ``forced_ids``.

    Raises:
        DataError: the recording lacks the step, or some of its tokens or layers, or a file is
            damaged.
    """
    if config.moe.replay_routing is None:
        return None
    model, (num_rows, seq_len) = config.model, batch.tokens.shape
    top_k, num_layers = model.num_experts_per_token, model.num_moe_layers
    most = (top_k, seq_len, num_layers, model.num_scored_experts)
    folder = Path(config.moe.replay_routing).expanduser() / f"step-{step}"
    files = sorted(folder.glob("rank-*.npz"))
    if not files:
        raise DataError(
            f"{folder}: no recorded routing. Replay at most as many steps as were recorded "
            "(moe.record_routing), from the same step on"
        )
    forced = np.full((num_rows, seq_len, num_layers, 2, top_k), -1, dtype=np.int64)
    for path in files:
        raw = io.BytesIO(read_file(path))
        try:
            with np.load(raw) as part:
                rows = part["rows"] - batch.first_row
                mine = (rows >= 0) & (rows < num_rows)
                if not mine.any():
                    continue
                index, layers, choices = (part[name] for name in ("index", "layers", "choices"))
                seen = (choices.shape[-1], index.max() + 1, layers.max() + 1, choices.max() + 1)
                if seen[0] != top_k or np.greater(seen, most).any():
                    raise DataError(
                        f"{path}: recorded with K={seen[0]}, rows of at least {seen[1]} tokens and at least "
                        f"{seen[2]} MoE layers of {seen[3]} experts; this run has K={top_k}, train.seq_len={seq_len}, "
                        f"{num_layers} and {most[-1]}. Replay with the model and rows of the recording"
                    )
                forced[rows[mine][:, None], index[mine][:, None], layers] = choices[mine]
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{path}: damaged ({error!r}). Copy it again, or record again"
            ) from None
    if missing := int((forced < 0).any((2, 3, 4)).sum()):
        raise DataError(
            f"{folder}: {missing} of {num_rows * seq_len} tokens of rows {batch.first_row} ... "
            f"{batch.first_row + num_rows - 1} were not recorded. Replay with the same data, seed and batch, and keep "
            "every rank's file"
        )
    return torch.from_numpy(forced)
