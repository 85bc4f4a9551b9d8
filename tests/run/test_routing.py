"""Routing on disk: what a directory that does not fit is called."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from automoe.comm.tokens import MicroBatch, StepBatch
from automoe.errors import DataError
from automoe.model.decoder import Decoder
from automoe.parallel.parallelize import build_decoder
from automoe.run.routing import record_routing, replayed_routing
from automoe.verify.compare import compare_tensors
from tests.moe.routing_cases import MODEL, VOCAB, routing_config
from tests.support.gpu import one_rank

B, S = 2, 8


def small_decoder() -> Decoder:
    model = build_decoder(MODEL, routing_config().moe, torch.float64)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    for _, layer in model.moe_layers():
        layer.router.reset_buffers()
        layer.router.load.reset_buffers()
    return model


def record(directory: Path, step: int = 0, first_row: int = 4) -> tuple[Decoder, torch.Tensor, torch.Tensor]:
    """One step of two micro-batches on one rank: model, its rows, their logits."""
    model = small_decoder()
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(step))
    row_ids = torch.arange(first_row, first_row + B).unsqueeze(1).expand(B, S)
    config = routing_config(record_routing=str(directory))
    with one_rank("cpu"), torch.no_grad(), record_routing(config, {0: model}, step):
        logits = [model(batch=MicroBatch(tokens[b : b + 1], row_ids=row_ids[b : b + 1])) for b in range(B)]
    return model, tokens, torch.cat(logits)


def read(directory: Path, step: int = 0, first_row: int = 4, **changed: int) -> torch.Tensor:
    sizes = dict(num_rows=B, seq_len=S, num_layers=MODEL.num_layers, num_experts=MODEL.num_experts, top_k=3) | changed
    config = routing_config(replay_routing=str(directory))
    model = replace(
        MODEL, num_layers=sizes["num_layers"], num_experts_per_token=sizes["top_k"], num_experts=sizes["num_experts"]
    )
    tokens = torch.zeros(sizes["num_rows"], sizes["seq_len"], dtype=torch.int64)
    batch = StepBatch(tokens, tokens, tokens, tokens, 0, first_row)
    choices = replayed_routing(replace(config, model=model), batch, step)
    assert choices is not None
    return choices


def test_what_was_written_is_read_and_repeats_the_forward_pass(tmp_path: Path) -> None:
    model, tokens, logits = record(tmp_path)
    forced = read(tmp_path)
    assert forced.shape == (B, S, MODEL.num_layers, 2, 3) and forced.dtype == torch.int64
    with torch.no_grad():
        again = model(batch=MicroBatch(tokens, forced_ids=forced))
        assert compare_tensors("logits", "", 0, again, logits).within(1e-12)
        other = model(batch=MicroBatch(tokens, forced_ids=(forced + 1) % MODEL.num_experts))
        assert not compare_tensors("logits", "", 0, other, logits).within(1e-3)


def test_rows_that_another_rank_reads_are_found_by_their_number(tmp_path: Path) -> None:
    record(tmp_path)
    assert torch.equal(read(tmp_path, first_row=5, num_rows=1), read(tmp_path)[1:])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (dict(step=1), "no recorded routing"),
        (dict(first_row=5), "8 of 16 tokens of rows 5 ... 6 were not recorded"),
        (dict(seq_len=2 * S), "16 of 32 tokens"),
        (dict(top_k=2), "K=3"),
        (dict(num_layers=1), "2 MoE layers"),
        (dict(seq_len=4), "at least 8 tokens"),
        (dict(num_experts=4), "experts; this run has K=3, train.seq_len=8, 2 and 4"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_a_recording_that_does_not_fit_is_refused(tmp_path: Path, changed: dict, said: str) -> None:
    record(tmp_path)
    with pytest.raises(DataError, match=said):
        read(tmp_path, **changed)


def _cut(path: Path, parts: dict) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _flipped(path: Path, parts: dict) -> None:
    raw = bytearray(path.read_bytes())
    raw[raw.index(b"choices.npy") + 200] ^= 1
    path.write_bytes(raw)


DAMAGE = {
    "cut": _cut,
    "flipped": _flipped,
    "empty": lambda path, parts: path.write_bytes(b""),
    "pickle": lambda path, parts: path.write_bytes(pickle.dumps({"rows": [1]})),
    "one-array": lambda path, parts: np.save(path.open("wb"), parts["rows"]),
    "no-layers": lambda path, parts: np.savez(path, **{k: v for k, v in parts.items() if k != "layers"}),
    "fewer-choices": lambda path, parts: np.savez(path, **parts | {"choices": parts["choices"][:-1]}),
    "far-below-zero": lambda path, parts: np.savez(path, **parts | {"index": parts["index"] - 99}),
    "no-token": lambda path, parts: np.savez(path, **parts | {"index": parts["index"][:0]}),
    "words": lambda path, parts: np.savez(path, **parts | {"rows": parts["rows"].astype(str)}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_recording_is_refused_with_its_file(tmp_path: Path, damage: str) -> None:
    record(tmp_path)
    [path] = tmp_path.rglob("*.npz")
    DAMAGE[damage](path, dict(np.load(path)))
    with pytest.raises(DataError, match=r"rank-0\.npz: damaged .*Copy it again"):
        read(tmp_path)


def test_a_step_that_failed_leaves_no_file(tmp_path: Path) -> None:
    model = small_decoder()
    with pytest.raises(IndexError), record_routing(routing_config(record_routing=str(tmp_path)), {0: model}, 0):
        model(torch.full((1, S), VOCAB))
    assert not list(tmp_path.rglob("*.npz"))
    with torch.no_grad():
        model(torch.zeros(1, S, dtype=torch.int64))  # nothing is left hooked
    assert not list(tmp_path.rglob("*.npz"))
