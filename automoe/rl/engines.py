"""Functions that open an RL recipe's inference engine, and configure its teacher model.

``recipe_args.sampler`` and ``recipe_args.engine`` select the engine, ``recipe_args.teacher`` the
teacher.
"""

from __future__ import annotations

from dataclasses import replace

from automoe.config.schema import Config
from automoe.config.train_schema import LoraConfig
from automoe.config.validate import validate
from automoe.errors import ConfigError
from automoe.hf.families.registry import model_config_from_hf
from automoe.rl.engine import Engine, TransformersEngine
from automoe.rl.sglang import ServedSGLang
from automoe.rl.vllm import LocalVLLM, ServedVLLM
from automoe.training.context import RunContext


def open_engine(config: Config, context: RunContext) -> Engine:
    """Start, or connect to, the inference engine that the configuration selects. Collective.

    ``recipe_args.sampler`` is ``generate`` (transformers in this process), ``sglang`` or ``vllm``.
    ``recipe_args.engine`` is an HTTP address, or the path of a Python interpreter that has vLLM.
    """
    args = config.recipe_args
    if args.sampler == "generate":
        return TransformersEngine(config, context.device)
    served = ServedSGLang if args.sampler == "sglang" else ServedVLLM
    kind = served if "://" in args.engine else LocalVLLM
    return kind(args.engine, config, context.run_dir)


def teacher_of(config: Config, num_ranks: int) -> Config:
    """Return the configuration to load the teacher model ``recipe_args.teacher`` on the run's mesh.

    Args:
        config: the student's configuration; the teacher uses its mesh and other settings, without
            LoRA and expert capacities.
        num_ranks: number of ranks of the run.

    Raises:
        ConfigError: the teacher has another vocabulary size, or cannot run with these settings.
    """
    path = config.recipe_args.teacher
    model, ids = model_config_from_hf(path), config.model.vocab_size
    if model.vocab_size != ids:
        rule = f"the teacher has {model.vocab_size} ids and the student {ids}: not the same tokens"
        raise ConfigError(
            "recipe_args.teacher", path, rule, "Name one with the student's tokenizer"
        )
    # Stages by number and capacities are the student's.
    parallel = replace(config.parallel, layers_per_stage=None, layout=None)
    moe = replace(config.moe, capacity_factor=0.0)
    teacher = replace(config, model=model, lora=LoraConfig(), parallel=parallel, moe=moe)
    try:
        validate(teacher, num_ranks)
    except ConfigError as error:
        rule = f"this model does not run as the student does: {error}"
        raise ConfigError(
            "recipe_args.teacher", path, rule, "Name another, or change that"
        ) from None
    return teacher
