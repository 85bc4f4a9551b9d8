"""Commands that write a checkpoint say what engines are known to ignore in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from automoe.config.compose import compose_config
from automoe.convert import main as convert
from automoe.hf.engines import IGNORED, ignored_keys
from automoe.hf.families.family import value_of
from automoe.hf.families.registry import FAMILIES
from automoe.hf.folder import write_settings
from tests.support.configurations import quick_model
from tests.support.hf_models import save_small_hf


@pytest.mark.parametrize(
    ("preset", "said"),
    [
        ("dsv3_671b", []),
        (
            "kimi_k2_1t_a32b",
            ["llama.cpp (llama-cpp-python 0.3.36) ignores rope.beta_fast=1.0, and computes another model"],
        ),
        (
            "gpt_oss_120b",
            ["llama.cpp (llama-cpp-python 0.3.36) ignores rope.truncate=False, and computes another model"],
        ),
        ("olmoe_7b_a1b", []),
        ("qwen3_5_35b_a3b", []),
    ],
)
def test_published_models_say_what_is_known(preset: str, said: list[str], tmp_path: Path) -> None:
    write_settings(tmp_path, quick_model(preset), torch.float32, "none")
    assert ignored_keys(tmp_path) == said


def test_convert_names_each_engine_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_small_hf("olmoe", tmp_path / "in", other_sizes={"rms_norm_eps": 1e-4, "clip_qkv": 2.0})
    assert convert([str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
    assert len(notes) == 2
    assert "note: llama.cpp" in notes[0] and "norm_eps=0.0001, attention.clip_qkv=2.0" in notes[0]
    assert "note: vLLM" in notes[1] and "norm_eps=0.0001, and" in notes[1]


def test_the_table_has_keys_and_families_that_exist() -> None:
    model = compose_config().model
    for families in IGNORED.values():
        for family, taken in families.items():
            assert family in FAMILIES
            for key in taken:
                value_of(model, key)
