"""Rows longer than the positions that a model was made for are said at the start."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from automoe.config.schema import Config, RopeConfig, TrainConfig
from automoe.run.record import _describe_length


@pytest.mark.parametrize(
    ("stated", "rope", "longest"),
    [
        (128, RopeConfig(original_seq_len=128), 128),
        (160, RopeConfig(original_seq_len=16, factor=10, scaling="yarn"), 160),
        (32, RopeConfig(original_seq_len=32, factor=4, scaling="yarn"), 128),  # the checkpoint states the first length
        (1024, RopeConfig(original_seq_len=64, factor=8, scaling="llama3"), 1024),
        (None, RopeConfig(original_seq_len=64), 64),
        (None, RopeConfig(original_seq_len=64, factor=2, scaling="yarn"), 128),
    ],
)
def test_rows_beyond_the_models_positions_are_said(
    tmp_path: Path, stated: int | None, rope: RopeConfig, longest: int
) -> None:
    config = Config()
    config.model = replace(config.model, rope=rope)
    if stated is not None:
        (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": stated}))
        config.model.hf_path = str(tmp_path)
    assert _describe_length(replace(config, train=TrainConfig(seq_len=longest))) == []
    [said] = _describe_length(replace(config, train=TrainConfig(seq_len=longest + 1)))
    assert said.startswith(f"train.seq_len={longest + 1} is above the model's max_position_embeddings={longest}")
