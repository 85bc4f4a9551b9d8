"""Configuration keys that a recipe declares itself, in a dataclass ``Args``.

The classes of shipped recipes are in this module, because recipes import torch and a configuration
is checked before torch is imported. A user's recipe that declares ``Args`` is imported, and torch
with it.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields, is_dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

from automoe.config.hub import local_folder
from automoe.config.paths import PathText
from automoe.config.schema import Config
from automoe.config.shipped import find_recipe, import_recipe, own_recipe, source_of
from automoe.errors import ConfigError

SECTION = "recipe_args"
CLASS = "Args"


@dataclass
class DPOArgs:
    """Direct preference optimisation (``docs/dpo.md``)."""

    beta: float = 0.1  # larger: the model stays closer to the weights that it started from
    # sigmoid: DPO's own; ipo: margins of mean log-probabilities, drawn to 1 / (2 beta)
    loss: Literal["sigmoid", "ipo"] = "sigmoid"

    def check(self, config: Config) -> None:
        if not self.beta > 0:
            raise ConfigError(
                "recipe_args.beta", self.beta, "must be larger than 0", "Set recipe_args.beta=0.1"
            )
        if not config.data.is_preference:
            raise ConfigError(
                "data.kind",
                config.data.kind,
                f"recipe={config.recipe} compares two answers",
                "Set data=preference data.path=FILE",
            )
        if config.train.loss != "cross_entropy":
            raise ConfigError(
                "train.loss",
                config.train.loss,
                f"recipe={config.recipe} has its own loss",
                "Leave it out, and set recipe_args.loss",
            )


@dataclass
class GRPOArgs:
    """Reinforcement learning from a reward function (``docs/rl.md``).

    Prompts are those of ``observe.samples``, answers have up to ``observe.sample_tokens`` tokens.
    """

    reads_data: ClassVar[bool] = False  # no corpus is prepared

    prompts: int = 8  # prompts of a rollout
    samples: int = 8  # answers to each of them, whose rewards are compared
    temperature: float = 1.0
    iterations: int = 1  # passes over the answers of a rollout
    mini_batches: int = 1  # updates of a pass, each by as many of the answers
    # a checkpoint, whose log-probabilities of the answers are learned instead of rewards
    teacher: PathText | None = None
    kl: float = 0.0  # weight of the distance (k3) from the weights that training began with
    # routes of the engine: repeated by the training step, or chosen anew
    replay: bool = True
    # generate: of transformers, in the ranks of the training; vllm, sglang: in processes of their own
    sampler: Literal["generate", "vllm", "sglang"] = "generate"
    # address of the server (http://host:8000), or the Python that has vLLM, which is then started
    engine: PathText | None = None
    max_gap: float = 0.1  # largest mean difference of the engine's log-probabilities, in nats

    def check(self, config: Config) -> None:
        for key in ("prompts", "iterations", "mini_batches", "temperature", "max_gap"):
            if not (value := getattr(self, key)) > 0:
                raise ConfigError(f"{SECTION}.{key}", value, "must be larger than 0", "Set 1")
        if self.kl < 0:
            rule = "would drive the weights away from those that training began with"
            raise ConfigError(f"{SECTION}.kl", self.kl, rule, "Set 0 or more")
        if self.samples < 2:
            rule = "the answers to a prompt are compared with one another"
            raise ConfigError(f"{SECTION}.samples", self.samples, rule, "Set 2 or more")
        if self.mini_batches > (answers := self.prompts * self.samples):
            rule = f"a rollout has prompts * samples = {answers} answers"
            raise ConfigError(
                f"{SECTION}.mini_batches", self.mini_batches, rule, f"Set at most {answers}"
            )
        if self.teacher and not (local_folder(self.teacher) / "config.json").is_file():
            rule = "is no folder of a checkpoint with a config.json"
            raise ConfigError(f"{SECTION}.teacher", self.teacher, rule, "Name an export")
        if not config.observe.samples:
            rule = f"recipe={config.recipe} answers the prompts of observe.samples"
            raise ConfigError(
                "observe.samples", "", rule, "Name a text file, a prompt on each line"
            )
        needed = {"generate": "none", "vllm": "an address or a Python with vLLM"}
        has = "none" if self.engine is None else "a Python with vLLM"
        if "://" in (self.engine or ""):
            has = "an address" if re.match(r"https?://[^/]", self.engine or "") else "no address"
        if has not in (rule := needed.get(self.sampler, "an address")):
            rule = f"sampler={self.sampler} takes {rule}"
            raise ConfigError(f"{SECTION}.engine", self.engine, rule, "Set both, or leave both out")
        if self.replay and self.sampler == "vllm" and has == "an address":
            rule = "a server of vLLM is not asked for routes"
            raise ConfigError(f"{SECTION}.replay", True, rule, f"Set {SECTION}.replay=false")


_SHIPPED = {"dpo": DPOArgs, "grpo": GRPOArgs}


def args_class(recipe: str) -> type | None:
    """Return the dataclass ``Args`` of a recipe; None if the recipe declares none.

    A user's recipe is imported if its source mentions ``Args``.

    Raises:
        ConfigError: the recipe does not exist, or its ``Args`` cannot be read.
    """
    path = own_recipe(recipe)
    if path is None:
        return _SHIPPED.get(Path(find_recipe(recipe)).stem)
    try:
        if CLASS not in source_of(path).read_text():
            return None  # the recipe, and with it torch, is not imported
        cls: type | None = getattr(import_recipe(path), CLASS, None)
    except Exception as error:  # whatever a user's own statements raise
        raise ConfigError(
            "recipe",
            recipe,
            f"{CLASS} of {path} cannot be read: {type(error).__name__}: {error}",
            "Mend it",
        ) from error
    if cls is not None and not is_dataclass(cls):
        raise ConfigError(
            "recipe", recipe, f"{CLASS} of {path} is not a dataclass", "Write @dataclass above it"
        )
    return cls


def default_args(args: Any) -> dict[str, Any]:
    """Return field name -> default of a dataclass or its instance; MISSING without a default."""
    declared = fields(args) if is_dataclass(args) else ()
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in declared
    }


def check_args(config: Config) -> None:
    """Raise ``ConfigError`` if a number in ``recipe_args`` is not finite or its ``check`` fails."""
    args = config.recipe_args
    if not is_dataclass(args):
        return
    for field in fields(args):
        value = getattr(args, field.name)
        key = f"{SECTION}.{field.name}"
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(key, value, "must be a finite number", "Write one")
    if hasattr(args, "check"):
        try:
            args.check(config)
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(
                SECTION, "", str(error), f"The recipe {config.recipe} asks for it"
            ) from error
