"""Keys of a recipe's own: checked, shown, frozen and compared as every other key."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from automoe.config.compose import check_swept_values, compose_config
from automoe.config.convert import config_to_dict
from automoe.config.frozen import differences, dump_config, load_config, parse_config, save_config
from automoe.config.recipe_args import DPOArgs, check_args
from automoe.config.reference import help_on
from automoe.config.shipped import copy_recipe, load_recipe, named_recipe, own_recipe
from automoe.errors import ConfigError
from automoe.launch.prepare import check_here

RECIPE = '''
"""Preferences."""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Literal
from beside import FLOOR

@dataclass(slots=True)
class Reference:
    dtype: Literal["float32", "bfloat16"] = "float32"

@dataclass
class Args:
    """Of preferences."""

    pairs: str  # a file of pairs
    beta: float = 0.1  # distance from the reference
    names: dict[str, str] | None = None
    reference: Reference = field(default_factory=Reference)

    def __post_init__(self) -> None:
        self.halves = self.beta / 2  # no setting: no file has it

    def check(self, config) -> None:
        if not self.beta > FLOOR:
            raise ValueError(f"beta must be larger than {FLOOR}")

def main(config, shape, context):
    return config.recipe_args.beta
'''


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(RECIPE)
    (tmp_path / "beside.py").write_text("FLOOR = 0.0\n")
    return ["recipe=mine.py", "recipe_args.pairs=a.jsonl"]


def test_they_are_a_typed_object(recipe: list[str]) -> None:
    args = compose_config(overrides=[*recipe, "recipe_args.beta=1", "recipe_args.reference.dtype=bfloat16"]).recipe_args
    assert (type(args).__name__, args.pairs, args.beta, args.names) == ("Args", "a.jsonl", 1.0, None)
    assert isinstance(args.beta, float) and args.reference.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("recipe_args.bta=1", "recipe_args.bta=1: unknown key.*Did you mean recipe_args.beta"),
        ("recipe_args.beta=much", "recipe_args.beta=much: expected a number"),
        (
            "recipe_args.reference.dtype=float16",
            "recipe_args.reference.dtype=float16: must be one of float32, bfloat16",
        ),
        ("recipe_args.pairs=1", "recipe_args.pairs=1: expected text"),
        ("recipe=pretrain", "recipe_args.pairs=a.jsonl: unknown key: the recipe pretrain declares no Args"),
    ],
)
def test_a_wrong_one_is_an_error_with_its_remedy(recipe: list[str], typed: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose_config(overrides=[*recipe, typed])
    with pytest.raises(ConfigError, match=says):
        check_swept_values("config", [*recipe, f"{typed},{typed.partition('=')[2]}"], None)  # before the first job


def test_what_a_recipe_itself_checks_is_told_before_ranks_start(recipe: list[str]) -> None:
    with pytest.raises(ConfigError, match="beta must be larger than 0.0. The recipe mine.py asks for it"):
        check_here(compose_config(overrides=[*recipe, "recipe_args.beta=0"]))
    with pytest.raises(ConfigError, match="beta must be larger"):
        check_swept_values("config", [*recipe, "recipe_args.beta=0.1,-1"], None)
    with pytest.raises(ConfigError, match=r"recipe_args.beta=inf: must be a finite number"):
        check_args(compose_config(overrides=[*recipe, "recipe_args.beta='1e999'"]))
    with pytest.raises(ConfigError, match="recipe_args.pairs: needs a value"):
        compose_config(overrides=recipe[:1])


def test_a_primary_sets_them(recipe: list[str], tmp_path: Path) -> None:
    text = "defaults: [base, _self_]\nrecipe: mine.py\nrecipe_args: {pairs: a, beta: 0.3}\n"
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "mine.yaml").write_text(text)
    args = compose_config("mine", ["recipe_args.pairs=b"], str(tmp_path / "conf")).recipe_args
    assert (args.pairs, args.beta) == ("b", 0.3)


def test_they_are_frozen_and_part_of_what_a_run_is(recipe: list[str], tmp_path: Path) -> None:
    config = compose_config(overrides=recipe)
    assert config.run_dir == "runs/default-recipe-mine.py-pairs-a.jsonl"
    assert parse_config(dump_config(config), plugins=True) == config
    then = config_to_dict(config)
    del then["recipe_args"]["beta"]  # the recipe has that key since
    other = compose_config(overrides=[*recipe, "recipe_args.beta=0.3", "recipe_args.names={a: b}"])
    assert differences(then, config) == {}
    assert differences(then, other) == {"recipe_args.beta": (0.1, 0.3), "recipe_args.names": (None, {"a": "b"})}
    # A folder from elsewhere names its recipe, and no line of that is run.
    save_config(config, tmp_path)
    (tmp_path / "mine.py").write_text(RECIPE.replace("FLOOR\n", "FLOOR\nFLOOR /= 0\n"))
    assert load_config(tmp_path).recipe_args == asdict(config.recipe_args)
    with pytest.raises(ConfigError, match="Args of .*mine.py cannot be read: ZeroDivisionError"):
        load_config(tmp_path, plugins=True)


def test_a_rank_hands_the_recipe_its_own_class(recipe: list[str], tmp_path: Path) -> None:
    save_config(compose_config(overrides=recipe), tmp_path)
    config = load_config(tmp_path, plugins=True)
    assert type(config.recipe_args) is load_recipe("mine.py").Args and config.recipe_args.pairs == "a.jsonl"


def test_a_recipe_that_is_a_module_imports_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "house_recipes").mkdir()
    (tmp_path / "house_recipes" / "__init__.py").touch()
    (tmp_path / "house_recipes" / "common.py").write_text("BETA = 0.5\n")
    text = "import torch\nfrom dataclasses import dataclass\nfrom .common import BETA\n"
    (tmp_path / "house_recipes" / "dpo.py").write_text(f"{text}@dataclass\nclass Args:\n    beta: float = BETA\n")
    assert compose_config(overrides=["recipe=house_recipes.dpo"]).recipe_args.beta == 0.5
    (tmp_path / "house_recipes" / "plain.py").write_text("class Args:\n    beta = 1\n")
    with pytest.raises(ConfigError, match="is not a dataclass"):
        compose_config(overrides=["recipe=house_recipes.plain"])


def test_torch_waits_for_the_keys_of_shipped_recipes_and_those_without_any(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef main(config, shape, context): pass\n")
    for recipe in ("pretrain", "dpo", "mine.py"):
        typed = [f"recipe={recipe}", "data=preference", "data.path=x"]
        code = f"from automoe.config.compose import compose_config; compose_config(overrides={typed})"
        code += "; import sys; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_a_copy_of_a_shipped_recipe_keeps_its_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy_recipe("dpo")
    typed = ["recipe=dpo", "data=preference", "data.path=x", "recipe_args.beta=0.3"]
    assert own_recipe(named_recipe("dpo")) is not None and compose_config(overrides=typed).recipe_args == DPOArgs(
        beta=0.3
    )


def test_help_shows_them(recipe: list[str]) -> None:
    shown = help_on("recipe_args", "mine.py").splitlines()
    assert shown[:4] == [
        "recipe_args: Of preferences.",
        "",
        "  recipe_args.pairs=???   (text)",
        "      a file of pairs",
    ]
    assert "  recipe_args.reference.dtype=float32   (float32 | bfloat16)" in shown
    assert help_on("recipe_args.beta", "mine.py").endswith("distance from the reference")
    with pytest.raises(ConfigError, match="Its keys: recipe_args.pairs, recipe_args.beta"):
        help_on("recipe_args.gamma", "mine.py")
    assert "pretrain has no keys of its own" in help_on("recipe_args")


def test_a_key_that_the_recipe_has_lost_is_a_difference(recipe: list[str], tmp_path: Path) -> None:
    then = config_to_dict(compose_config(overrides=[*recipe, "recipe_args.beta=0.3"]))
    (tmp_path / "mine.py").write_text(RECIPE.replace("    beta: float = 0.1", "    # beta").replace("self.beta", "1"))
    now = compose_config(overrides=recipe)
    assert differences(then, now) == {"recipe_args.beta": (0.3, "not a key")}
