"""Engines by the names that ``recipe_args.sampler`` and ``recipe_args.engine`` give them."""

from __future__ import annotations

from collections.abc import Collection

from automoe.config.schema import Config
from automoe.rl.engine import Engine, TransformersEngine
from automoe.rl.sglang import ServedSGLang
from automoe.rl.vllm import LocalVLLM, ServedVLLM
from automoe.training.context import RunContext


def open_engine(config: Config, stops: Collection[int], context: RunContext) -> Engine:
    """Return the engine of a run. Collective.

    Args:
        stops: tokens that end an answer.
    """
    args = config.recipe_args
    if args.sampler == "generate":
        return TransformersEngine(config, stops, context.device)
    served = ServedSGLang if args.sampler == "sglang" else ServedVLLM
    kind = served if "://" in args.engine else LocalVLLM
    return kind(args.engine, config, stops, context.run_dir)
