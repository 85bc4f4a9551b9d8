"""Configuration keys that a recipe declares itself, in a dataclass ``Args``.

The classes of shipped recipes are in this module, because recipes import torch and a configuration
is checked before torch is imported. A user's recipe that declares ``Args`` is imported, and torch
with it.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal

from automoe.config.hub import local_folder
from automoe.config.paths import PathText
from automoe.config.rule_engine import Scope, check_rows, refused, table
from automoe.config.schema import Config
from automoe.config.shipped import find_recipe, import_recipe, own_recipe, source_of
from automoe.errors import ConfigError

SECTION = "recipe_args"
CLASS = "Args"
# fmt: off
_DPO = table("""
recipe_args.beta <= 0 | | must be larger than 0 | Set recipe_args.beta=0.1
data.kind: not data.is_preference | | recipe={recipe} compares two answers | Set data=preference data.path=FILE
train.loss != cross_entropy | | recipe={recipe} has its own loss | Leave it out, and set recipe_args.loss
""")
_GRPO = table("""
recipe_args.prompts <= 0; recipe_args.iterations <= 0; recipe_args.mini_batches <= 0; recipe_args.temperature <= 0;
    recipe_args.max_gap <= 0 | | must be larger than 0 | Set 1
recipe_args.kl < 0 | | would drive the weights away from those that training began with | Set 0 or more
recipe_args.samples < 2 | | the answers to a prompt are compared with one another | Set 2 or more
recipe_args.mini_batches: recipe_args.prompts * recipe_args.samples < recipe_args.mini_batches |
    | a rollout has prompts * samples = {recipe_args.prompts * recipe_args.samples} answers
    | Set at most {recipe_args.prompts * recipe_args.samples}
recipe_args.teacher: facts.no_teacher | | is no folder of a checkpoint with a config.json | Name an export
train.epochs > 0; train.rampup_batch_size != null | | recipe={recipe} reads no rows of data
    | Leave it out, and set train.steps
checkpoint.keep_best > 0 | | recipe={recipe} has no validation loss | Leave it out
train.loss != cross_entropy | | recipe={recipe} has its own loss | Leave it out
moe.record_routing != null; moe.replay_routing != null |
    | recipe={recipe} keeps an engine's routes with its answers, and repeats them (recipe_args.replay) | Leave it out
not observe.samples | | recipe={recipe} answers the prompts of observe.samples
    | Name a text file, a prompt on each line
recipe_args.engine != null | recipe_args.sampler == generate | sampler=generate takes none | BOTH
recipe_args.sampler == generate | model.family == muse_spark_text
    | transformers generates with its text model only in a wrapper | Set vllm or sglang, and recipe_args.engine
recipe_args.engine: not facts.address | recipe_args.sampler == sglang | sampler=sglang takes an address | BOTH
recipe_args.engine: not facts.usable | recipe_args.sampler == vllm
    | sampler=vllm takes an address or a Python with vLLM | BOTH
recipe_args.replay | recipe_args.sampler == vllm and facts.address | a server of vLLM is not asked for routes
    | Set recipe_args.replay=false
""", BOTH="Set both, or leave both out")
# fmt: on


@dataclass
class DPOArgs:
    """Settings of recipe=dpo, direct preference optimisation (``docs/dpo.md``).

    ``loss`` is DPO's own (``sigmoid``) or that of IPO; a larger ``beta`` keeps the model closer to
    its initial weights.
    """

    beta: float = 0.1  # larger: the model stays closer to the weights that it started from
    # sigmoid: DPO's own; ipo: margins of mean log-probabilities, drawn to 1 / (2 beta)
    loss: Literal["sigmoid", "ipo"] = "sigmoid"

    def check(self, config: Config) -> None:
        config = replace(config, recipe_args=self)
        check_rows(config, refused(Scope(config, config.mesh), _DPO))


@dataclass
class GRPOArgs:
    """Settings of recipe=grpo, reinforcement learning from a reward function (``docs/rl.md``).

    A rollout has ``samples`` answers, of up to ``observe.sample_tokens`` tokens, to each of
    ``prompts`` prompts of ``observe.samples``. The ``sampler`` draws them at ``temperature``;
    ``engine`` says where vLLM or SGLang is, ``replay`` repeats its routing in training, and
    ``max_gap`` limits the mean difference of its log-probabilities from the trainer's, in nats. The
    answers are trained on ``iterations`` times, in ``mini_batches`` updates each; ``kl`` weights
    the distance from the first weights, and a ``teacher`` replaces rewards. ``reads_data`` is
    False: the recipe needs no data set.
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
        config = replace(config, recipe_args=self)
        engine = self.engine or ""
        address = re.match(r"https?://[^/]", engine)
        see = Scope(config, config.mesh).knowing(
            no_teacher=self.teacher and not (local_folder(self.teacher) / "config.json").is_file(),
            address=address,
            usable=engine and (address or "://" not in engine),
        )
        check_rows(config, refused(see, _GRPO))


_SHIPPED = {"dpo": DPOArgs, "grpo": GRPOArgs}


def args_class(recipe: str) -> type | None:
    """Return the dataclass ``Args`` of a recipe; None if the recipe declares none.

    A user's recipe is imported if its source mentions ``Args``.

    Raises:
        ConfigError: the recipe does not exist, or its ``Args`` cannot be read or is no dataclass.
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
    """Return the defaults of a dataclass or its instance by field name; {} for anything else.

    A field without a default has ``dataclasses.MISSING``.
    """
    declared = fields(args) if is_dataclass(args) else ()
    return {
        f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in declared
    }


def check_args(config: Config) -> None:
    """Raise ``ConfigError`` for a number in ``recipe_args`` that is not finite.

    The method ``check(config)`` of the recipe's ``Args``, if there is one, may refuse the
    configuration too.
    """
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
