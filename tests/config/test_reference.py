from __future__ import annotations

from pathlib import Path

import pytest

from automoe import cli
from automoe.config.convert import leaf_keys
from automoe.config.reference import help_on, sections
from automoe.config.shipped import load_file
from automoe.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_page_in_docs_is_that_of_the_schema() -> None:
    page = load_file(ROOT / "docs" / "write_config.py").page()
    assert (ROOT / "docs" / "config.md").read_text() == page, "run: make docs-config"


def test_every_key_is_there_once_with_its_default() -> None:
    keys = [key for _, _, found in sections() for key in found]
    assert sorted(key.name for key in keys if "[]" not in key.name) == sorted([*leaf_keys(), "recipe_args"])
    shown = {key.name: (key.kind, key.default) for key in keys}
    assert shown["mesh.dp_shard"] == ("a whole number", "-1")
    assert shown["optim.betas"] == ("2 numbers", "[0.9,0.95]")
    assert shown["model.hf_path"] == ("text or null", "null")
    assert shown["checkpoint.export_hf"] == ("true or false", "true")
    assert shown["train.dtype"][0] == "float64 | float32 | bfloat16"


def test_comments_above_and_behind_a_field_are_its_own() -> None:
    comments = {key.name: key.comment for _, _, found in sections() for key in found}
    assert comments["mesh.ep"] == "expert parallelism: ranks that divide the experts of a layer among them"
    assert comments["kernels.attention"].startswith("sdpa: torch picks")
    assert comments["parallel.recompute"].endswith("mla_up_proj and moe_act; or full, the whole layer")
    assert comments["parallel.recompute_layers"].startswith("layers that parallel.recompute applies to")
    assert comments["optim.betas"] == ""


def test_help_on_a_section_a_key_and_what_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "mesh"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("mesh: Two views") and "  mesh.ep=0   (a whole number)\n      expert parallelism" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert help_on("model").count("\n\nmodel.") == 3  # attention, rope, router
    assert help_on("optim.lr").splitlines() == [
        "  optim.lr=0.003   (a number)",
        "      peak learning rate, after warm-up",
    ]
    assert cli.main(["train", "mesh.ep=4", "model=small_mixtral", "--help"]) == 0
    assert "primary configurations" in capsys.readouterr().out
    assert cli.main(["train", "--help", "optim.learning_rate"]) == 2
    assert "optim has no 'learning_rate'" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        help_on("model.attention.heads")
